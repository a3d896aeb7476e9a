"""Rooms that tenants share, and that none of them can close to the others: for what waits in a front end, for the bytes that it holds, and for log probabilities."""

from collections import Counter
from dataclasses import dataclass


class FairShare:
    """So much of something. A tenant may have as much as it leaves free: one alone half of the room, two a third each. So a place is left for
    whoever comes next (the dynamic thresholds of Choudhury and Hahne, 1998).

    >>> room = FairShare(12)
    >>> room.take("eve", 6)
    >>> room.has("eve", 1), room.has("bob", 3), room.has("bob", 4)
    (False, True, False)
    """

    def __init__(self, most: int) -> None:
        self._most, self._taken = most, 0
        self._of = Counter[str]()

    @property
    def alone(self) -> int:
        """As much as a tenant has beside nobody else."""
        return self._most // 2

    def has(self, tenant: str, more: int) -> bool:
        """Whether a tenant may take so much more."""
        return self._of[tenant] + more <= self._most - self._taken - more

    def take(self, tenant: str, more: int) -> None:
        self._of[tenant] += more
        self._taken += more

    def give_back(self, tenant: str, less: int) -> None:
        self._taken -= less
        self._of[tenant] -= less
        if not self._of[tenant]:
            del self._of[tenant]


@dataclass
class Lease:
    """What one request has of a room.

    >>> held = Lease(FairShare(12), "eve")
    >>> held.take(4), held.take(4), held.size
    (True, False, 4)
    """

    room: FairShare
    tenant: str
    size: int = 0

    def take(self, more: int) -> bool:
        """Take so much more, if the tenant may."""
        if not self.room.has(self.tenant, more):
            return False
        self.room.take(self.tenant, more)
        self.size += more
        return True

    def keep(self, more: int) -> None:
        """Take so much more in any case."""
        self.room.take(self.tenant, more)
        self.size += more

    def give_back(self, less: int) -> None:
        self.room.give_back(self.tenant, less)
        self.size -= less

    def end(self) -> None:
        """Give everything back. It may be called again."""
        self.room.give_back(self.tenant, self.size)
        self.size = 0
