"""RMS norms and gated feed-forwards with fewer passes over memory: by Liger's kernels if that package is there, else by torch's and our own."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from symbiosis.offload.logit_check import place_of
from symbiosis.training.fused.module_forward import ModuleForward, is_watched

GATED = "gate_proj", "up_proj", "down_proj", "act_fn"


class NormForward(ModuleForward):
    """The `forward` of an RMS norm."""

    def __init__(self, module: nn.Module, eps: float, offset: float) -> None:
        super().__init__(module)
        self.eps, self.offset = eps, offset

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight: Tensor | None = self.module._parameters["weight"]
        if args or kwargs or weight is None or x.dtype is not weight.dtype or is_watched():
            return self.own(x, *args, **kwargs)  # type: ignore[no-any-return]
        if x.is_cuda and has_liger():
            from liger_kernel.ops.rms_norm import LigerRMSNormFunction

            mode = "gemma" if self.offset else "llama"
            return LigerRMSNormFunction.apply(x, weight, self.eps, self.offset, mode, False)  # type: ignore[no-any-return]
        if self.offset:
            weight = weight + self.offset
        return torch._fused_rms_norm(x, weight.shape, weight, self.eps)[0]  # type: ignore[no-any-return]


class GatedForward(ModuleForward):
    """The `forward` of `down(act(gate(x)) * up(x))`."""

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        module: Any = self.module
        multiply = _gate_of(module) if x.is_cuda else None
        if args or kwargs or multiply is None or is_watched():
            return self.own(x, *args, **kwargs)  # type: ignore[no-any-return]
        return module.down_proj(multiply(module.gate_proj(x), module.up_proj(x)))  # type: ignore[no-any-return]


@cache
def has_liger() -> bool:
    return find_spec("liger_kernel") is not None


def _gate_of(module: Any) -> Callable[[Tensor, Tensor], Tensor] | None:
    kind: Any = type(module.act_fn)
    return gate_of(kind)


@cache
def gate_of(activation: Any) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return what multiplies one tensor's activation by another on a GPU, or None."""
    if has_liger():
        from liger_kernel.ops.geglu import LigerGELUMulFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        known = {SiLUActivation: LigerSiLUMulFunction, nn.SiLU: LigerSiLUMulFunction, GELUTanh: LigerGELUMulFunction}
        return known[activation].apply if activation in known else None  # type: ignore[no-any-return]
    if activation not in (SiLUActivation, nn.SiLU) or find_spec("triton") is None:
        return None
    from symbiosis.training.fused.gated_kernels import SiluMul

    return SiluMul.apply  # type: ignore[return-value]


def norm_forward(module: nn.Module) -> NormForward | None:
    """Return what may take the place of a norm's `forward`, tried on random rows; None if it is no RMS norm, or one of its own kind."""
    weight = module._parameters.get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or type(weight) is not nn.Parameter or not isinstance(eps, float):
        return None
    rows = _rows(weight.shape[-1], weight)
    for offset in (0.0, 1.0):
        fused = NormForward(module, eps, offset)
        if are_near(fused, rows):
            return fused
    return None


def gated_forward(module: nn.Module) -> GatedForward | None:
    """Return what may take the place of a gated feed-forward's `forward`, tried on random rows; None if there is no kernel for it."""
    if not all(isinstance(getattr(module, name, None), nn.Module) for name in GATED):
        return None
    device, dtype = place_of(module)
    if device.type != "cuda" or _gate_of(module) is None or not isinstance(width := _width(module), int):
        return None
    fused = GatedForward(module)
    return fused if are_near(fused, _rows(width, torch.empty(0, device=device, dtype=dtype))) else None


def _width(module: nn.Module) -> Any:
    return getattr(module.gate_proj, "in_features", None)


def _rows(width: int, like: Tensor) -> Tensor:
    """Return random rows, so small that they show what is added to their squares."""
    return (0.1 * torch.randn(3, width, generator=torch.Generator().manual_seed(0))).to(like)


@torch.no_grad()
def are_near(fused: Any, rows: Tensor) -> bool:
    """Whether a module's two ways have results that differ by rounding only."""
    found, expected = fused(rows), fused.own(rows)
    if found.shape != expected.shape or found.dtype is not expected.dtype:
        return False
    near = 8 * torch.finfo(expected.dtype).eps
    return bool((found.double() - expected.double()).abs().max() <= near * expected.double().abs().max())
