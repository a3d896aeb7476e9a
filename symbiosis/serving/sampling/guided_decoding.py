"""Texts that follow schemas, in the engine's thread: it waits a moment for what may come next in them, and no longer.

What may come next is found in other threads, for one text of each tenant at a time. A step waits for all of it together, but not for long: a text
of which it is not known by then takes no part in the step, and is asked about in the next one. Those that have waited longest come first. So
whatever one tenant's texts cost, the texts of others get their tokens.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic

from torch import Tensor

from symbiosis.serving.engine.request_state import RequestState
from symbiosis.serving.request import Request
from symbiosis.serving.sampling.grammar import LATE_S, NotFollowed
from symbiosis.serving.sampling.side_thread import Outcome, SideThread, TooSlow
from symbiosis.serving.scheduler.scheduler_output import Sequence

STEP_S = 0.05  # how long a step waits for what may come next in all of its texts


@dataclass(slots=True, eq=False)
class GuidedText:
    """A text of a request. Called, it tells which tokens may come next."""

    job: RequestState
    sequence: Sequence

    def __call__(self) -> Tensor:
        return self.job.grammars[self.sequence.completion].allowed()


def _told_at(text: GuidedText) -> float:
    return text.sequence.told_at


@dataclass(slots=True, eq=False)
class Question:
    """A text that is being asked about."""

    text: GuidedText
    since: float
    thread: SideThread


class GuidedDecoding:
    """Asks grammars."""

    def __init__(self) -> None:
        self._takes, self._idle = SideThread(), list[SideThread]()
        self._questions: dict[str, Question] = {}  # by tenant
        self._done = SimpleQueue[Outcome]()
        self.on_late: Callable[[Request], None] = lambda request: None  # called when a text took too long

    def allowed(self, texts: Iterable[GuidedText], others: bool) -> dict[Sequence, Tensor | None]:
        """Return which tokens may come next in these texts: in those of which it is known in time. None: none may, for the job has a
        failure, and none of its grammars may be asked again.

        Args:
            others: Whether the step has something to go on with besides. Else it waits until one of the texts can.
        """
        found: dict[Sequence, Tensor | None] = {text.sequence: None for text in texts if text.job.failure}
        known = found.keys() | {question.text.sequence for question in self._questions.values()}
        left: dict[str, list[GuidedText]] = {text.sequence.tenant: [] for text in texts}
        for text in sorted(texts, key=_told_at, reverse=True):  # the last one is asked about first
            if text.sequence not in known:
                left[text.sequence.tenant].append(text)
        for tenant in left:
            self._ask(tenant, left)
        until = monotonic() + (STEP_S if others or found else LATE_S)
        while self._questions.keys() & left.keys() or not self._done.empty():  # what came meanwhile was not late
            try:
                outcome = self._done.get(timeout=max(0.0, until - monotonic()))
            except Empty:
                break
            self._hear(outcome, found, left)
            until = min(until, monotonic() + STEP_S)
        for tenant, question in list(self._questions.items()):
            if monotonic() - question.since >= LATE_S:
                self._give_up(tenant, question)
                found[question.text.sequence] = None
        return found

    def _ask(self, tenant: str, left: dict[str, list[GuidedText]]) -> None:
        """Ask about a tenant's next text, unless another one of this tenant is being asked about."""
        if tenant in self._questions or not left.get(tenant):
            return
        thread, text = self._idle.pop() if self._idle else SideThread(), left[tenant].pop()
        self._questions[tenant] = Question(text, monotonic(), thread)
        thread.begin(text, self._done)

    def _hear(self, outcome: Outcome, found: dict[Sequence, Tensor | None], left: dict[str, list[GuidedText]]) -> None:
        """Take an answer. One for a text that is not in this step is kept by its grammar."""
        text: GuidedText = outcome.call  # type: ignore[assignment]
        tenant = text.sequence.tenant
        question = self._questions.get(tenant)
        if question is None or question.text is not text:  # it was given up
            return
        del self._questions[tenant]
        self._idle.append(question.thread)
        if isinstance(outcome.error, NotFollowed):
            text.job.failure = text.job.failure or str(outcome.error)
        elif outcome.error is not None:
            raise outcome.error
        found[text.sequence] = None if text.job.failure else outcome.result
        self._ask(tenant, left)

    def _give_up(self, tenant: str, question: Question) -> None:
        del self._questions[tenant]
        question.thread.close()
        self._is_late(question.text.job)

    def _is_late(self, job: RequestState) -> None:
        job.failure = f"what may come next in this text takes longer than {LATE_S} s to find: simplify it"
        self.on_late(job.request)

    def take(self, job: RequestState, completion: int, token: int) -> None:
        """Go on with a token in one text. It may be that the job has a failure then."""
        if job.failure:
            return
        try:
            self._takes.within(LATE_S, lambda: job.grammars[completion].take(token))
        except TooSlow:
            self._is_late(job)
        except NotFollowed as error:
            job.failure = str(error)

    def close(self) -> None:
        for thread in (self._takes, *self._idle, *(question.thread for question in self._questions.values())):
            thread.close()
