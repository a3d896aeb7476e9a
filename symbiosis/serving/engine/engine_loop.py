"""The loop of an engine, in a thread of its own: schedule, run, choose and tell, step after step."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from symbiosis.base.logs import Tracebacks, about_request
from symbiosis.errors import ConfigError, ConnectionLost, SymbiosisError
from symbiosis.serving.engine.engine_stats import EngineStats
from symbiosis.serving.engine.inflight_step import InflightStep
from symbiosis.serving.engine.request_state import RequestState
from symbiosis.serving.engine.step_bisect import StepBisect
from symbiosis.serving.lora.adapter import Adapter
from symbiosis.serving.request import Finish, Token
from symbiosis.serving.runner.hidden_states import HiddenStates
from symbiosis.serving.runner.model_runner import GaveWay, ModelRunner, RanksLost
from symbiosis.serving.sampling.guided_decoding import GuidedDecoding, GuidedText
from symbiosis.serving.sampling.sampler import Chosen, begin_choice
from symbiosis.serving.scheduler.scheduler import UNKNOWN, Scheduler, Unsettled
from symbiosis.serving.scheduler.scheduler_output import ScheduledRequest, SchedulerOutput, Sequence
from symbiosis.serving.speculation.speculation import accepted, choosing

logger = logging.getLogger("symbiosis")
IDLE_S = 0.001  # between looks at adapters on their way
# seconds of messages between two steps: however many one client sends, the streams of the others go on. A step of a large model takes longer
MESSAGES_S = 0.004
MOST_LOST = 3  # times that ranks are lost with rows of a request, before it ends
NOTHING = "the model's numbers are not finite, or nothing that the schema or grammar allows can come"
LITTLE = 64 << 20  # bytes, which the host has to be asked for: where these cannot be had, requests fail one by one


class Loop:
    """Does what `begin` and `ask` tell it, which any thread may call.

    With `ahead`, a step is launched while the one before runs: the device has the tokens that are to come next, and what the host does for
    each token hides behind the device's work. A sequence that turns out to have ended has computed a row in vain.

    Args:
        most: Requests under way.
        on_ended: Called with the adapter of each request that has ended, in the engine's thread.
    """

    def __init__(
        self, served: ModelRunner, scheduler: Scheduler, most: int, on_ended: Callable[[Adapter], None]
    ) -> None:
        self._served, self._scheduler, self._most = served, scheduler, most
        self.hidden = HiddenStates(served)
        self._under_way: set[int] = set()  # requests, with those that `jobs` will have after this step
        self._coming: dict[int, int] = {}  # of those that `jobs` does not have yet: the tokens of their prompts
        served.gives_way = self._gives_way
        self._begun = 0  # completions
        self.jobs: dict[int, RequestState] = {}
        self.versions = Counter[int]()  # of adapters: how many of the jobs have each; only for the engine's thread
        self.figures, self.finished = EngineStats(), Counter[str]()
        # called between two steps, when what a step tells is all told by then
        self.on_pause: Callable[[], None] = lambda: None
        self._on_ended, self.following = on_ended, GuidedDecoding()
        self.ahead = served.batches and served.device.type == "cuda"  # a CPU computes when it is told to
        self.is_starved = False  # a step has failed, and no memory can be had
        self._launched: InflightStep | None = None
        self._following: InflightStep | None = None  # launched behind it
        # how often ranks were lost with rows of a sequence, since it was computed last
        self._lost_with = Counter[Sequence]()
        self._lives = 0  # how often ranks were started again
        self.has_lost_ranks = False  # for good
        self._suspects = StepBisect()
        self._tracebacks = Tracebacks()
        self._messages: deque[Callable[[], None]] = deque()
        self._awake = threading.Condition()
        self._closing = False
        self._step_began: float | None = None
        # beside that which a trainer in the same program uses, whose passes take long
        self._stream = torch.cuda.Stream(served.device) if served.device.type == "cuda" else None
        self._thread = threading.Thread(target=self._run, name="symbiosis-engine", daemon=True)
        self._thread.start()

    def check(self, request: int) -> None:
        """Raise `ConfigError` if there is no place for a further request, or if there is one of this number."""
        if len(self._under_way) >= self._most:
            raise ConfigError(f"the server has {self._most} requests already: try again later")
        if request in self._under_way:
            raise ConfigError(f"request {request} is under way already")

    def begin(self, job: RequestState) -> None:
        """Begin a request, if it may be (`check`)."""
        id = job.request.id
        with self._awake:
            self.check(id)
            self.ask(self._begin, job)
            self._under_way.add(id)
            self._coming[id] = job.sequences[0].uncomputed
            self._begun += len(job.sequences)

    def ask(self, do: Callable[..., None], *arguments: Any, is_end: bool = False) -> None:
        """Call `do` between two steps, in the engine's thread. This does not wait for it. Raises `ConfigError` if the engine is closed, unless
        it ends something."""
        with self._awake:
            if self._closing and not is_end:
                raise ConfigError("the engine is closed")
            self._messages.append(partial(do, *arguments))
            self._awake.notify()

    def close(self, drain: bool) -> None:
        with self._awake:
            if not drain:
                self._messages.append(partial(self._end_all, Finish.CANCELLED))
            self._closing = True
            self._awake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.following.close()

    @property
    def in_flight(self) -> int:
        """How many completions have begun, and have not ended."""
        return self._begun - self.finished.total()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def step_s(self) -> float:
        """How many seconds the present step has taken so far."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def _run(self) -> None:
        on_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.inference_mode(), on_stream:  # inference: its tensors are those of an engine that was made within it
            self._run_steps()

    def _run_steps(self) -> None:
        while True:
            try:
                if not self._take_messages():
                    return
                self._step_began = time.monotonic()
                self._step(self._step_began)
            except RanksLost as lost:
                self._begin_anew(lost)
            except Exception as error:  # a defect of ours: who waits is told, and the next ones get their chance
                logger.exception("the engine ends all requests")
                self._launched = None
                self.is_starved = self.is_starved or not _has_memory(self._served.device)
                self._end_all(Finish.ERROR, f"the server failed: {type(error).__name__}")
            finally:
                self._step_began = None

    def _take_messages(self) -> bool:
        """Do what was asked since the last step, or as much as the time between two steps allows. If nothing runs, wait for more. Return
        False if everything is done and the engine closes, which no step delays."""
        while True:
            until = time.monotonic() + MESSAGES_S
            while self._messages and (self._closing or time.monotonic() < until):
                self._messages.popleft()()
            self.on_pause()
            if self.jobs:
                return True
            if self._launched is not None:
                self._settle()
            with self._awake:
                if not self._messages:
                    if self._closing:
                        return False
                    self._awake.wait()

    def _step(self, now: float) -> None:
        """Schedule, run, choose and tell. What runs `ahead` is told of while the next step runs."""
        for sequence in self._scheduler.late(now):
            self.end(sequence.request.id, Finish.ABORTED)
        try:
            step = self._scheduler.next_step(now, is_ahead=self._launched is not None)
        except Unsettled:
            self._settle()
            step = self._scheduler.next_step(now)
        if step is not None and self._launched is not None:
            step = self._launched.feed(step)
        self._following = launched = None if step is None else self._launch(step)
        if step is None and self._launched is None:
            time.sleep(IDLE_S)
        self._settle()
        self._launched, self._following = launched, None
        if launched is not None and not (self.ahead and launched.may_be_followed):
            self._settle()

    def _settle(self) -> None:
        """Wait for the step that is under way, if there is one, and tell of it."""
        if self._launched is None:
            return
        step, chosen, places = self._launched
        told = list(accepted(step, chosen.tokens()))
        self._served.check()
        self._launched = None
        for segment in step.segments if self._lost_with else ():
            self._lost_with.pop(segment.sequence, None)
        for segment, tokens in told:
            ids = [UNKNOWN if token is None else token.id for token in tokens]
            self._scheduler.choose(segment, places[segment.sequence], ids)
        now = time.monotonic()
        self._scheduler.advance(step, now)
        for segment, tokens in told:
            if not (sequence := segment.sequence).has_ended:
                self._tell(sequence, tokens, places[sequence] - sequence.prompt_length, now)
        for segment in step.segments:
            sequence = segment.sequence
            is_last = sequence.request.pooling is not None and segment.end == sequence.prompt_length
            if is_last and not sequence.has_ended:
                self._tell_vector(sequence)
        self.figures.steps += 1

    def _launch(self, step: SchedulerOutput) -> InflightStep | None:
        """Begin to compute a step. If it fails, its parts are computed by themselves, down to single segments, so that one request's error concerns no
        other."""
        try:
            computed, chosen = self._choose(step)
            return None if chosen is None else InflightStep(computed, chosen, self._scheduler.launched(computed))
        except GaveWay:
            pass
        except RanksLost as lost:
            self._begin_anew(lost, step)
        except ConnectionLost as error:
            logger.warning("all requests end: %s", error)
            self._end_all(Finish.ERROR, str(error))
        except Exception as error:
            self._settle()
            if len(step.segments) > 1:
                lives = self._lives
                for part in self._suspects.parts(step):
                    if self._lives > lives:  # nothing is computed any more of what the parts build on
                        break
                    self._launched = self._launch(part)
                    self._settle()
            elif not (sequence := step.segments[0].sequence).has_ended:
                told = f"{type(error).__name__}: {error}"
                trace = None if isinstance(error, SymbiosisError) else self._tracebacks.of(error)
                with about_request(sequence.request.external_id):
                    logger.warning("a request ends: %s", told, exc_info=trace)
                self.is_starved = self.is_starved or not _has_memory(self._served.device)
                self._suspects.add(sequence.version)
                self.end(sequence.request.id, Finish.ERROR, told)
        return None

    def _begin_anew(self, lost: RanksLost, step: SchedulerOutput | None = None) -> None:
        """Start the other ranks again. What they computed is lost, and computed again. A request ends only if ranks are lost again and again with its
        rows."""
        logger.error("%s: all ranks are started again, and requests go on", lost)
        voided = [each for each in (self._launched, self._following) if each is not None]
        self._launched = self._following = None
        for inflight in reversed(voided):
            for sequence, place in inflight.places.items():
                del sequence.tokens[place:]
        steps = [each.step for each in voided] + ([step] if step is not None else [])
        self._lost_with.update({segment.sequence for each in steps for segment in each.segments})
        for sequence, times in list(self._lost_with.items()):
            if times >= MOST_LOST or sequence.has_ended:
                del self._lost_with[sequence]
                self.end(sequence.request.id, Finish.ERROR, f"ranks were lost {times} times with it: {lost}")
        self._lives += 1
        self._scheduler.begin_anew()
        try:
            self._served.restart()
        except RanksLost as again:
            self._begin_anew(again)
        except SymbiosisError as error:
            logger.critical("%s", error)
            self.has_lost_ranks = True
            self._end_all(Finish.ERROR, str(error))

    def _gives_way(self, step: SchedulerOutput) -> bool:
        """Whether a step that is being computed is composed anew, with what has come since."""
        if not self._coming:
            return False
        with self._awake:
            shortest = min(self._coming.values())
        return self._scheduler.gives_way(step, time.monotonic(), shortest)

    def _choose(self, step: SchedulerOutput) -> tuple[SchedulerOutput, Chosen | None]:
        """Return what was computed of a step, and the tokens that it chooses: all but those of texts by a schema of which it is not known yet what
        may come next. They are computed again in the next step. If nothing else is in the step, nothing was computed."""
        logits = self._computed(step)
        rows = choosing(step)
        guided = [each for each in rows if isinstance(each, Sequence) and each.is_guided]
        allowed, unknown = self._allowed(step, guided) if guided else ({}, set())
        if unknown:
            step = step.without(unknown)
            kept = [row for row, each in enumerate(rows) if each not in unknown]
            logits, rows = logits[kept], [rows[row] for row in kept]
        if not step.segments:
            return step, None
        by_row = {row: allowed[each] for row, each in enumerate(rows) if each in allowed}
        return step, begin_choice(logits, rows, self._served.ends, by_row)

    def _computed(self, step: SchedulerOutput) -> Tensor:
        """Compute a step, and return the logits of the rows that choose. What is asked of prompts is read beside."""
        scores = any(segment.sequence.scores_prompt for segment in step.segments)
        pooled = [each for each in step.segments if each.sequence.request.pooling is not None]
        compute = partial(_scored, self._served, self.jobs, step) if scores else partial(self._served.forward, step)
        if not pooled:
            return compute()
        with self.hidden.kept():
            logits = compute()
            hidden = self.hidden.of(step)
        for segment in pooled:
            if (vector := self.jobs[segment.sequence.request.id].vector) is not None:
                vector.read(segment, hidden[segment.first : segment.first + segment.rows])
        return logits

    def _allowed(
        self, step: SchedulerOutput, sequences: list[Sequence]
    ) -> tuple[dict[Sequence, Tensor], set[Sequence]]:
        """Return what may come next in texts by a schema, and those of which it is not known yet."""
        jobs = {each: self.jobs[each.request.id] for each in sequences if not each.has_ended}
        texts = [GuidedText(job, sequence) for sequence, job in jobs.items() if job.grammars]
        if not texts:
            return {}, set()
        found = self.following.allowed(texts, others=len(texts) < len(step.segments))
        nothing = torch.zeros(self._served.vocabulary, dtype=torch.bool)
        allowed = {sequence: nothing if mask is None else mask for sequence, mask in found.items()}
        return allowed, {text.sequence for text in texts} - found.keys()

    def _tell(self, sequence: Sequence, tokens: list[Token | None], produced: int, now: float) -> None:
        """Tell of tokens that were chosen, behind so many, and end what ends with them. None: there was none to choose."""
        job, sampling, figures = self.jobs[sequence.request.id], sequence.request.sampling, self.figures
        chosen, told, finish = [each for each in tokens if each is not None], list[Token](), None
        if len(chosen) < len(tokens):
            self.end(job.request.id, Finish.UNFIT if job.failure else Finish.ERROR, job.failure or NOTHING)
            return
        if not sequence.told_at and sequence.is_first:
            self._count_prompt(sequence)
        if not sampling.max_tokens:
            self._finish(job, sequence, (), Finish.LENGTH)
            return
        for token in chosen:
            told.append(token)
            finish = self._finish_at(job, sequence, token, produced + len(told))
            if job.failure:
                self.end(job.request.id, Finish.UNFIT, job.failure)
                return
            if finish is not None:
                break
        figures.generated_tokens += len(told)
        if sequence.told_at:
            for _ in told:
                figures.between_tokens_s.observe((now - sequence.told_at) / len(told))
        elif sequence.is_first:
            figures.first_token_s.observe(now - sequence.arrived)
        sequence.told_at = now
        if finish is not None:
            self._finish(job, sequence, tuple(told), finish)
        elif not job.tell(sequence.completion, tuple(told)):
            self.end(job.request.id, None)

    def _finish_at(self, job: RequestState, sequence: Sequence, token: Token, produced: int) -> Finish | None:
        """Return why a completion ends with a token, the last of so many, if it does. What follows a grammar goes on with it; the job may have a
        failure then."""
        sampling = sequence.request.sampling
        if job.grammars and token.id not in self._served.ends:
            self.following.take(job, sequence.completion, token.id)
        is_last = token.id in sampling.stop_tokens or (token.id in self._served.ends and not sampling.ignore_eos)
        if is_last or (job.grammars and job.grammars[sequence.completion].has_ended):
            return Finish.STOP
        return Finish.LENGTH if produced >= sampling.max_tokens else None

    def _tell_vector(self, sequence: Sequence) -> None:
        """Tell of the vector of a prompt that is computed, which ends its request."""
        job = self.jobs[sequence.request.id]
        assert job.vector is not None
        self._count_prompt(sequence)
        try:
            vector = job.vector.packed()
        except (ConfigError, RuntimeError) as error:  # the latter is torch's, of this prompt's numbers alone
            self.end(job.request.id, Finish.ERROR, str(error))
            return
        self._finish(job, sequence, (), Finish.STOP, vector)

    def _count_prompt(self, sequence: Sequence) -> None:
        self.figures.queue_s.observe(sequence.began - sequence.arrived)
        self.figures.prompt_tokens += len(sequence.request.prompt)

    def _finish(
        self, job: RequestState, sequence: Sequence, tokens: tuple[Token, ...], finish: Finish, vector: bytes = b""
    ) -> None:
        """End one completion, whose text is whole."""
        self._scheduler.finish(sequence)
        self.finished[finish.value] += 1
        self.figures.whole_s.observe(time.monotonic() - sequence.arrived)
        if all(each.has_ended for each in job.sequences):
            self._forget(job)
        if not job.tell(sequence.completion, tokens, finish, vector=vector):
            self.end(job.request.id, None)

    def end(self, request: int, finish: Finish | None, error: str | None = None) -> None:
        """End all completions of a request that have not ended. Without `finish` it is not told."""
        if (job := self.jobs.get(request)) is None:
            return
        left = [sequence for sequence in job.sequences if not sequence.has_ended]
        self._scheduler.drop(request)
        self._forget(job)
        for sequence in left:
            self.finished[(finish or Finish.CANCELLED).value] += 1
            if finish is not None and not job.tell(sequence.completion, finish=finish, error=error):
                finish = None

    def stop(self, request: int, completion: int) -> None:
        """End one completion, if it has told a token and has not ended."""
        job = self.jobs.get(request)
        for sequence in job.sequences if job is not None else ():
            if job is not None and sequence.completion == completion and sequence.told_at and not sequence.has_ended:
                self._finish(job, sequence, (), Finish.STOP)

    def _forget(self, job: RequestState) -> None:
        """Forget a request, all of whose sequences are gone."""
        del self.jobs[job.request.id]
        self._under_way.discard(job.request.id)
        first = job.sequences[0]
        self.versions[first.version] -= 1
        if not self.versions[first.version]:
            del self.versions[first.version]
        if first.adapter is not None:
            self._on_ended(first.adapter)

    def _end_all(self, finish: Finish, error: str | None = None) -> None:
        for request in list(self.jobs):
            self.end(request, finish, error)

    def _begin(self, job: RequestState) -> None:
        with self._awake:
            del self._coming[job.request.id]
        self.jobs[job.request.id] = job
        self.versions[job.sequences[0].version] += 1
        self._scheduler.add(job.sequences)


def _scored(served: ModelRunner, jobs: Mapping[int, RequestState], step: SchedulerOutput) -> Tensor:
    """Return the logits of the rows that choose. Those of prompts whose log probabilities were asked for are computed with them, and read."""
    rows: list[int] = []
    parts: list[tuple[ScheduledRequest, int, int]] = []
    for segment in step.segments:
        whole = segment.sequence.scores_prompt
        start = len(rows)
        rows.extend(range(segment.first, segment.first + segment.rows) if whole else segment.choices)
        parts.append((segment, start, len(rows)))
    logits = served.logits(step, torch.tensor(rows))
    for segment, start, end in parts:
        if segment.sequence.scores_prompt:
            jobs[segment.sequence.request.id].read_prompt(segment, logits[start:end])
    return logits[[row for segment, _, end in parts for row in range(end - len(segment.choices), end)]]


def _has_memory(device: torch.device) -> bool:
    try:
        torch.empty(LITTLE, dtype=torch.uint8, device=device)
    except (MemoryError, RuntimeError):  # which torch raises, for the host and for a device
        return False
    return True
