"""Stacks of rows that do not lie one after another, as `F.linear` multiplies them.

Contiguous rows are one matrix, and the bias is added inside their product. Other rows are one matrix where their strides allow it, or where
the weight requires grad; else torch multiplies each matrix of the stack by itself. In float32 and float64 that rounds otherwise.
"""

from typing import Any

import torch
from torch import Tensor

from symbiosis.client.requests import LARGEST, unshared
from symbiosis.client.session import Session
from symbiosis.protocol import Op, Priority, View


def is_strided(x: Any, has_bias: bool) -> bool:
    """Whether `F.linear` does not take `x` for contiguous rows. Without a bias it looks at strides alone, also at those of a dimension of one."""
    if not isinstance(x, Tensor) or x.dim() < 3:
        return False
    return not x.is_contiguous() or (not has_bias and not is_one_matrix(x))


def is_one_matrix(x: Tensor) -> bool:
    """Whether all rows of a stack can be seen as those of one matrix, without a copy.

    >>> import torch
    >>> is_one_matrix(torch.zeros(2, 3, 8)[..., :4]), is_one_matrix(torch.zeros(3, 2, 4).transpose(0, 1))
    (True, False)
    """
    sizes, strides = x.shape, x.stride()
    if len(sizes) == 3:  # which most have
        return strides[0] == strides[1] * sizes[1] or (sizes[0] == 1 and x.is_contiguous())
    return all(strides[dim] == strides[dim + 1] * sizes[dim + 1] for dim in range(len(sizes) - 2))


def can_be_stacked(x: Tensor, session: Session) -> bool:
    """Whether the executor can be asked for a product for each matrix. What masks rows knows rows only, and very many go in parts."""
    return not session.keeps_secrets and x.numel() * x.element_size() <= LARGEST


def product_of_stack(x: Tensor, session: Session, layer: int, op: Op, width: int, priority: Priority) -> Tensor:
    """Multiply each matrix of `x` by the weight of a linear layer (FORWARD), or by its transpose (DGRAD)."""
    x_GTK = x.reshape(-1, *x.shape[-2:])
    taken = x.shape[-1]
    along = (1, taken) if op is Op.FORWARD else (width, 1)
    at_once = max(1, min(LARGEST, session.welcome.limits.max_call_bytes) // (taken * width * x.element_size()))
    parts = []
    for part in x_GTK.split(at_once):  # as many as libraries may copy the weight for
        view = View((len(part), taken, width), (0, *along), 0)
        parts.append(session.call(Op.PRODUCT, layer, part, view=view, priority=priority, gradient=op is Op.DGRAD))
    return unshared(parts[0] if len(parts) == 1 else torch.cat(parts), (*x.shape[:-1], width))
