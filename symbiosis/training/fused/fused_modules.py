"""RMS norms, gated feed-forwards and rotary positions with fewer passes over memory: by Liger's kernels if that package is there, else by torch's
and our own."""

import inspect
import logging
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from symbiosis.offload.logit_check import place_of
from symbiosis.training.fused.module_forward import ModuleForward, is_watched

logger = logging.getLogger("symbiosis")
GATED = "gate_proj", "up_proj", "down_proj", "act_fn"
ROTARY = "apply_rotary_pos_emb"
RENAMED = {"past_key_values", "past_key_value"}  # arguments that a decorator gives other names


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


class AttentionForward(ModuleForward):
    """The `forward` of an attention: its class's code, with another function for rotary positions."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or kwargs.keys() & RENAMED or is_watched():
            return self.own(*args, **kwargs)
        kind: Any = type(self.module)
        return with_fused_rotary(kind)(self.module, *args, **kwargs)


@cache
def with_fused_rotary(kind: Any) -> Callable[..., Any]:
    """Return a class's `forward` for which `apply_rotary_pos_emb` is `rotary`."""
    code: Any = inspect.unwrap(kind.forward)
    names = {**code.__globals__, ROTARY: partial(rotary, code.__globals__[ROTARY])}
    made = FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)
    made.__kwdefaults__ = code.__kwdefaults__
    return made


def rotary(own: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Turn queries and keys as `own` does."""
    if (
        args
        or kwargs
        or not q.is_cuda
        or cos.stride() != sin.stride()
        or not _can_be_turned(q, cos)
        or not _can_be_turned(k, cos)
    ):
        return own(q, k, cos, sin, *args, **kwargs)
    from symbiosis.training.fused.fused_kernels import rotate

    return rotate(q, k, cos, sin)


def _can_be_turned(x: Tensor, cos: Tensor) -> bool:
    return (
        x.dim() == 4
        and cos.dim() == 3
        and x.shape[2:] == cos.shape[1:]
        and x.shape[-1] % 2 == 0
        and cos.shape[0] in (1, x.shape[0])
        and x.dtype is cos.dtype
        and x.stride(-1) == cos.stride(-1) == 1
    )


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
    from symbiosis.training.fused.fused_kernels import silu_mul

    return silu_mul  # type: ignore[no-any-return]


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


def attention_forward(module: nn.Module) -> AttentionForward | None:
    """Return what may take the place of an attention's `forward`, if its class turns queries and keys as Llama's does; tried on random ones."""
    code: Any = inspect.unwrap(type(module).forward)
    own = getattr(code, "__globals__", {}).get(ROTARY)
    if own is None or ROTARY not in code.__code__.co_names or find_spec("triton") is None:
        return None
    device, dtype = place_of(module)
    return AttentionForward(module) if device.type == "cuda" and turns_as_llama(own, device, dtype) else None


@cache
@torch.no_grad()
def turns_as_llama(own: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a function turns random queries and keys as ours does, apart from rounding."""
    q, k, cos, sin = (
        _rows(16, torch.empty(0, device=device, dtype=dtype), *shape)
        for shape in ((2, 3, 5), (2, 1, 5), (1, 5), (1, 5))
    )
    try:
        pairs = zip(rotary(own, q, k, cos, sin), own(q, k, cos, sin), strict=True)
    except Exception:  # a function of another kind, or a kernel that cannot be compiled here
        return False
    return all(is_near(found, expected) for found, expected in pairs)


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


def _rows(width: int, like: Tensor, *shape: int) -> Tensor:
    """Return random rows, so small that they show what is added to their squares."""
    return (0.1 * torch.randn(*shape or (3,), width, generator=torch.Generator().manual_seed(width + len(shape)))).to(
        like
    )


@torch.no_grad()
def are_near(fused: Any, rows: Tensor) -> bool:
    """Whether a module's two ways have results that differ by rounding only."""
    try:
        return is_near(fused(rows), fused.own(rows))
    except Exception as error:  # a module of another kind, or a kernel that cannot be compiled here
        logger.debug("%s is left as it is: %s", type(fused.module).__name__, error)
        return False


def is_near(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype is not expected.dtype:
        return False
    near = 8 * torch.finfo(expected.dtype).eps
    return bool((found.double() - expected.double()).abs().max() <= near * expected.double().abs().max())
