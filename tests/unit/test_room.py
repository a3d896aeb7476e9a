"""Where a model fits, as `symbiosis doctor --model` says it."""

import json

import pytest

from symbiosis.cli import model_fit
from symbiosis.cli.model_fit import fits, room_for, ways_for

G = 1 << 30


@pytest.mark.parametrize(
    ("needed", "host", "gpus", "ways"),
    [
        (10 * G, 64 * G, (), ["--device cpu"]),
        (10 * G, 10 * G, (), []),  # products and clients need memory, too
        (10 * G, 10 * G + 800 * (1 << 20), (), []),  # and so does the process itself
        (10 * G, 64 * G, (24 * G,), ["--device cpu", "--device cuda:0"]),
        (26 * G, 8 * G, (24 * G, 24 * G), ["--devices 0,1 (13.0, 13.0 GiB)"]),
        (26 * G, 8 * G, (8 * G, 80 * G), ["--device cuda:1", "--devices 0,1 --shares 7.5,75.0 (2.4, 23.6 GiB)"]),
        (100 * G, 8 * G, (80 * G, 0, 40 * G, 80 * G), ["--devices 0,3 (50.0, 50.0 GiB)"]),
        (170 * G, 8 * G, (80 * G, 0, 40 * G, 80 * G), ["--devices 0,2,3 --shares 75.0,37.5,75.0 (68.0, 34.0, 68.0 GiB)"]),
        (300 * G, 8 * G, (80 * G,) * 2, []),
    ],
)  # fmt: skip
def test_ways_to_hold_a_model(needed: int, host: int, gpus: tuple[int, ...], ways: list[str]) -> None:
    assert ways_for(needed, host, gpus) == ways


def test_half_as_many_bits_may_fit() -> None:
    assert fits("m", 10 * G, 5 * G, 64 * G, ()).state == "ok"
    found = fits("m", 100 * G, 50 * G, 64 * G, ())
    assert found.state == "warn" and found.remedy == "With --dtype bfloat16 it does: --device cpu"
    assert fits("m", 1000 * G, 500 * G, 64 * G, (80 * G,)).state == "FAIL"
    found = fits("m", 200 * G, 100 * G, 64 * G, (), {"int8": 100 * G, "nf4": 52 * G})
    assert found.state == "warn" and found.remedy == "With --quantize nf4 it does: --device cpu"


def test_what_can_be_said_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_fit, "free_memory", lambda: 64 * G)
    found = room_for("demo")
    assert found.state == "ok" and "free: host 64.0" in found.text and "--device cpu" in found.text
    monkeypatch.setattr(model_fit, "free_memory", lambda: 1 << 20)
    monkeypatch.setattr(model_fit, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(model_fit, "free_gpu_memory", lambda device: {"cuda:0": None, "cuda:1": 3 * G}[device])
    assert "It fits on: --device cuda:1" in room_for("demo").text
    assert room_for("/nowhere").state == "FAIL"
    config = '{"quantization_config": {"quant_method": "fp8"}}'
    monkeypatch.setattr(model_fit, "read_config", lambda folder: json.loads(config))
    assert "It fits on: --device cuda:1" in room_for("demo").text  # a GPU holds quantised weights as they are packed
