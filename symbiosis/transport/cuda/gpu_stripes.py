"""Tensors in equal parts in the memory of several GPUs, mapped one part behind the other: whole again for each of them, without a copy.

CUDA maps an allocation as a whole only. So each run of pages that one rank holds is an allocation of its own. Large tensors begin at pages, and
are cut there; small ones lie one behind the other in the pages at the end. A page of the user's own GPU comes before them all, because torch
takes the GPU of a mapping's beginning for that of all its tensors.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from math import prod
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from symbiosis.errors import Code, ProtocolError
from symbiosis.protocol import ITEMSIZE, Layer
from symbiosis.transport.cuda.driver import DeviceMemory, DeviceRange, created, enter, whole
from symbiosis.transport.cuda.weights import ALIGNED
from symbiosis.transport.cuda.weights import Mapping as Unmapped
from symbiosis.transport.local.striped_weights import cuts, in_stripes
from symbiosis.transport.tensors import TORCH_DTYPE

PAGE = 2 << 20  # of device memory
TOGETHER = 64  # outputs: products of fewer, or beside such a place, are slow


class StripeRun(NamedTuple):
    """Pages behind each other that one rank holds: where they begin, and their bytes."""

    rank: int
    begin: int
    nbytes: int


class RunLayout:
    """Where tensors begin, by number, and the runs of pages in which they lie. Every rank counts alike."""

    def __init__(self, manifest: Sequence[Layer], shares: Sequence[float], tied: Mapping[int, int]) -> None:
        """`tied`: the number of the earlier tensor that a tensor is tied to."""
        self.manifest, self.tied, self.numbers = manifest, tied, in_stripes(manifest)
        self.begins: dict[int, int] = {}
        self.runs: list[StripeRun] = []
        self._ranks = len(shares)
        own = [number for number in self.numbers if number not in tied]
        large = [number for number in own if _nbytes(manifest[number]) >= PAGE * len(shares)]
        self._nbytes = self._turn = 0
        for number in large:
            self.begins[number] = self._nbytes
            self._add_pages(_nbytes(manifest[number]), shares)
        end = self._nbytes
        for number in own:
            if number not in self.begins:
                self.begins[number] = end
                end += -(-_nbytes(manifest[number]) // ALIGNED) * ALIGNED
        self._add_pages(end - self._nbytes, shares)
        self.begins |= {number: self.begins[tied[number]] for number in self.numbers if number in tied}

    def _add_pages(self, nbytes: int, shares: Sequence[float]) -> None:
        """Divide the next pages among the ranks. Pages behind those of the same rank lengthen its run."""
        begin = self._nbytes
        self._turn += 1
        for rank, first, last in cuts(-(-nbytes // PAGE), shares, self._turn):
            if self.runs and self.runs[-1].rank == rank:
                self.runs[-1] = self.runs[-1]._replace(nbytes=self.runs[-1].nbytes + (last - first) * PAGE)
            else:
                self.runs.append(StripeRun(rank, begin + first * PAGE, (last - first) * PAGE))
            self._nbytes = begin + last * PAGE

    def cuts(self, number: int) -> list[int]:
        """Return at which bytes of a tensor the part of another rank begins."""
        begin = self.begins[number]
        nbytes = _nbytes(self.manifest[number])
        return [run.begin - begin for run in self.runs if 0 < run.begin - begin < nbytes]

    def first_outputs(self, manifest: Sequence[Layer]) -> dict[int, tuple[int, ...]]:
        """Return with which output each rank's part of a linear layer begins, by rank, to a few outputs; of layers of which every rank has
        some. `manifest`: of the same tensors, and says which of them are served."""
        found = {}
        for number in self.begins:
            layer = manifest[number]
            if layer.kind == "linear" and len(layer.shape) == 2:
                row = layer.shape[1] * ITEMSIZE[layer.dtype]
                at = [TOGETHER * round(begin / row / TOGETHER) for _, begin in sorted(self._parts(number).items())]
                if len(at) == self._ranks and len(set(at)) == len(at) and max(at) < layer.shape[0]:
                    found[number] = tuple(at)
        return found

    def _parts(self, number: int) -> dict[int, int]:
        """Return at which byte of a tensor each rank's part begins, of those that have one."""
        begin, nbytes = self.begins[number], _nbytes(self.manifest[number])
        runs = self.runs[max(0, bisect_right(self.runs, begin, key=attrgetter("begin")) - 1) :]
        here = takewhile(lambda run: run.begin < begin + nbytes, runs)
        return {run.rank: max(0, run.begin - begin) for run in here}

    def of_rank(self, rank: int) -> list[StripeRun]:
        return [run for run in self.runs if run.rank == rank]


def _nbytes(layer: Layer) -> int:
    return prod(layer.shape) * ITEMSIZE[layer.dtype]


class DevicePart:
    """One rank's part while it is written. Each tensor is given once, whole, in the manifest's order, and this rank's part is kept."""

    def __init__(self, layout: RunLayout, rank: int, device: torch.device) -> None:
        must_have_such_pages(device)
        self._layout, self._next = layout, iter(layout.numbers)
        self._memory = [(run, DeviceMemory.create(run.nbytes, device)) for run in layout.of_rank(rank)]

    def add(self, tensor: Tensor) -> None:
        """Keep this rank's part of the next tensor."""
        begin, raw = self._layout.begins[next(self._next)], tensor.reshape(-1).view(torch.uint8)
        for run, memory in self._memory:
            first, last = max(begin, run.begin), min(begin + len(raw), run.begin + run.nbytes)
            if first < last:
                memory.tensor(first - run.begin, "uint8", (last - first,)).copy_(raw[first - begin : last - begin])

    def add_tied(self, other: int) -> None:
        """The next tensor is that of an earlier number, as the layout knows."""
        assert self._layout.tied[next(self._next)] == other

    def sealed(self) -> list[int]:
        """Return handles of this rank's runs, in order. Nobody writes to them any more."""
        torch.cuda.synchronize(self._memory[0][1].user if self._memory else None)
        return [memory.unmapped() for _, memory in self._memory]


class StripedMapping(DeviceRange, Unmapped):
    """All runs, mapped one behind the other, until the last tensor over them is gone."""


def mapped(
    layout: RunLayout, handles: Mapping[int, Sequence[int]], device: torch.device
) -> tuple[StripedMapping, dict[int, Tensor]]:
    """Map the runs of all ranks for use by `device`: return what holds them, and the tensors, by number. Tied ones are the same object. A
    write to one is a fault of the GPU, which ends its program. `handles`: of each rank's runs, in order; the mapping releases them."""
    must_have_such_pages(device)
    enter(device)
    left = {rank: iter(some) for rank, some in handles.items()}
    pieces = [(created(PAGE, device), PAGE), *((_next(left, run), run.nbytes) for run in layout.runs)]
    held = StripedMapping(pieces, device)
    everything = held.tensor(0, "uint8", (held.nbytes,))
    at: dict[int, Tensor] = {}
    for number, begin in layout.begins.items():
        if begin not in at:
            at[begin] = _tensor(everything, layout.manifest[number], PAGE + begin)
    return held, {number: at[begin] for number, begin in layout.begins.items()}


def _next(left: Mapping[int, Iterator[int]], run: StripeRun) -> int:
    handle = next(left[run.rank], None)
    if handle is None:
        raise ProtocolError(Code.BAD_FRAME, f"rank {run.rank} has handed over fewer pieces of memory than it holds")
    return handle


def _tensor(everything: Tensor, layer: Layer, begin: int) -> Tensor:
    return everything[begin : begin + _nbytes(layer)].view(TORCH_DTYPE[layer.dtype]).view(layer.shape)


def must_have_such_pages(device: torch.device) -> None:
    """Raise `RuntimeError` unless the device's memory is mapped in pages of the size that all ranks count with."""
    if PAGE % whole(1, device):
        raise RuntimeError(f"{device} maps memory in pages of {whole(1, device)} bytes, not of {PAGE}")
