"""Calls of several GPU clients that are foreseen to come together. They are launched as soon as the last one has rung.

All clients wait for whatever the CPU does between the last bell and the launch, and none waits for what it does afterwards. So calls
that the batcher has foreseen skip its queue, and are counted while the GPU computes. If another call comes instead, or one of them does
not come, they go through the queue as usual.
"""

from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from symbiosis.executor.scheduling.batcher import Batcher

if TYPE_CHECKING:
    from symbiosis.executor.call_kinds import DeviceWork


class ForeseenBatch:
    """The calls that the batcher has foreseen to run as one product, as far as they have come."""

    def __init__(
        self,
        batcher: Batcher,
        launch: "Callable[[Sequence[DeviceWork]], float]",
        launched: "Callable[[Sequence[DeviceWork], float, float], None]",
        enqueue: "Callable[[DeviceWork, float], None]",
    ) -> None:
        """`launch` runs calls as one product and returns the seconds it takes. `launched` is told afterwards: the calls, the seconds that
        they waited, and those seconds. `enqueue` leaves a call and its time of arrival to the batcher."""
        self._batcher, self._launch, self._launched, self._enqueue = batcher, launch, launched, enqueue
        self._rung: dict[int, tuple[DeviceWork, float]] = {}  # by session
        self._rows = 0

    def __len__(self) -> int:
        return len(self._rung)

    def takes(self, work: "DeviceWork", now: float) -> bool:
        """Whether a call that has just come was foreseen. Then it waits here."""
        awaited = self._batcher.awaited
        if awaited is None or work.plan.key != awaited.key or not work.can_be_batched:
            return False
        number = work.peer.session.number
        if number in self._rung or number not in self._batcher.callers.live:
            return False
        if work.plan.rows >= self._batcher.rules.batch_below or (not self._rung and now < awaited.since):
            return False
        self._rung[number] = work, now
        self._rows += work.plan.rows
        return True

    def wake_at(self) -> float:
        """Return when to call `step` again."""
        if not self._rung:
            return inf
        awaited = self._batcher.awaited
        if awaited is None:
            return -inf
        first = next(arrived for _, arrived in self._rung.values())
        return min(awaited.until, first + self._batcher.waiting.budget(awaited.key))

    def step(self, now: float) -> bool:
        """Run the calls if all have come, or go on waiting, and return True. Else hand those that have come to the batcher."""
        awaited = self._batcher.awaited
        if awaited is not None:
            complete = len(self._rung) == awaited.calls
            if self._run() if complete else now < self.wake_at():
                return True
        self.disband()
        return False

    def disband(self) -> None:
        """Hand the calls that have come to the batcher, as ordinary calls."""
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
