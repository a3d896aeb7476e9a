"""The TCP connection below a ZeroMQ message: what the kernel knows of it, and how to end it, for which ZeroMQ has no call."""

import os
import socket
import struct
from contextlib import suppress
from typing import NamedTuple

import zmq

_RECEIVED_AT = 128  # of tcpi_bytes_received in the kernel's struct tcp_info


class Wire(NamedTuple):
    """A descriptor of ZeroMQ's, and who is at its other end: descriptors are used again, so that tells whether it still is."""

    fd: int
    other_end: tuple[object, ...]

    @classmethod
    def of(cls, fd: int) -> "Wire | None":
        """None if the connection has ended."""
        try:
            with socket.socket(fileno=os.dup(fd)) as kept:
                return cls(fd, kept.getpeername())
        except OSError:
            return None

    @classmethod
    def below(cls, frame: zmq.Frame) -> "Wire | None":
        return cls.of(int(frame.get(zmq.SRCFD)))  # type: ignore[arg-type]

    def received(self) -> int:
        """Bytes that came in so far; 0 if the connection has ended."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.fd)) as kept:
            if kept.getpeername() == self.other_end:
                info = kept.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
                return int(struct.unpack_from("=Q", info, _RECEIVED_AT)[0])
        return 0

    def hang_up(self) -> None:
        """ZeroMQ then forgets the connection, and what is queued for it."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.fd)) as kept:
            if kept.getpeername() == self.other_end:
                kept.shutdown(socket.SHUT_RDWR)
