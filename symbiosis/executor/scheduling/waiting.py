"""Decides whether a queue waits for calls that are still to come. The policy says when a queue is ready:

* `immediate`      every call by itself, at once;
* `lockstep`       when every active session waits for an answer: one that had an answer within the last `idle_s`;
* `opportunistic`  when waiting longer would not pay. It pays to wait for sessions whose rhythm says that their next call is
                   this one, as long as the products that are saved so outweigh the time until they come, and within the
                   provider's budget.
"""

from collections.abc import Hashable, Sequence
from math import inf
from typing import NamedTuple

from symbiosis.executor.scheduling.arrival_model import Due
from symbiosis.executor.scheduling.callers import Callers
from symbiosis.executor.scheduling.costs import Costs
from symbiosis.executor.scheduling.queue import Item, Queue, Queues
from symbiosis.executor.scheduling.ranking import Behind
from symbiosis.executor.scheduling.rules import Rules


class Awaited(NamedTuple):
    """Calls that are worth waiting for: `calls` of this key, until that time. It holds while no other queue has calls, and for a queue
    that did not begin before `since`."""

    key: Hashable
    calls: int
    until: float
    since: float = -inf


class Waiting:
    """Tells which queues are ready, and when to ask again about the others (`wake`)."""

    def __init__(self, rules: Rules, queues: Queues, callers: Callers, costs: Costs) -> None:
        self._rules, self._queues, self._callers, self._costs = rules, queues, callers, costs
        self.wake = inf
        self.awaited: Awaited | None = None

    def budget(self, key: Hashable) -> float:
        """Return how long a call of this key may wait for others."""
        return self._rules.max_wait * self._costs.rounds.get(key, 1)

    def ready(self, now: float) -> tuple[Sequence[Queue], Behind]:
        """Return the queues that need not wait any more, and how far behind each place in the ring the next session is."""
        if not self._queues or (self.awaited is not None and self._still_waits(self.awaited, now)):
            return [], {}
        self.wake, self.awaited = inf, None
        queues = list(self._queues.values())
        if self._rules.policy.waits_for_all:
            if self._all_wait(now):
                return queues, self._behind(queues[0][0]) if len(queues) > 1 else {}
            return [queue for queue in queues if self._callers[queue[0]].watches], {}
        all_here = len(queues) == 1 and len(queues[0]) >= len(self._callers.live)  # all live sessions wait in one queue
        if self._rules.policy.foresees and not all_here:
            due = self._due(now)
            queues = [queue for queue in queues if self._is_ready(queue, due.get(queue[0].key), now)]
            if queues:
                behind = self._behind(queues[0][0])
                return self._without_leaders(queues, behind, now), behind
        return queues, {}

    def foresee(self, now: float) -> None:
        """Decide, before the next calls arrive, whether to wait for those of all live sessions. It pays if all will make the same call,
        and the last is expected soon after the first."""
        self.awaited = None
        self._callers.forget_silent(now)
        if not self._rules.policy.foresees or len(self._callers.live) < 2:
            return
        live = self._callers.live.values()
        key = next(iter(live)).next
        if key is None or any(rhythm.next != key or rhythm.pending for rhythm in live):
            return
        coming = [rhythm.due(now) for rhythm in live]
        first, last = min(coming).expected, max(coming).expected
        spread = 1.0 if key in self._costs.rounds else self._rules.spread  # a round was measured beside other programs
        worth = min(spread * self._saved(key), self.budget(key))
        if last - first < worth:
            self.awaited = Awaited(key, len(coming), max(due.latest for due in coming), last - worth)

    def _saved(self, key: Hashable) -> float:
        return self._costs.saved(key, self._rules.contention)

    def _all_wait(self, now: float) -> bool:
        """Whether every session waits for an answer, except those that have long been idle."""
        rhythms = self._callers.sessions.values()
        idle_at = [rhythm.replied + self._rules.idle_s for rhythm in rhythms if rhythm.active and not rhythm.pending]
        waited_for = [at for at in idle_at if now < at]
        self.wake = max(waited_for, default=inf)
        return not waited_for

    def _still_waits(self, awaited: Awaited, now: float) -> bool:
        """Whether the awaited calls have yet to arrive, and no other call has."""
        if len(self._queues) > 1 or not self._rules.policy.foresees:
            return False
        key, calls, until, since = awaited
        queue = self._queues.get(key)
        if queue is None or queue.apart or queue.rows >= self._rules.batch_below or len(queue) >= calls:
            return False
        if queue[0].arrived < since:
            return False
        self.wake = min(until, queue[0].arrived + self.budget(key))
        return now < self.wake

    def _due(self, now: float) -> dict[Hashable, list[Due]]:
        """Return, for each key with waiting calls, when the sessions whose next call (or next but one) it is are due."""
        table: dict[Hashable, list[Due]] = {}
        for rhythm in self._callers.live.values():
            if rhythm.next in self._queues and rhythm.comes and now < (due := rhythm.due(now)).latest:
                table.setdefault(rhythm.next, []).append(due)
        return table

    def _is_ready(self, queue: Queue, coming: list[Due] | None, now: float) -> bool:
        """Whether none of the calls `coming` to the queue is worth waiting for."""
        head = queue[0]
        deadline = head.arrived + self.budget(head.key)
        if not coming or now >= deadline or not head.batchable or queue.rows >= self._rules.batch_below:
            return True
        calls, wake = _worth_waiting(sorted(coming), self._saved(head.key), now, deadline)
        if not calls:
            return True
        self.wake = min(self.wake, wake)
        self.awaited = Awaited(head.key, len(queue) + calls, wake)
        return False

    def _behind(self, item: Item) -> Behind:
        """Return, for each place in the ring of `item`'s session where a session is, how many calls the next session is behind it."""
        ring = self._callers[item].ring()
        taken = sorted({(ring[rhythm.at], rhythm.at) for rhythm in self._callers.live.values() if rhythm.at in ring})
        return {key: (place - taken[i - 1][0]) % len(ring) for i, (place, key) in enumerate(taken)}

    def _without_leaders(self, queues: list[Queue], behind: Behind, now: float) -> list[Queue]:
        """Hold back queues of sessions ahead in the ring while the session that is furthest behind thinks, if that takes less than a
        product. Calls too large to be batched are not held back."""
        last = max(behind, key=lambda key: behind[key], default=None)
        if last is None or last in self._queues:
            return queues
        thinking = [rhythm for rhythm in self._callers.live.values() if rhythm.at == last]
        expected, latest = min(rhythm.due(now) for rhythm in thinking)
        if now >= latest:
            return queues
        ready = []
        for queue in queues:
            head = queue[0]
            deadline = head.arrived + self.budget(head.key)
            meets = head.key in behind and head.batchable and head.left < self._rules.batch_below
            if meets and now < deadline and expected - now < self._saved(head.key):
                self.wake = min(self.wake, latest, deadline)
            else:
                ready.append(queue)
        return ready


def _worth_waiting(coming: list[Due], saved: float, now: float, deadline: float) -> tuple[int, float]:
    """Return for how many calls to wait, the earliest first, and until when, so that the products saved outweigh the time most."""
    best, until, calls, wake = 0.0, now, 0, inf
    for number, (expected, latest) in enumerate(coming, 1):
        if expected > deadline:
            break
        until = max(until, latest)
        gain = number * saved - max(0.0, expected - now)
        if gain > best:
            best, calls, wake = gain, number, min(until, deadline)
    return calls, wake
