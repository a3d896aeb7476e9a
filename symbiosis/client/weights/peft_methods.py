"""PEFT methods that would read or copy a weight, changed so that they ask the executor for what they need instead."""

import sys
from contextlib import suppress
from functools import cache, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from symbiosis.client.layers.virt_layer import VirtLinear
from symbiosis.client.state_dict import values_later
from symbiosis.client.weights.remote_weight import RemoteWeight
from symbiosis.client.weights.view import Handle
from symbiosis.protocol import Op, Priority

_squared_norms: "WeakKeyDictionary[Handle, Tensor]" = WeakKeyDictionary()


@cache
def support_peft_methods() -> None:
    """Patch the methods that the installed PEFT has, if there is one."""
    for patch in (_patch_dora, _patch_hra, _patch_rewriting_inits, _patch_glora, _patch_state_dicts):
        with suppress(ImportError):
            patch()


def _is_remote_linear(layer: Any) -> bool:
    """Whether a method has to be rewritten for this layer."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, RemoteWeight) or weight.handle.private is not None or weight.has_values:
        return False
    return weight.is_whole and weight.handle.layer.kind in ("linear", "conv1d")


# ---------------------------------------------------------------- DoRA


@torch.compiler.disable  # Dynamo takes the kept norms of one layer for those of all
def row_norms(layer: nn.Module, a_RK: Tensor, b_NR: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """Return the norms of the rows of `W + s B A` for a remote W. As PEFT means it, they are constants to autograd."""
    handle: Handle = layer.weight.handle  # type: ignore[union-attr, assignment]
    wide = torch.promote_types(dtype, torch.float32)
    priority = Priority.TRAIN if torch.is_grad_enabled() else Priority.DECODE
    with torch.no_grad():
        aw_RN = handle.session.call(Op.FORWARD, handle.index, a_RK.to(dtype), priority=priority).to(wide)
        a_RK, b_NR = a_RK.to(wide), b_NR.to(wide)
        cross_N = (aw_RN.t() * b_NR).sum(1)
        low_N = ((b_NR @ (a_RK @ a_RK.t())) * b_NR).sum(1)
        squared_N = _squared_row_norms(handle, wide).to(b_NR.device) + 2 * scaling * cross_N + scaling**2 * low_N
        return squared_N.clamp_min(0).sqrt().to(dtype)


def _squared_row_norms(handle: Handle, dtype: torch.dtype) -> Tensor:
    norms = _squared_norms.get(handle)
    if norms is None or norms.dtype != dtype:
        norms = _squared_norms[handle] = handle.session.call(Op.NORMS, handle.index, dtype=dtype)
    return norms


def _patch_dora() -> None:
    from peft.tuners.lora import dora

    layer: Any = dora.DoraLinearLayer
    layer.update_layer = _dora_update_layer(layer.update_layer)
    layer.forward = _dora_forward(layer.forward, dora.cache_decorator("weight-norm")(_dora_norms))


def _dora_update_layer(original: Any) -> Any:
    @wraps(original)
    def update_layer(
        self: Any, *, base_layer: Any, lora_A: Tensor, lora_B: Tensor, scaling: float, **rest: Any
    ) -> None:
        if not _is_remote_linear(base_layer):
            original(self, base_layer=base_layer, lora_A=lora_A, lora_B=lora_B, scaling=scaling, **rest)
            return
        norms = row_norms(base_layer, lora_A, lora_B, scaling, base_layer.weight.dtype)
        self.weight = nn.Parameter(norms.cpu() if rest.get("place_on_cpu") else norms, requires_grad=True)

    return update_layer


def _dora_norms(self: Any, layer: Any, lora: tuple[Tensor, Tensor], scaling: float, dtype: Any, **_: Any) -> Tensor:
    return row_norms(layer, *lora, scaling, dtype)


def _dora_forward(original: Any, norms_of: Any) -> Any:
    @wraps(original)
    def forward(
        self: Any, x: Tensor, *, lora_A: Any, lora_B: Any, scaling: float, base_layer: Any, base_result: Any = None,
        **rest: Any,
    ) -> Tensor:  # fmt: skip
        if not _is_remote_linear(base_layer):
            rest |= {"lora_A": lora_A, "lora_B": lora_B, "scaling": scaling, "base_layer": base_layer}
            return original(self, x, base_result=base_result, **rest)
        adapter = {"adapter_name": rest.get("adapter_name")}
        norms = norms_of(self, base_layer, (lora_A.weight, lora_B.weight), scaling, x.dtype, **adapter)
        scale = (self.weight / norms).view(1, -1)
        if base_result is None:
            base_result = F.linear(x, _rows(base_layer).to(x.dtype))
        elif base_layer.bias is not None:
            base_result = base_result - base_layer.bias
        return (scale - 1) * base_result + scale * lora_B(lora_A(x)) * scaling

    return forward


def _rows(layer: nn.Module) -> Tensor:
    """Return the weight as `nn.Linear` holds it, one row for each output."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight.t() if weight.handle.layer.kind == "conv1d" else weight  # type: ignore[attr-defined]


# ---------------------------------------------------------------- HRA, PiSSA and its kin, GLoRA


def _patch_hra() -> None:
    from peft.tuners.hra import layer as hra

    layer: Any = hra.HRALinear
    forward = layer.forward

    @wraps(forward)
    def remote_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        active = [name for name in self.active_adapters if name in self.hra_u]
        base_layer = self.get_base_layer()
        if not active or self.disable_adapters or self.merged or not _is_remote_linear(base_layer):
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
    from peft.tuners.lora import variants

    for name, method in (("pissa", "PiSSA"), ("olora", "OLoRA"), ("corda", "CorDA"), ("loftq", "LoftQ")):
        init = getattr(lora.LoraLayer, f"{name}_init")
        setattr(lora.LoraLayer, f"{name}_init", _on_private_copy(init, method))
    kasa: Any = variants.KasaLinearVariant
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
