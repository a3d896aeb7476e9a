"""What a ROUTER socket receives: taken in as it comes, kept within bounds, and handed out by turns."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq

from symbiosis.protocol import Limits
from symbiosis.transport.reactor import Reactor
from symbiosis.transport.tcp.discard import Discard
from symbiosis.transport.tcp.turns import Turns

MOST_FRAMES = 64  # of a message: one of ours has at most 3
MOST_UNREAD = 256 << 20  # bytes of a tenant's messages that wait to be read, but for a single one
Frames = list[zmq.Frame]  # of one message; the first names the connection


class Intake:
    """ZeroMQ goes by connection, so whose message is read next is decided here. Of a message that has too many frames the first are
    told of at once, and the rest is thrown away in pieces: what others have sent lies behind it."""

    def __init__(
        self,
        socket: Any,
        reactor: Reactor,
        limits: Limits,
        whose: Callable[[Frames], str | bytes],
        is_too_much: Callable[[Frames], None],
    ) -> None:
        """`whose` turn it takes to read a message; `is_too_much` hears of one that cannot be kept."""
        self._socket, self._reactor, self._whose, self._is_too_much = socket, reactor, whose, is_too_much
        self._discard = Discard(socket)
        self.turns = Turns[str | bytes, Frames](limits.max_in_flight, min(MOST_UNREAD, limits.max_tenant_bytes))

    @property
    def blocked(self) -> bool:
        """Whether a message that nobody wants is still to be thrown away."""
        return self._discard.going

    def unblock(self) -> None:
        """Throw away a part of the message that nobody wants."""
        if self._discard.going:
            self._discard.some()

    def take_in(self, most: int) -> int:
        """How many messages have come, at most so many. They are kept as they are, which takes a tenth of the time of reading
        them; but who has sent too much is told at once."""
        taken = 0
        with suppress(zmq.Again):
            while taken < most and not self.blocked:
                frames = self._receive()
                taken += 1
                self._reactor.attempt(None, self._keep, frames)
        return taken

    def _receive(self) -> Frames:
        """The next message, or as much of it as anybody needs who is to refuse it."""
        frames = [self._socket.recv(zmq.NOBLOCK, copy=False)]
        while frames[-1].more:
            if len(frames) > MOST_FRAMES:
                self._discard.begin()
                break
            frames.append(self._socket.recv(zmq.NOBLOCK, copy=False))
        return frames

    def _keep(self, frames: Frames) -> None:
        whose, nbytes = self._whose(frames), sum(map(len, frames))
        if self.blocked or not self.turns.put(whose, frames[0].bytes, frames, nbytes):
            self._is_too_much(frames)
