"""Throws away the rest of a message with too many frames, in pieces. ZeroMQ hands out nothing else before its end.

A frame takes about half a microsecond in Python, and a tenth of that in C (`discard.c`), which is compiled when a process listens for the
first time: the first such message would be over before the compiler is. Without a C compiler, Python does all of it.
"""

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from threading import Thread, get_native_id
from time import perf_counter
from typing import Any

import zmq

from symbiosis.kernels import compile_c

PIECE_S = 2e-3  # of the loop's time for a piece
BY_PYTHON, BY_C = 256, 4096  # frames between two looks at the clock
SOURCE = Path(__file__).with_suffix(".c")
Frames = Callable[[int], bool]  # throws so many frames away, and returns whether more follow


class Discard:
    """Throws away frames of a socket's unwanted messages.

    >>> with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
    ...     _ = theirs.connect(f"tcp://127.0.0.1:{ours.bind_to_random_port('tcp://127.0.0.1')}")
    ...     theirs.send_multipart([b""] * 1000)
    ...     theirs.send(b"another")
    ...     discard, _ = Discard(ours), ours.recv()
    ...     discard.begin()
    ...     while discard.going:
    ...         discard.some()
    ...     ours.recv()
    b'another'
    """

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self.going = False  # whether such a message is partly thrown away
        _compile_meanwhile()

    def begin(self) -> None:
        """Begin to throw away the rest of the message whose first frames were received last."""
        self.going = True

    def some(self) -> None:
        """Throw away a piece of the message."""
        frames, most = (_in_c(_libraries[0], self._socket), BY_C) if _libraries else (self._in_python, BY_PYTHON)
        end = perf_counter() + PIECE_S
        while self.going and perf_counter() < end:
            self.going = frames(most)

    def _in_python(self, most: int) -> bool:
        return all(self._socket.recv(zmq.NOBLOCK, copy=False).more for _ in range(most))


def _in_c(library: ctypes.CDLL, socket: Any) -> Frames:
    return lambda most: bool(library.discard(socket.underlying, most, *_zeromq()))


_libraries: list[ctypes.CDLL] = []  # holds the library once it is compiled


@lru_cache
def _compile_meanwhile() -> None:
    Thread(target=_compile_gently, name="symbiosis-compile", daemon=True).start()


def _compile_gently() -> None:
    os.setpriority(os.PRIO_PROCESS, get_native_id(), 19)  # this thread's, and the compiler's
    _compile()


def _compile() -> None:
    try:
        _zeromq()
    except (OSError, AttributeError, ImportError):  # not pyzmq's usual backend: Python does it
        return
    arguments = [ctypes.c_void_p, ctypes.c_int, *[ctypes.c_void_p] * 4]
    if library := compile_c.load(SOURCE, "-O2", discard=(arguments, ctypes.c_int)):
        _libraries.append(library)


@lru_cache
def _zeromq() -> tuple[ctypes.c_void_p, ...]:
    """Return the functions of the very ZeroMQ that pyzmq uses."""
    from zmq.backend.cython import _zmq

    library = ctypes.CDLL(_zmq.__file__)
    names = ("zmq_msg_init", "zmq_msg_recv", "zmq_msg_more", "zmq_msg_close")
    return tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in names)
