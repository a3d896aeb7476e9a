"""Sums of few rows that the ranks' GPUs make by writing into each other's memory."""

import os
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from symbiosis.kernels.gpu import sum_of_ranks
from symbiosis.transport.cuda.driver import CudaError, NamedMemory, WordPage

if TYPE_CHECKING:
    from symbiosis.serving.tensor_parallel.collectives import RankGroup


class PeerSums:
    """One rank's end.

    Args:
        memory: This rank's.
        addresses: Of the memory of all ranks, as this one's GPU knows them.
    """

    def __init__(self, memory: NamedMemory, addresses: list[int], rank: int, device: torch.device) -> None:
        self._rank = rank
        self._memories = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(sum_of_ranks.PARTS, dtype=torch.int32, device=device)
        with os.fdopen(os.memfd_create("symbiosis-stop"), "r+b") as file:
            file.truncate(WordPage.nbytes)
            self._page = WordPage(file.fileno())
        weakref.finalize(self, _close, memory, self._page)

    def can_sum(self, x: Tensor) -> bool:
        """Whether so many rows are added up faster so."""
        return sum_of_ranks.fits(x)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors."""
        return sum_of_ranks.sum_of_ranks(x, self._memories, self._numbers, self._page.at(0), self._rank)

    def stop(self) -> None:
        """End what waits for another rank, undone, and let nothing wait any more."""
        self._page.words[0] = 1


def _close(memory: NamedMemory, page: WordPage) -> None:
    page.words[0] = 1
    memory.close()
    page.close()


def joined(group: "RankGroup", rank: int, device: torch.device) -> PeerSums | None:
    """Return this rank's end, or None if not every rank reaches the memory of all others. All ranks of the group ask at the same time."""
    size = sum_of_ranks.memory_of(len(group.gather(torch.zeros(1, device=device))))
    memory, name = None, b""
    try:
        memory = NamedMemory(size, device)
        name = memory.name
    except CudaError:
        pass
    told = group.gather(torch.tensor(list(name.ljust(64, b"\0")), dtype=torch.uint8, device=device))
    names = [bytes(each) for each in told.tolist()]
    addresses = list[int]()
    try:
        if memory is not None and all(any(each) for each in names):
            addresses = [memory.address if each == name else memory.other(each) for each in names]
    except CudaError:
        pass
    lacking = group.sum(torch.tensor([0.0 if addresses else 1.0], device=device))
    if memory is None or lacking.item():
        if memory is not None:
            memory.close()
        return None
    return PeerSums(memory, addresses, rank, device)
