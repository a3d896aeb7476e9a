"""Adapters' files: whatever is wrong with one, it is never read as something else than by safetensors itself."""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from symbiosis.errors import AdapterError
from symbiosis.server.api_errors import ApiError
from symbiosis.server.uploads import _config
from symbiosis.serving.lora import adapter_files
from symbiosis.serving.lora.adapter import MOST_HEADER_BYTES
from symbiosis.serving.lora.adapter_files import AdapterWeights, in_parallel, parse_tensors, read_adapter

WRONG = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
SHAPES = st.lists(st.integers(0, 4), max_size=3)
TENSORS = st.dictionaries(
    st.text(max_size=5).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(list(adapter_files.DTYPES.values())), SHAPES),
    max_size=4,
)


def made(kinds: dict[str, tuple[torch.dtype, list[int]]]) -> dict[str, torch.Tensor]:
    return {name: torch.arange(math.prod(shape)).view(shape).to(dtype) for name, (dtype, shape) in kinds.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    alike = [(a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape) for name in b if name in a]
    bits = (
        [a[name].contiguous().view(-1).view(torch.uint8) for name in sorted(a)],
        [b[name].contiguous().view(-1).view(torch.uint8) for name in sorted(b)],
    )
    return a.keys() == b.keys() and all(alike) and all(map(torch.equal, *bits))


@settings(deadline=None, max_examples=60)
@given(TENSORS)
def test_what_safetensors_writes_is_read(kinds: dict[str, Any]) -> None:
    tensors = made(kinds)
    data = safetensors.torch.save(tensors, {"format": "pt"})
    assert same(parse_tensors(data)[0], tensors) and same(parse_tensors(memoryview(bytearray(data)))[0], tensors)


@settings(deadline=None, max_examples=200)
@given(TENSORS, st.data())
def test_damage_is_refused_or_read_as_safetensors_reads_it(kinds: dict[str, Any], data: Any) -> None:
    whole = bytearray(safetensors.torch.save(made(kinds)))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.sampled_from(b'\x00\x01\x7f0129-,:[]{}"ab\xff'))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))] if data.draw(st.booleans()) else whole)
    try:
        found, _ = parse_tensors(cut)
    except WRONG:
        return
    try:
        expected = safetensors.torch.load(cut)
    except (SafetensorError, KeyError):  # stricter about the header's text, which changes no number
        return
    assert same(found, expected)


def with_header(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}},
        {"a": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 8]}},
        {"a": {"dtype": "PICKLE", "shape": [8], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "F32", "shape": [0, 1 << 62, 1 << 62], "data_offsets": [8, 8]}},
        {"a": [0, 8]}, [1, 2], "a", 7,
    ],
    ids=["overlapping", "a hole", "too much", "negative", "half", "boolean", "too little", "huge", "dtype", "empty and huge", "no table", "list", "text", "number"],
)  # fmt: skip
def test_what_the_format_does_not_allow(header: Any) -> None:
    with pytest.raises(WRONG):
        parse_tensors(with_header(header, bytes(8)))
    with pytest.raises(AdapterError, match="cannot be read"):
        AdapterWeights.parse(b'{"peft_type": "LORA"}', with_header(header, bytes(8)))


@pytest.mark.parametrize(
    "sides", [[10**400] * 18_000, [0, *[10**400] * 18_000], [1] * 1_000_000], ids=["huge", "and empty", "many"]
)
def test_sides_are_counted_before_they_are_multiplied(sides: list[int]) -> None:
    data = with_header({"a": {"dtype": "F32", "shape": sides, "data_offsets": [0, 8]}}, bytes(8))
    began = time.process_time()
    with pytest.raises(ValueError, match="no tensor's|more than"):
        parse_tensors(data)
    assert time.process_time() - began < 2


def test_places_are_looked_at_before_they_are_sorted() -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0] * 1000}
    with pytest.raises(ValueError, match="too many values"):
        parse_tensors(with_header({str(name): entry for name in range(400)}, bytes(8)))


def test_a_name_in_an_error_is_cut() -> None:
    name = "a" * 100_000 + "\n"
    with pytest.raises(ValueError) as refused:
        parse_tensors(with_header({name: {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8)))
    assert len(str(refused.value)) < 500


def test_a_tensor_may_lie_anywhere() -> None:
    data = with_header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, torch.ones(2).numpy().tobytes())
    shifted = data[:8].replace(data[:1], bytes([data[0] + 1]), 1) + data[8 : 8 + data[0]] + b" " + data[8 + data[0] :]
    assert parse_tensors(data)[0]["a"].tolist() == parse_tensors(shifted)[0]["a"].tolist() == [1.0, 1.0]


def test_large_files_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_files, "PIECE_BYTES", 7)
    data = bytes(range(256)) * 3
    (tmp_path / "file").write_bytes(data)
    assert bytes(adapter_files._read(tmp_path / "file", len(data))) == data


@pytest.mark.parametrize("threads", [1, 3])
def test_in_parallel_keeps_the_order_and_tells_errors(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_files, "THREADS", threads)
    adapter_files._threads.cache_clear()
    assert in_parallel(lambda n: n * n, range(11)) == [n * n for n in range(11)]
    with pytest.raises(ZeroDivisionError):
        in_parallel(lambda n: 1 // (n - 5), range(11))
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():  # what is made in it is written to by all
            zeros = torch.zeros(11)
            in_parallel(lambda n: zeros[n : n + 1].add_(n), range(11))  # noqa: B023
            assert in_parallel(lambda n: torch.is_grad_enabled(), range(3)) == [torch.is_grad_enabled()] * 3
        assert zeros.tolist() == list(range(11))
    adapter_files._threads.cache_clear()


def test_a_header_without_measure_is_not_parsed() -> None:
    header = b'{"__metadata__": {"a": "' + b"x" * MOST_HEADER_BYTES + b'"}}'
    with pytest.raises(ValueError, match="its header has more than"):
        parse_tensors(len(header).to_bytes(8, "little") + header)


def many(tensors: int) -> bytes:
    """A file of empty tensors."""
    return with_header(
        {str(name): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in range(tensors)}, b""
    )


@pytest.mark.parametrize(
    "make", [lambda: many(110_000), lambda: many(1000).replace(b'"data_offsets"', b'"data_offset\\u0073"')[:-1] + b" }"]
)
def test_tensors_are_counted_before_any_is_made(make: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    data = make()
    monkeypatch.setattr(adapter_files, "_tensor", None)
    monkeypatch.setattr(json, "loads", lambda text: None)
    with pytest.raises(
        AdapterError, match="too many tensors, or too much beside them: its header tells of more than 100"
    ):
        AdapterWeights.parse(b"{}", data, most_tensors=100)


def test_as_many_tensors_as_a_base_may_need_are_read() -> None:
    assert len(parse_tensors(many(2000), most=2000)[0]) == 2000


@pytest.mark.parametrize(
    "config", [{"a": [[]] * 70_000}, {"a": dict.fromkeys(map(str, range(70_000)), 1)}, {"a": [1] * 70_000}]
)
def test_a_configurations_values_are_counted_before_any_is_made(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"peft_type": "LORA", **config})
    file = sent(tmp_path / "file", {"adapter_config": text})
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(AdapterError, match="more than 65536 values"):
        adapter_files.parse_config(text.encode())
    with pytest.raises(ApiError, match="more than 65536 values"):
        _config(file)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_was_cut_off_is_its_senders_mistake(share: float, tmp_path: Path) -> None:
    tensors = {"base_model.model.a.lora_A.weight": torch.ones(40, 40)}
    whole = safetensors.torch.save(tensors, {"adapter_config": '{"peft_type": "LORA"}'})
    (file := tmp_path / "file").write_bytes(cut := whole[: int(len(whole) * share)])
    with pytest.raises((ApiError, AdapterError), match="cut off"):
        AdapterWeights.parse(_config(file).encode(), cut)
    with pytest.raises(AdapterError, match="cut off"):
        read_adapter(file)


def test_what_is_sent_in_one_file_is_read_as_if_it_lay_in_two(tmp_path: Path) -> None:
    tensors = {"base_model.model.a.lora_A.weight": torch.ones(40, 40)}
    (file := tmp_path / "file").write_bytes(
        safetensors.torch.save(tensors, {"adapter_config": '{"peft_type": "LORA"}'})
    )
    found = read_adapter(file)
    assert found.config == {"peft_type": "LORA"} and same(found.tensors, tensors)
    assert found.place_of(found.tensors["base_model.model.a.lora_A.weight"]) == file.stat().st_size - 6400
    with pytest.raises(AdapterError, match="has 6[0-9]{3} bytes, and may have 6000: start the server with more"):
        read_adapter(file, most_bytes=6000)
    long = json.dumps({"peft_type": "LORA", "a": "x" * (1 << 20)})
    file.write_bytes(safetensors.torch.save(tensors, {"adapter_config": long}))
    with pytest.raises(AdapterError, match="adapter_config.json has 1048.* bytes, and may have 1048576"):
        read_adapter(file)


@pytest.mark.parametrize("config", [7, None, [], {"a": 1}, "\ud800", "[" * 9000, "", "[]"])
def test_a_file_whose_configuration_is_none_is_refused(config: Any, tmp_path: Path) -> None:
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for metadata in ({"adapter_config": config}, config):
        (file := tmp_path / "file").write_bytes(with_header({"__metadata__": metadata, "a": tensor}, bytes(8)))
        with pytest.raises(AdapterError, match="no safetensors file|is not JSON|has no peft_type"):
            read_adapter(file)


def sent(file: Path, metadata: dict[str, str]) -> Path:
    """A file without tensors, as one that a client has sent."""
    header = json.dumps({"__metadata__": metadata}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    return file


def test_a_header_may_be_as_large_whether_the_adapter_is_sent_or_lies_in_the_folder(tmp_path: Path) -> None:
    config = {"adapter_config": '{"peft_type": "LORA"}'}
    large = sent(tmp_path / "large", {**config, "more": "x" * (MOST_HEADER_BYTES - 200)})
    assert json.loads(_config(large)) == {"peft_type": "LORA"} and parse_tensors(large.read_bytes())[0] == {}
    larger = sent(tmp_path / "larger", {**config, "more": "x" * MOST_HEADER_BYTES})
    with pytest.raises(ApiError, match="is a safetensors file, but its header has more than 8388608 bytes"):
        _config(larger)
    with pytest.raises(AdapterError, match="too many tensors, or too much beside them: its header has more than"):
        adapter_files.AdapterWeights.parse(b'{"peft_type": "LORA"}', larger.read_bytes())
    with pytest.raises(AdapterError, match="too many tensors, or too much beside them: its header has more than"):
        read_adapter(larger)
    larger.write_bytes(larger.read_bytes()[:100])
    with pytest.raises(ApiError, match="is no safetensors file whose metadata has"):
        _config(larger)


def test_an_adapter_whose_mtime_was_put_back_is_another(tmp_path: Path) -> None:
    """All adapters of one configuration have one size, and `rsync --times` and builds of images set the time."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(b"before")
    file, before = tmp_path / "adapter_model.safetensors", adapter_files.state_of(tmp_path)
    times = file.stat()
    time.sleep(0.02)  # a tick of the file system's clock
    with file.open("r+b") as opened:
        opened.write(b"after!")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_mtime_ns == times.st_mtime_ns and adapter_files.state_of(tmp_path) != before
