"""Decides who adds a layer's bias: the executor, inside the product, where the sum rounds once as in the unsplit layer, or the client.

The executor can only add the base's bias. The client's may change at any time, and torch does not report every change: fused
optimizers, `.data`, numpy and DLPack raise no version. So each call compares the client's values with those that the executor adds.
On a GPU comparing would require waiting, and traced code cannot compare at all. There the executor adds the base's bias and the client
subtracts the difference, which is zero and changes no bit until the bias is trained.
"""

import torch
from torch import Tensor

from symbiosis.client.weights.view import Handle


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
    return y + bias if base is None else y - (base.to(y) - bias)
