"""Calls of GPU clients who go on together: launched as soon as the last has rung, and accounted for while the GPU computes.

What a CPU does between the last bell and the launch, all clients wait for; what it does after the launch, nobody. So calls that
the batcher has foreseen do not go through its queue, unless something else comes or one of them does not.
"""

from collections.abc import Callable
from math import inf
from time import monotonic

from symbiosis.executor.batcher import Batcher
from symbiosis.executor.engine import Engine, Work
from symbiosis.executor.metrics import Figures


class Cohort:
    """Those of whom the batcher foresees that their next calls are one product."""

    def __init__(
        self, batcher: Batcher, engine: Engine, figures: Figures, enqueue: Callable[[Work, float], None]
    ) -> None:
        """`enqueue`: leaves a call, and when it came, to the batcher."""
        self._batcher, self._engine, self._figures, self._enqueue = batcher, engine, figures, enqueue
        self._rung: dict[int, tuple[Work, float]] = {}  # by session
        self._rows = 0

    def __len__(self) -> int:
        return len(self._rung)

    def takes(self, work: Work, now: float) -> bool:
        """Whether a call that has just come is one of theirs: then it waits here."""
        awaited = self._batcher.awaited
        if awaited is None or work.plan.key != awaited.key or work.places is None:
            return False
        number = work.peer.session.number
        if number in self._rung or not self._batcher.lives(number):
            return False
        if work.plan.rows >= self._batcher.join_below or (not self._rung and now < awaited.since):
            return False
        self._rung[number] = work, now
        self._rows += work.plan.rows
        return True

    def wake_at(self) -> float:
        """When `step` wants to be asked again."""
        awaited = self._batcher.awaited
        if not self._rung or awaited is None:
            return -inf if self._rung else inf
        first = next(arrived for _, arrived in self._rung.values())
        return min(awaited.until, first + self._batcher.budget(awaited.key))

    def step(self, now: float) -> bool:
        """Run what has come, or wait on. Else, what has come is the batcher's."""
        awaited = self._batcher.awaited
        if awaited is not None:
            complete = len(self._rung) == awaited.calls
            if self._run() if complete else now < self.wake_at():
                return True
        self.disband()
        return False

    def disband(self) -> None:
        """The calls that have come wait in the batcher's queue, as any others."""
        rung, self._rung, self._rows = self._rung, {}, 0
        for work, arrived in rung.values():
            self._enqueue(work, arrived)

    def _run(self) -> bool:
        formed = monotonic()
        if self._rows > self._batcher.max_rows:
            return False
        works = [work for work, _ in self._rung.values()]
        try:
            seconds = self._engine.join(works)
        except Exception:  # whatever it is: the engine tells whose call is to blame when they come one by one
            return False
        rung = self._rung
        each = seconds / self._rows
        self._rung, self._rows = {}, 0
        calls, waited = [], 0.0
        for number, (work, arrived) in rung.items():
            self._engine.attempt(work.peer, work.peer.count, len(rung), len(work.calls))
            if work.peer.session is not None:
                work.peer.session.count(work.plan)
                work.peer.session.account.usage.seconds += each * work.plan.rows
            calls.append((number, arrived, work.plan.rows))
            waited += formed - arrived
        self._batcher.went(works[0].plan.key, calls, formed, seconds, formed + seconds)
        self._figures.together(works, waited, seconds)
        return True
