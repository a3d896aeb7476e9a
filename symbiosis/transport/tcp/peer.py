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
from symbiosis.transport.tcp.sockets import COPY_BELOW, Wire, cut
from symbiosis.transport.tensors import bytes_of

SLACK_BYTES = 1 << 20  # bytes that a message may have besides its payload: frame headers, signatures, beats


class TcpHome(Protocol):
    """What a peer needs of the listener that it came by."""

    inbox: ServerPort
    reactor: Reactor

    @property
    def encrypted(self) -> bool:
        """Whether what is sent is encrypted."""
        ...

    def send(
        self, peer: "TcpPeer", frames: Sequence[bytes | memoryview], copy: bool = True
    ) -> zmq.MessageTracker | None:
        """Send frames. Without `copy`, return a tracker that tells when they have left this process."""
        ...

    def too_many(self, peer: "TcpPeer", weight: int = 1) -> bool:
        """Count a refusal. Return whether there were too many, so that the connection was hung up on."""
        ...

    def drop(self, peer: "TcpPeer", why: str = ...) -> None:
        """Forget a peer whose connection has ended."""
        ...

    def hang_up(self, peer: "TcpPeer", why: str = ...) -> None:
        """End a peer's connection."""
        ...


class TcpPeer:
    """Replies go to the identity that ZeroMQ gave the connection."""

    transport = "tcp"

    def __init__(self, home: TcpHome, identity: bytes, tenant: str | None = None, wire: Wire | None = None) -> None:
        self.session = None
        self.identity, self.tenant, self.wire = identity, tenant, wire
        self._home, self._not_before = home, 0.0
        self.heeds = False  # whether it was told last to wait, and had waited as it was told before
        self.heard = True  # whether a whole message came since the last tick
        self._before: int | None = None  # bytes received at the first tick after the last whole message
        self._received = 0  # bytes received at the last tick
        self._sent: deque[tuple[zmq.MessageTracker, int]] = deque()

    def out(self, call: Call, shape: tuple[int, ...]) -> Tensor | None:
        return None

    def reply(self, reply: Reply, result: Tensor) -> None:
        if reply.code is not Code.OK and self._too_many(reply):
            return
        frames: list[bytes | memoryview] = [encode_reply(reply)]
        if reply.nbytes:
            frames += cut(bytes_of(result), self._home.encrypted)
        small = reply.nbytes < COPY_BELOW
        tracker = self._home.send(self, frames, copy=small)
        if not small and tracker is not None:
            self._sent.append((tracker, reply.nbytes))

    def _too_many(self, reply: Reply) -> bool:
        """Count a refusal. Return whether the connection was hung up on for it. A client that is told to wait, and does, has done
        nothing wrong."""
        early = monotonic() < self._not_before
        self.heeds = reply.code is Code.BUSY and not early
        if reply.code is Code.BUSY:
            self._not_before = monotonic() + reply.wait_us / 1e6
        return not self.heeds and self._home.too_many(self)

    @property
    def address(self) -> str:
        return ":".join(map(str, self.wire.other_end[:2])) if self.wire else ""

    @property
    def unread(self) -> Sequence[int]:
        if not self._sent:  # the usual case, kept short: each call asks all of a tenant's connections
            return ()
        while self._sent and self._sent[0][0].done:
            self._sent.popleft()
        return [nbytes for _, nbytes in self._sent]

    def check_wire(self) -> None:
        """Drop the peer if its connection has ended, and hang up if it sends too much of one message: ZeroMQ keeps all frames until the
        last has come. Bytes that arrive are a sign of life, because a large call takes long over a slow line."""
        if self.heard:
            self.heard, self._before = False, None
            return
        received = self.wire.received() if self.wire else 0
        if not received:
            self._home.drop(self)
        elif self._before is None:
            self._before = received
        elif received - self._before > self._home.inbox.limits.max_call_bytes + SLACK_BYTES:
            self._home.hang_up(self)
        elif received > self._received:
            self._home.inbox.heard(self)
        self._received = received

    def close(self) -> None:
        self._home.hang_up(self)

    def release(self) -> None:
        """Do nothing: there is no memory to release."""
