"""A run: one adapter that is trained, by commands that are done in their order."""

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from symbiosis.errors import AdapterError, ConfigError
from symbiosis.training.datum import Datum, sequences
from symbiosis.training.losses import Custom, check_loss
from symbiosis.training.run_adapter import RunAdapter
from symbiosis.training.run_work import RunWork

ADAPTER = "adapter_model.safetensors"
OPTIMIZER = "optimizer.safetensors"  # beside PEFT's files
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, for each parameter


@dataclass(frozen=True)
class PassResult:
    """What a pass found.

    Args:
        loss: The sum over all targets; of a batch as transformers' models take it, the mean over its labels.
        logprobs: For each sequence, the log probabilities of its targets before the next step.
        joined: Runs that were computed in the same pass, this one counted.
    """

    loss: float
    logprobs: list[Tensor]
    joined: int


@dataclass(eq=False)
class Command:
    """What a run is to do: a pass, or a call."""

    future: "Future[Any]"
    work: RunWork | None = None
    function: Custom | None = None  # its loss, if that is one of the program's own
    call: Callable[[], Any] = field(default=lambda: None)

    @property
    def tokens(self) -> int:
        return 0 if self.work is None else sum(map(len, self.work.data))


class CommandQueue(Protocol):
    """Where the commands of runs wait: the engine."""

    def check(self, data: Sequence[Datum]) -> None: ...
    def put(self, run: "Run", command: Command) -> Any: ...
    def forget(self, run: "Run") -> None: ...


class Run:
    """One adapter that is trained. Made by `Engine.create` and `Engine.load`; threads may each have their own, or share one."""

    def __init__(self, engine: CommandQueue, adapter: RunAdapter, lora_plus: float) -> None:
        self._engine, self._adapter = engine, adapter
        self.commands: deque[Command] = deque()  # that wait, in their order; of the engine
        self.tokens = 0  # that it had computed
        self.optimizer = torch.optim.AdamW(_groups(adapter, lora_plus), lr=0.0, fused=adapter.is_on_gpu)
        self._ratios = [float(group["ratio"]) for group in self.optimizer.param_groups]

    @property
    def steps(self) -> int:
        """How many steps the optimizer has made."""
        states = self.optimizer.state.values()
        return max((int(state["step"]) for state in states), default=0)

    @property
    def model(self) -> Any:
        """PEFT's model of this adapter: to look at, not to call."""
        return self._adapter.peft

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
        function = None if isinstance(loss, str) else loss
        if function is not None and not callable(function):
            raise ConfigError(f"loss is the name of one, or a function, not {loss!r}")
        return self._pass(batch, loss if isinstance(loss, str) else "cross_entropy", config or {}, True, function)

    def forward(self, batch: Any) -> "Future[PassResult]":
        """Find the log probabilities of a batch's targets; no gradients."""
        return self._pass(batch, "cross_entropy", {}, False, None)

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
        numbers = {
            "lr": lr,
            "eps": eps,
            "weight_decay": weight_decay,
            **dict(zip(("beta1", "beta2"), betas, strict=True)),
        }
        for name, number in numbers.items():
            if not 0 <= number < float("inf") or (name.startswith("beta") and number >= 1):
                raise ConfigError(f"{name} is {number}: it is not negative, and a beta is below 1")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm is positive or None, not {max_grad_norm}")
        return self.when_done(lambda: self._step(lr, betas, eps, weight_decay, max_grad_norm))

    def save(self, path: str | Path) -> Path:
        """Write the adapter as PEFT saves it, and the optimizer's state beside it, when all commands before have been done. The folder is there as
        a whole or not at all, and is never written again.

        Raises `ConfigError` if there is something at that path.
        """
        target = Path(path)
        self.when_done(lambda: self.write(target)).result()
        return target

    def when_done(self, call: Callable[[], Any]) -> "Future[Any]":
        """Have something called when all commands before have been done, and before any later one: `write`, `read`, or what looks at `model`.
        All runs wait meanwhile, so it must be quick."""
        return self._engine.put(self, Command(Future(), call=call))  # type: ignore[no-any-return]

    def close(self) -> None:
        """Forget the run, when its commands have been done."""
        self.when_done(lambda: self._engine.forget(self)).result()

    def _pass(self, batch: Any, kind: str, config: Mapping[str, float], backward: bool, function: Custom | None) -> Any:
        data = sequences(batch)
        self._engine.check(data)
        check_loss(kind, data, config)
        work = RunWork(self._adapter, data, kind, config, backward)
        return self._engine.put(self, Command(Future(), work, function))

    def _step(self, lr: float, betas: tuple[float, float], eps: float, decay: float, most: float | None) -> float:
        flats = self._adapter.flats
        if not any(flat.waits for flat in flats):
            raise ConfigError("there are no gradients to step with: call forward_backward first")
        norm = float(torch.nn.utils.get_total_norm([flat.gradients for flat in flats]))
        try:
            if not norm < float("inf"):
                raise ConfigError(f"the gradients' norm is {norm}: they are dropped, and nothing has changed")
            if most is not None:
                torch.nn.utils.clip_grads_with_norm_([flat.values for flat in flats], most, torch.tensor(norm))
            for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
                group.update(lr=lr * ratio, betas=betas, eps=eps, weight_decay=decay)
            self.optimizer.step()
        finally:
            for flat in flats:
                flat.drop_gradients()
        return norm

    def write(self, target: Path) -> None:
        """Write the files of `save` at once. To be called by `when_done`."""
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(
                f"{target} is there already, and a checkpoint is never written again: choose another name"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        part.mkdir()
        try:
            self._adapter.save(part)
            save_file(self._optimizer_tensors(), part / OPTIMIZER, {"lora_plus": json.dumps(max(self._ratios))})
            part.rename(target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's state by the numbers of the parameters."""
        found: dict[str, Tensor] = {}
        number = 0
        for flat in self._adapter.flats:
            state = self.optimizer.state.get(flat.values, {})
            parts = {name: flat.parts(state[name].detach().cpu()) for name in MOMENTS if state}
            for place in range(len(flat.parameters)):
                for name, values in parts.items():
                    found[f"{number}.{name}"] = values[place].contiguous()
                if state:
                    found[f"{number}.step"] = state["step"].detach().cpu().clone()
                number += 1
        return found

    def read(self, folder: Path, optimizer: bool = True) -> None:
        """Take over the values of such a folder, with those of the optimizer, or with one that begins anew. To be called by `when_done`."""
        try:
            self._adapter.load(load_file(folder / ADAPTER))
            self.optimizer.state.clear()
            self.optimizer.zero_grad(set_to_none=True)
            if optimizer and (folder / OPTIMIZER).is_file():
                self.load_optimizer(folder / OPTIMIZER)
        except SafetensorError as error:
            raise AdapterError(f"{folder} is cut off or damaged: {error}") from error

    def load_optimizer(self, file: Path) -> None:
        """Go on with the optimizer's state of a checkpoint."""
        tensors = load_file(file)
        number = 0
        for flat in self._adapter.flats:
            numbers = range(number, number + len(flat.parameters))
            number = numbers.stop
            for place, parameter in zip(numbers, flat.parameters, strict=True):
                shapes = {tensors[name].shape for kind in MOMENTS if (name := f"{place}.{kind}") in tensors}
                if f"{place}.step" in tensors and shapes != {parameter.shape}:
                    raise AdapterError(f"{file} is of another adapter: its state {place} does not fit")
            if all(f"{place}.step" in tensors for place in numbers):
                moments = {
                    name: torch.cat([tensors[f"{place}.{name}"].reshape(-1) for place in numbers]) for name in MOMENTS
                }
                self.optimizer.state[flat.values] = {
                    "step": tensors[f"{numbers[0]}.step"].to(flat.values.device),
                    **{name: moment.to(flat.values) for name, moment in moments.items()},
                }


def _groups(adapter: RunAdapter, lora_plus: float) -> list[dict[str, Any]]:
    """Return what the optimizer steps with one learning rate; that of LoRA's B is `lora_plus` times the others' (LoRA+)."""
    names = {id(p): name for name, p in adapter.peft.named_parameters()}
    return [
        {"params": [flat.values], "ratio": lora_plus if "lora_B" in names[id(flat.parameters[0])] else 1.0}
        for flat in adapter.flats
    ]
