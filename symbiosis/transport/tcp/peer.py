"""`tcp://HOST:PORT`, the executor's end of one connection."""

from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Protocol

import zmq
from torch import Tensor

from symbiosis.errors import Code
from symbiosis.protocol import Call, Reply, encode_reply
from symbiosis.transport.base import ServerPort
from symbiosis.transport.reactor import Reactor
from symbiosis.transport.tcp.sockets import COPY_BELOW, Wire
from symbiosis.transport.tensors import bytes_of

NO_MEMORY = "the executor has no memory for this call: send fewer rows at once"


class TcpHome(Protocol):
    """What a peer needs of the listener that it came by."""

    inbox: ServerPort
    reactor: Reactor

    def send(self, peer: "TcpPeer", frames: list[bytes], copy: bool = True) -> zmq.MessageTracker | None:
        """Where nothing is copied, the answer tells when all has left this process."""
        ...

    def too_many(self, peer: "TcpPeer", weight: int = 1) -> bool:
        """It was refused something. Whether it has gone on with that for too long, and was hung up on."""
        ...

    def drop(self, peer: "TcpPeer", why: str = ...) -> None:
        """Its connection has ended."""
        ...

    def hang_up(self, peer: "TcpPeer", why: str = ...) -> None:
        """End its connection."""
        ...


class TcpPeer:
    """Replies go to the identity that ZeroMQ gave the connection."""

    transport = "tcp"

    def __init__(self, home: TcpHome, identity: bytes, tenant: str | None = None, wire: Wire | None = None) -> None:
        self.session = None
        self.identity, self.tenant, self.wire = identity, tenant, wire
        self._home, self._not_before = home, 0.0
        self.heard = True  # a whole message since the last tick
        self.before: int | None = None  # bytes received at the first tick after the last whole message
        self.received = 0  # ... at the last tick
        self._sent: deque[tuple[zmq.MessageTracker, int]] = deque()

    def out(self, call: Call, shape: tuple[int, ...]) -> Tensor | None:
        return None

    def reply(self, reply: Reply, result: Tensor) -> None:
        if reply.code is not Code.OK and self._too_many(reply):
            return
        frames = [encode_reply(reply)]
        if reply.nbytes:
            frames.append(bytes_of(result))  # type: ignore[arg-type]
        small = reply.nbytes < COPY_BELOW
        tracker = self._home.send(self, frames, copy=small)
        if not small and tracker is not None:
            self._sent.append((tracker, reply.nbytes))

    def _too_many(self, reply: Reply) -> bool:
        """Whether this refusal is answered by hanging up. Who is told to wait, and does, has done nothing wrong."""
        early = monotonic() < self._not_before
        if reply.code is Code.BUSY:
            self._not_before = monotonic() + reply.wait_us / 1e6
        return (early or reply.code is not Code.BUSY) and self._home.too_many(self)

    @property
    def address(self) -> str:
        return ":".join(map(str, self.wire.other_end[:2])) if self.wire else ""

    @property
    def unread(self) -> Sequence[int]:
        if not self._sent:  # as usual: who has many connections is asked for all of them at each call
            return ()
        while self._sent and self._sent[0][0].done:
            self._sent.popleft()
        return [nbytes for _, nbytes in self._sent]

    def close(self) -> None:
        self._home.hang_up(self)

    def release(self) -> None:
        """The session is over."""
