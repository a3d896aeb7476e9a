"""Tensors in parts in several files: whole and in their places when they are mapped, evenly divided, and checked."""

import gc
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from symbiosis.errors import ProtocolError
from symbiosis.protocol import Layer
from symbiosis.transport.local import striped_weights
from symbiosis.transport.local.segment import Slab
from symbiosis.transport.local.striped_weights import PAGE, PartFile, mapped
from symbiosis.transport.tensors import DTYPE_NAME

SHAPES = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=6)
SHARES = st.lists(st.sampled_from([1.0, 1.0, 3.0, 0.5]), min_size=2, max_size=4)


def manifest_of(tensors: Sequence[Tensor]) -> list[Layer]:
    return [Layer(f"l{n}", "linear", tuple(t.shape), DTYPE_NAME[t.dtype], "") for n, t in enumerate(tensors)]


def files_of(tensors: Sequence[Tensor], shares: Sequence[float], tied: bool = False) -> list:
    """The files of all ranks; `tied`: the last tensor is the first."""
    files = []
    for rank in range(len(shares)):
        part = PartFile(manifest_of(tensors), shares, rank)
        for tensor in tensors[: len(tensors) - tied]:
            part.add(tensor)
        if tied:
            part.add_tied(0)
        files.append(part.seal())
    return files


def shifted(shape: tuple[int, ...], dtype: torch.dtype, by: int) -> Tensor:
    """A tensor that begins `by` elements after 64 bytes."""
    rows, columns = shape
    return torch.randn(rows * columns + by).to(dtype)[by:].view(shape)


@settings(max_examples=40)
@given(SHAPES, SHARES, st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.integers(0, 3))
def test_tensors_are_whole_and_begin_where_they_began(
    shapes: list[tuple[int, int]], shares: list[float], dtype: torch.dtype, by: int
) -> None:
    tensors = [shifted(shape, dtype, by) for shape in shapes]
    files = files_of(tensors, shares)
    held = mapped(manifest_of(tensors), [file.fileno() for file in files])
    for number, tensor in enumerate(tensors):
        assert torch.equal(held[number], tensor)
        assert held[number].data_ptr() % 64 == tensor.data_ptr() % 64


def test_parts_are_even_and_by_shares() -> None:
    tensors = [torch.zeros(200, 777) for _ in range(12)]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    for shares in ((1.0, 1.0), (3.0, 1.0), (1.0,) * 4):
        sizes = [os.fstat(file.fileno()).st_size for file in files_of(tensors, shares)]
        for size, share in zip(sizes, shares, strict=True):
            assert abs(size - nbytes * share / sum(shares)) <= 2 * PAGE * len(tensors)


def test_small_tensors_do_not_all_lie_on_one_rank() -> None:
    sizes = [os.fstat(file.fileno()).st_size for file in files_of([torch.zeros(2, 2)] * 8, (1.0, 1.0))]
    assert sizes == [5 * PAGE, 4 * PAGE]  # the first begins with a page that says where everything lies


def test_tied_tensors_lie_there_once_and_are_one() -> None:
    tensors = [torch.randn(64, 64), torch.randn(8, 8)]
    tensors.append(tensors[0])
    files = files_of(tensors, (1.0, 1.0), tied=True)
    held = mapped(manifest_of(tensors), [file.fileno() for file in files])
    assert held[2] is held[0] and torch.equal(held[0], tensors[0])
    assert sum(os.fstat(file.fileno()).st_size for file in files) < 2 * tensors[0].nbytes


def test_what_a_client_changes_is_its_own() -> None:
    tensors = [torch.randn(64, 64)]
    files = files_of(tensors, (1.0, 1.0))
    fds = [file.fileno() for file in files]
    mine, theirs = (mapped(manifest_of(tensors), fds, writable=True)[0] for _ in range(2))
    mine.zero_()
    assert torch.equal(theirs, tensors[0]) and not mine.any()


def test_memory_is_unmapped_with_the_last_tensor() -> None:
    def maps() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count(striped_weights.NAME)

    before, tensors = maps(), [torch.randn(300, 300)] * 2
    files = files_of(tensors, (1.0, 1.0))
    held = mapped(manifest_of(tensors), [file.fileno() for file in files])
    last = held[1][5:, 3:]
    assert maps() > before
    del held
    assert maps() > before and torch.equal(last, tensors[1][5:, 3:])
    del last
    assert maps() == before


def test_files_that_are_not_what_they_should_be_are_refused() -> None:
    tensors = [torch.randn(64, 64), torch.randn(64, 64)]
    manifest, files = manifest_of(tensors), files_of(tensors, (1.0, 1.0))
    fds = [file.fileno() for file in files]
    slab = Slab.create(1 << 20)
    for wrong, text in (
        ([fds[0], slab.fd], "is not sealed memory"),
        ([fds[1], fds[0]], "came with 2 descriptors"),
        ([fds[0], fds[1], fds[1]], "came with 3 descriptors|is not sealed memory"),
    ):
        with pytest.raises(ProtocolError, match=text):
            mapped(manifest, wrong)
    larger = [*manifest, Layer("more", "linear", (999, 999), "float32", "")]
    with pytest.raises(ProtocolError):
        mapped(larger, fds)
    other = [manifest[0], Layer("l1", "linear", (32, 64), "float32", "")]
    part = PartFile(manifest, (1.0, 1.0), 0)
    part.add(tensors[0])
    part.add_tied(0)
    with pytest.raises(ProtocolError, match="l1 cannot be tied to tensor number 0"):
        mapped(other, [part.seal().fileno(), fds[1]])
