"""Ranks on GPUs of one host, connected by NCCL, and for few rows by each other's memory. Operations are enqueued on the current stream, so a captured
step has them within its graph."""

import ctypes
import logging
import os
import threading

import torch
from torch import Tensor

from symbiosis.serving.tensor_parallel.peer_group import PeerGroup
from symbiosis.transport.cuda.driver import CudaError
from symbiosis.transport.nccl.driver import check, library, new_unique, unique_of

logger = logging.getLogger("symbiosis")

DTYPES = {
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
SUM = 0
_TOLD_BYTES = 64  # that ranks tell each other at once
ABORT_S = 2.0  # for a call that enqueues


def meeting() -> bytes:
    """Return the bytes by which ranks of this host find one another."""
    _settle()
    return new_unique()


def _settle() -> None:
    """Have NCCL use the loopback interface only, and no multicast of NVLink, unless whoever runs this says otherwise. It reads these once.

    Registering a graph's memory is a meeting of all ranks within the capture, and ranks may capture a step at different times."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


class NcclGroup:
    """One rank's end. It waits for ever for a rank that is gone, until it is aborted."""

    def __init__(self, unique: bytes, rank: int, ranks: int, device: torch.device) -> None:
        _settle()
        self._ranks, self._device, self._library = ranks, device, library()
        self._calling, self._is_aborted = threading.Lock(), False
        self._comm = ctypes.c_void_p()
        self._peers: PeerGroup | None = None
        with torch.cuda.device(device):
            code = self._library.ncclCommInitRank(ctypes.byref(self._comm), ranks, unique_of(unique), rank)
            check(code, "ncclCommInitRank")
            self.sum(
                torch.zeros(1, device=device)
            )  # what CUDA loads and allocates for it is there before anything is captured
            torch.cuda.current_stream(device).synchronize()
            if ranks > 1:
                self._peers = self._by_memory(rank)

    def sum(self, x: Tensor) -> Tensor:
        if self._peers is not None and self._peers.sums_at_once(x):
            self._must_be_connected()
            return self._peers.sum(x)
        made = torch.empty_like(x)
        self._call("ncclAllReduce", x.data_ptr(), made.data_ptr(), x.numel(), DTYPES[x.dtype], SUM)
        return made

    def gather(self, x: Tensor) -> Tensor:
        made = x.new_empty(self._ranks, *x.shape)
        self._call("ncclAllGather", x.data_ptr(), made.data_ptr(), x.numel(), DTYPES[x.dtype])
        return made

    def broadcast(self, x: Tensor) -> None:
        self._call("ncclBroadcast", x.data_ptr(), x.data_ptr(), x.numel(), DTYPES[x.dtype], 0)

    def abort(self) -> None:
        """End what the GPU waits for, undone. A call that waits for room in the GPU's queue ends, too.

        NCCL ends it at once, and then waits until there is no graph any more that has its operations: so a thread has that to do."""
        if self._peers is not None:
            self._peers.abort()
        is_mine = self._calling.acquire(timeout=ABORT_S)
        was_aborted, self._is_aborted = self._is_aborted, True
        if is_mine:
            self._calling.release()
        if not was_aborted:
            abort = self._library.ncclCommAbort
            threading.Thread(target=abort, args=[self._comm], name="symbiosis-abort", daemon=True).start()

    def _call(self, name: str, *words: int) -> None:
        with self._calling:
            self._must_be_connected()
            stream = torch.cuda.current_stream(self._device).cuda_stream
            check(getattr(self._library, name)(*words, self._comm, stream), name)

    def _by_memory(self, rank: int) -> PeerGroup | None:
        """Return what adds up few rows, unless a rank is out of another one's reach: all ranks find the same."""
        try:
            return PeerGroup(self._exchange, rank, self._ranks, self._device)
        except CudaError as why:
            logger.info("rank %d: NCCL adds up few rows, too: %s", rank, why)
            return None

    def _exchange(self, told: bytes) -> list[bytes]:
        mine = torch.tensor(list(told.ljust(_TOLD_BYTES, b"\0")), dtype=torch.uint8, device=self._device)
        return [bytes(each) for each in self.gather(mine).tolist()]

    def _must_be_connected(self) -> None:
        if self._is_aborted:
            raise RuntimeError("the ranks are not connected any more")
