"""What a run has in memory: its adapter, AdamW's moments, and gradients that wait for a step."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from symbiosis.errors import AdapterError, ConfigError
from symbiosis.training.flat_parameters import FlatParameters
from symbiosis.training.run_adapter import RunAdapter

OPTIMIZER = "optimizer.safetensors"  # beside PEFT's files
ADAPTER = "adapter_model.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW
ALL = ("values", "gradients", "step", *MOMENTS)


class TrainState:
    """An adapter and its optimizer. Used by the engine's thread only."""

    def __init__(self, adapter: RunAdapter, lora_plus: float) -> None:
        self.adapter = adapter
        self.optimizer = torch.optim.AdamW(_groups(adapter, lora_plus), lr=0.0, fused=adapter.is_on_gpu)
        self._ratios = [float(group["ratio"]) for group in self.optimizer.param_groups]
        self.home = adapter.parameters[0].device

    @property
    def can_be_filled(self) -> bool:
        """Whether this would be another run if it had the tensors of that."""
        return self.adapter.has_parameters_only

    @property
    def steps(self) -> int:
        states = self.optimizer.state.values()
        return max((int(state["step"]) for state in states), default=0)

    def step(self, lr: float, betas: tuple[float, float], eps: float, decay: float, most: float | None) -> float:
        """Make a step of AdamW, and return the gradients' norm. They are gone then, also if they were not finite."""
        flats = self.adapter.flats
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
            self._drop_gradients()
        return norm

    def to(self, device: torch.device) -> None:
        for flat in self.adapter.flats:
            flat.to(device)
            if state := self.optimizer.state.get(flat.values):
                state.update({name: state[name].to(device) for name in MOMENTS})

    # ------------------------------------------------------------ as a whole, to the bit

    def tensors(self) -> dict[str, Tensor]:
        """Return all that commands change."""
        found = {f"{number}.drawn": state for number, state in enumerate(self.adapter.drawn)}
        for number, flat in enumerate(self.adapter.flats):
            state = self.optimizer.state.get(flat.values, {})
            each = {"values": flat.values, **({"gradients": flat.gradients} if flat.waits else {}), **state}
            found |= {f"{number}.{name}": tensor.detach().cpu() for name, tensor in each.items()}
        return found

    @torch.no_grad()
    def put(self, tensors: dict[str, Tensor]) -> None:
        """Be what `tensors` were told of."""
        for number, flat in enumerate(self.adapter.flats):
            of = {name: tensors[f"{number}.{name}"] for name in ALL if f"{number}.{name}" in tensors}
            if of["values"].shape != flat.values.shape:
                raise AdapterError(
                    "its folder is of another base: open it with an engine of the one that it began with"
                )
            flat.values.copy_(of["values"])
            flat.drop_gradients()
            if "gradients" in of:
                flat.gradients.copy_(of["gradients"])
                flat.set_gradients()
            self._begin_again(flat, of if "step" in of else None)
        count = sum(name.endswith(".drawn") for name in tensors)
        self.adapter.drawn = tuple(tensors[f"{number}.drawn"] for number in range(count))

    def _begin_again(self, flat: FlatParameters, of: dict[str, Tensor] | None) -> None:
        """Give these parameters AdamW's state, or none."""
        self.optimizer.state.pop(flat.values, None)
        if of is not None:
            step = of["step"].to(flat.values.device) if self.adapter.is_on_gpu else of["step"]
            self.optimizer.state[flat.values] = {"step": step, **{n: of[n].to(flat.values) for n in MOMENTS}}

    def _drop_gradients(self) -> None:
        for flat in self.adapter.flats:
            flat.drop_gradients()

    # ------------------------------------------------------------ as PEFT has it

    def save(self, folder: Path) -> None:
        """Write the adapter as PEFT saves it, and the optimizer's state beside it."""
        self.adapter.save(folder)
        save_file(self._of_parameters(), folder / OPTIMIZER, {"lora_plus": json.dumps(max(self._ratios))})

    def load(self, folder: Path, optimizer: bool = True) -> None:
        """Take over the values of such a folder, with those of the optimizer, or with one that begins anew."""
        try:
            self.adapter.load(load_file(folder / ADAPTER))
            self.optimizer.state.clear()
            self._drop_gradients()
            if optimizer and (folder / OPTIMIZER).is_file():
                self._put_of_parameters(load_file(folder / OPTIMIZER))
        except SafetensorError as error:
            raise AdapterError(f"{folder} is cut off or damaged: {error}") from error

    def _of_parameters(self) -> dict[str, Tensor]:
        """Return the optimizer's state by the numbers of the parameters."""
        found: dict[str, Tensor] = {}
        number = 0
        for flat in self.adapter.flats:
            state = self.optimizer.state.get(flat.values, {})
            parts = {name: flat.parts(state[name].detach().cpu()) for name in MOMENTS if state}
            for place in range(len(flat.parameters)):
                for name, values in parts.items():
                    found[f"{number}.{name}"] = values[place].contiguous()
                if state:
                    found[f"{number}.step"] = state["step"].detach().cpu().clone()
                number += 1
        return found

    def _put_of_parameters(self, tensors: dict[str, Tensor]) -> None:
        number = 0
        for flat in self.adapter.flats:
            numbers = range(number, number + len(flat.parameters))
            number = numbers.stop
            for place, parameter in zip(numbers, flat.parameters, strict=True):
                shapes = {tensors[name].shape for kind in MOMENTS if (name := f"{place}.{kind}") in tensors}
                if f"{place}.step" in tensors and shapes != {parameter.shape}:
                    raise AdapterError(f"the optimizer's state is of another adapter: its part {place} does not fit")
            if all(f"{place}.step" in tensors for place in numbers):
                moments = {name: torch.zeros_like(flat.values.detach()) for name in MOMENTS}
                for name, moment in moments.items():
                    for place, part in zip(numbers, flat.parts(moment), strict=True):
                        part.copy_(tensors[f"{place}.{name}"])
                self._begin_again(flat, {"step": tensors[f"{numbers[0]}.step"], **moments})


def lora_plus_of(folder: Path) -> float:
    """Return by how much the learning rate of B is larger, in a checkpoint."""
    if not (folder / OPTIMIZER).is_file():
        return 1.0
    try:
        with safe_open(folder / OPTIMIZER, "pt") as opened:
            return float(json.loads((opened.metadata() or {}).get("lora_plus", "1.0")))
    except SafetensorError as error:
        raise AdapterError(f"{folder} is cut off or damaged: {error}") from error


def _groups(adapter: RunAdapter, lora_plus: float) -> list[dict[str, Any]]:
    """Return what the optimizer steps with one learning rate; that of LoRA's B is `lora_plus` times the others' (LoRA+)."""
    names = {id(p): name for name, p in adapter.peft.named_parameters()}
    return [
        {"params": [flat.values], "ratio": lora_plus if "lora_B" in names[id(flat.parameters[0])] else 1.0}
        for flat in adapter.flats
    ]
