"""A run: one adapter that is trained, by commands that are done in their order."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

from symbiosis.errors import ConfigError
from symbiosis.training.checkpoint_folders import write_checkpoint
from symbiosis.training.command_intake import CommandIntake
from symbiosis.training.command_order import CommandOrder
from symbiosis.training.datum import Datum, sequences
from symbiosis.training.losses import Custom, check_loss
from symbiosis.training.refused_adapters import LARGEST
from symbiosis.training.run_command import FORWARD, FORWARD_BACKWARD, Command, PassResult, step_command
from symbiosis.training.run_journal import RunJournal
from symbiosis.training.train_state import TrainState

logger = logging.getLogger("symbiosis")

SMALLEST = 1.2e-38  # float32's: an eps below it is nothing, and a gradient of 0 would be divided by 0


class Commander(Protocol):
    """Whom a run's commands go to: the engine."""

    intake: CommandIntake

    def check(self, data: Sequence[Datum], in_front: int) -> None: ...
    @property
    def order_wait(self) -> float: ...
    def forget(self, run: "Run") -> None: ...


class Run:
    """One adapter that is trained. Made by `Engine.create`, `Engine.load` and `Engine.open`; threads may each have their own, or share one."""

    def __init__(self, engine: Commander, name: str, tenant: str, journal: RunJournal | None) -> None:
        self.name, self.tenant = name, tenant
        self.steps = 0  # that the optimizer has made
        # the rest is the engine's
        self.commands: deque[Command] = deque()  # that wait, in their order
        self.order = CommandOrder[Command](engine.order_wait)
        self.state: TrainState | None = None  # None while it is on disk only
        self.journal = journal
        self.is_read = False  # its values are not those that its commands make: its folder does not know of them
        self.in_front = 0, 0  # tokens that its adapter puts in front of a sequence, and keys and values
        self._engine = engine
        self._warned = False

    def __repr__(self) -> str:
        return f"<run {self.name!r}: {self.steps} steps>"

    @property
    def model(self) -> Any:
        """PEFT's model of this adapter, as it is until the next command: to look at, not to call."""
        if (state := self.state) is not None:
            return state.adapter.peft
        return self._put(Command("look", call=lambda state: state.adapter.peft)).result()

    @property
    def next_number(self) -> int:
        """The number of the next command, if they are numbered."""
        return self.order.next

    @property
    def first_kept(self) -> int:
        """The first number whose result is kept."""
        return self.order.first_kept

    def forward_backward(
        self, batch: Any, loss: str | Custom = "cross_entropy", config: Mapping[str, float] | None = None
    ) -> "Future[PassResult]":
        """Add the gradients of a batch to those that wait for a step. What waits at the same time, of any runs, is computed together.

        Args:
            batch: A `Datum`, a list of them, or a dict of `input_ids`, `labels` and `attention_mask` as transformers' models take it.
            loss: "cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", or a function of (log probabilities by sequence, data)
                that returns one number.
            config: What the loss lets one choose, such as `clip_low_threshold`.

        >>> import symbiosis
        >>> from peft import LoraConfig
        >>> with symbiosis.Executor("demo") as executor, symbiosis.training.Engine(executor.endpoint) as engine:
        ...     run = engine.create(LoraConfig(r=4, target_modules=["q_proj"]))
        ...     datum = symbiosis.training.Datum([1, 2, 3], targets=[2, 3, 4])
        ...     result = run.forward_backward(datum, lambda logprobs, data: -logprobs[0].sum()).result()
        >>> result.logprobs[0].shape
        torch.Size([3])
        """
        return self._put(self._forward_backward(batch, loss, config))

    def forward(self, batch: Any) -> "Future[PassResult]":
        """Find the log probabilities of a batch's targets; no gradients."""
        return self._put(self._forward(batch))

    def step(
        self,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
    ) -> "Future[float]":
        """Make a step of AdamW with the gradients that have been added since the last one. Its result is their norm. Gradients that are not finite
        change nothing, and raise.

        Args:
            max_grad_norm: To which the gradients of this run are scaled down, if their norm is larger; None: they are not.
        """
        return self._put(self._step(lr, betas, eps, weight_decay, max_grad_norm))

    def when_done(self, call: Callable[[], Any]) -> "Future[Any]":
        """Have something called when all commands before have been done, and before any later one: `write`, `read`, or what looks at `model`.
        All runs wait meanwhile, so it must be quick."""
        return self._put(self._call(call))

    def write(self, target: Path) -> None:
        """Write the files of `save` at once. To be called by `when_done`."""
        assert self.state is not None
        write_checkpoint(self.state, target, None)

    def read(self, folder: Path, optimizer: bool = True) -> None:
        """Take over the values of such a folder, with those of the optimizer, or with one that begins anew. To be called by `when_done`."""
        assert self.state is not None
        self.state.load(folder, optimizer)
        self.steps, self.is_read = self.state.steps, True

    def save(self, path: str | Path, *, ttl_seconds: float | None = None) -> Path:
        """Write the adapter as PEFT saves it, and the optimizer's state beside it, when all commands before have been done. The folder is there as
        a whole or not at all, and is never written again.

        Args:
            ttl_seconds: For so long it is kept: after that it is loaded no more, and `training.expire` removes it. None: for ever.

        Raises `ConfigError` if there is something at that path, `OSError` if there is no room.
        """
        result: Path = self._put(self._save(path, ttl_seconds=ttl_seconds)).result()
        return result

    def submit(self, number: int, verb: str, *args: Any, **words: Any) -> "Future[Any]":
        """Send a command with a number, for whoever sends over a network. Commands with numbers, which begin at 1, are done in their order, and each
        once: one that comes too early waits for those before it, and one that comes again has the result of the first. What is wrong
        with it is told by its future, too, since its number is used up then.

        Args:
            verb: "forward_backward", "forward", "step" or "save", which takes these arguments; or "call", which takes a function, as `when_done`
                does. What it returns is kept as a text. After a crash it may be called once more, so it must do the same thing again.

        >>> import symbiosis
        >>> from peft import LoraConfig
        >>> with symbiosis.Executor("demo") as executor, symbiosis.training.Engine(executor.endpoint) as engine:
        ...     run = engine.create(LoraConfig(r=4, target_modules=["q_proj"]))
        ...     datum = symbiosis.training.Datum([1, 2, 3], targets=[2, 3, 4])
        ...     late = run.submit(2, "step", lr=1e-3)
        ...     first, again = (run.submit(1, "forward_backward", datum) for _ in range(2))
        ...     late.result() > 0, first is again, run.steps
        (True, True, 1)
        """
        if verb not in (FORWARD_BACKWARD, FORWARD, "step", "save", "call"):
            raise ConfigError(f"the verbs are forward_backward, forward, step, save and call; not {verb!r}")
        return self._engine.intake.put_in_order(self, number, verb, lambda: self._command(verb, args, words))

    def _command(self, verb: str, args: Any, words: Any) -> Command:
        """Return what the method of this verb would send."""
        given = signature(Run.when_done if verb == "call" else getattr(Run, verb)).bind(self, *args, **words)
        given.apply_defaults()
        make: Callable[..., Command] = getattr(self, f"_{verb}")
        return make(*given.args[1:], **given.kwargs)

    def close(self) -> None:
        """Forget the run, when its commands have been done; also on disk. What is sent after this is refused."""
        self._put(Command("close", call=lambda _: self._engine.forget(self))).result()

    def _forward_backward(self, batch: Any, loss: str | Custom, config: Mapping[str, float] | None) -> Command:
        if not isinstance(loss, str) and not callable(loss):
            raise ConfigError(f"loss is the name of one, or a function, not {loss!r}")
        kind = loss if isinstance(loss, str) else "cross_entropy"
        function = None if isinstance(loss, str) else loss
        data = self._checked(batch)
        check_loss(kind, data, config or {})
        if function is None:
            self._warn_of_nothing(data)
        return Command(FORWARD_BACKWARD, data, kind, dict(config or {}), function, changes=True)

    def _warn_of_nothing(self, data: list[Datum]) -> None:
        """Say once that nothing can be learned from a batch: transformers would tell a loss that is not a number."""
        if self._warned or any(datum.counts for datum in data):
            return
        self._warned = True
        logger.warning(
            "run %s: no token of a batch has a loss, since its labels are all -100, or its weights all 0. Its loss is 0, and nothing is learned of it: "
            "look at what masks or cuts the sequences. This is said once",
            self.name,
        )

    def _forward(self, batch: Any) -> Command:
        return Command(FORWARD, self._checked(batch))

    def _checked(self, batch: Any) -> list[Datum]:
        data = sequences(batch, int(self.in_front[0] > 0))
        self._engine.check(data, sum(self.in_front))
        return data

    def _step(self, lr: Any, betas: Any, eps: Any, weight_decay: Any, max_grad_norm: Any) -> Command:
        try:
            beta1, beta2 = (float(each) for each in betas)
            words = {
                "lr": float(lr),
                "eps": float(eps),
                "weight_decay": float(weight_decay),
                "beta1": beta1,
                "beta2": beta2,
            }
            most = None if max_grad_norm is None else float(max_grad_norm)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"a step takes numbers, and two betas: {error}") from None
        for name, number in words.items():
            if not 0 <= number <= LARGEST or (name.startswith("beta") and number >= 1):
                raise ConfigError(f"{name} is {number}: it is from 0 to {LARGEST:g}, and a beta is below 1")
        if words["eps"] < SMALLEST:
            raise ConfigError(f"eps is {eps}, and at least {SMALLEST:g}: below that a step divides by zero")
        if most is not None and not most > 0:
            raise ConfigError(f"max_grad_norm is positive or None, not {max_grad_norm}")
        return step_command({**words, "max_grad_norm": most})

    def _save(self, path: str | Path, *, ttl_seconds: float | None) -> Command:
        target = Path(path)
        if ttl_seconds is not None and not 0 < ttl_seconds < float("inf"):
            raise ConfigError(f"ttl_seconds is a positive number of seconds, or None, not {ttl_seconds}")
        return Command("save", call=lambda state: write_checkpoint(state, target, ttl_seconds))

    def _call(self, function: Callable[[], Any]) -> Command:
        return Command("call", call=lambda _: function())

    def _put(self, command: Command) -> Any:
        return self._engine.intake.put(self, command)
