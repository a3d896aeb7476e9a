"""Passes of several runs, computed together."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from symbiosis.training.losses import slopes_of_function
from symbiosis.training.packed_model import PackedModel
from symbiosis.training.run_command import FORWARD_BACKWARD, Command, PassResult
from symbiosis.training.run_work import RunWork
from symbiosis.training.train_state import TrainState

SHARE_S = 0.1  # so long a part of a large pass takes while others wait
LEAST_SHARE = 128  # tokens


class JoinedPasses:
    """Computes passes.

    Args:
        most: Tokens of one pass; larger batches are computed in several.
    """

    def __init__(self, model: PackedModel, most: int) -> None:
        self._model, self._most = model, most
        self.count = self.runs = 0  # passes, and the runs in them
        self._pace = 8 * LEAST_SHARE / SHARE_S  # tokens per second: the best of late
        self.last_s = 0.0  # what the last part of one took

    @property
    def share(self) -> int:
        """How many tokens take `SHARE_S`."""
        return min(self._most, max(LEAST_SHARE, int(self._pace * SHARE_S)))

    def compute(
        self,
        asked: Sequence[tuple[Command, TrainState]],
        most: Callable[[], int] = lambda: 0,
        between: Callable[[], object] = lambda: None,
    ) -> list[PassResult | Exception]:
        """Return what came of each. If passes fail together, each is computed by itself, so that nobody suffers by another's fault.

        Args:
            most: Returns how many tokens the next part may have; 0: as many as a pass.
            between: Called between two parts: others may compute meanwhile.
        """
        works = [_work(command, state) for command, state in asked]
        joined = len({id(work.adapter) for work in works})
        self.count, self.runs = self.count + 1, self.runs + joined
        try:
            with _kept(works):
                for (command, _), work in zip(asked, works, strict=True):
                    if command.function is not None:
                        self._differentiate(command, work)
                for number, part in enumerate(_parts(_by_adapter(works), lambda: most() or self._most)):
                    if number:
                        between()
                    self._compute(part)
        except Exception as error:
            if len(asked) == 1:
                return [error]
            return [outcome for each in asked for outcome in self.compute([each], most, between)]
        return [PassResult(work.loss, [each.cpu() for each in work.found], joined) for work in works]

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
        tokens, self.last_s = sum(len(datum) for work in works for datum in work.data), time.monotonic() - began
        self._pace = max(0.9 * self._pace, tokens / self.last_s)
        for work in works:
            assert work.whole is not None
            work.whole.found += work.found
            work.whole.loss += work.loss


def _work(command: Command, state: TrainState) -> RunWork:
    backward = command.verb == FORWARD_BACKWARD
    work = RunWork(state.adapter, command.data, command.kind or "cross_entropy", command.config, backward)
    work.given, work.loss = command.slopes, command.loss
    return work


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
    yield part
