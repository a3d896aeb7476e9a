"""Messages of a ROUTER socket, received within bounds and handed out tenant by tenant. ZeroMQ hands them out by connection."""

from collections import Counter, deque
from collections.abc import Callable, Container, Set
from contextlib import suppress
from typing import Any

import zmq

from symbiosis.protocol import Limits
from symbiosis.transport.reactor import Reactor
from symbiosis.transport.tcp.call_frames import Message
from symbiosis.transport.tcp.discard import Discard
from symbiosis.transport.tcp.sockets import most_frames

MOST_FRAMES = 64  # of a message without keys; a valid one has at most 3
BESIDES = 3  # frames of a valid message besides its rows
FRAMES_AT_ONCE = 256  # most frames that are received in one pass of the loop
MOST_OF_ONE = 1024  # messages of a tenant, over all its connections
MOST_BYTES = 256 << 20  # of a tenant's messages, unless it is a single one


class TenantQueues:
    """A queue of messages for each tenant. Bounded are the messages of a connection, and a tenant's messages and bytes."""

    def __init__(
        self,
        socket: Any,
        reactor: Reactor,
        limits: Limits,
        whose: Callable[[Message], str | bytes],
        is_too_much: Callable[[Message], object],
        encrypted: bool,
    ) -> None:
        """`whose` tells the tenant of a message. `is_too_much` is called with a message that cannot be kept."""
        self._socket, self._reactor, self._whose, self._is_too_much = socket, reactor, whose, is_too_much
        self.most_frames = BESIDES + most_frames(limits.max_call_bytes, encrypted) if encrypted else MOST_FRAMES
        self._most, self._most_bytes = limits.max_in_flight, min(MOST_BYTES, limits.max_tenant_bytes)
        self._discard = Discard(socket)
        self._begun: Message | None = None  # a message of which some frames are received: the others must be next
        self._queues: dict[str | bytes, deque[Message]] = {}  # in the order in which they come next; none is empty
        self._kept = Counter[bytes]()  # messages of each connection
        self._nbytes = Counter[str | bytes]()

    def __len__(self) -> int:
        return self._kept.total()

    @property
    def waiting(self) -> Set[str | bytes]:
        """The tenants with messages."""
        return self._queues.keys()

    @property
    def blocked(self) -> bool:
        """Whether the rest of a message must be received, or thrown away, before another can be."""
        return self._discard.going or self._begun is not None

    def unblock(self) -> None:
        """Receive, or throw away, some more of a long message, if there is one."""
        if self._discard.going:
            self._discard.some()
        elif self._begun is not None:
            self._take_one()

    def take_in(self, most: int) -> int:
        """Take in at most `most` messages, and return how many came. To keep one takes a tenth of the time of reading it. A connection
        that has sent too much is told at once."""
        taken = 0
        with suppress(zmq.Again):
            while taken < most and not self.blocked:
                self._take_one()
                taken += 1
        return taken

    def _take_one(self) -> None:
        if message := self._receive():
            self._reactor.attempt(None, self._keep, message)

    def _receive(self) -> Message | None:
        """Receive the next message, or the first frames of one that has too many: the others are thrown away. Return None if more of it is
        to be received in the next pass."""
        message, self._begun = self._begun or Message(), None
        for _ in range(FRAMES_AT_ONCE):
            message.append(self._socket.recv(zmq.NOBLOCK, copy=False))
            if not message[-1].more:
                return message
            if len(message) > self.most_frames:
                self._discard.begin()
                return message
        self._begun = message
        return None

    def _keep(self, message: Message) -> None:
        message.nbytes = sum(map(len, message))
        if self._discard.going or not self.put(self._whose(message), message):
            self._is_too_much(message)

    def put(self, tenant: str | bytes, message: Message) -> bool:
        """Keep a message if there is room. Return whether there was; if not, refuse it, so that others need not wait."""
        connection, waiting = message[0].bytes, self._nbytes[tenant]
        queue = self._queues.get(tenant, deque())
        too_many = self._kept[connection] >= self._most or len(queue) >= MOST_OF_ONE
        if too_many or (waiting and waiting + message.nbytes > self._most_bytes):
            return False
        queue.append(message)
        self._queues[tenant] = queue
        self._nbytes[tenant] += message.nbytes
        self._kept[connection] += 1
        return True

    def holds(self, connection: bytes) -> bool:
        """Whether messages of this connection wait."""
        return connection in self._kept

    def next(self, besides: Container[str | bytes] = ()) -> str | bytes | None:
        """Return the tenant to read from next: of those that are not in `besides`, the one that has waited longest, if any."""
        return next((tenant for tenant in self._queues if tenant not in besides), None)

    def first(self, tenant: str | bytes) -> Message:
        """Return a tenant's oldest message. The tenant then comes last."""
        queue = self._queues[tenant] = self._queues.pop(tenant)
        return queue[0]

    def remove_first(self, tenant: str | bytes) -> None:
        """Forget a tenant's oldest message, which was read."""
        message = self._queues[tenant].popleft()
        self._nbytes[tenant] -= message.nbytes
        if not self._queues[tenant]:
            del self._queues[tenant], self._nbytes[tenant]
        self._kept[message[0].bytes] -= 1
        if not self._kept[message[0].bytes]:
            del self._kept[message[0].bytes]
