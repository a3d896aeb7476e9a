"""What ZeroMQ tells of the TCP connections to a socket: which are open, and why others ended without a message.

ZeroMQ ends a handshake that fails or takes too long. It does not end a connection that never joins, and it bounds neither the number of
frames of a message nor how long it keeps them: so connections without a session are looked at here.
"""

import struct
from collections import deque
from collections.abc import Callable, Container
from contextlib import suppress
from itertools import islice
from time import monotonic
from typing import Any

import zmq

from symbiosis.transport.base import UNJOINED_S
from symbiosis.transport.reactor import Reactor
from symbiosis.transport.tcp.sockets import Wire

AT_ONCE = 64  # most events that are read in one pass of the loop
LOOKS = 256  # most connections that are looked at in one tick, which takes some milliseconds
FIRST_BYTES = 64 << 10  # bytes that a connection may send before it joins
REFUSED_KEY = zmq.EVENT_HANDSHAKE_FAILED_AUTH  # `TenantAuth` tells of it
FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | REFUSED_KEY


class ConnectionMonitor:
    """Reads the monitor of one socket.

    ZeroMQ names the descriptor of a connection when it comes and when it goes, and in between says only that one has failed. That one
    goes next, unless another of ZeroMQ's threads tells of its own connections meanwhile. The thread that accepts a connection hands it
    on before it tells of it, so a message may have come from it by then, and it may be gone.
    """

    def __init__(self, socket: Any, reactor: Reactor, has_keys: bool, failed: Callable[[str, str], None]) -> None:
        """The socket is bound later. `failed` takes the reason and the address, "" if that is not known."""
        self._socket, self._reactor, self._has_keys, self._failed = socket, reactor, has_keys, failed
        self._open: dict[int, tuple[Wire, bool]] = {}  # by descriptor; whether a message has come
        self._since: dict[Wire, float] = {}  # when each connection came, or was last seen with a session
        self._failures: deque[str] = deque()  # of connections that have not gone yet
        place = f"inproc://symbiosis-monitor-{id(self)}"
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

    def look(self, joined: Container[Wire | None]) -> None:
        """Hang up on connections that have not joined in time, or that have sent too much without a session."""
        now = monotonic()
        for wire in list(islice(self._since, LOOKS)):
            since = self._since.pop(wire)
            if wire in joined:
                since = now
            elif now > since + UNJOINED_S or wire.received() > FIRST_BYTES:
                wire.hang_up()
                continue
            self._since[wire] = since  # comes last in the next look

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
            known, _ = self._open.get(value, (None, False))
            if wire and wire != known:
                self._open[value] = wire, False
            if wire:
                self._since[wire] = monotonic()
        elif event & FAILED:
            self._failures.append(self._why(event, value))
        else:
            wire, has_spoken = self._open.pop(value, (None, False))
            if wire:
                self._since.pop(wire, None)
            if not has_spoken and (why := self._failures.popleft() if self._failures else "NOTHING_SAID"):
                self._failed(why, str(wire.other_end[0]) if wire else "")

    def _why(self, event: int, value: int) -> str:
        """Return why a handshake failed, "" if `TenantAuth` tells it."""
        if event == REFUSED_KEY:
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
