"""Requests that are kept: the same one may come again, also as another process reads it; another one of its number is refused."""

from pathlib import Path

import pytest

from symbiosis.server.tinker.request_folder import RequestFolder
from symbiosis.server.tinker.tinker_messages import Array, OptimStep, Pass, PlainDatum, TinkerRefusal

INPUTS = {"weights": Array(b"1234", (1,), False), "target_tokens": Array(b"12345678", (1,), True)}


def asked(inputs: dict[str, Array]) -> Pass:
    return Pass(model_id="a run", seq_id=1, data=[PlainDatum(b"1234", inputs)], loss_fn="cross_entropy")


def test_the_same_request_in_another_order_of_its_maps(tmp_path: Path) -> None:
    kept = RequestFolder(tmp_path / "requests")
    assert kept.put(1, asked(INPUTS)) and not kept.put(1, asked(dict(reversed(INPUTS.items()))))
    for other in (asked({**INPUTS, "weights": Array(b"1235", (1,), False)}), OptimStep(model_id="a run", seq_id=1)):
        with pytest.raises(TinkerRefusal, match="another request"):
            kept.put(1, other)
    assert kept.get(1) == asked(INPUTS)


def test_another_process_finds_what_is_whole(tmp_path: Path) -> None:
    kept = RequestFolder(tmp_path / "requests")
    for number in (0, 2, 10):
        kept.put(number, OptimStep(model_id="a run", seq_id=number))
    (kept.path / ".11").write_bytes(b"cut off")
    (kept.path / "2").write_bytes(b"of another release")
    again = RequestFolder(kept.path)
    assert again.numbers == [0, 2, 10] and again.get(2) is None is again.get(11)
    again.drop(0)
    assert again.numbers == [2, 10] == RequestFolder(kept.path).numbers
    again.remove()
    with pytest.raises(FileNotFoundError):
        kept.put(11, OptimStep(model_id="a run", seq_id=11))
