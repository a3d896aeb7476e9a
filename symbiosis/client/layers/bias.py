"""Decides who adds a layer's bias: the executor, inside the product, where the sum rounds once as in the unsplit layer, or the client.

The executor can only add the base's bias. The client's may change at any time, and torch does not report every change: fused
optimizers, `.data`, numpy and DLPack raise no version. So each call compares the client's values with those that the executor adds.
On a GPU comparing would require waiting, and traced code cannot compare at all. There the executor adds the base's bias and the client
subtracts the difference, which is zero and changes no bit until the bias is trained.
"""

from typing import Any

import torch
from torch import Tensor

from symbiosis.client.requests import is_watched
from symbiosis.client.weights.remote_view import Handle


def who_adds_bias(handle: Handle, bias: Tensor, dtype: torch.dtype, watched: bool) -> tuple[bool, bool]:
    """Decide who adds a bias to a product in `dtype`.

    Returns whether the executor adds the base's bias, and whether something is then left for `add_rest`. `watched`: the code is traced."""
    base = handle.bias
    if base is None:
        return False, True
    if bias.is_cpu and base.is_cpu and not watched:
        as_it_is = bias.dtype is base.dtype
        same = torch.equal(bias, base) if as_it_is else torch.equal(bias.to(dtype), base.to(dtype))
        return same, not same or (bias.requires_grad and torch.is_grad_enabled())
    if base.device != bias.device and not watched:
        handle.bias = base.to(bias.device)
    return bias.shape == base.shape, True


def add_rest(y: Tensor, bias: Tensor, base: Tensor | None) -> Tensor:
    """Add a bias to a product that already includes `base`, or no bias at all if `base` is None."""
    bias = bias.to(y.dtype)
    if base is None:
        return y + bias
    return y - (base.to(y) - bias) if is_watched() or not y.is_cpu else _Included.apply(y, bias)  # type: ignore[no-any-return, no-untyped-call]


class _Included(torch.autograd.Function):
    """Gives a bias that a product includes its gradient: to subtract a difference of zero would give some of its zeros another sign."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        ctx.shape = bias.shape
        ctx.set_materialize_grads(False)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        return dy, None if dy is None else dy.sum_to_size(ctx.shape)


def add_rest_to_rows(y: Tensor, bias: Tensor, base: Tensor | None) -> Tensor:
    """Add it as `F.linear` does to contiguous rows: to one matrix of all rows, since the bias's gradient is summed as that lies."""
    return add_rest(y.view(-1, y.shape[-1]), bias, base).view(y.shape) if y.dim() > 2 else add_rest(y, bias, base)
