"""A LoRA that a program of this process trains: its very parameters, found once, and read whenever it is published."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from symbiosis.serving.lora.adapter_kinds import HARMLESS, Part


@dataclass(slots=True, frozen=True, eq=False)
class TrainedLayer:
    """One layer of PEFT's: `y + scaling B A x`, in the parameters `a` and `b`."""

    module: Any
    a: Tensor
    b: Tensor
    scaling: float


@dataclass(slots=True, eq=False)
class TrainedLora:
    """All layers of a LoRA that is nothing else than that. Other kinds have none."""

    config: Any
    adapter: str
    layers: dict[str, TrainedLayer]
    dtype: torch.dtype
    _parts: dict[str, Part] = field(default_factory=dict)
    _addresses: list[int] = field(default_factory=list)

    def is_current(self, model: Any) -> bool:
        """Whether the model's adapter still has these parameters."""
        name = self.adapter
        return model.peft_config.get(name) is self.config and all(
            name in layer.module.lora_A and layer.module.lora_A[name].weight is layer.a and layer.module.lora_B[name].weight is layer.b
            and layer.module.scaling[name] == layer.scaling
            for layer in self.layers.values()
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        """Where the parameters are now: those of a run that idles may have been away."""
        return next(iter(self.layers.values())).a.device

    def parts(self) -> dict[str, Part]:
        """Return views of the parameters; `up` is not scaled."""
        addresses = [t.data_ptr() for layer in self.layers.values() for t in (layer.a, layer.b)]
        if addresses != self._addresses:
            self._addresses = addresses
            self._parts = {
                name: Part(down=layer.a.detach(), up=layer.b.detach().t()) for name, layer in self.layers.items()
            }
        return self._parts

    def scales(self) -> dict[str, float]:
        """By which `up` is to be multiplied."""
        return {name: layer.scaling for name, layer in self.layers.items()}


def trained_lora(model: Any, adapter: str) -> TrainedLora | None:
    """Return the LoRA that a PEFT model trains under this name; None if it does anything else than `y + s B A x`."""
    from peft import LoraModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    config = model.peft_config[adapter]
    if type(model.base_model) is not LoraModel or config.bias != "none" or _is_rewritten(config):
        return None
    if any(value for name, value in config.to_dict().items() if name not in HARMLESS):
        return None
    layers: dict[str, TrainedLayer] = {}
    for name, module in model.base_model.model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            return None
        if isinstance(module, BaseTunerLayer) and _has(module, adapter):
            if (layer := _layer(module, adapter)) is None:
                return None
            layers[name] = layer
    kinds = {(t.dtype, t.device) for layer in layers.values() for t in (layer.a, layer.b)}
    return TrainedLora(config, adapter, layers, kinds.pop()[0]) if len(kinds) == 1 else None


def _is_rewritten(config: Any) -> bool:
    """Whether the base's weights may have been changed for it: the general way says what is wrong with that."""
    return isinstance(config.init_lora_weights, str)


def _has(module: Any, adapter: str) -> bool:
    return any(adapter in getattr(module, name) for name in module.adapter_layer_names if hasattr(module, name))


def _layer(module: Any, adapter: str) -> TrainedLayer | None:
    from peft.tuners.lora import Linear

    if type(module) is not Linear or not isinstance(module.get_base_layer(), nn.Linear | Conv1D):
        return None
    if module.use_dora.get(adapter) or module.lora_variant.get(adapter) is not None:
        return None
    a, b = module.lora_A[adapter], module.lora_B[adapter]
    if a.bias is not None or b.bias is not None:
        return None
    return TrainedLayer(module, a.weight, b.weight, float(module.scaling[adapter]))
