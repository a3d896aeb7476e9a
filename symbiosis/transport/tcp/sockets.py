"""The TCP connections below ZeroMQ: how they are set up, what the kernel knows of one, and how to end it, for which ZeroMQ has no
call.

The rows of a message go last, so that no frame is left to be sent behind one that takes long: libzmq 4.3 aborts the process when a
socket is closed in the midst of a message just as its connection breaks.
"""

import errno
import os
import resource
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import zmq

COPY_BELOW = 64 << 10  # smaller payloads are cheaper to copy than to hand over
# The kernel notices a network that is gone. Not ZeroMQ's heartbeats: they wait behind what is being sent, so on a thin line a
# large call would look like death; and libzmq 4.3 aborts the process when one meets a full queue and a client gone.
PROBES = (
    (zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, 5), (zmq.TCP_KEEPALIVE_INTVL, 5), (zmq.TCP_KEEPALIVE_CNT, 3),
    (zmq.TCP_MAXRT, 20_000),
)  # fmt: skip
_RECEIVED_AT = 128  # of tcpi_bytes_received in the kernel's struct tcp_info


def harden(socket: zmq.Socket[bytes]) -> None:
    """Either end's: bounded queues, and no wait for what is gone."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 64)
    socket.setsockopt(zmq.RCVHWM, 8)
    for option in PROBES:
        socket.setsockopt(*option)


class Wire(NamedTuple):
    """A descriptor of ZeroMQ's, and who is at its other end: descriptors are used again, so that tells whether it still is."""

    fd: int
    other_end: tuple[object, ...]

    @classmethod
    def of(cls, fd: int, port: int | None = None) -> "Wire | None":
        """None if that is no connection (any more), or not one that came in at `port`."""
        with suppress(OSError), _opened(fd) as kept:
            if kept.family in (socket.AF_INET, socket.AF_INET6) and port in (None, kept.getsockname()[1]):
                return cls(fd, kept.getpeername())
        return None

    @classmethod
    def below(cls, frame: zmq.Frame) -> "Wire | None":
        return cls.of(int(frame.get(zmq.SRCFD)))  # type: ignore[arg-type]

    @classmethod
    def all_at(cls, port: int) -> "Iterator[Wire]":
        """The connections that this process has accepted at a port."""
        for fd in _descriptors():
            if wire := cls.of(fd, port):
                yield wire

    def near_end(self) -> str:
        """The address by which this process was reached; that of any if the connection has ended."""
        with suppress(OSError), _opened(self.fd) as kept:
            if kept.getpeername() == self.other_end:
                return str(kept.getsockname()[0])
        return ""

    def received(self) -> int:
        """Bytes that came in so far; 0 if the connection has ended."""
        with suppress(OSError), _opened(self.fd) as kept:
            if kept.getpeername() == self.other_end:
                info = kept.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
                return int(struct.unpack_from("=Q", info, _RECEIVED_AT)[0])
        return 0

    def hang_up(self) -> None:
        """ZeroMQ then forgets the connection, and what is queued for it."""
        with suppress(OSError), _opened(self.fd) as kept:
            if kept.getpeername() == self.other_end:
                kept.shutdown(socket.SHUT_RDWR)


def _descriptors() -> Iterable[int]:
    """Of this process. If none is left to list them with, all that it may have are in use."""
    try:
        return list(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208
    except OSError as error:
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) if error.errno == errno.EMFILE else ()


@contextmanager
def _opened(fd: int) -> Iterator[socket.socket]:
    """A descriptor of our own for the same socket, for a moment; ZeroMQ's if none is left."""
    own = _copied(fd)
    try:
        kept = socket.socket(fileno=own)
        try:
            yield kept
        finally:
            kept.detach()
    finally:
        if own != fd:
            os.close(own)


def _copied(fd: int) -> int:
    try:
        return os.dup(fd)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return fd
