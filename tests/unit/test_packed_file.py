"""Packed weights in a sealed file: what comes back is what was written, and a file of something else is refused."""

import fcntl
import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from symbiosis.errors import ProtocolError
from symbiosis.kernels.packed import PackedWeight, TableWeight
from symbiosis.kernels.packing import pack
from symbiosis.protocol import Layer
from symbiosis.transport.local.packed_file import LENGTH, publish, taken
from symbiosis.transport.local.shared_weights import SEALS
from tests.unit.test_packed import KINDS


def layer(weight: PackedWeight) -> Layer:
    return Layer("layer", "linear", weight.shape, "float32", "", packed=weight.format)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_is_mapped(kind: str) -> None:
    torch.manual_seed(0)
    first, second = KINDS[kind](24, 40), KINDS[kind](24, 40)
    weights = {0: first, 2: second}
    plain = Layer("norm", "client", (4,), "float32", "")
    with publish(weights) as file:
        assert not weights  # each is let go
        found = taken([layer(first), plain, layer(second)], file.fileno())
    assert {number: weight.digest() for number, weight in found.items()} == {0: first.digest(), 2: second.digest()}
    assert torch.equal(found[2].whole(torch.bfloat16), second.whole(torch.bfloat16))
    assert all(part.data_ptr() % 64 == 0 for weight in found.values() for part in weight.parts.values())


def forged(change: Callable[[list[Any]], Any], seals: int = SEALS) -> int:
    """Return a file with another head."""
    with publish({0: pack(torch.ones(4, 64), "int8")}) as file:
        raw = os.pread(file.fileno(), 1 << 16, 0)
    (length,) = LENGTH.unpack_from(raw)
    head = msgspec.msgpack.encode(change(msgspec.msgpack.decode(raw[LENGTH.size : LENGTH.size + length])))
    fd = os.memfd_create("forged", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, LENGTH.pack(len(head)) + head + bytes(4096))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def with_part(**figures: Any) -> Callable[[list[Any]], Any]:
    def change(entries: list[Any]) -> Any:
        entries[0]["parts"]["codes"].update(figures)
        return entries

    return change


def test_figures_of_a_shape_are_counted() -> None:
    def many(entries: list[Any]) -> Any:
        entries[0]["figures"]["shape"] = [1 << 63] * 100_000
        return entries

    with pytest.raises(ProtocolError, match="length"):
        taken([], forged(many))
    with pytest.raises(ValueError, match="no weight's"):
        TableWeight((1 << 62,) * 8, "nf4", torch.zeros(1, dtype=torch.uint8), torch.zeros(16), 64, torch.zeros(1))


@pytest.mark.parametrize(
    ("change", "seals", "message"),
    [
        (lambda head: head, 0, "not sealed memory"),
        (lambda head: "weights", SEALS, "no packed weights"),
        (lambda head: [], SEALS, "not those of the manifest"),
        (lambda head: [{**head[0], "number": 1}], SEALS, "not those of the manifest"),
        (lambda head: [{**head[0], "kind": "Tensor"}], SEALS, "no packed weights"),
        (lambda head: [{**head[0], "figures": {}}], SEALS, "no packed weights"),
        (lambda head: [{**head[0], "figures": {**head[0]["figures"], "block": (0, 64)}}], SEALS, "no packed weights"),
        (with_part(begin=1 << 40), SEALS, "not sealed memory"),
        (with_part(shape=(1 << 20, 64)), SEALS, "not sealed memory"),
        (with_part(shape=(2, 64)), SEALS, "no packed weights: codes of"),
        (with_part(dtype="complex64"), SEALS, "no packed weights"),
        (with_part(begin=-1), SEALS, "no packed weights"),
    ],
)
def test_a_file_of_something_else_is_refused(change: Callable[[list[Any]], Any], seals: int, message: str) -> None:
    weight = pack(torch.ones(4, 64), "int8")
    fd = forged(change, seals)
    try:
        with pytest.raises(ProtocolError, match=message):
            taken([layer(weight)], fd)
    finally:
        os.close(fd)
