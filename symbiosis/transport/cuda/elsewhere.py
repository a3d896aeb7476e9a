"""Calls of clients on another GPU of the host: their rows and results lie in memory of the executor's GPU meanwhile."""

import itertools
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from symbiosis.protocol import ITEMSIZE
from symbiosis.transport.cuda.driver import DeviceMemory, copy
from symbiosis.transport.cuda.words import aligned
from symbiosis.transport.tensors import tensor_at

Kind = tuple[str, tuple[int, ...]]  # dtype and shape


class Place(NamedTuple):
    """Where a tensor lies in a client's memory."""

    memory: DeviceMemory
    start: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def address(self) -> int:
        return self.memory.address + self.start

    def tensor(self) -> Tensor:
        return self.memory.tensor(self.start, self.dtype, self.shape)


class Staging:
    """Memory here for the calls of one client. They come one by one, so all begin at the same place. When one needs more, other memory is
    taken, in which the next ones lie, too; calls that were registered before stay where they are."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def tensors(self, places: Sequence[Place]) -> list[Tensor]:
        """Return a tensor here for each of these, one behind the other."""
        lies, nbytes = lay_out([(place.dtype, place.shape) for place in places])
        if nbytes > len(self._memory):
            self._memory = self._memory.new_empty(max(nbytes, 2 * len(self._memory)))
        return [tensor_at(self._memory, *lie) for lie in lies]


def lay_out(kinds: Sequence[Kind]) -> tuple[list[tuple[int, str, tuple[int, ...]]], int]:
    """Return start, dtype and shape of tensors of these kinds, one behind the other, and the bytes of all."""
    sizes = [aligned(prod(shape) * ITEMSIZE[dtype]) for dtype, shape in kinds]
    *starts, nbytes = itertools.accumulate(sizes, initial=0)
    return [(start, *kind) for start, kind in zip(starts, kinds, strict=True)], nbytes


class RemoteCopies:
    """Copies a call's payload here from another GPU, and its results back."""

    def __init__(self, places: Sequence[Place], tensors: Sequence[Tensor], parts: int) -> None:
        """`parts`: how many of them, the first, are the payload."""
        pairs = [(place.address, tensor) for place, tensor in zip(places, tensors, strict=True)]
        self._payload, self._results = pairs[:parts], pairs[parts:]

    def fetch(self, stream: int) -> None:
        for address, tensor in self._payload:
            copy(tensor.data_ptr(), address, tensor.nbytes, stream)

    def deliver(self, stream: int) -> None:
        for address, tensor in self._results:
            copy(address, tensor.data_ptr(), tensor.nbytes, stream)
