"""Decides which calls run next, and which run together. Plain Python over plain data, without torch or a clock of its own.

Calls wait in one queue per key (layer, op, dtype, ...), and calls of one key may run as one product. `waiting.py` says which queues are
ready, `ranking.py` which of their calls is first, and `cutting.py` how much of it runs, and with whom. They go by what is known about
the sessions (`callers.py`, `arrival_model.py`) and what products cost (`costs.py`).
"""

from collections.abc import Hashable, Sequence
from math import inf

from symbiosis.executor.scheduling.arrival_model import note
from symbiosis.executor.scheduling.callers import ALONE_S, Callers
from symbiosis.executor.scheduling.costs import Costs
from symbiosis.executor.scheduling.cutting import Cutting
from symbiosis.executor.scheduling.queue import Batch, Item, Queues
from symbiosis.executor.scheduling.ranking import Ranking
from symbiosis.executor.scheduling.rules import Policy, Rules
from symbiosis.executor.scheduling.waiting import Awaited, Waiting


class Batcher:
    """Queues, and the policy over them.

    >>> from symbiosis.executor.scheduling.rules import IMMEDIATE
    >>> batcher = Batcher(IMMEDIATE)
    >>> batcher.join(7)
    >>> batcher.add(Item(session=7, key=("layer", 0), rows=3, priority=0, arrived=0.0))
    >>> [piece.stop for piece in batcher.next_batch(now=0.0).slices]
    [3]
    """

    def __init__(
        self,
        policy: Policy,
        max_wait: float = 0.0,
        max_rows: int = 4096,
        idle_s: float = inf,
        invariant: bool = False,
        spread: float = 1.0,
        overdue: float = 1.5,
    ) -> None:
        self.rules = Rules(policy, max_wait, max_rows, idle_s, invariant, spread, overdue)
        self._queues, self.costs = Queues(), Costs()
        self._begun: list[Batch] = []  # batches that have had a turn and need more
        self.callers = Callers(self.rules, self.costs.rounds)
        self.waiting = Waiting(self.rules, self._queues, self.callers, self.costs)
        self._ranking = Ranking(self.rules, self._queues, self.callers)
        self._cutting = Cutting(self.rules, self._queues, self.callers, self.costs, self._ranking)
        self._caller, self._since = 0, 0.0  # the session that called last, and since when no other did
        self._alone_s = max(ALONE_S, idle_s) if self.rules.policy.waits_for_all else ALONE_S

    def __len__(self) -> int:
        return self._queues.count() + len(self._begun)

    @property
    def idle(self) -> bool:
        """Whether no call waits."""
        return not self._queues and not self._begun

    def alone(self, session: int, now: float) -> bool:
        """Whether a call of this session can meet no other, because nobody else has called lately. Such a call need not be added."""
        if session != self._caller:
            self._caller, self._since = session, now
        if not self.idle or (self.rules.policy.batches and now - self._since < self._alone_s):
            return False
        self.unseen(session)
        return True

    def unseen(self, session: int) -> None:
        """Note that a call of this session runs without being added, so that its next call says nothing about its pauses."""
        self.callers.sessions[session].last_key = None

    def away(self, session: int) -> None:
        """Note that a call of this session runs without being added, and that nobody need wait for the session until its next call."""
        self.unseen(session)
        if self.callers.live.pop(session, None):
            self.waiting.awaited = None

    def join(self, session: int, tenant: str | None = None, watches: bool = False) -> None:
        """Add a session. One that `watches` makes no calls that others could be batched with or would have to wait for."""
        self.callers.join(session, tenant, watches)

    def leave(self, session: int) -> list[Item]:
        """Forget a session. Return its calls that were still waiting, which are dropped."""
        self.waiting.awaited = None
        dropped = self.callers.leave(session)
        for item in dropped:
            self._queues.remove(item)
        self._begun = [batch for batch in self._begun if self.callers.of(batch)]
        return dropped

    def add(self, item: Item) -> None:
        """Take a call that has come: this is the one place that learns from it."""
        rhythm = self.callers.sessions[item.session]
        self.callers.calls(rhythm, item.arrived, self.costs.of_call(item))
        if item.calls > 1:
            note(self.costs.rounds, item.key, item.calls)
        if not rhythm.pending and item.batchable:
            rhythm.learn(item.key, item.arrived, self.costs.product.get(item.key, 0.0))
            self.callers.live[item.session] = rhythm
        rhythm.pending.append(item)
        item.whole = item.batchable and item.rows < self.rules.batch_below and item.kind not in self.costs.slow
        self._queues.put(item)

    def next_batch(self, now: float) -> Batch | None:
        """Return the batch to run now, or None if there is none before `wake_at()` or the next `add`."""
        queues, behind = self.waiting.ready(now)
        if not queues and not self._begun:
            return None
        if len(queues) == 1 and len(queues[0]) == 1 and not self._begun:  # as it is mostly
            return self._cutting.take(queues[0][0], now)
        here = self.callers.sessions
        begun = {item: batch for batch in self._begun for item, _, _ in batch.slices if item.session in here}
        item = self._ranking.first(queues, begun, behind, now)
        if item not in begun:
            return self._cutting.take(item, now)
        batch = begun[item]
        self._begun = [other for other in self._begun if other is not batch]
        self._cutting.go_on(batch, now)
        return batch

    def wake_at(self) -> float:
        """Return when to ask `next_batch` again: infinity if only an arrival can change its answer."""
        return self.waiting.wake if self._queues else inf

    @property
    def awaited(self) -> Awaited | None:
        """The calls that were foreseen when the last product began, as long as no call waits."""
        return self.waiting.awaited if not self._queues and self.rules.policy.foresees else None

    def done(self, batch: Batch, seconds: float, now: float) -> None:
        """Note that a turn of a batch has run and its replies, if any, are sent."""
        ends = batch.ends
        batch.seconds += seconds
        self.costs.learn_turn(batch, seconds)
        if ends:
            self.costs.learn(batch)
        elif self.callers.of(batch):
            self._begun.append(batch)
        each = seconds / max(1, batch.rows)
        for item, start, stop in batch.slices:
            rhythm = self.callers.sessions.get(item.session)
            if rhythm is None:
                continue
            rhythm.uses(each * (stop - start))
            if ends and item.finished:
                rhythm.pending.remove(item)
                if item.batchable:  # other calls are rare: they have no rhythm and keep no session active
                    coming = rhythm.pending[0].key if rhythm.pending else item.key
                    rhythm.answered(item.key, coming, now, self.costs.product.get(coming, 0.0))
        if self.idle:
            self.waiting.foresee(now)

    def went(
        self, key: Hashable, calls: Sequence[tuple[int, float, int]], formed: float, seconds: float, now: float
    ) -> None:
        """Note that the awaited calls have run as one product without being added. Each of `calls` is a session, its arrival and its
        rows."""
        rows = sum(rows for _, _, rows in calls)
        cost = self.costs.learn_product(key, rows, seconds)
        self._caller = 0  # no session is alone now
        for session, arrived, own in calls:
            rhythm = self.callers.sessions[session]
            self.callers.calls(rhythm, arrived)
            rhythm.learn(key, arrived, cost)
            rhythm.uses(seconds * own / rows)
            rhythm.last_key, rhythm.replied = key, now
        self.callers.served([self.callers.sessions[session] for session, _, _ in calls], formed)
        self.waiting.foresee(now)

    def took(self, key: Hashable, seconds: float) -> None:
        """Note how long an item of several calls took, from the first to the last."""
        self.costs.learn_round(key, seconds)
