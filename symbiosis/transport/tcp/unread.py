"""Unread messages by tenant. They are read tenant by tenant, however much one of them has sent."""

from collections import Counter, deque
from collections.abc import Container, Hashable, Set
from typing import Generic, TypeVar

Tenant = TypeVar("Tenant", bound=Hashable)
Message = TypeVar("Message")


MOST_OF_ONE = 1024  # messages of a tenant, over all its connections


class Unread(Generic[Tenant, Message]):
    """A queue for each tenant. It bounds the messages of a connection, and a tenant's bytes unless they are a single message.

    >>> unread = Unread[str, int](most=8, most_bytes=1 << 20)
    >>> for tenant, message in (("a", 1), ("a", 2), ("a", 3), ("b", 4)):
    ...     assert unread.put(tenant, b"a connection", message, nbytes=100)
    >>> [unread.take(unread.next()) for _ in range(4)]
    [1, 4, 2, 3]
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._queues: dict[
            Tenant, deque[tuple[bytes, Message, int]]
        ] = {}  # in the order in which they come next; none is empty
        self._kept = Counter[bytes]()  # messages of each connection
        self._nbytes = Counter[Tenant]()
        self._taken: tuple[Tenant, bytes, int] | None = None  # whose the message was that was taken last

    def __len__(self) -> int:
        return self._kept.total()

    @property
    def waiting(self) -> Set[Tenant]:
        """The tenants with messages."""
        return self._queues.keys()

    def next(self, besides: Container[Tenant] = ()) -> Tenant | None:
        """Return the tenant to read from next: of those that are not in `besides`, the one that has waited longest, if any."""
        return next((tenant for tenant in self._queues if tenant not in besides), None)

    def holds(self, connection: bytes) -> bool:
        """Whether messages of this connection wait."""
        return connection in self._kept

    def put(self, tenant: Tenant, connection: bytes, message: Message, nbytes: int) -> bool:
        """Keep a message if there is room. Return whether there was; if not, refuse it, so that others need not wait."""
        waiting = self._nbytes[tenant]
        too_many = self._kept[connection] >= self._most or len(self._queues.get(tenant, ())) >= MOST_OF_ONE
        if too_many or (waiting and waiting + nbytes > self._most_bytes):
            return False
        self._count(tenant, connection, nbytes)
        self._queues[tenant].append((connection, message, nbytes))
        return True

    def _count(self, tenant: Tenant, connection: bytes, nbytes: int) -> None:
        self._queues.setdefault(tenant, deque())
        self._nbytes[tenant] += nbytes
        self._kept[connection] += 1

    def give_back(self, message: Message) -> None:
        """Keep the message that was taken last a little longer: it comes first when it is its tenant's turn again."""
        assert self._taken is not None
        tenant, connection, nbytes = self._taken
        self._count(tenant, connection, nbytes)
        self._queues[tenant].appendleft((connection, message, nbytes))

    def take(self, tenant: Tenant) -> Message:
        """Return a tenant's oldest message. The tenant then comes last."""
        queue = self._queues.pop(tenant)
        connection, message, nbytes = queue.popleft()
        self._taken = tenant, connection, nbytes
        if queue:
            self._queues[tenant] = queue
        self._nbytes[tenant] -= nbytes
        if not queue:
            del self._nbytes[tenant]
        self._kept[connection] -= 1
        if not self._kept[connection]:
            del self._kept[connection]
        return message
