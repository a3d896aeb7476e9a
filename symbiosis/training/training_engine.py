"""`Engine`: trains the adapters of any number of runs on one frozen model. What waits at the same time is computed in one pass."""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symbiosis.client import arguments
from symbiosis.client.from_executor import built
from symbiosis.client.weights.remote_weight import close_sessions, remote_weights
from symbiosis.errors import Busy, ConfigError
from symbiosis.training.checkpoint_folders import check_adapter
from symbiosis.training.command_order import PATIENCE_S
from symbiosis.training.command_queue import CommandQueue
from symbiosis.training.datum import Datum, check_tokens
from symbiosis.training.engine_folder import NAME, EngineFolder
from symbiosis.training.joined_passes import JoinedPasses
from symbiosis.training.joined_steps import StepWords, step_together
from symbiosis.training.packed_model import PackedModel
from symbiosis.training.refused_adapters import LARGEST, check_rank
from symbiosis.training.residency import Residency
from symbiosis.training.run_adapter import RunAdapter, in_front
from symbiosis.training.run_command import Command, future_of
from symbiosis.training.run_journal import About, RunJournal, config_of, no_room, restoring
from symbiosis.training.train_state import TrainState, lora_plus_of
from symbiosis.training.training_run import Run

LINGER, LEAST_LINGER_S = (
    0.1,
    0.002,
)  # of what the last pass took: if nothing comes for so long, runs that were in passes are not waited for
MOST_LINGER = 0.5  # ... and for so long in any case
RECENT = 8  # passes: runs that were in one of these may come back
CALLS_S = 0.05  # calls are made for so long, or as long as the last pass took, before the next pass
IN_MEMORY = 256  # runs
MANY = 1 << 30


class TrainingEngine:
    """Trains many adapters on one frozen model.

    Args:
        model: A causal language model of transformers, wrapped or not, which is not changed; or the endpoint of an executor.
        max_tokens: Of one pass. Larger batches are computed in several, with the same result.
        max_rank: Of an adapter.
        max_waiting: Commands that wait in all. Of these a tenant has as many as it leaves free.
        room_wait: How long a command waits for room among them, in seconds, until it raises `Busy`; None: as long as it takes.
        order_wait: How long a command with a number waits for those before it, in seconds, until its future says which one is missing.
        state: A folder in which runs outlive this process: no command that was acknowledged is lost if it is killed. One engine has it at a time.
        in_memory: Runs whose adapters and optimizers are in memory, with `state`: idle ones beyond that are in that folder only. Default: 256.
        on_device: Of these, on a GPU: those that were used last. Default: as many as leave an eighth of its memory free.
        wait: How long an executor may take to come up, in seconds; None: as long as it may be away later.
        recompute: Keep nothing of a layer for the backward pass, and compute it again in that: less memory, a third more time, the same numbers.
            Default: in passes for which the free memory would not suffice.
        batch_invariant: The results of a run are the same bits, whoever else trains: each command is computed by itself. An executor has to be started
            with `batch_invariant`, too.
        compiled: Compile what lies between products by torch.compile, on a GPU. The first pass takes a minute, then, and those after it are faster.

    >>> import symbiosis
    >>> with symbiosis.Executor("demo") as executor, symbiosis.training.Engine(executor.endpoint) as engine:
    ...     engine.packs
    True
    """

    def __init__(
        self,
        model: nn.Module | str,
        *,
        max_tokens: int = 8192,
        max_rank: int = 256,
        max_waiting: int = 4096,
        room_wait: float | None = None,
        order_wait: float = PATIENCE_S,
        state: str | Path | None = None,
        in_memory: int | None = None,
        on_device: int | None = None,
        wait: float | None = None,
        recompute: bool | None = None,
        batch_invariant: bool = False,
        compiled: bool = False,
    ) -> None:
        arguments.model_or_endpoint(model)
        limits = {"max_tokens": max_tokens, "max_rank": max_rank, "in_memory": in_memory or 1}
        limits |= {} if on_device is None else {"on_device": on_device}
        for name, number in {**limits, "max_waiting": max_waiting - 1}.items():
            if number < 1:
                raise ConfigError(f"{name} is {'2 or more' if name == 'max_waiting' else 'positive'}, not {number}")
        if in_memory is not None and state is None:
            raise ConfigError("in_memory needs state=FOLDER, where the other runs are")
        self._max_rank, self._room_wait, self.order_wait = max_rank, room_wait, order_wait
        self._folder = None if state is None else EngineFolder(Path(state))
        self._own_model: nn.Module | None = None
        try:
            if isinstance(model, str):
                self._own_model = built(model, {"wait": wait}, priority="train")
            given = model if isinstance(model, nn.Module) else self._own_model
            if batch_invariant:
                _must_be_invariant(given)
            self._model = PackedModel(given, compiled, recompute)  # type: ignore[arg-type]
        except BaseException:
            if self._folder is not None:
                self._folder.close()
            if self._own_model is not None:
                close_sessions(self._own_model)
            raise
        self._passes = JoinedPasses(self._model, max_tokens)
        self._together = 0 if batch_invariant else max_tokens  # tokens of commands that are computed together
        here = MANY if state is None else in_memory or IN_MEMORY
        self._residency = Residency(self._made_anew, self._do_again, here, on_device)
        self._runs: dict[str, Run] = {}
        self._queue = CommandQueue(max_waiting)
        self._early: set[Run] = set()  # with commands that wait for one before them
        self._recent: dict[Run, int] = {}  # the number of the pass in which a run was
        self._last_s = 0.0  # what the last pass took
        self._arrived = self._free_since = 0.0  # when the last command came, and since when one could be done
        self._had_calls = False
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="symbiosis-training", daemon=True)
        self._thread.start()

    @property
    def packs(self) -> bool:
        """Whether sequences are computed in one row of tokens; else they are padded to a rectangle."""
        return self._model.packs

    @property
    def joined(self) -> float:
        """How many runs a pass computed, on average."""
        return self._passes.runs / max(self._passes.count, 1)

    @property
    def names(self) -> list[str]:
        """The names of all runs in alphabetical order, also of those in the folder that nobody has opened."""
        on_disk = set() if self._folder is None else self._folder.names()
        return sorted(on_disk | self._runs.keys())

    def create(
        self, config: Any, *, seed: int | None = None, lora_plus: float = 1.0, tenant: str = "", name: str | None = None
    ) -> Run:
        """Begin a run with a new adapter, which is the one that `torch.manual_seed(seed); get_peft_model(model, config)` makes.

        Args:
            config: Of PEFT, such as `LoraConfig`.
            lora_plus: By how much the learning rate of LoRA's B matrices is larger than that of the others.
            tenant: With whom it shares: passes are shared out by tenant.
            name: By which it is opened again; default: one that nobody else has.
        """
        if seed is not None and (not isinstance(seed, int) or not 0 <= seed < 1 << 63):
            raise ConfigError(f"seed is a whole number from 0 to 2**63 - 1, or None, not {seed!r}")
        about = About(tenant, _drawn_seed() if seed is None else seed, lora_plus)
        return self._begin(name, config, about, self._made(config, about), is_new=True)

    def load(self, path: str | Path, *, optimizer: bool = True, tenant: str = "", name: str | None = None) -> Run:
        """Begin a run with a checkpoint of `Run.save`, or with an adapter that PEFT saved: then the optimizer begins anew, as it does without
        `optimizer`."""
        folder = Path(path)
        check_adapter(folder)
        config = config_of(folder)
        about = About(tenant, 0, lora_plus_of(folder))
        state = self._made(config, about)
        state.load(folder, optimizer)
        return self._begin(name, config, about, state, is_new=False)

    def open(self, name: str) -> Run:
        """Return the run of this name, which may be of an earlier process: it goes on where that was.

        >>> import symbiosis, tempfile
        >>> from peft import LoraConfig
        >>> with tempfile.TemporaryDirectory() as folder, symbiosis.Executor("demo") as executor:
        ...     with symbiosis.training.Engine(executor.endpoint, state=folder) as engine:
        ...         run = engine.create(LoraConfig(r=4, target_modules=["q_proj"]), name="mine")
        ...         datum = symbiosis.training.Datum([1, 2, 3], targets=[2, 3, 4])
        ...         passed, norm = run.forward_backward(datum), run.step(lr=1e-3).result()
        ...     with symbiosis.training.Engine(executor.endpoint, state=folder) as engine:
        ...         engine.names, engine.open("mine").steps
        (['mine'], 1)
        """
        with self._changed:
            self._refuse_if_closed()
            if (run := self._runs.get(name)) is None:
                if self._folder is None or not self._folder.has(name):
                    raise ConfigError(f"there is no run {name!r}: `names` tells those that there are")
                folder = self._folder.path / name
                with restoring(folder):
                    run = self._runs[name] = _opened(self, name, RunJournal(folder))
        return run

    def has_room(self, tenant: str = "") -> bool:
        """Whether a command of this tenant would not have to wait for room."""
        with self._changed:
            return self._queue.room.has(tenant, 1)

    def check(self, data: Sequence[Datum], in_front: int = 0) -> None:
        """Refuse what the model cannot read, behind so many places of an adapter's own."""
        check_tokens(data, self._model.head.vocabulary, self._model.longest - in_front)

    def put(self, run: Run, command: Command) -> "Future[Any]":
        """Add a command to those of a run; return its future."""
        with self._changed:
            self._wait_for_room(run)
            self._add(run, command)
        return command.future

    def put_in_order(self, run: Run, number: int, verb: str, make: Callable[[], Command]) -> "Future[Any]":
        """Add a command that has a number, when its turn comes; or return the future of the same one."""
        with self._changed:
            self._refuse_if_closed(run)
            if (known := run.order.known(number, verb)) is not None:
                return known
        command = _made_or_wrong(verb, make)
        command.number = number
        with self._changed:
            if run.order.missing != number:  # for which others wait, that have their room
                self._wait_for_room(run)
            if (known := run.order.known(number, verb)) is not None:
                return known
            turns = list(run.order.arrived(number, command, time.monotonic()))
            (self._early.add if run.order.missing else self._early.discard)(run)
            self._queue.room.take(run.tenant, 1)
            for turn in turns:
                self._add(run, turn, has_room=True)
            self._changed.notify_all()
        return command.future

    def forget(self, run: Run) -> None:
        with self._changed:
            self._runs.pop(run.name, None)
            self._recent.pop(run, None)
            self._queue.forget(run, not any(other.tenant == run.tenant for other in self._runs.values()))
        self._residency.drop(run)
        if run.journal is not None:
            run.journal.remove()

    def close(self) -> None:
        """End, when all commands have been done. It may be called again."""
        with self._changed:
            was_closed, self._closed = self._closed, True
            self._changed.notify_all()
        self._thread.join()
        if was_closed:
            return
        if self._own_model is not None:
            close_sessions(self._own_model)
        if self._folder is not None:
            self._folder.close()

    def __enter__(self) -> "TrainingEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- runs begin

    def _begin(self, name: str | None, config: Any, about: About, state: TrainState, is_new: bool) -> Run:
        if not isinstance(about.tenant, str):
            raise ConfigError(f"tenant is a name, not {about.tenant!r}")
        with self._changed:
            self._refuse_if_closed()
            name = f"run-{secrets.token_hex(6)}" if name is None else name
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise ConfigError(
                    f"a run's name has letters, digits and ._:@=+-, and begins with one of the first two: {name!r}"
                )
            if name in self._runs or (self._folder is not None and self._folder.has(name)):
                raise ConfigError(f"there is a run {name!r} already: open it, or choose another name")
            run = self._runs[name] = Run(self, name, about.tenant, None)
        run.state, run.in_front = state, in_front(config)

        def begin(state: TrainState) -> None:
            self._model.add(state.adapter)
            if self._folder is not None:
                run.journal = RunJournal.begin(self._folder.path / name, config, about, None if is_new else state)
            run.steps = state.steps

        try:
            self.put(run, Command("begin", call=begin)).result()
        except BaseException:
            self.forget(run)
            raise
        return run

    def _made(self, config: Any, about: About) -> TrainState:
        check_rank(config, self._max_rank)
        if not 0 < about.lora_plus <= LARGEST:
            raise ConfigError(f"lora_plus is a positive number, at most {LARGEST:g}, not {about.lora_plus}")
        return TrainState(RunAdapter(self._model.skeleton, config, about.seed), about.lora_plus)

    def _made_anew(self, journal: RunJournal) -> TrainState:
        state = self._made(journal.config(), journal.about)
        self._model.add(state.adapter)
        return state

    def _do_again(self, state: TrainState, command: Command) -> None:
        if command.is_pass:
            self.check(command.data, state.adapter.virtual)
            for outcome in self._passes.compute([(command, state)]):
                if isinstance(outcome, Exception):
                    raise outcome
            return
        try:
            command.call(state)
        except ConfigError:
            return  # as it was then: the journal has told it

    # ---------------------------------------------------------------- commands come

    def _add(self, run: Run, command: Command, has_room: bool = False) -> None:
        if not has_room:
            self._queue.room.take(run.tenant, 1)
        command.future.set_running_or_notify_cancel()  # what is put is done: others may come after it
        self._arrived = time.monotonic()
        if not self._queue:
            self._free_since = self._arrived
        self._queue.add(run, command)
        self._changed.notify_all()

    def _wait_for_room(self, run: Run) -> None:
        self._refuse_if_closed(run)
        if threading.current_thread() is self._thread:
            return  # what is done when a future is done
        until = None if self._room_wait is None else time.monotonic() + self._room_wait
        while not self._queue.room.has(run.tenant, 1):
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                who = f"tenant {run.tenant!r}" if run.tenant else "this engine"
                raise Busy(f"so many commands of {who} wait already: send it again when some have been done")
            self._changed.wait(left)
            self._refuse_if_closed(run)

    def _refuse_if_closed(self, run: Run | None = None) -> None:
        if self._closed:
            raise ConfigError("this engine is closed")
        if run is not None and self._runs.get(run.name) is not run:
            raise ConfigError("this run is closed")

    # ---------------------------------------------------------------- commands are done

    def _work(self) -> None:
        while (work := self._next()) is not None:
            calls, passes = work
            if calls:
                self._make_calls(calls)
            else:
                self._compute(passes)
            self._free_since = time.monotonic()
            self._residency.make_room()
        self._residency.close()

    def _next(self) -> tuple[list[Run], list[tuple[Run, Command]]] | None:
        """Wait for what comes next: runs that have calls to make, or passes of several. None, when the engine is closed."""
        with self._changed:
            while True:
                now = time.monotonic()
                due = self._tell_who_waits_too_long(now)
                if not self._queue:
                    if self._closed:
                        return None
                    self._changed.wait(None if due is None else due - now)
                    continue
                until = self._linger_until()
                lingers = now < until and self._together and not self._all_are_back()
                calls = self._queue.calls()
                if calls and (lingers or not self._had_calls or not self._queue.has_passes):
                    self._had_calls = True
                    return calls, []
                if lingers:
                    self._changed.wait(until - now)
                    continue
                self._had_calls = False
                return [], self._taken(self._queue.passes(self._together))

    def _tell_who_waits_too_long(self, now: float) -> float | None:
        """Return when this is to be asked again."""
        for run in list(self._early):
            number = run.order.missing
            forgotten = run.order.waited_too_long(now + (float("inf") if self._closed else 0.0))
            for command in forgotten:
                command.future.set_running_or_notify_cancel()
                self._queue.room.give_back(run.tenant, 1)
                command.future.set_exception(
                    ConfigError(f"command {number} has not come: send it, and then this one again; it was not done")
                )
            if forgotten:
                self._early.discard(run)
        return min((run.order.due for run in self._early), default=None)

    def _linger_until(self) -> float:
        """Return until when a pass waits for others, as long as they keep coming."""
        quiet = self._arrived + max(LEAST_LINGER_S, LINGER * self._last_s)
        return min(quiet, self._free_since + MOST_LINGER * self._last_s)

    def _all_are_back(self) -> bool:
        """Whether the runs of the last passes have one to compute."""
        return self._closed or all(run.commands and run.commands[0].is_pass for run in self._recent)

    def _taken(self, commands: list[tuple[Run, Command]]) -> list[tuple[Run, Command]]:
        for run, _ in commands:
            self._queue.room.give_back(run.tenant, 1)
        self._changed.notify_all()
        return commands

    def _make_calls(self, runs: list[Run]) -> None:
        """Make one call of each, for a while; steps together."""
        began = time.monotonic()
        with self._changed:
            steps = self._taken([(run, self._queue.take(run)) for run in runs if run.commands[0].verb == "step"])
        self._step(steps)
        stepped = {run for run, _ in steps}
        for run in runs:
            if run in stepped:
                continue
            with self._changed:
                [(_, command)] = self._taken([(run, self._queue.take(run))])
            self._call(run, command)
            if time.monotonic() - began > max(CALLS_S, self._last_s):
                return

    def _step(self, commands: list[tuple[Run, Command]]) -> None:
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

    def _brought(self, commands: list[tuple[Run, Command]]) -> list[tuple[Run, Command, TrainState]]:
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

    def _compute(self, commands: list[tuple[Run, Command]]) -> None:
        began = time.monotonic()
        there = self._brought(commands)
        outcomes = self._passes.compute([(command, state) for _, command, state in there]) if there else []
        took = time.monotonic() - began
        tokens = sum(command.tokens for _, command, _ in there)
        for (run, command, state), outcome in zip(there, outcomes, strict=True):
            share = took * command.tokens / tokens
            if run.state is not state:
                outcome = no_room(Path(run.name), OSError("a command before it was not done"))
            if isinstance(outcome, Exception):
                self._finish(run, command, None, outcome, share)
            else:
                self._finish(run, command, outcome, None, share)
        self._write_if_due([run for run, _, _ in there])
        number = self._passes.count
        with self._changed:
            self._recent = {run: at for run, at in self._recent.items() if number - at < RECENT}
            self._recent |= {run: number for run, _ in commands if self._runs.get(run.name) is run}
        self._last_s = took

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
            command.future.set_exception(error)
            return
        run.steps += command.verb == "step"
        command.future.set_result(result)

    def _write_if_due(self, runs: list[Run]) -> None:
        for run in dict.fromkeys(runs):
            if run.journal is not None and run.state is not None and run.journal.since and run.journal.is_due:
                self._residency.tries_to_write(run)


def _must_be_invariant(model: Any) -> None:
    """Refuse executors that join the calls of several sessions."""
    for session in {weight.handle.session for weight in remote_weights(model)}:
        if not session.welcome.batch_invariant:
            raise ConfigError(
                f"batch_invariant needs products that do not depend on others, and {session.endpoint} joins them: start it with --batch-invariant"
            )


def _opened(engine: TrainingEngine, name: str, journal: RunJournal) -> Run:
    """Return a run as its folder tells."""
    run = Run(engine, name, journal.about.tenant, journal)
    run.steps = journal.steps()
    run.in_front = in_front(journal.config())
    for record in journal.records():
        run.steps += record.verb == "step" and not record.is_past and record.error is None
        if record.number is not None:
            run.order.was_done(record.number, record.verb, future_of(record))
    return run


def _made_or_wrong(verb: str, make: Callable[[], Command]) -> Command:
    """Return a command; or, if it is wrong, one that says so when its turn comes."""
    try:
        return make()
    except Exception as wrong:
        error = wrong

    def tell(_: TrainState) -> None:
        raise error

    return Command(verb, call=tell)


def _drawn_seed() -> int:
    return int(torch.randint(1 << 62, ()))
