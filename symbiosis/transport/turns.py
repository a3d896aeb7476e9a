"""Messages that have come and are not read yet, by whom they came from: each in turn, however much one has sent."""

from collections import Counter, deque
from collections.abc import Hashable, Set
from typing import Generic, TypeVar

MOST = 8  # messages of one connection; and one more
MOST_BYTES = 4 << 20  # of all of them, but for the latest

Tenant = TypeVar("Tenant", bound=Hashable)
Message = TypeVar("Message")


class Turns(Generic[Tenant, Message]):
    """A queue for each tenant.

    >>> turns = Turns[str, int]()
    >>> for tenant, message in (("a", 1), ("a", 2), ("a", 3), ("b", 4)):
    ...     turns.put(tenant, b"a connection", message, nbytes=100)
    >>> [turns.take() for _ in range(4)]
    [1, 4, 2, 3]
    """

    def __init__(self) -> None:
        self._queues: dict[Tenant, deque[tuple[bytes, Message, int]]] = {}  # in the order of their turns; none is empty
        self._kept = Counter[bytes]()  # messages of each connection
        self._ahead = set[bytes]()  # connections with too many
        self._nbytes = self._latest = 0

    def __len__(self) -> int:
        return self._kept.total()

    @property
    def waiting(self) -> Set[Tenant]:
        """Of whom there are messages."""
        return self._queues.keys()

    @property
    def next(self) -> Tenant:
        """Whose turn it is: who has had none for longest."""
        return next(iter(self._queues))

    @property
    def full(self) -> bool:
        """Whether to take no more for now. ZeroMQ gives us messages by turns of connections: when there are many of one, those of
        the others have been taken."""
        return bool(self._ahead) or self._nbytes - self._latest > MOST_BYTES

    def put(self, tenant: Tenant, connection: bytes, message: Message, nbytes: int) -> None:
        self._queues.setdefault(tenant, deque()).append((connection, message, nbytes))
        self._nbytes += nbytes
        self._latest = nbytes
        self._kept[connection] += 1
        if self._kept[connection] > MOST:
            self._ahead.add(connection)

    def take(self) -> Message:
        """The oldest message of the tenant whose turn it is. Then it is the others' turn."""
        tenant = self.next
        queue = self._queues.pop(tenant)
        connection, message, nbytes = queue.popleft()
        if queue:
            self._queues[tenant] = queue
        self._nbytes -= nbytes
        self._kept[connection] -= 1
        if self._kept[connection] <= MOST:
            self._ahead.discard(connection)
        if not self._kept[connection]:
            del self._kept[connection]
        return message
