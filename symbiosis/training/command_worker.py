"""The engine's own thread, which does what waits: steps and checkpoints of a run by itself, passes of several together."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from symbiosis.errors import SymbiosisError
from symbiosis.training.command_intake import CommandIntake, Taken
from symbiosis.training.joined_passes import JoinedPasses, PassParts
from symbiosis.training.joined_steps import StepWords, step_together
from symbiosis.training.residency import Residency
from symbiosis.training.run_command import Command, PassResult
from symbiosis.training.run_journal import no_room
from symbiosis.training.train_state import TrainState
from symbiosis.training.training_run import Run

CALLS_S = 0.05  # calls are made for so long, or as long as the last pass took, before the next pass


@dataclass(eq=False)
class OpenPass:
    """Passes that are computed together, and have begun."""

    runs: list[Run]  # of all, also of those whose state could not be brought
    there: list[tuple[Run, Command, TrainState]]
    parts: PassParts
    tokens: int = field(init=False)
    computed: int = 0  # of these
    took_s: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = sum(command.tokens for _, command, _ in self.there)

    def next_part(self) -> tuple[int, list[PassResult | Exception] | None]:
        """Compute a part. Return how many tokens it had, and after the last one what came of each pass."""
        try:
            tokens = next(self.parts)
        except StopIteration as end:
            return self.tokens - self.computed, end.value
        self.computed += tokens
        return tokens, None


class CommandWorker:
    """Does commands until the intake is closed, and nothing waits any more."""

    def __init__(self, intake: CommandIntake, passes: JoinedPasses, residency: Residency) -> None:
        self._intake, self._passes, self._residency = intake, passes, residency
        self._open = list[OpenPass]()
        self._thread = threading.Thread(target=self._work, name="symbiosis-training", daemon=True)
        intake.taker, intake.tokens_in = self._thread, passes.tokens_in
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _work(self) -> None:
        while (turn := self._intake.next()) is not None:
            if turn.calls:
                self._make_calls(turn.calls)
            elif turn.passes:
                self._begin(turn.passes)
            else:
                self._go_on(next(each for each in self._open if turn.goes_on in each.runs))
            self._intake.was_done()
            self._residency.make_room([run for each in self._open for run in each.runs])
        self._residency.close()

    def _make_calls(self, runs: list[Run]) -> None:
        """Make one call of each, for a while; steps together."""
        began = time.monotonic()
        steps = self._intake.take(runs, "step")
        self._step(steps)
        stepped = {run for run, _ in steps}
        for run in runs:
            if run in stepped:
                continue
            for _, command in self._intake.take([run]):
                self._call(run, command)
            if time.monotonic() - began > max(CALLS_S, self._intake.last_s):
                return

    def _step(self, commands: Taken) -> None:
        began = time.monotonic()
        there = self._brought(commands)
        try:
            outcomes = step_together([(state, StepWords(**command.words)) for _, command, state in there])
        except Exception as error:
            outcomes = [error] * len(there)
        share = (time.monotonic() - began) / max(1, len(there))
        for (run, command, _), outcome in zip(there, outcomes, strict=True):
            failed = outcome if isinstance(outcome, Exception) else None
            self._finish(run, command, None if failed else outcome, failed, share)
        self._write_if_due([run for run, _, _ in there])

    def _brought(self, commands: Taken) -> list[tuple[Run, Command, TrainState]]:
        """Return what these runs have in memory. Whose cannot be brought hear of it."""
        there = []
        for run, command in commands:
            try:
                there.append((run, command, self._residency.bring(run)))
            except Exception as error:
                self._finish(run, command, None, error, 0.0, False)
        return there

    def _call(self, run: Run, command: Command) -> None:
        began, was_there = time.monotonic(), False
        try:
            state = self._residency.bring(run)
            was_there = True
            result, error = command.call(state), None
        except Exception as why:
            result, error = None, why
        self._finish(run, command, result, error, time.monotonic() - began, was_there)
        self._write_if_due([run])

    def _begin(self, commands: Taken) -> None:
        """Begin passes that are computed together. Those that are large are computed in parts."""
        runs = list(dict.fromkeys(run for run, _ in commands))
        there = self._brought(commands)
        tokens = Counter[str]()
        for run, command in commands:
            tokens[run.tenant] += command.tokens
        is_large = max(tokens.values()) > self._intake.share > 0
        most = partial(self._intake.part, runs) if is_large else lambda: 0
        asked = [(command, state) for _, command, state in there]
        self._open.append(begun := OpenPass(runs, there, self._passes.parts(asked, most)))
        self._go_on(begun)

    def _go_on(self, begun: OpenPass) -> None:
        """Compute the next part of a pass."""
        began = time.monotonic()
        tokens, outcomes = begun.next_part()
        took = time.monotonic() - began
        begun.took_s += took
        self._intake.computed([(run, command) for run, command, _ in begun.there], tokens / max(1, begun.tokens), took)
        if outcomes is not None:
            self._open.remove(begun)
            self._end(begun, outcomes)

    def _end(self, begun: OpenPass, outcomes: list[PassResult | Exception]) -> None:
        for (run, command, state), outcome in zip(begun.there, outcomes, strict=True):
            share = begun.took_s * command.tokens / begun.tokens
            if run.state is not state:
                outcome = no_room(Path(run.name), OSError("a command before it was not done"))
            if isinstance(outcome, Exception):
                self._finish(run, command, None, outcome, share)
            else:
                self._finish(run, command, outcome, None, share)
        self._write_if_due([run for run, _, _ in begun.there])
        self._intake.passed(begun.runs, self._passes.count, begun.took_s)

    def _finish(
        self, run: Run, command: Command, result: Any, error: Exception | None, took_s: float, was_tried: bool = True
    ) -> None:
        """Tell the journal, then whoever waits. What the journal could not take is not done: the run is what its folder tells."""
        if run.journal is not None:
            try:
                if run.is_read:
                    self._residency.write(run)
                if command.is_told(error):
                    record = command.record(result, error)
                    record.is_past = not was_tried
                    run.journal.append(record, took_s)
            except Exception as why:  # whatever it was, others go on
                self._residency.drop(run)
                result, error = None, no_room(run.journal.folder, why)
        if error is not None:
            if command.number is not None and isinstance(error, SymbiosisError):
                error = error.with_traceback(None)  # its future is kept, and frames would keep its data
            command.future.set_exception(error)
            return
        run.steps += command.verb == "step"
        command.future.set_result(result)

    def _write_if_due(self, runs: list[Run]) -> None:
        for run in dict.fromkeys(runs):
            if run.journal is not None and run.state is not None and run.journal.since and run.journal.is_due:
                self._residency.tries_to_write(run)
