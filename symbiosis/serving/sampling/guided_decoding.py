"""Texts that follow schemas, in the engine's thread: it waits a moment for what may come next in one of them, and no longer."""

from collections.abc import Callable
from typing import TypeVar

from symbiosis.serving.engine.request_state import RequestState
from symbiosis.serving.request import Request
from symbiosis.serving.sampling.grammar import LATE_S, NotFollowed
from symbiosis.serving.sampling.side_thread import SideThread, TooSlow

Result = TypeVar("Result")


class GuidedDecoding:
    """Asks grammars."""

    def __init__(self) -> None:
        self._thread = SideThread()
        self.on_late: Callable[[Request], None] = lambda request: None  # called when a text took too long

    def attempt(self, job: RequestState, do: Callable[[], Result]) -> Result | None:
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
