"""PEFT methods that would read a weight, rewritten to ask the executor for what they need of it instead.

DoRA needs the norm of each row of `W + s B A`. With the row norms of W, which the executor computes once,

    |W_i + s (BA)_i|^2 = |W_i|^2 + 2 s <(A W^T)_i, B_i> + s^2 B_i (A A^T) B_i^T

where `A W^T` is one forward call of r rows. PEFT's layers are patched once per process; they act as before on layers that
are not remote.
"""

from functools import wraps
from typing import Any

import torch
from torch import Tensor

from symbiosis.client.remote_weight import RemoteWeight
from symbiosis.protocol import Op

_done = False


def support_peft_methods() -> None:
    """Patch PEFT, once, if it is installed."""
    global _done
    if _done:
        return
    _done = True
    try:
        from peft.tuners.lora.dora import DoraLinearLayer
    except ImportError:
        return
    DoraLinearLayer.update_layer = _update_layer(DoraLinearLayer.update_layer)
    DoraLinearLayer.forward = _forward(DoraLinearLayer.forward)


def _remote(base_layer: Any) -> bool:
    weight = getattr(base_layer, "weight", None)
    return isinstance(weight, RemoteWeight) and weight.handle.private is None


def row_norms(base_layer: Any, a_RK: Tensor, b_NR: Tensor, scaling: float) -> Tensor:
    """The norms of the rows of `W + s B A`, W remote: as PEFT means it, a constant to autograd."""
    weight: RemoteWeight = base_layer.weight
    handle = weight.handle
    with torch.no_grad():
        a_RK, b_NR = a_RK.detach().to(weight.dtype), b_NR.detach().to(weight.dtype)
        if getattr(base_layer, "_symbiosis_norms", None) is None:
            wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
            base_layer._symbiosis_norms = handle.session.call(Op.NORMS, handle.index, dtype=wide)
        norms_N = base_layer._symbiosis_norms.to(weight.device)
        aw_RN = handle.session.call(Op.FORWARD, handle.index, a_RK)
        cross_N = (aw_RN.t() * b_NR).sum(1)
        low_N = ((b_NR @ (a_RK @ a_RK.t())) * b_NR).sum(1)
        squared = norms_N + 2 * scaling * cross_N + scaling**2 * low_N
        return squared.clamp_min(0).sqrt().to(weight.dtype)


def _update_layer(original: Any) -> Any:
    @wraps(original)
    def update_layer(
        self: Any, *, base_layer: Any, lora_A: Tensor, lora_B: Tensor, scaling: float, **rest: Any
    ) -> None:
        if not _remote(base_layer):
            original(self, base_layer=base_layer, lora_A=lora_A, lora_B=lora_B, scaling=scaling, **rest)
            return
        norms = row_norms(base_layer, lora_A, lora_B, scaling)
        self.weight = torch.nn.Parameter(norms.cpu() if rest.get("place_on_cpu") else norms, requires_grad=True)

    return update_layer


def _forward(original: Any) -> Any:
    @wraps(original)
    def forward(
        self: Any,
        x: Tensor,
        *,
        lora_A: Any,
        lora_B: Any,
        scaling: float,
        base_layer: Any,
        base_result: Any = None,
        **rest: Any,
    ) -> Tensor:
        if not _remote(base_layer):
            return original(
                self, x, lora_A=lora_A, lora_B=lora_B, scaling=scaling, base_layer=base_layer, base_result=base_result, **rest
            )  # fmt: skip
        norms = row_norms(base_layer, lora_A.weight, lora_B.weight, scaling)
        scale = (self.weight / norms).view(1, -1).to(x.dtype)
        if base_result is None:
            base_result = base_layer(x)
            bias = None if getattr(base_layer, "bias", None) is None else base_layer.bias
        else:
            bias = base_layer.bias
        if bias is not None:
            base_result = base_result - bias
        return (scale - 1) * base_result + scale * lora_B(lora_A(x)) * scaling

    return forward
