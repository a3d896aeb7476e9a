"""Texts that follow schemas, in the engine's thread: it waits a moment for what may come next in one of them, and no longer."""

from collections.abc import Callable
from typing import TypeVar

from symbiosis.serving.choosing.grammar import LATE_S, NotFollowed
from symbiosis.serving.choosing.side_thread import SideThread, TooSlow
from symbiosis.serving.engine.job import Job
from symbiosis.serving.request import Request

Result = TypeVar("Result")


class Following:
    """Asks grammars."""

    def __init__(self) -> None:
        self._thread = SideThread()
        self.on_late: Callable[[Request], None] = lambda request: None  # called when a text took too long

    def attempt(self, job: Job, do: Callable[[], Result]) -> Result | None:
        """Return what a grammar of this job says. Else the job has a failure, and none of its grammars may be asked again."""
        if job.failure:
            return None
        try:
            return self._thread.within(LATE_S, do)
        except TooSlow:
            job.failure = f"what may come next by the JSON schema takes longer than {LATE_S} s to find: simplify it"
            self.on_late(job.request)
        except NotFollowed as error:
            job.failure = str(error)
        return None

    def close(self) -> None:
        self._thread.close()
