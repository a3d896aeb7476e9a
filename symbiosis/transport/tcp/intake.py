"""Takes in what a ROUTER socket receives, within bounds, and hands it out tenant by tenant."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq

from symbiosis.protocol import Limits
from symbiosis.transport.reactor import Reactor
from symbiosis.transport.tcp.discard import Discard
from symbiosis.transport.tcp.unread import Unread

MOST_FRAMES = 64  # frames of a message; a valid one has at most 3
MOST_UNREAD = 256 << 20  # bytes of a tenant's unread messages, unless it is a single one
Frames = list[zmq.Frame]  # one message; the first frame names the connection


class Intake:
    """Keeps unread messages by tenant, because ZeroMQ hands them out by connection. Of a message with too many frames, the first are
    reported at once and the rest is thrown away in pieces: what others have sent lies behind it."""

    def __init__(
        self,
        socket: Any,
        reactor: Reactor,
        limits: Limits,
        whose: Callable[[Frames], str | bytes],
        is_too_much: Callable[[Frames], None],
    ) -> None:
        """`whose` tells the tenant of a message. `is_too_much` is called with a message that cannot be kept."""
        self._socket, self._reactor, self._whose, self._is_too_much = socket, reactor, whose, is_too_much
        self._discard = Discard(socket)
        self.unread = Unread[str | bytes, Frames](limits.max_in_flight, min(MOST_UNREAD, limits.max_tenant_bytes))

    @property
    def blocked(self) -> bool:
        """Whether the rest of an unwanted message is still to be thrown away."""
        return self._discard.going

    def unblock(self) -> None:
        """Throw away a piece of an unwanted message, if there is one."""
        if self._discard.going:
            self._discard.some()

    def take_in(self, most: int) -> int:
        """Take in at most `most` messages, and return how many came. They are kept unread, which takes a tenth of the time of reading
        them. A connection that has sent too much is told at once."""
        taken = 0
        with suppress(zmq.Again):
            while taken < most and not self.blocked:
                frames = self._receive()
                taken += 1
                self._reactor.attempt(None, self._keep, frames)
        return taken

    def _receive(self) -> Frames:
        """Receive the next message, or the first frames of one that has too many."""
        frames = [self._socket.recv(zmq.NOBLOCK, copy=False)]
        while frames[-1].more:
            if len(frames) > MOST_FRAMES:
                self._discard.begin()
                break
            frames.append(self._socket.recv(zmq.NOBLOCK, copy=False))
        return frames

    def _keep(self, frames: Frames) -> None:
        whose, nbytes = self._whose(frames), sum(map(len, frames))
        if self.blocked or not self.unread.put(whose, frames[0].bytes, frames, nbytes):
            self._is_too_much(frames)
