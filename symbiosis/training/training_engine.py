"""`Engine`: trains the adapters of any number of runs on one frozen model. What waits at the same time is computed in one pass."""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symbiosis.client import arguments
from symbiosis.client.from_executor import built
from symbiosis.client.weights.remote_weight import close_sessions
from symbiosis.errors import ConfigError
from symbiosis.serving.runner.bitwise import must_be_invariant
from symbiosis.training.bitwise_proof import prove_bitwise
from symbiosis.training.checkpoint_folders import check_adapter
from symbiosis.training.command_intake import CommandIntake
from symbiosis.training.command_order import PATIENCE_S
from symbiosis.training.command_worker import CommandWorker
from symbiosis.training.datum import Datum, check_tokens
from symbiosis.training.engine_folder import NAME, EngineFolder
from symbiosis.training.joined_passes import JoinedPasses
from symbiosis.training.packed_model import PackedModel
from symbiosis.training.refused_adapters import LARGEST, check_kind, check_patterns, check_rank
from symbiosis.training.residency import Residency
from symbiosis.training.run_adapter import RunAdapter, in_front
from symbiosis.training.run_command import Command, future_of
from symbiosis.training.run_journal import About, RunJournal, config_of, restoring
from symbiosis.training.train_state import TrainState, lora_plus_of
from symbiosis.training.training_run import Run

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
        bitwise: The log probabilities of what `serving.Engine(bitwise=True)` samples are, bit for bit, those that it told. An executor has to be
            started with `batch_invariant`. LoRA at linear layers only, and on a CPU only.
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
        bitwise: bool = False,
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
        self._max_rank, self.order_wait = max_rank, order_wait
        self._folder = None if state is None else EngineFolder(Path(state))
        self._own_model: nn.Module | None = None
        try:
            if isinstance(model, str):
                self._own_model = built(model, {"wait": wait}, priority="train")
            given = model if isinstance(model, nn.Module) else self._own_model
            if batch_invariant:
                must_be_invariant(given, "batch_invariant")  # type: ignore[arg-type]
            self._model = PackedModel(given, compiled, recompute, bitwise)  # type: ignore[arg-type]
        except BaseException:
            if self._folder is not None:
                self._folder.close()
            if self._own_model is not None:
                close_sessions(self._own_model)
            raise
        self._passes = JoinedPasses(self._model, max_tokens)
        here = MANY if state is None else in_memory or IN_MEMORY
        self._residency = Residency(self._made_anew, self._do_again, here, on_device)
        self.intake = CommandIntake(max_waiting, room_wait, together=0 if batch_invariant else max_tokens)
        self._runs = self.intake.runs
        self._worker = CommandWorker(self.intake, self._passes, self._residency)

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
        self._check_config(config)
        about = About(tenant, _drawn_seed() if seed is None else seed, lora_plus)
        return self._begin(name, config, about, self._made(config, about), is_new=True)

    def load(self, path: str | Path, *, optimizer: bool = True, tenant: str = "", name: str | None = None) -> Run:
        """Begin a run with a checkpoint of `Run.save`, or with an adapter that PEFT saved: then the optimizer begins anew, as it does without
        `optimizer`."""
        folder = Path(path)
        check_adapter(folder)
        config = config_of(folder)
        self._check_config(config)
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
        with self.intake.changed:
            self.intake.refuse_if_closed()
            if (run := self._runs.get(name)) is None:
                if self._folder is None or not self._folder.has(name):
                    raise ConfigError(f"there is no run {name!r}: `names` tells those that there are")
                folder = self._folder.path / name
                with restoring(folder):
                    run = self._runs[name] = _opened(self, name, RunJournal(folder))
        return run

    def prove_bitwise(self, sampler: Any) -> int:
        """Check that a `serving.Engine(bitwise=True)` of the same model says of some tokens, bit for bit, what this engine computes of them; return how
        many they were. Raises `ConfigError` if it does not: libraries of another processor may have other sums.

        >>> import symbiosis
        >>> with symbiosis.Executor("demo", batch_invariant=True) as executor, symbiosis.training.Engine(executor.endpoint, bitwise=True) as trainer:
        ...     with symbiosis.serving.Engine(executor.endpoint, memory=1 << 24, bitwise=True) as sampler:
        ...         trainer.prove_bitwise(sampler)
        40
        """
        return prove_bitwise(sampler, self, self._model.linear_layers())

    def has_room(self, tenant: str = "") -> bool:
        """Whether a command of this tenant would not have to wait for room."""
        return self.intake.has_room(tenant)

    def check(self, data: Sequence[Datum], in_front: int = 0) -> None:
        """Refuse what the model cannot read, behind so many places of an adapter's own."""
        check_tokens(data, self._model.head.vocabulary, self._model.longest - in_front)

    def forget(self, run: Run) -> None:
        self.intake.forget(run)
        self._residency.drop(run)
        if run.journal is not None:
            run.journal.remove()

    def close(self) -> None:
        """End, when all commands have been done. It may be called again."""
        was_closed = self.intake.close()
        self._worker.join()
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
        with self.intake.changed:
            self.intake.refuse_if_closed()
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
            self.intake.put(run, Command("begin", call=begin)).result()
        except BaseException:
            self.forget(run)
            raise
        return run

    def _check_config(self, config: Any) -> None:
        check_kind(config)
        check_patterns(config, self._model.skeleton.names())

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
            self.check(command.data, state.adapter.virtual + state.adapter.prefix_length)
            for outcome in self._passes.compute([(command, state)]):
                if isinstance(outcome, Exception):
                    raise outcome
            return
        try:
            command.call(state)
        except ConfigError:
            return  # as it was then: the journal has told it


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


def _drawn_seed() -> int:
    return int(torch.randint(1 << 62, ()))
