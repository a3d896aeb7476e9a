"""DoRA on remote weights. It needs the norms of the rows of `W + s B A`.

Where the values of W are at hand, PEFT's own code makes the norms, and the results are the unsplit model's. Elsewhere the executor gives what they
follow from. Either takes as long as a product of many rows, so a layer keeps its norms, and what they were made of: A and B are compared
with what they were then, bit by bit, because their versions do not tell of every change.
"""

from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from symbiosis.client.requests import is_transformed, is_watched
from symbiosis.client.weights.remote_view import Handle
from symbiosis.client.weights.remote_weight import is_linear_as_served, is_remote_linear
from symbiosis.errors import WeightRead
from symbiosis.protocol import Op, Priority


class Kept(NamedTuple):
    """The norms of a layer, and what they follow from."""

    a_RK: Tensor
    b_NR: Tensor
    how: tuple[Any, ...]
    norms_N: Tensor


_kept: "WeakKeyDictionary[nn.Module, Kept]" = WeakKeyDictionary()
_squared_norms: "WeakKeyDictionary[Handle, Tensor]" = WeakKeyDictionary()


def patch_dora() -> None:
    """Patch the installed PEFT. DoRA of 0.18 reads the weights, and says so where it may not."""
    from peft.tuners.lora import dora

    layer: Any = dora.DoraLinearLayer
    if not hasattr(dora, "cache_decorator"):
        for name in ("update_layer", "forward"):
            setattr(layer, name, _needing_a_newer_peft(getattr(layer, name)))
        return
    layer.update_layer = _update_layer(layer.update_layer)
    layer.forward = _forward(layer.forward, dora)


def _needing_a_newer_peft(original: Any) -> Any:
    @wraps(original)
    def reading(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except WeightRead as error:
            raise WeightRead(
                f"DoRA on weights that may not be read needs peft 0.19 or later; with {version('peft')}, {error}"
            ) from None

    return reading


def _update_layer(original: Any) -> Any:
    @wraps(original)
    def update_layer(
        self: Any, *, base_layer: Any, lora_A: Tensor, lora_B: Tensor, scaling: float, **rest: Any
    ) -> None:
        if not is_remote_linear(base_layer):
            original(self, base_layer=base_layer, lora_A=lora_A, lora_B=lora_B, scaling=scaling, **rest)
            return
        norms = row_norms(base_layer, lora_A, lora_B, scaling, base_layer.weight.dtype)
        self.weight = nn.Parameter(norms.cpu() if rest.get("place_on_cpu") else norms, requires_grad=True)

    return update_layer


def _forward(original: Any, dora: Any) -> Any:
    by_terms = dora.cache_decorator("weight-norm")(_norms_by_terms)

    @wraps(original)
    def forward(
        self: Any, x: Tensor, *, lora_A: Any, lora_B: Any, scaling: float, base_layer: Any, base_result: Any = None,
        **rest: Any,
    ) -> Tensor:  # fmt: skip
        made_of: dict[str, Any] = {"lora_A": lora_A, "lora_B": lora_B, "scaling": scaling, "base_layer": base_layer}
        keeps = not dora.ENABLE_DORA_CACHING and is_linear_as_served(base_layer) and _can_be_kept(lora_A, lora_B)
        if not keeps and not is_remote_linear(base_layer):
            return original(self, x, base_result=base_result, **made_of, **rest)  # type: ignore[no-any-return]
        norms_of = _norms_of_values if base_layer.weight.has_values else by_terms
        norms = (_kept_norms if keeps else _made_norms)(norms_of, self, x.dtype, made_of | rest)
        scale = (self.weight / norms).view(1, -1)
        if base_result is None:
            base_result = F.linear(x, _rows(base_layer).to(x.dtype))
        elif base_layer.bias is not None:
            base_result = base_result - base_layer.bias
        return (scale - 1) * base_result + scale * lora_B(lora_A(x)) * scaling  # type: ignore[no-any-return]

    return forward


def _rows(layer: nn.Module) -> Tensor:
    """Return the weight as `nn.Linear` holds it, one row for each output."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight.t() if weight.handle.layer.kind == "conv1d" else weight  # type: ignore[attr-defined]


# ---------------------------------------------------------------- norms that are kept


def _can_be_kept(lora_a: Any, lora_b: Any) -> bool:
    """Whether nothing but two tensors of this CPU decides about the norms, and nobody watches how they are made."""
    if is_watched() or is_transformed():
        return False
    return all(
        type(lora) is nn.Linear
        and type(lora.weight) is nn.Parameter
        and lora.weight.is_cpu
        and not (lora._forward_hooks or lora._forward_pre_hooks)
        for lora in (lora_a, lora_b)
    )


def _kept_norms(norms_of: Callable[..., Tensor], layer: Any, dtype: torch.dtype, made_of: dict[str, Any]) -> Tensor:
    """Return the norms of `layer`, which are made again if anything has changed that they follow from."""
    layer._cache_clear()  # as PEFT does wherever it caches nothing
    a_RK, b_NR = made_of["lora_A"].weight, made_of["lora_B"].weight
    handle: Handle = made_of["base_layer"].weight.handle
    how = (
        handle.session.number,
        handle.index,
        made_of["scaling"],
        norms_of is _norms_of_values,
        a_RK.dtype,
        b_NR.dtype,
        *_roundings(dtype),
    )
    kept = _kept.get(layer)
    if kept is None or kept.how != how or not (torch.equal(kept.a_RK, a_RK) and torch.equal(kept.b_NR, b_NR)):
        norms_N = _made_norms(norms_of, layer, dtype, made_of)
        kept = _kept[layer] = Kept(a_RK.detach().clone(), b_NR.detach().clone(), how, norms_N)
    return kept.norms_N


def _roundings(dtype: torch.dtype) -> tuple[Any, ...]:
    """Return what else decides how the norms are rounded, and what autograd may do with them."""
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    how = torch.get_num_threads(), torch.get_float32_matmul_precision()
    return dtype, autocast, *how, torch.is_inference_mode_enabled()


def _made_norms(norms_of: Callable[..., Tensor], layer: Any, dtype: torch.dtype, made_of: dict[str, Any]) -> Tensor:
    return norms_of(layer, dtype=dtype, **made_of)


def _norms_of_values(
    self: Any, lora_A: Any, lora_B: Any, scaling: float, base_layer: Any, dtype: torch.dtype, **adapter: Any
) -> Tensor:
    """Return the norms as PEFT makes them. They are constants to autograd."""
    with torch.no_grad():
        change_NK = self.get_lora_weight(lora_A=lora_A, lora_B=lora_B, **adapter).to(dtype)
        weight = base_layer.weight.values_to_read().to(dtype)
        return self.get_weight_norm(weight=weight, lora_weight=change_NK, scaling=scaling, **adapter)  # type: ignore[no-any-return]


# ---------------------------------------------------------------- norms by the executor's terms


def _norms_by_terms(
    self: Any, lora_A: Any, lora_B: Any, scaling: float, base_layer: Any, dtype: torch.dtype, **_: Any
) -> Tensor:
    return row_norms(base_layer, lora_A.weight, lora_B.weight, scaling, dtype)


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
