"""Tells of connections that end without a message: from where they came, and why. ZeroMQ refuses a handshake by itself."""

import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq

from symbiosis.transport.reactor import Reactor
from symbiosis.transport.tcp.sockets import Wire

AT_ONCE = 64  # most events that are read in one pass of the loop
TOLD = zmq.EVENT_HANDSHAKE_FAILED_AUTH  # refused by the door, which tells of it
FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | TOLD


class Handshakes:
    """Reads what ZeroMQ tells of the connections to one socket.

    ZeroMQ names the descriptor of a connection when it comes and when it goes, and in between says only that one has failed. That one
    goes next, unless another of ZeroMQ's threads tells of its own connections meanwhile. The thread that accepts a connection hands it
    on before it tells of it, so a message may have come from it by then, and it may be gone.
    """

    def __init__(
        self,
        socket: Any,
        reactor: Reactor,
        has_keys: bool,
        came: Callable[[str], None],
        failed: Callable[[str, str], None],
    ) -> None:
        """The socket is bound later. `came` takes the address of each connection, "" if that is not known; `failed` takes the reason and
        the address."""
        self._socket, self._reactor, self._has_keys = socket, reactor, has_keys
        self._came, self._failed = came, failed
        self._open: dict[int, tuple[Wire, bool]] = {}  # by descriptor; whether a message has come
        self._failures: deque[str] = deque()  # of connections that have not gone yet
        place = f"inproc://symbiosis-handshakes-{id(self)}"
        socket.monitor(place, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | FAILED)
        self._events: Any = socket.context.socket(zmq.PAIR)
        self._events.linger = self._events.rcvhwm = 0  # no bound: ZeroMQ's thread would wait for room
        self._events.connect(place)
        self._fd = int(self._events.getsockopt(zmq.FD))
        reactor.watch(self._fd, self._read_some)
        self._read_some()  # the descriptor tells only of what comes after somebody has looked

    def spoke(self, fd: int) -> None:
        """Note that a message has come from a connection, so that its handshake has not failed."""
        while self._read(AT_ONCE):  # an earlier connection with this descriptor may not have been told yet as gone
            pass
        wire = self._open[fd][0] if fd in self._open else Wire.of(fd)
        if wire:
            self._open[fd] = wire, True

    def _read_some(self) -> None:
        if self._read(AT_ONCE):
            self._reactor.call_soon(self._read_some)

    def _read(self, most: int) -> bool:
        """Read what ZeroMQ has told, and return whether there may be more."""
        with suppress(zmq.Again):
            for _ in range(most):
                event, _ = self._events.recv_multipart(zmq.NOBLOCK)
                self._attend(*struct.unpack("=HI", event))
            return True
        return False

    def _attend(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            wire = Wire.of(value)
            self._came(_address(wire))
            known, _ = self._open.get(value, (None, False))
            if wire and wire != known:
                self._open[value] = wire, False
        elif event & FAILED:
            self._failures.append(self._why(event, value))
        else:
            wire, has_spoken = self._open.pop(value, (None, False))
            if not has_spoken and (why := self._failures.popleft() if self._failures else "NOTHING_SAID"):
                self._failed(why, _address(wire))

    def _why(self, event: int, value: int) -> str:
        """Return why a handshake failed, "" if the door tells it."""
        if event == TOLD:
            return ""
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:  # the client left, or took too long
            return "UNFINISHED"
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return "WITHOUT_KEY" if self._has_keys else "WITH_KEY"
        return "WRONG_EXECUTOR_KEY" if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC else "NO_HANDSHAKE"

    def close(self) -> None:
        """Stop reading, before the socket is closed."""
        self._reactor.forget(self._fd)
        self._socket.disable_monitor()
        self._events.close()


def _address(wire: Wire | None) -> str:
    return str(wire.other_end[0]) if wire else ""  # it was gone before ZeroMQ told of it
