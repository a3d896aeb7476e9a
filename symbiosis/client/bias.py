"""Who adds a layer's bias: the executor, inside the product, where the sum rounds once as in the unsplit layer; or the client.

The executor adds the base's own. The client's can change at any time, and torch does not tell of every way: fused optimizers, `.data`,
numpy and DLPack raise no version. So nothing is remembered of it: each call compares its values with what the executor adds. Where
that would mean to wait (on a GPU) or cannot be asked (in code that is traced), the executor adds its own, and the difference is taken
away here: as long as there is none, that changes no bit.
"""

import torch
from torch import Tensor

from symbiosis.client.remote_view import Handle


def shares(handle: Handle, bias: Tensor, dtype: torch.dtype, watched: bool) -> tuple[bool, bool]:
    """Of a product in `dtype`, for a client whose layer has this bias: whether the executor adds its own, and whether something is then
    left to `complete`. `watched`: the code is traced."""
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


def complete(y: Tensor, bias: Tensor, base: Tensor | None) -> Tensor:
    """The sum, of a product to which the executor added `base`, unless that is None."""
    bias = bias.to(y.dtype)
    return y + bias if base is None else y - (base.to(y) - bias)
