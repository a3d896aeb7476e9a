"""Versions of adapters whose rows have failed, and how a step that fails is divided."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from symbiosis.serving.scheduler.scheduler_output import SchedulerOutput

MOST = 64  # versions


class StepBisect:
    """The versions of adapters that have failed last."""

    def __init__(self) -> None:
        self._versions: deque[int] = deque(maxlen=MOST)

    def add(self, version: int) -> None:
        if version not in self._versions:
            self._versions.append(version)

    def parts(self, step: SchedulerOutput) -> Iterator[SchedulerOutput]:
        """Divide a step that has failed: by the versions of adapters with which others have failed, else into halves. So what one request costs the
        others grows with the logarithm of their number. Those that have ended meanwhile are left out."""
        failed = [each for each in step.segments if each.sequence.version in self._versions]
        others = [each for each in step.segments if each.sequence.version not in self._versions]
        if not failed or not others:
            half = len(step.segments) // 2
            failed, others = list(step.segments[:half]), list(step.segments[half:])
        for part in (failed, others):
            under_way = [each for each in part if not each.sequence.has_ended]
            if under_way:
                firsts = accumulate((each.rows for each in under_way), initial=0)
                yield SchedulerOutput(
                    tuple(replace(each, first=first) for each, first in zip(under_way, firsts, strict=False))
                )
