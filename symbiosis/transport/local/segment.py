"""The shared memory segment of one `local://` session, as either end sees it.

A call is written once into it and never serialised:

    0      the client's beat, a counter
    8      1 while the executor sleeps and must be woken by an eventfd; 16 likewise the client
    24     the number of the newest call; 32 of the newest reply: written last, they are the doorbells
    64     call header
    256    reply header
    4096   payload of the call, and behind it (64-byte aligned) that of the reply
"""

import fcntl
import logging
import mmap
import os
import struct
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from symbiosis.errors import Code, ProtocolError
from symbiosis.protocol import Call
from symbiosis.transport.cuda.driver import CudaError, PinnedMemory
from symbiosis.transport.release import over
from symbiosis.transport.tensors import tensor_at

EXECUTOR_SLEEPS_AT, CLIENT_SLEEPS_AT, CALL_BELL_AT, REPLY_BELL_AT = 8, 16, 24, 32
CALL_AT, REPLY_AT, PAYLOAD_AT = 64, 256, 4096
WORD = struct.Struct("<Q")
VIEWS_KEPT = 512
PINNED_AT_MOST = 256 << 20  # bytes of a segment; pinning more takes too long, and takes memory from everybody else
logger = logging.getLogger("symbiosis")


def must_hold(fd: int, nbytes: int, seals: int = fcntl.F_SEAL_SHRINK) -> None:
    """Raise `ProtocolError` unless another process's descriptor is memory of this size, sealed to stay so. Touching memory that is gone
    would end this process."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals == seals
    except OSError:
        sealed = False
    if not sealed or os.fstat(fd).st_size < nbytes:
        raise ProtocolError(Code.BAD_FRAME, f"what the other side shares is not sealed memory of {nbytes} bytes")


class Slab:
    """A shared memory segment. Tensors over it are cached by place, dtype and shape."""

    _still_pinned: ClassVar[dict[int, Tensor]] = {}  # keeps pinned memory mapped

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes
        must_hold(fd, nbytes)
        self.memory = mmap.mmap(fd, nbytes)
        with torch.inference_mode(False):  # tensors over it are written to in whatever mode a call is made
            self._bytes = over(self.memory)
        self._views: dict[tuple[int, str, tuple[int, ...]], Tensor] = {}
        self._pinned: PinnedMemory | None = None

    @classmethod
    def create(cls, nbytes: int) -> "Slab":
        fd = os.memfd_create("symbiosis", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise

    def tensor(self, start: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
        key = (start, dtype, shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= VIEWS_KEPT:
                self._views.clear()
            with torch.inference_mode(False):
                view = self._views[key] = tensor_at(self._bytes, start, dtype, shape)
        return view

    def pin(self) -> None:
        """Pin the memory, so that a GPU's copies are faster and asynchronous. If that fails, copies still work."""
        if self.nbytes <= PINNED_AT_MOST:
            try:
                self._pinned = PinnedMemory(self.memory)
                self._still_pinned[self._bytes.data_ptr()] = self._bytes
            except CudaError as error:
                logger.warning("copies between a session's shared memory and the GPU are slow: %s", error)

    def close(self) -> None:
        """Close the descriptor. The memory is unmapped when the last tensor over it goes. No copy by a GPU may be under way."""
        self._views.clear()
        os.close(self.fd)
        if self._pinned is not None:
            try:
                self._pinned.close()
            except CudaError as error:  # the device is broken
                logger.warning("a session's shared memory stays pinned: %s", error)
            else:
                self._still_pinned.pop(self._bytes.data_ptr(), None)


def ring(memory: mmap.mmap, at: int, number: int) -> None:
    """Write a doorbell's number in one store. The other side may read at any time, and `pack_into` would write zeros first, then byte
    by byte."""
    memory[at : at + WORD.size] = WORD.pack(number)


@lru_cache(maxsize=1 << 14)
def reply_at(call: Call) -> int:
    """Return where the payload of the reply begins: behind that of the call, on a cache line."""
    return PAYLOAD_AT + -(-call.nbytes // 64) * 64
