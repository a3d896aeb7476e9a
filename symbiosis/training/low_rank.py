"""LoRA of several runs at one layer, by segments of rows.

    y += s (x Aᵀ) Bᵀ        dB += s gᵀ (x Aᵀ)        dA += s (g B)ᵀ x        dx += s (g B) A

Products are made in the dtype of the rows, as PEFT's layers make them under autocast. Gradients are added to those of the runs' parameters, in their
dtype, in the backward pass itself: no node and no tensor for each matrix of each run.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class LowRank(NamedTuple):
    """One adapter's matrices at one layer."""

    a: nn.Parameter  # [R, K]
    b: nn.Parameter  # [N, R]
    scale: float


class LowRankSegment(NamedTuple):
    """The rows of one run at a layer."""

    rows: slice
    matrices: LowRank


def adapt(y: Tensor, x: Tensor, anchor: Tensor, segments: list[LowRankSegment]) -> Tensor:
    """Return what the adapters make of the base's product `y` of `x`, in the memory of `y`. `anchor` requires a gradient, so that the first layer
    has a backward pass, too."""
    return _Adapt.apply(y, x, anchor, segments)  # type: ignore[no-any-return, no-untyped-call]


class _Adapt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, anchor: Tensor, segments: list[LowRankSegment]) -> Tensor:
        y_TN, x_TK = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        lows = []
        for rows, (a, b, scale) in segments:
            low_TR = x_TK[rows] @ a.to(x.dtype).t()
            y_TN[rows] += (low_TR @ b.to(x.dtype).t()) * scale
            lows.append(low_TR)
        ctx.mark_dirty(y)
        ctx.segments = segments
        ctx.save_for_backward(x, *lows)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, *lows = ctx.saved_tensors
        dy_TN, x_TK = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx_TK = torch.zeros_like(x_TK) if ctx.needs_input_grad[1] else None
        for (rows, (a, b, scale)), low_TR in zip(ctx.segments, lows, strict=True):
            g_TN = dy_TN[rows] * scale
            dlow_TR = g_TN @ b.to(dy.dtype)
            gradient_of(b).add_(g_TN.t() @ low_TR)
            gradient_of(a).add_(dlow_TR.t() @ x_TK[rows])
            if dx_TK is not None:
                torch.mm(dlow_TR, a.to(dy.dtype), out=dx_TK[rows])
        return dy, None if dx_TK is None else dx_TK.view(x.shape), None, None


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return what a parameter's gradient is added to."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
