"""What a run has in memory: its adapter, AdamW's moments, and gradients that wait for a step."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from symbiosis.errors import AdapterError
from symbiosis.serving.lora.adapter_files import check_finite
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
        self._moments: dict[FlatParameters, dict[str, Tensor]] = {}  # with the number of steps
        self._ratios = _ratios(adapter, lora_plus)
        self.home = adapter.parameters[0].device

    @property
    def can_be_filled(self) -> bool:
        """Whether this would be another run if it had the tensors of that."""
        return self.adapter.has_parameters_only

    @property
    def steps(self) -> int:
        return max((int(moments["step"]) for moments in self._moments.values()), default=0)

    def rates(self) -> Iterator[tuple[FlatParameters, float]]:
        """Yield parameters, and by how much their learning rate is larger than was asked for."""
        return zip(self.adapter.flats, self._ratios, strict=True)

    def moments(self, flat: FlatParameters) -> dict[str, Tensor]:
        """Return AdamW's state of these parameters, which may begin now."""
        if flat not in self._moments:
            step = torch.zeros((), device=flat.values.device if flat.values.is_cuda else None)
            self._moments[flat] = {"step": step, **{name: torch.zeros_like(flat.values.detach()) for name in MOMENTS}}
        return self._moments[flat]

    def to(self, device: torch.device) -> None:
        for flat in self.adapter.flats:
            flat.to(device)
            if moments := self._moments.get(flat):
                moments.update({name: moments[name].to(device) for name in MOMENTS})

    # ------------------------------------------------------------ as a whole, to the bit

    def tensors(self) -> dict[str, Tensor]:
        """Return all that commands change."""
        found = {f"{number}.drawn": state for number, state in enumerate(self.adapter.drawn)}
        for number, flat in enumerate(self.adapter.flats):
            state = self._moments.get(flat, {})
            each = {"values": flat.values, **({"gradients": flat.gradients} if flat.waits else {}), **state}
            found |= {f"{number}.{name}": tensor.detach().cpu() for name, tensor in each.items()}
        return found

    @torch.no_grad()
    def put(self, tensors: dict[str, Tensor]) -> None:
        """Be what `tensors` were told of."""
        for number, flat in enumerate(self.adapter.flats):
            of = {name: tensors[f"{number}.{name}"] for name in ALL if f"{number}.{name}" in tensors}
            if any(tensor.shape != flat.values.shape for name, tensor in of.items() if name != "step"):
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
        self._moments.pop(flat, None)
        if of is not None:
            step = of["step"].to(flat.values.device) if self.adapter.is_on_gpu else of["step"]
            self._moments[flat] = {"step": step, **{n: of[n].to(flat.values) for n in MOMENTS}}

    def drop_gradients(self) -> None:
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
            tensors = load_file(folder / ADAPTER)
            check_finite(tensors.items(), "attention would hide it, and train on: take an earlier checkpoint")
            self.adapter.load(tensors)
            self._moments.clear()
            self.drop_gradients()
            if optimizer and (folder / OPTIMIZER).is_file():
                self._put_of_parameters(load_file(folder / OPTIMIZER))
        except SafetensorError as error:
            raise AdapterError(f"{folder} is cut off or damaged: {error}") from error

    def _of_parameters(self) -> dict[str, Tensor]:
        """Return the optimizer's state by the numbers of the parameters."""
        found: dict[str, Tensor] = {}
        number = 0
        for flat in self.adapter.flats:
            state = self._moments.get(flat, {})
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


def _ratios(adapter: RunAdapter, lora_plus: float) -> list[float]:
    """Return by how much each learning rate is larger: that of LoRA's B is `lora_plus` times the others' (LoRA+)."""
    names = {id(p): name for name, p in adapter.peft.named_parameters()}
    return [lora_plus if "lora_B" in names[id(flat.parameters[0])] else 1.0 for flat in adapter.flats]
