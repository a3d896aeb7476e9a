"""A communicator of two ranks, on streams of its own, that can be made and left at any time. torch does not offer that. It uses the NCCL
library that torch has loaded, through ctypes."""

import ctypes
import hashlib
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

UNIQUE_BYTES = 128
EXCHANGE_S = 10.0  # that the first exchange may take
_BYTES = 0  # ncclInt8


class NcclError(RuntimeError):
    """NCCL refused, or the other side is gone."""


class _Unique(ctypes.Structure):
    """ncclUniqueId"""

    _fields_ = [("bytes", ctypes.c_byte * UNIQUE_BYTES)]


@cache
def library() -> Any:
    """Return NCCL's library, as torch has loaded it."""
    torch.cuda.init()  # loads it
    library = ctypes.CDLL("libnccl.so.2")
    library.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, _Unique, ctypes.c_int]
    for name in ("ncclSend", "ncclRecv"):
        getattr(library, name).argtypes = [
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
        ]  # fmt: skip
    number, word = ctypes.c_int, ctypes.c_void_p
    library.ncclAllReduce.argtypes = [word, word, ctypes.c_size_t, number, number, word, word]
    library.ncclAllGather.argtypes = [word, word, ctypes.c_size_t, number, word, word]
    library.ncclBroadcast.argtypes = [word, word, ctypes.c_size_t, number, number, word, word]
    library.ncclCommAbort.argtypes = [ctypes.c_void_p]
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def check(code: int, what: str) -> None:
    """Raise `NcclError` if this is no success."""
    if code:
        raise NcclError(f"{what}: {library().ncclGetErrorString(code).decode()}")


def version() -> int:
    """Return the version of NCCL as NCCL counts (2.28.9 is 22809), 0 if there is none."""
    number = ctypes.c_int()
    try:
        check(library().ncclGetVersion(ctypes.byref(number)), "ncclGetVersion")
    except (OSError, RuntimeError, AttributeError):
        return 0
    return number.value


def shown(token: bytes) -> bytes:
    """Return what a client shows of the token that it was given. What goes to a port that an executor names is nothing that it could have
    chosen, such as a command to another server."""
    return hashlib.sha256(token).digest()


def new_unique() -> bytes:
    """Return the bytes by which two processes meet. The one that calls this waits for both."""
    unique = _Unique()
    check(library().ncclGetUniqueId(ctypes.byref(unique)), "ncclGetUniqueId")
    return bytes(unique)


def unique_of(unique: bytes) -> _Unique:
    """Return these bytes as NCCL takes them."""
    return _Unique.from_buffer_copy(unique)


class Communicator:
    """Two processes, each with a GPU: the client is rank 0, the executor rank 1. Operations are enqueued on the streams that they are
    given."""

    def __init__(self, unique: bytes, rank: int, device: torch.device, stream: torch.cuda.Stream) -> None:
        """Return when both sides have come and have sent each other something, so that CUDA has loaded and allocated what that takes."""
        self._other = 1 - rank
        self._ended = False
        self._comm = ctypes.c_void_p()
        self._ending = threading.Lock()
        with torch.cuda.device(device):
            code = library().ncclCommInitRank(ctypes.byref(self._comm), 2, unique_of(unique), rank)
            check(code, "ncclCommInitRank")
            try:
                self._exchange(rank, device, stream)
            except BaseException:
                self.abort()
                raise

    def _exchange(self, rank: int, device: torch.device, stream: torch.cuda.Stream) -> None:
        word = torch.zeros(1, device=device)
        stream.wait_stream(torch.cuda.current_stream(device))
        first, second = (self.send, self.receive) if rank == 0 else (self.receive, self.send)
        first(word, stream.cuda_stream)
        second(word, stream.cuda_stream)
        end = time.monotonic() + EXCHANGE_S
        while not stream.query():
            if time.monotonic() > end:
                raise NcclError(f"the other side went away, or did nothing for {EXCHANGE_S:g} s")
            time.sleep(1e-3)

    def send(self, rows: Tensor, stream: int) -> None:
        if not rows.nbytes:
            return
        code = library().ncclSend(rows.data_ptr(), rows.nbytes, _BYTES, self._other, self._comm, stream)
        check(code, "ncclSend")

    def receive(self, rows: Tensor, stream: int) -> None:
        if not rows.nbytes:
            return
        code = library().ncclRecv(rows.data_ptr(), rows.nbytes, _BYTES, self._other, self._comm, stream)
        check(code, "ncclRecv")

    def abort(self) -> None:
        """End exchanges that a stream still waits for, undone. This returns when the device is done with them, so no other stream of
        this process may wait for something that only this thread can do."""
        with self._ending:
            if not self._ended:
                self._ended = True
                library().ncclCommAbort(self._comm)


def communicator_within(
    seconds: float, unique: bytes, rank: int, device: torch.device, meanwhile: Callable[[], None]
) -> Communicator:
    """Make a communicator within so many seconds, else raise `NcclError`: NCCL itself may wait for ever. `meanwhile` is called about
    once a second."""
    made: list[Communicator | RuntimeError] = []
    given_up = threading.Event()

    def make() -> None:
        try:
            comm = Communicator(unique, rank, device, torch.cuda.Stream(device))
            made.append(comm)
            if given_up.is_set():
                comm.abort()
        except RuntimeError as error:
            made.append(error)

    thread = threading.Thread(target=make, name="symbiosis-meeting", daemon=True)
    thread.start()
    end = time.monotonic() + seconds
    while not made and time.monotonic() < end:
        thread.join(1.0)
        meanwhile()
    if not made:
        given_up.set()
        raise NcclError(f"the other side did not come to the meeting within {seconds:g} s")
    if isinstance(made[0], RuntimeError):
        raise NcclError(str(made[0]))
    return made[0]
