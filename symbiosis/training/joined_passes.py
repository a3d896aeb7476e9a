"""Passes of several runs, computed together."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from symbiosis.training.losses import slopes_of_function
from symbiosis.training.mismatch import mismatch
from symbiosis.training.packed_model import PackedModel
from symbiosis.training.run_command import FORWARD_BACKWARD, Command, PassResult
from symbiosis.training.run_work import RunWork
from symbiosis.training.train_state import TrainState

LEAST_PART = 128  # tokens of a pass, whatever time they take
FIRST_PACE = 10_000.0  # tokens per second
PassParts = Generator[int, None, list[PassResult | Exception]]


class JoinedPasses:
    """Computes passes.

    Args:
        most: Tokens of one pass; larger batches are computed in several.
    """

    def __init__(self, model: PackedModel, most: int) -> None:
        self._model, self._most = model, most
        self.count = self.runs = 0  # passes, and the runs in them
        self._pace = FIRST_PACE  # tokens per second: the best of late

    def tokens_in(self, seconds: float) -> int:
        """How many tokens take so long."""
        return min(self._most, max(LEAST_PART, int(self._pace * seconds)))

    def compute(self, asked: Sequence[tuple[Command, TrainState]]) -> list[PassResult | Exception]:
        """Return what came of each. If passes fail together, each is computed by itself, so that nobody suffers by another's fault."""
        parts = self.parts(asked, lambda: 0)
        while True:
            try:
                next(parts)
            except StopIteration as end:
                return cast(list[PassResult | Exception], end.value)

    def parts(self, asked: Sequence[tuple[Command, TrainState]], most: Callable[[], int]) -> PassParts:
        """Compute as `compute` does, and yield after each part but the last one how many tokens it had: others may compute meanwhile.

        Args:
            most: Returns how many tokens the next part may have; 0: as many as a pass.
        """
        works = [_work(command, state) for command, state in asked]
        joined = len({id(work.adapter) for work in works})
        self.count, self.runs = self.count + 1, self.runs + joined
        try:
            with _kept(works):
                for (command, _), work in zip(asked, works, strict=True):
                    if command.function is not None:
                        self._differentiate(command, work)
                tokens = 0
                for part in _parts(_by_adapter(works), lambda: most() or self._most):
                    if tokens:
                        yield tokens
                    self._compute(part)
                    tokens = sum(len(datum) for work in part for datum in work.data)
        except Exception as error:
            if len(asked) == 1:
                return [error]
            outcomes = list[PassResult | Exception]()
            for each in asked:
                outcomes += yield from self.parts([each], most)
            return outcomes
        return [_result(work, joined) for work in works]

    def _differentiate(self, command: Command, work: RunWork) -> None:
        """Find the derivatives of a loss that only the program knows."""
        if command.slopes is None:
            assert command.function is not None
            forward = RunWork(work.adapter, work.data, backward=False)
            drawn = work.adapter.drawn
            for part in _parts([forward], lambda: self._most):
                self._compute(part)
            work.adapter.drawn = drawn  # dropout is the same in the pass that follows
            command.loss, command.slopes = slopes_of_function(command.function, forward.found, work.data)
        work.loss, work.given = command.loss, command.slopes

    def _compute(self, works: list[RunWork]) -> None:
        began = time.monotonic()
        self._model.compute(works)
        tokens = sum(len(datum) for work in works for datum in work.data)
        self._pace = max(0.9 * self._pace, tokens / (time.monotonic() - began))
        for work in works:
            assert work.whole is not None
            work.whole.found += work.found
            work.whole.loss += work.loss


def _work(command: Command, state: TrainState) -> RunWork:
    backward = command.verb == FORWARD_BACKWARD
    work = RunWork(state.adapter, command.data, command.kind or "cross_entropy", command.config, backward)
    work.given, work.loss = command.slopes, command.loss
    return work


def _result(work: RunWork, joined: int) -> PassResult:
    found = [each.cpu() for each in work.found]
    return PassResult(work.loss, found, joined, mismatch(found, work.data))


def _by_adapter(works: Sequence[RunWork]) -> list[RunWork]:
    """Return them so that those of one adapter follow one another."""
    return [work for adapter in {work.adapter: None for work in works} for work in works if work.adapter is adapter]


@contextmanager
def _kept(works: Sequence[RunWork]) -> Iterator[None]:
    """If the block fails, these runs are what they were before it. Those that only look are so in any case."""
    flats = [flat for adapter in {w.adapter: None for w in works if w.backward} for flat in adapter.flats]
    bring_back = [flat.kept() for flat in flats]
    drawn = {work.adapter: work.adapter.drawn for work in works}
    try:
        for flat in flats:
            flat.begin_gradients()
        yield
    except BaseException:
        for each in bring_back:
            each()
        for adapter, state in drawn.items():
            adapter.drawn = state
        raise
    trained = {work.adapter for work in works if work.backward}
    for adapter in drawn.keys() - trained:
        adapter.drawn = drawn[adapter]


def _parts(works: Sequence[RunWork], limit: Callable[[], int]) -> Iterator[list[RunWork]]:
    """Cut works into passes of at most so many tokens, or of one sequence. The limit is asked for anew for each."""
    part, tokens, most = list[RunWork](), 0, limit()
    for work in works:
        first = 0
        for number, datum in enumerate(work.data):
            if tokens and tokens + len(datum) > most:
                part += [work.part(first, number)] if number > first else []
                yield part
                part, tokens, first, most = [], 0, number, limit()
            tokens += len(datum)
        part.append(work.part(first, len(work.data)))
    if part:
        yield part
