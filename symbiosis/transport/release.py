"""Returns large memory to the system in a thread of its own.

Returning a GiB takes the kernel 0.1 to 0.3 s, and Python and torch hold the interpreter for as long, so the executor's loop would
answer nobody meanwhile. Here the pages are returned by calls that do not hold it.
"""

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor

from symbiosis.base.forks import at_fork, look_for_fork

APART = 16 << 20  # bytes; smaller memory is returned in a few milliseconds
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None)
_waiting: SimpleQueue[Callable[[], object]] = SimpleQueue()
_threads: list[threading.Thread] = []
at_fork(_threads.clear)  # the thread is the parent's


def mapped(nbytes: int) -> Tensor:
    """Return fresh memory, which the other thread unmaps when the last tensor over it goes."""
    return over(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def apart(tensor: Tensor) -> Tensor:
    """Return a copy of a CPU tensor in memory of its own, which goes back to the system with it. What lies among smaller blocks may not."""
    return mapped(max(1, tensor.nbytes))[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def over(memory: mmap.mmap) -> Tensor:
    """Return a tensor over `memory`, which is unmapped when the last tensor over it goes."""
    return _tensor_over(ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory), memory.close)


def lent(data: memoryview) -> Tensor:
    """Return a tensor over `data`, whose memory must have been allocated for it alone. The pages are returned when the last tensor over
    it goes."""
    address = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
    return _tensor_over(address, len(data), partial(_drop, address, data))


def _tensor_over(address: int, nbytes: int, end: Callable[[], object]) -> Tensor:
    array = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(array, _soon if nbytes >= APART else _now, end).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


def _now(act: Callable[[], object]) -> None:
    act()


def _soon(act: Callable[[], object]) -> None:
    look_for_fork()
    if not _threads:
        _threads.append(threading.Thread(target=_release, name="symbiosis-release", daemon=True))
        _threads[0].start()
    _waiting.put(act)


def _release() -> None:
    while True:
        _waiting.get()()


def _drop(address: int, data: memoryview) -> None:
    """Return the pages of `data`, except the first and the last, which may hold other data."""
    first, last = -(-address // _PAGE) * _PAGE, (address + len(data)) // _PAGE * _PAGE
    _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
