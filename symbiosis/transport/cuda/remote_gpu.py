"""Calls of clients on another GPU of the host: their rows and results lie in memory of the executor's GPU meanwhile."""

import itertools
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from symbiosis.protocol import ITEMSIZE, Kind
from symbiosis.transport.cuda.driver import DeviceMemory, copy
from symbiosis.transport.cuda.words import aligned
from symbiosis.transport.tensors import tensor_at


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


class RemoteCopies:
    """A call's payload and results in memory here, and in the client's."""

    def __init__(self, places: Sequence[Place], tensors: Sequence[Tensor], parts: int, in_reach: bool) -> None:
        """`parts`: how many of them, the first, are the payload. `in_reach`: whether kernels here can use the client's memory, too."""
        self.tensors = tensors
        self._pairs = [(place.address, tensor) for place, tensor in zip(places, tensors, strict=True)]
        self._payload, self._results = self._pairs[:parts], self._pairs[parts:]
        self._in_reach = in_reach

    @property
    def at(self) -> Callable[[Tensor], int] | None:
        """What returns the address of a tensor in the client's memory; None if that is out of reach."""
        return self._there if self._in_reach else None

    def _there(self, tensor: Tensor) -> int:
        """Return the address, in the client's memory, of what `tensor` holds here: one of these tensors, or a part of one."""
        for address, whole in self._pairs:
            if 0 <= (start := tensor.data_ptr() - whole.data_ptr()) < whole.nbytes:
                return address + start
        raise ValueError("this is no part of the call")

    def fetch(self, stream: int) -> None:
        for address, tensor in self._payload:
            copy(tensor.data_ptr(), address, tensor.nbytes, stream)

    def deliver(self, stream: int) -> None:
        for address, tensor in self._results:
            copy(address, tensor.data_ptr(), tensor.nbytes, stream)


class Staging:
    """Memory here for the calls of one client. Its calls come one by one, so all begin at the same place. When one needs more, other memory is
    taken, in which the next ones lie, too; calls that were registered before stay where they are."""

    def __init__(self, device: torch.device, in_reach: bool) -> None:
        self._memory, self._in_reach = torch.empty(0, dtype=torch.uint8, device=device), in_reach

    def copies(self, places: Sequence[Place], parts: int) -> RemoteCopies:
        """Return a tensor here for each of these, one behind the other. The first `parts` of them are the payload."""
        lies, nbytes = lay_out([(place.dtype, place.shape) for place in places])
        if nbytes > len(self._memory):
            self._memory = self._memory.new_empty(max(nbytes, 2 * len(self._memory)))
        return RemoteCopies(places, [tensor_at(self._memory, *lie) for lie in lies], parts, self._in_reach)


def lay_out(kinds: Sequence[Kind]) -> tuple[list[tuple[int, str, tuple[int, ...]]], int]:
    """Return start, dtype and shape of tensors of these kinds, one behind the other, and the bytes of all."""
    sizes = [aligned(prod(shape) * ITEMSIZE[dtype]) for dtype, shape in kinds]
    *starts, nbytes = itertools.accumulate(sizes, initial=0)
    return [(start, *kind) for start, kind in zip(starts, kinds, strict=True)], nbytes
