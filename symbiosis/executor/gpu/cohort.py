"""Calls of GPU clients who go on together: launched as soon as the last has rung, and accounted for while the GPU computes.

What a CPU does between the last bell and the launch, all clients wait for; what it does after the launch, nobody. So calls that
the batcher has foreseen do not go through its queue, unless something else comes or one of them does not.
"""

from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from symbiosis.executor.scheduling.batcher import Batcher

if TYPE_CHECKING:
    from symbiosis.executor.work import DeviceWork


class Cohort:
    """Those of whom the batcher foresees that their next calls are one product."""

    def __init__(
        self,
        batcher: Batcher,
        launch: "Callable[[Sequence[DeviceWork]], float]",
        launched: "Callable[[Sequence[DeviceWork], float, float], None]",
        enqueue: "Callable[[DeviceWork, float], None]",
    ) -> None:
        """`launch`: runs calls as one product, and says for how many seconds; `launched` hears of it, with the seconds that they waited
        and those; `enqueue`: leaves a call, and when it came, to the batcher."""
        self._batcher, self._launch, self._launched, self._enqueue = batcher, launch, launched, enqueue
        self._rung: dict[int, tuple[DeviceWork, float]] = {}  # by session
        self._rows = 0

    def __len__(self) -> int:
        return len(self._rung)

    def takes(self, work: "DeviceWork", now: float) -> bool:
        """Whether a call that has just come is one of theirs: then it waits here."""
        awaited = self._batcher.awaited
        if awaited is None or work.plan.key != awaited.key or not work.joins:
            return False
        number = work.peer.session.number
        if number in self._rung or number not in self._batcher.callers.live:
            return False
        if work.plan.rows >= self._batcher.rules.join_below or (not self._rung and now < awaited.since):
            return False
        self._rung[number] = work, now
        self._rows += work.plan.rows
        return True

    def wake_at(self) -> float:
        """When `step` wants to be asked again."""
        if not self._rung:
            return inf
        awaited = self._batcher.awaited
        if awaited is None:
            return -inf
        first = next(arrived for _, arrived in self._rung.values())
        return min(awaited.until, first + self._batcher.waiting.budget(awaited.key))

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
        if self._rows > self._batcher.rules.max_rows:
            return False
        works = [work for work, _ in self._rung.values()]
        try:
            seconds = self._launch(works)
        except Exception:  # whatever it is: the engine tells whose call is to blame when they come one by one
            return False
        rung = self._rung
        self._rung, self._rows = {}, 0
        self._launched(works, sum(formed - arrived for _, arrived in rung.values()), seconds)
        calls = [(number, arrived, work.plan.rows) for number, (work, arrived) in rung.items()]
        self._batcher.went(works[0].plan.key, calls, formed, seconds, formed + seconds)
        return True
