"""Products of single values that torch makes in many passes over memory, in one each way, on a GPU: silu(gate) * up, and rotary positions."""

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


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    x, y, cos, sin, heads, length, x_batch, x_head, x_row, y_batch, y_head, y_row, cos_batch, cos_row,
    HALF: tl.constexpr, WIDE: tl.constexpr, BACK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One row of a sequence, some heads of it."""
    batch, row = tl.program_id(0) // length, tl.program_id(0) % length
    head, i = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, WIDE)[None, :]
    inside = (head < heads) & (i < HALF)
    at = batch.to(tl.int64) * cos_batch + row * cos_row + i
    c1 = tl.load(cos + at, mask=i < HALF, other=0).to(tl.float32)
    c2 = tl.load(cos + at + HALF, mask=i < HALF, other=0).to(tl.float32)
    s1 = tl.load(sin + at, mask=i < HALF, other=0).to(tl.float32)
    s2 = tl.load(sin + at + HALF, mask=i < HALF, other=0).to(tl.float32)
    from_ = x + batch.to(tl.int64) * x_batch + row.to(tl.int64) * x_row + head * x_head + i
    x1 = tl.load(from_, mask=inside).to(tl.float32)
    x2 = tl.load(from_ + HALF, mask=inside).to(tl.float32)
    if BACK:
        y1, y2 = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        y1, y2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    to = y + batch.to(tl.int64) * y_batch + row.to(tl.int64) * y_row + head * y_head + i
    tl.store(to, y1, mask=inside)
    tl.store(to + HALF, y2, mask=inside)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    batch, heads, length, width = x.shape
    y = x.new_empty(batch, length, heads, width).transpose(1, 2)  # as the products on either side of it have their rows
    strides = *x.stride()[:3], *y.stride()[:3], cos.stride(0) if len(cos) > 1 else 0, cos.stride(1)
    wide, at_once = triton.next_power_of_2(width // 2), 8
    grid = batch * length, triton.cdiv(heads, at_once)
    _rotate[grid](x, y, cos, sin, heads, length, *strides, width // 2, wide, back, at_once)
    return y


class Rotary(torch.autograd.Function):
    """Queries and keys [B, H, S, D] turned by cosines and sines [B or 1, S, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotated(q, cos, sin, False), _rotated(k, cos, sin, False)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        dq, dk = (each if each.stride(-1) == 1 else each.contiguous() for each in (dq, dk))
        return _rotated(dq, cos, sin, True), _rotated(dk, cos, sin, True), None, None


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


# without the check for transforms of torch.func, which never come here
rotate: Any = super(torch.autograd.Function, Rotary).apply  # type: ignore[misc]
silu_mul: Any = super(torch.autograd.Function, SiluMul).apply  # type: ignore[misc]
