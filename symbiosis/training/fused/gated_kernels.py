"""silu(gate) * up in one pass over memory each way, on a GPU. Only gate and up are kept."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _forward(gate, up, y, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside).to(tl.float32)
    u = tl.load(up + at, mask=inside).to(tl.float32)
    tl.store(y + at, g * tl.sigmoid(g) * u, mask=inside)


@triton.jit
def _backward(gate, up, dy, dgate, dup, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside).to(tl.float32)
    u = tl.load(up + at, mask=inside).to(tl.float32)
    d = tl.load(dy + at, mask=inside).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(dup + at, d * g * s, mask=inside)
    tl.store(dgate + at, d * u * s * (1 + g * (1 - s)), mask=inside)


class SiluMul(torch.autograd.Function):
    """silu(gate) * up, for tensors of one shape and dtype."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        _forward[(triton.cdiv(y.numel(), BLOCK),)](gate, up, y, y.numel(), BLOCK)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        dy, dgate, dup = dy.contiguous(), torch.empty_like(gate), torch.empty_like(up)
        _backward[(triton.cdiv(dy.numel(), BLOCK),)](gate, up, dy, dgate, dup, dy.numel(), BLOCK)
        return dgate, dup
