"""Ranks whose GPUs reach each other's memory, or that share one GPU. Operations are enqueued on the current stream, so a captured step has them within its
graph."""

import os
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from symbiosis.kernels.gpu.rank_exchange import (
    BLOCKS,
    BLOCKS_OF_MANY,
    MOST,
    SUMMED,
    RankMemory,
    gather_of_ranks,
    memory_of,
    sum_of_ranks,
)
from symbiosis.transport.cuda.driver import CudaError, NamedMemory, WordPage


class PeerGroup:
    """One rank's end. It waits for ever for a rank that is gone, until it is aborted.

    Args:
        exchange: Tells all ranks something of at most 64 bytes, and returns what each has told.
        shares_gpu: Whether ranks are on the same GPU.

    Raises `CudaError` on all ranks if one cannot reach the memory of another.
    """

    def __init__(
        self,
        exchange: Callable[[bytes], list[bytes]],
        rank: int,
        ranks: int,
        device: torch.device,
        shares_gpu: bool = False,
    ) -> None:
        self._is_aborted = False
        memory = _memory(memory_of(ranks), device)
        addresses = _addresses(memory, exchange(memory.name if memory is not None else b""), rank)
        reaches_all = all(each.strip(b"\0") for each in exchange(b"yes" if addresses else b""))
        if memory is None or not reaches_all:
            if memory is not None:
                memory.close()
            raise CudaError("a rank cannot reach the memory of another")
        with os.fdopen(os.memfd_create("symbiosis-stop"), "r+b") as file:
            file.truncate(WordPage.nbytes)
            self._stop = WordPage(file.fileno())
        self._memory = RankMemory(
            rank,
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.zeros(BLOCKS_OF_MANY if shares_gpu else BLOCKS, dtype=torch.int32, device=device),
            self._stop.at(0),
        )
        weakref.finalize(self, _close, memory, self._stop)
        self.sum(torch.zeros(1, device=device))
        torch.cuda.current_stream(device).synchronize()  # all are there

    def sum(self, x: Tensor) -> Tensor:
        self._check()
        assert x.dtype in SUMMED
        return sum_of_ranks(x, self._memory)

    def sums_at_once(self, x: Tensor) -> bool:
        """Whether this is few enough to be exchanged at once."""
        return x.nbytes <= MOST and x.dtype in SUMMED

    def gather(self, x: Tensor) -> Tensor:
        self._check()
        return gather_of_ranks(x, self._memory)

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self.gather(x)[0])

    def abort(self) -> None:
        """End what the GPU waits for, undone."""
        self._is_aborted = True
        self._stop.words[0] = 1

    def _check(self) -> None:
        if self._is_aborted:
            raise RuntimeError("the ranks are not connected any more")


def _memory(nbytes: int, device: torch.device) -> NamedMemory | None:
    try:
        return NamedMemory(nbytes, device)
    except CudaError:
        return None


def _addresses(memory: NamedMemory | None, names: list[bytes], rank: int) -> list[int]:
    """Return where the memory of each rank is, or nothing if one cannot be reached."""
    if memory is None or not all(name.strip(b"\0") for name in names):
        return []
    try:
        return [memory.address if each == rank else memory.other(name) for each, name in enumerate(names)]
    except CudaError:
        return []


def _close(memory: NamedMemory, stop: WordPage) -> None:
    stop.words[0] = 1
    memory.close()
    stop.close()
