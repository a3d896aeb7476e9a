"""PEFT methods other than DoRA that would read or copy a weight, changed so that they ask the executor for what they need instead."""

import sys
from contextlib import suppress
from functools import cache, wraps
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from symbiosis.client.layers.virt_layer import VirtLinear
from symbiosis.client.state_dict import values_later
from symbiosis.client.weights.dora import patch_dora
from symbiosis.client.weights.remote_weight import RemoteWeight, is_remote_linear


@cache
def support_peft_methods() -> None:
    """Patch the methods that the installed PEFT has, if there is one. What a patch imports, older ones lack."""
    for patch in (patch_dora, _patch_hra, _patch_rewriting_inits, _patch_kasa, _patch_glora, _patch_state_dicts):
        with suppress(ImportError):
            patch()


# ---------------------------------------------------------------- HRA, PiSSA and its kin, GLoRA


def _patch_hra() -> None:
    from peft.tuners.hra import layer as hra

    layer: Any = hra.HRALinear
    forward = layer.forward

    @wraps(forward)
    def remote_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        active = [name for name in self.active_adapters if name in self.hra_u]
        base_layer = self.get_base_layer()
        if not active or self.disable_adapters or self.merged or not is_remote_linear(base_layer):
            return forward(self, x, *args, **kwargs)
        rotated = self._cast_input_dtype(x, self.hra_u[active[0]].dtype)
        for name in reversed(active):
            rotated = rotated @ self.get_delta_weight(name).t()
        weight, bias = (
            self._cast_input_dtype(tensor, rotated.dtype) for tensor in (base_layer.weight, base_layer.bias)
        )
        return F.linear(rotated, weight, bias).to(x.dtype)

    layer.forward = remote_forward


def _patch_rewriting_inits() -> None:
    from peft.tuners.lora import layer as lora

    for name, method in (("pissa", "PiSSA"), ("olora", "OLoRA"), ("corda", "CorDA"), ("loftq", "LoftQ")):
        init = getattr(lora.LoraLayer, f"{name}_init")
        setattr(lora.LoraLayer, f"{name}_init", _on_private_copy(init, method))


def _patch_kasa() -> None:
    from peft.tuners.lora.variants import KasaLinearVariant

    kasa: Any = KasaLinearVariant
    kasa.init = staticmethod(_on_private_copy(kasa.init, "KaSA"))


def _on_private_copy(init: Any, method: str) -> Any:
    @wraps(init)
    def init_private(layer: Any, *args: Any, **kwargs: Any) -> None:
        weight = layer.get_base_layer().weight
        if isinstance(weight, RemoteWeight):
            weight.privatise(f"{method}, which changes the weights that it starts from,")
        init(layer, *args, **kwargs)

    return init_private


def _patch_glora() -> None:
    from peft.tuners.glora import layer, model
    from peft.tuners.tuners_utils import BaseTunerLayer

    glora: Any = model.GloraModel
    create = glora._create_new_module

    @wraps(create)
    def create_on_remote(peft_config: Any, adapter_name: str, target: nn.Module, **options: Any) -> nn.Module:
        base_layer = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if type(base_layer) is VirtLinear:
            return layer.GloraLinear(target, adapter_name, config=peft_config)
        return create(peft_config, adapter_name, target, **options)

    glora._create_new_module = staticmethod(create_on_remote)


# ---------------------------------------------------------------- adapters' state dicts


def _patch_state_dicts() -> None:
    """Keep PEFT from reading values that it does not keep: it asks for the whole model's state dict, and takes the adapter's part."""
    from peft.utils import hotswap, save_and_load

    for home, name in (
        (save_and_load, "get_peft_model_state_dict"),
        (save_and_load, "set_peft_model_state_dict"),
        (hotswap, "hotswap_adapter_from_state_dict"),
    ):
        original = getattr(home, name)
        patched = _reading_what_is_kept(original)
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is original:
                setattr(module, name, patched)


def _reading_what_is_kept(function: Any) -> Any:
    @wraps(function)
    def kept(*args: Any, **kwargs: Any) -> Any:
        with values_later():
            result = function(*args, **kwargs)
        if isinstance(result, dict):
            return {name: value.value() if isinstance(value, RemoteWeight) else value for name, value in result.items()}
        return result

    return kept
