"""What the batcher learns about a session: what it has used, what it tends to call next, and when."""

from collections.abc import Container, Hashable
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from symbiosis.executor.scheduling.queue import Item
from symbiosis.executor.scheduling.rules import Rules
from symbiosis.executor.scheduling.tenant_use import TenantUse

SMOOTHING = 0.25  # weight of the newest observation in the moving averages
HABITS_KEPT = 1 << 11  # calls of one session that are remembered
KEYS_KEPT = 1 << 14  # a client may make ever new keys (views of a weight): beyond so many, start to learn anew


class Due(NamedTuple):
    """When a call is expected, and when it is given up."""

    expected: float
    latest: float


class Habits:
    """What a tenant's earlier sessions did. It gives later ones a start, because they run through the same model."""

    def __init__(self) -> None:
        self.follows: dict[Hashable, Hashable] = {}
        self.gap: dict[Hashable, float] = {}

    def adopt(self, rhythm: "ArrivalModel") -> None:
        self._adopt(self.follows, rhythm.follows)
        self._adopt(self.gap, rhythm.gap)

    def _adopt(self, mine: dict[Hashable, Any], theirs: dict[Hashable, Any]) -> None:
        if len(theirs) > HABITS_KEPT:  # a session that made ever new calls teaches nothing
            return
        if len(mine) + len(theirs) > 2 * HABITS_KEPT:
            mine.clear()
        mine.update(theirs)


@dataclass(slots=True)
class ArrivalModel:
    """What is known about a session: what it has used, what it waits for, what it tends to call next and when."""

    tenant: TenantUse
    habits: Habits  # consulted where the session has not shown its own
    rules: Rules
    rounds: Container[Hashable]  # keys that may follow themselves
    watches: bool = False  # it makes no calls that others could be batched with, or would have to wait for
    used: float = 0.0
    served: float = -inf
    pending: list[Item] = field(default_factory=list)
    last_key: Hashable = None
    replied: float = 0.0
    follows: dict[Hashable, Hashable] = field(default_factory=dict)
    gap: dict[Hashable, float] = field(default_factory=dict)
    at: Hashable = None  # the call that the session waits for, or the last one that it made
    next: Hashable = None  # the call that follows `at`, as far as is known
    pause: float = inf  # seconds from the answer to the next call
    answer_s: float = 0.0  # seconds that the answer takes
    age: int = 0  # calls since the ring was worked out
    _ring: dict[Hashable, int] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        return self.last_key is not None

    def learn(self, key: Hashable, arrived: float, cost: float) -> None:
        """Learn from a call that the session made while it had none in flight."""
        before = self.last_key
        if before is not None:
            self.age += 1
            if self.follows.get(before) != key:
                note(self.follows, before, key)
            observe(self.gap, before, max(0.0, arrived - self.replied))
        self.arrive_at(key, cost)

    def uses(self, seconds: float) -> None:
        """Count the seconds that a product of this session took."""
        self.used += seconds
        self.tenant.used += seconds

    def answered(self, key: Hashable, coming: Hashable, now: float, cost: float) -> None:
        """Note that the session has its answer to `key`. It now waits for `coming`, or called that last, which costs `cost` seconds."""
        self.last_key, self.replied = key, now
        self.arrive_at(coming, cost)

    def arrive_at(self, key: Hashable, cost: float) -> None:
        self.at, self.answer_s = key, cost
        self.next = self.follows[key] if key in self.follows else self.habits.follows.get(key)
        self.pause = self.gap[key] if key in self.gap else self.habits.gap.get(key, inf)
        if self.next == key and key not in self.rounds:
            self.next = None

    @property
    def comes(self) -> bool:
        """Whether the session's next call is known, and is not the one that it waits for."""
        return self.next is not None and not (self.pending and self.next == self.at)

    def due(self, now: float) -> Due:
        """Return when the session's next call is expected (or, while it waits for an answer, its next but one)."""
        begun = now + self.answer_s if self.pending else self.replied
        expected = begun + self.pause
        late = (self.rules.overdue - 1) * self.pause
        return Due(expected, expected + min(late, self.rules.max_wait))

    def ring(self) -> dict[Hashable, int]:
        """Return the calls that the session makes again and again, each with its place in the ring. It is worked out anew now and
        then."""
        if self.age > len(self._ring):
            self.age, self._ring, key = 0, {}, self.at
            while key is not None and key not in self._ring:
                self._ring[key] = len(self._ring)
                key = self.follows[key] if key in self.follows else self.habits.follows.get(key)
        return self._ring


def note(table: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    if len(table) >= KEYS_KEPT and key not in table:
        table.clear()
    table[key] = value


def observe(table: dict[Hashable, float], key: Any, new: float, first: float | None = None) -> float:
    """Move the average of a key, which begins with `first` or with what is seen first, by an observation. Return it."""
    old = table.get(key, first)
    if old is not None:
        new = old + SMOOTHING * (new - old)
    if len(table) >= KEYS_KEPT and key not in table:
        table.clear()
    table[key] = new
    return new
