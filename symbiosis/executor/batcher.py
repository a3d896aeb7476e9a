"""Which calls run next, and together: plain Python over plain data, no torch, no clock of its own.

Calls wait in one queue per key (layer, op, dtype, ...); those of one key may run as one product. The policy says when a
queue is ready:

* `immediate`      every call by itself, at once;
* `lockstep`       when every active session waits for an answer;
* `opportunistic`  when waiting longer would not pay. It pays to wait for a session whose rhythm says that its next call
                   is this one and due within the budget; the budget is the provider's, and never more than what the
                   expected calls would cost as products of their own, because that is all that joining can save.

Among ready queues, priority goes first, but not being served raises it (`AGING_S`), and within one priority the session that has
used the least of the executor goes first. So a session can delay another by one slice of `max_rows`, never starve it.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from symbiosis.config import Policy

AGING_S = 0.05  # a call gains one step of priority per this time in which its session is not served
JOIN_BELOW = 256  # rows from which a product is bound by arithmetic: joining two gains nothing and costs copies
SMOOTHING = 0.25  # weight of the newest observation in the moving averages
PATIENCE = 1.5  # a session is still worth waiting for at this multiple of its usual time
KEYS_KEPT = 1 << 14  # a client may make ever new keys (views of a weight): then what was learned is forgotten


@dataclass(slots=True, eq=False)
class Item:
    """One call in the queue. `work` is the caller's; the batcher never looks into it."""

    session: int
    key: Hashable
    rows: int
    priority: int
    arrived: float
    work: Any = None
    divisible: bool = True  # may run as several slices of rows
    joinable: bool = True  # may run with others of its key
    start: int = 0  # rows that earlier slices took

    @property
    def left(self) -> int:
        return self.rows - self.start


class Slice(NamedTuple):
    """Rows `start` to `stop` of an item."""

    item: Item
    start: int
    stop: int

    @property
    def last(self) -> bool:
        return self.stop == self.item.rows


@dataclass(slots=True)
class Batch:
    """The slices that run as one product."""

    key: Hashable
    slices: list[Slice]
    formed: float

    @property
    def rows(self) -> int:
        return sum(piece.stop - piece.start for piece in self.slices)


@dataclass(slots=True)
class Rhythm:
    """What is known of a session: what it has used, what it waits for, what it tends to call next and when."""

    used: float = 0.0
    served: float = -inf
    pending: list[Item] = field(default_factory=list)
    last_key: Hashable = None
    replied: float = 0.0
    follows: dict[Hashable, Hashable] = field(default_factory=dict)
    gap: dict[Hashable, float] = field(default_factory=dict)

    def due_at(self, key: Hashable, cost: dict[Hashable, float], now: float) -> float:
        """When this session's call of `key` is expected; infinity if it is not the next (or next but one) it makes."""
        if self.pending:
            before = self.pending[0].key
            if self.follows.get(before) != key:
                return inf
            return now + cost.get(before, 0.0) + self.gap.get(before, inf) * PATIENCE
        if self.last_key is None or self.follows.get(self.last_key) != key:
            return inf
        return self.replied + self.gap.get(self.last_key, inf) * PATIENCE


class Batcher:
    """Queues, and the policy over them.

    >>> batcher = Batcher("immediate")
    >>> batcher.join(7)
    >>> batcher.add(Item(session=7, key=("layer", 0), rows=3, priority=0, arrived=0.0))
    >>> [piece.stop for piece in batcher.next_batch(now=0.0).slices]
    [3]
    """

    def __init__(self, policy: Policy, max_wait: float = 0.0, max_rows: int = 4096) -> None:
        self.policy, self.max_wait, self.max_rows = policy, max_wait, max_rows
        self._queues: dict[Hashable, deque[Item]] = {}
        self._sessions: dict[int, Rhythm] = {}
        self._cost: dict[Hashable, float] = {}
        self._least_used = 0.0
        self._wake = inf

    def __len__(self) -> int:
        return sum(map(len, list(self._queues.values())))  # a copy: other threads ask, too

    @property
    def idle(self) -> bool:
        """Whether no call waits."""
        return not self._queues

    @property
    def alone(self) -> bool:
        """Whether the next call can meet no other."""
        return not self._queues and (len(self._sessions) == 1 or self.policy == "immediate")

    def join(self, session: int) -> None:
        self._sessions[session] = Rhythm(used=self._least_used)

    def leave(self, session: int) -> list[Item]:
        """Forget a session; what it still waited for is dropped and returned."""
        rhythm = self._sessions.pop(session, None)
        if rhythm is None:
            return []
        for item in rhythm.pending:
            self._remove(item)
        return rhythm.pending

    def add(self, item: Item) -> None:
        rhythm = self._sessions[item.session]
        if not rhythm.pending:
            rhythm.used = max(rhythm.used, self._least_used)  # idleness earns no credit
            if rhythm.last_key is not None:
                self._learn(rhythm, item)
        rhythm.pending.append(item)
        self._queues.setdefault(item.key, deque()).append(item)

    def _learn(self, rhythm: Rhythm, item: Item) -> None:
        before = rhythm.last_key
        _note(rhythm.follows, before, item.key)
        _note(rhythm.gap, before, _smooth(rhythm.gap.get(before), item.arrived - rhythm.replied))

    def next_batch(self, now: float) -> Batch | None:
        """The batch to run now; None if there is none before `wake_at()` or the next `add`."""
        self._wake = inf
        ready = [queue for key, queue in self._queues.items() if self._ready(key, queue, now)]
        if not ready:
            return None
        return self._take(self._first(ready, now), now)

    def wake_at(self) -> float:
        """When the last `next_batch` wants to be asked again; infinity if only an arrival can change its answer."""
        return self._wake

    def done(self, batch: Batch, seconds: float, now: float) -> None:
        """A batch has run and its replies are out."""
        _note(self._cost, batch.key, _smooth(self._cost.get(batch.key), seconds))
        share = seconds / max(1, batch.rows)
        for item, start, stop in batch.slices:
            rhythm = self._sessions.get(item.session)
            if rhythm is None:
                continue
            rhythm.used += share * (stop - start)
            if stop == item.rows:
                rhythm.pending.remove(item)
                rhythm.last_key, rhythm.replied = item.key, now

    def _ready(self, key: Hashable, queue: deque[Item], now: float) -> bool:
        if self.policy == "immediate":
            return True
        if self.policy == "lockstep":
            return all(rhythm.pending for rhythm in self._sessions.values() if rhythm.last_key is not None)
        return self._wait_is_over(key, queue, now)

    def _wait_is_over(self, key: Hashable, queue: deque[Item], now: float) -> bool:
        if len(queue) >= len(self._sessions) or not queue[0].joinable:
            return True
        if sum(item.left for item in queue) >= JOIN_BELOW:
            return True
        here = {item.session for item in queue}
        due = [r.due_at(key, self._cost, now) for session, r in self._sessions.items() if session not in here]
        expected = [at for at in due if now < at < inf]
        deadline = queue[0].arrived + min(self.max_wait, self._cost.get(key, 0.0) * len(expected))
        coming = [at for at in expected if at <= deadline]
        if now >= deadline or not coming:
            return True
        self._wake = min(self._wake, max(coming))
        return False

    def _first(self, queues: list[deque[Item]], now: float) -> Item:
        if len(queues) == 1 and len(queues[0]) == 1:
            return queues[0][0]
        return min((item for queue in queues for item in queue), key=lambda item: self._rank(item, now))

    def _rank(self, item: Item, now: float) -> tuple[int, float, float]:
        rhythm = self._sessions[item.session]
        waited = int((now - max(item.arrived, rhythm.served)) / AGING_S)
        return max(0, item.priority - waited), rhythm.used, item.arrived

    def _take(self, head: Item, now: float) -> Batch:
        """`head`, and of its queue what may join it."""
        pieces = [self._slice(head)]
        rows, queue = pieces[0].stop - pieces[0].start, self._queues[head.key]
        if len(queue) > 1 and self.policy != "immediate" and head.joinable and rows < JOIN_BELOW:
            passed: set[int] = set()  # no call of a session overtakes an earlier one
            for item in [item for item in queue if item is not head]:
                fits = item.joinable and item.left < JOIN_BELOW and not item.start and rows + item.left <= self.max_rows
                if fits and item.session not in passed:
                    pieces.append(self._slice(item))
                    rows += item.rows
                else:
                    passed.add(item.session)
        for piece in pieces:
            if piece.last:
                self._remove(piece.item)
        for piece in pieces:
            self._sessions[piece.item.session].served = now
        self._least_used = max(self._least_used, self._sessions[head.session].used)
        return Batch(head.key, pieces, now)

    def _slice(self, item: Item) -> Slice:
        start, stop = item.start, item.rows
        if item.divisible and item.left > self.max_rows:
            stop = start + self.max_rows
        item.start = stop
        return Slice(item, start, stop)

    def _remove(self, item: Item) -> None:
        queue = self._queues.get(item.key)
        if queue is not None and item in queue:
            queue.remove(item)
            if not queue:
                del self._queues[item.key]


def _note(table: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    if len(table) >= KEYS_KEPT and key not in table:
        table.clear()
    table[key] = value


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
