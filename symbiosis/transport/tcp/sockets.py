"""The TCP connections below ZeroMQ: sets them up, asks the kernel about them, and ends one, for which ZeroMQ has no call.

The rows of a message go last, so that no frame waits behind a large one. libzmq 4.3 aborts the process if a socket is closed in the
middle of a message just as its connection breaks.

Over an encrypted connection no frame is large. ZeroMQ encrypts and decrypts a frame in one go, into memory of the frame's size. All
connections that share its thread wait meanwhile, and new memory takes longer than the encryption. Without keys nothing is done to the
bytes, so one frame holds all rows. The price: the middle of an encrypted message is long, so a program that closes its socket while it sends,
at the very moment at which the other end dies, may be aborted.
"""

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import zmq

COPY_BELOW = 64 << 10  # bytes; smaller payloads are cheaper to copy than to hand over
PIECE = 256 << 10  # bytes of an encrypted frame
# The kernel probes for a network that is gone. ZeroMQ's heartbeats would not do: they wait behind a large call on a slow line, which
# would look like death, and libzmq 4.3 aborts the process if one meets a full queue and a client that is gone.
PROBES = (
    (zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, 5), (zmq.TCP_KEEPALIVE_INTVL, 5), (zmq.TCP_KEEPALIVE_CNT, 3),
    (zmq.TCP_MAXRT, 20_000),
)  # fmt: skip
_RECEIVED_AT = 128  # offset of tcpi_bytes_received in the kernel's struct tcp_info


def harden(socket: zmq.Socket[bytes]) -> None:
    """Bound the queues of either end's socket, and let nothing wait for a peer that is gone."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 64)
    socket.setsockopt(zmq.RCVHWM, 8)
    for option in PROBES:
        socket.setsockopt(*option)


def cut(data: memoryview, encrypted: bool) -> list[memoryview]:
    """Divide bytes among frames.

    >>> [len(frame) for frame in cut(memoryview(bytes(600_000)), encrypted=True)]
    [262144, 262144, 75712]
    """
    if not encrypted or len(data) <= PIECE:
        return [data]
    return [data[start : start + PIECE] for start in range(0, len(data), PIECE)]


def most_frames(nbytes: int, encrypted: bool) -> int:
    """Return how many frames hold so many bytes, or fewer."""
    return max(1, -(-nbytes // PIECE)) if encrypted else 1


def hold(frames: Sequence[int], parts: Sequence[int], encrypted: bool) -> bool:
    """Whether frames of these sizes hold parts of so many bytes. A header may promise any number of frames: no list is made of those that
    did not come.

    >>> hold([262144, 262144, 75712], [600_000], encrypted=True), hold([75712], [1 << 60], encrypted=True)
    (True, False)
    """
    if len(frames) != sum(most_frames(part, encrypted) for part in parts):
        return False
    return list(frames) == [size for part in parts for size in _sizes(part, encrypted)]


def _sizes(nbytes: int, encrypted: bool) -> list[int]:
    """Return the sizes of the frames that hold so many bytes."""
    if not encrypted or nbytes <= PIECE:
        return [nbytes]
    whole, rest = divmod(nbytes, PIECE)
    return [PIECE] * whole + [rest] * (rest > 0)


class Wire(NamedTuple):
    """One of ZeroMQ's descriptors and the address at its other end. Descriptors are used again, so the address tells whether it is
    still the same connection."""

    fd: int
    other_end: tuple[object, ...]

    @classmethod
    def of(cls, fd: int) -> "Wire | None":
        """Return the wire of a descriptor, or None if it is not (or no longer) a connection."""
        with suppress(OSError), _opened(fd) as kept:
            if kept.family in (socket.AF_INET, socket.AF_INET6):
                return cls(fd, kept.getpeername())
        return None

    @classmethod
    def below(cls, frame: zmq.Frame, spoke: Callable[[int], None] = lambda _: None) -> "Wire | None":
        """Return the connection by which a message came, of whose descriptor `spoke` is told. Messages of ZMTP before 3.0, which are not
        ours, do not tell."""
        try:
            descriptor = int(frame.get(zmq.SRCFD))  # type: ignore[arg-type]
        except zmq.ZMQError:
            return None
        spoke(descriptor)
        return cls.of(descriptor)

    def near_end(self) -> str:
        """Return this process's address on the connection, "" if the connection has ended."""
        with suppress(OSError), _opened(self.fd) as kept:
            if kept.getpeername() == self.other_end:
                return str(kept.getsockname()[0])
        return ""

    def received(self) -> int:
        """Return the bytes received so far, 0 if the connection has ended."""
        with suppress(OSError), _opened(self.fd) as kept:
            if kept.getpeername() == self.other_end:
                info = kept.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
                return int(struct.unpack_from("=Q", info, _RECEIVED_AT)[0])
        return 0

    def hang_up(self) -> None:
        """End the connection. ZeroMQ then forgets it, and what is queued for it."""
        with suppress(OSError), _opened(self.fd) as kept:
            if kept.getpeername() == self.other_end:
                kept.shutdown(socket.SHUT_RDWR)


@contextmanager
def _opened(fd: int) -> Iterator[socket.socket]:
    """Yield the socket by a copy of its descriptor, or by ZeroMQ's own if none is left."""
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
