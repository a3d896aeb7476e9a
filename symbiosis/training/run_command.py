"""Commands of a run: what waits, and what its journal is told of it."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from symbiosis.errors import ConfigError
from symbiosis.text import LONGEST
from symbiosis.training.datum import Datum
from symbiosis.training.joined_steps import StepWords, step_together
from symbiosis.training.losses import Custom
from symbiosis.training.mismatch import Mismatch
from symbiosis.training.run_journal import DatumRecord, Record, packed, unpacked
from symbiosis.training.train_state import TrainState

FORWARD, FORWARD_BACKWARD = "forward", "forward_backward"


@dataclass(frozen=True)
class PassResult:
    """What a pass found.

    Args:
        loss: The sum over all targets; of a batch as transformers' models take it, the mean over its labels.
        logprobs: For each sequence, the log probabilities of its targets before the next step.
        joined: Runs that were computed in the same pass, this one counted.
        mismatch: How far the sampler's log probabilities are from these, if the data have them.
    """

    loss: float
    logprobs: list[Tensor]
    joined: int
    mismatch: Mismatch | None = None

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.logprobs)


@dataclass(eq=False)
class Command:
    """What a run is to do: a pass, or a call.

    Args:
        words: What a step was asked for.
        changes: Whether it changes what the run has in memory.
    """

    verb: str
    data: list[Datum] = field(default_factory=list)
    kind: str = ""
    config: Mapping[str, float] = field(default_factory=dict)
    function: Custom | None = None  # the loss, if it is one of the program's own
    slopes: list[Tensor] | None = None  # the derivatives of that, when they are known
    loss: float = 0.0  # and its value
    call: Callable[[TrainState], Any] = field(default=lambda _: None)
    words: dict[str, Any] = field(default_factory=dict)
    changes: bool = False
    number: int | None = None
    future: "Future[Any]" = field(default_factory=Future)

    @property
    def is_pass(self) -> bool:
        return bool(self.data)

    @cached_property  # asked for again and again while it waits
    def tokens(self) -> int:
        return sum(map(len, self.data))

    @property
    def cost(self) -> int:
        """What it is to its tenant: tokens, in each direction."""
        return self.tokens * (1 + (self.verb == FORWARD_BACKWARD) + (self.function is not None)) if self.data else 1

    def is_told(self, error: BaseException | None) -> bool:
        """Whether the journal is told of it. A pass that fails changes nothing; a step that does drops its gradients."""
        return self.number is not None or (self.changes and (error is None or self.verb == "step"))

    def record(self, result: Any, error: BaseException | None = None) -> Record:
        """Return what the journal is told, when it was done."""
        record = result_record(self.verb, self.number, result, error)
        if error is None and self.verb == FORWARD_BACKWARD:
            record.data = [DatumRecord.of(datum) for datum in self.data]
            record.kind, record.config = self.kind, dict(self.config)
            record.slopes = None if self.slopes is None else [packed(each) for each in self.slopes]
        record.words = self.words
        return record


def result_record(verb: str, number: int | None, result: Any, error: BaseException | None = None) -> Record:
    """Return the record of a result alone."""
    record = Record(verb=verb, number=number)
    if error is not None:
        record.error = str(error)[:LONGEST] or type(error).__name__
    elif isinstance(result, PassResult):
        record.loss, record.joined, record.mismatch = result.loss, result.joined, result.mismatch
        record.logprobs = [(packed(t), t.shape[1] if t.dim() == 2 else 0) for t in result.logprobs]
    elif isinstance(result, float):
        record.norm = result
    elif result is not None:
        record.text = str(result)
    return record


def future_of(record: Record) -> "Future[Any]":
    """Return the future of a command that was done in an earlier life."""
    future: Future[Any] = Future()
    if record.error is not None:
        future.set_exception(ConfigError(record.error))
    elif record.verb in (FORWARD, FORWARD_BACKWARD):
        logprobs = [
            unpacked(numbers).view(-1, columns) if columns else unpacked(numbers)
            for numbers, columns in record.logprobs
        ]
        future.set_result(PassResult(record.loss, logprobs, record.joined, record.mismatch))
    else:
        told = Path(record.text) if record.verb == "save" else record.text
        future.set_result(record.norm if record.verb == "step" else told)
    return future


def again(record: Record) -> Command | None:
    """Return a command of the journal, to be done again; None if it changes nothing."""
    if record.is_past or (record.error is not None and record.verb != "step"):
        return None
    if record.verb == FORWARD_BACKWARD:
        command = Command(record.verb, [each.datum() for each in record.data], record.kind, record.config, changes=True)
        if record.slopes is not None:
            pairs = zip(record.slopes, command.data, strict=True)
            command.slopes = [unpacked(each).view(datum.targets.shape) for each, datum in pairs]
            command.loss = record.loss
        return command
    if record.verb == "step":
        return step_command(record.words)
    return None


def step_command(words: dict[str, Any]) -> Command:
    """Return a step of AdamW, asked for by these words."""
    asked = StepWords(**words)

    def step(state: TrainState) -> float:
        [outcome] = step_together([(state, asked)])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return Command("step", call=step, words=words, changes=True)
