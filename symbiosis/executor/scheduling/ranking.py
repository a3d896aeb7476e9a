"""Decides which of the calls that are ready runs next.

Among sessions, priority goes first, and waiting raises it (`AGING_S`). Within one priority the session goes first that has used the
least of the executor, in steps of `SLACK_S`. So a session can delay another by one slice, and never starve it. Among equals the session
goes first that is furthest behind in the ring of calls that models make again and again. So it catches up with the others and goes on
together with them.

Where keys identify tenants, use goes before priority among them. So how much a tenant is served depends neither on how many sessions it
has, nor on how urgent they say they are.
"""

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, TypeAlias

from symbiosis.executor.scheduling.arrival_model import ArrivalModel
from symbiosis.executor.scheduling.callers import Callers
from symbiosis.executor.scheduling.queue import Item, Queue, Queues
from symbiosis.executor.scheduling.rules import Rules
from symbiosis.executor.scheduling.tenant_use import TenantUse

AGING_S = 0.05  # a call gains one step of priority per this time in which its session is not served
SLACK_S = 0.05  # a session may have used so much more than others before it must let them go first
# For each place in the ring where a session is: how many calls the next session is behind it.
Behind: TypeAlias = dict[Hashable, int]


class Ranking:
    """Orders the calls that are ready."""

    def __init__(self, rules: Rules, queues: Queues, callers: Callers) -> None:
        self._rules, self._queues, self._callers = rules, queues, callers

    def first(self, queues: Sequence[Queue], begun: Collection[Item], behind: Behind, now: float) -> Item:
        """Return the call to run, of those in `queues` and those that have `begun`; of a queue that runs as a whole, the most
        urgent."""
        if len(queues) == 1 and not begun and self.runs_whole(queues[0]):
            return queues[0][0]
        if len(queues) == 1 and not begun:
            items, behind = self._heads(queues[0]), {}  # all are at one place in the ring
        else:
            items = [*begun, *(item for queue in queues for item in self._heads(queue))]
        if not self._callers.are_tenants:
            return min(items, key=lambda item: self._rank(item, self._callers[item], behind, now))
        best = self._best_of_each(items, behind, now)
        return min(best, key=lambda item: self._rank(item, self._callers[item].tenant, behind, now))

    def runs_whole(self, queue: Queue) -> bool:
        """Whether the whole queue can run as one product."""
        return self._rules.policy.batches and not queue.apart and queue.rows <= self._rules.max_rows

    def _best_of_each(self, items: Iterable[Item], behind: Behind, now: float) -> list[Item]:
        """Return, for each tenant, the one of its calls that ranks first."""
        best: dict[TenantUse, tuple[Any, Item]] = {}
        for item in items:
            rhythm = self._callers[item]
            rank = self._rank(item, rhythm, behind, now)
            if rhythm.tenant not in best or rank < best[rhythm.tenant][0]:
                best[rhythm.tenant] = rank, item
        return [item for _, item in best.values()]

    def _heads(self, queue: Queue) -> Iterable[Item]:
        """Return the calls of a queue to compare: of a queue that runs as a whole, each tenant's most urgent."""
        if not self.runs_whole(queue):
            return queue
        if not self._callers.are_tenants:
            return [min(queue, key=_urgency)]
        first: dict[TenantUse, Item] = {}
        for item in sorted(queue, key=_urgency):
            first.setdefault(self._callers[item].tenant, item)
        return first.values()

    def _rank(
        self, item: Item, caller: ArrivalModel | TenantUse, behind: Behind, now: float
    ) -> tuple[int, int, int, float, float]:
        """Return the rank of a call among sessions or among tenants. A tenant's use counts first, because its priorities are only what
        it claims."""
        since = item.arrived if item.arrived > caller.served else caller.served
        urgency, used = item.priority - int((now - since) / AGING_S), int(caller.used / SLACK_S)
        if urgency < 0:
            urgency = 0
        last = behind.get(item.key, 0) * len(self._queues.get(item.key, ())) if behind else 0
        if isinstance(caller, TenantUse):
            return used, urgency, -last, caller.used, item.arrived
        return urgency, used, -last, caller.used, item.arrived


def _urgency(item: Item) -> tuple[int, float]:
    return item.priority, item.arrived
