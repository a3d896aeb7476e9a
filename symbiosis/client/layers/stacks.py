"""Rows that do not lie one after another, as `F.linear` multiplies them.

Contiguous rows are one matrix, and the bias is added inside their product. Other rows are one matrix where their strides allow it, or where
the weight requires grad; else torch multiplies each matrix of the stack by itself. In float32 and float64 that rounds otherwise.

Rows that are one matrix which lies column by column are multiplied as they lie, and torch computes their gradient so, too: `dx = (Wᵀ dyᵀ)ᵀ`.
"""

from typing import Any

import torch
from torch import Tensor

from symbiosis.client.requests import LARGEST, unshared
from symbiosis.client.session import Session
from symbiosis.protocol import Op, Priority, View


def is_strided(x: Any, has_bias: bool) -> bool:
    """Whether `x` is a stack that `F.linear` does not take for contiguous rows. Without a bias it looks at strides alone, also at those of a
    dimension of one."""
    if not isinstance(x, Tensor) or x.dim() < 3:
        return False
    return not x.is_contiguous() or (not has_bias and not is_one_matrix(x))


def is_one_matrix(x: Tensor) -> bool:
    """Whether `F.linear` sees all rows of a stack as those of one matrix. It looks at the strides of dimensions of one, too.

    >>> import torch
    >>> is_one_matrix(torch.zeros(2, 3, 8)[..., :4]), is_one_matrix(torch.zeros(3, 2, 4).transpose(0, 1))
    (True, False)
    >>> is_one_matrix(torch.zeros(1, 7, 4)[:, -1:])
    False
    """
    sizes, strides = x.shape, x.stride()
    if len(sizes) == 3:  # which most have
        return strides[0] == strides[1] * sizes[1]
    return all(strides[dim] == strides[dim + 1] * sizes[dim + 1] for dim in range(len(sizes) - 2))


def is_by_columns(x: Tensor) -> bool:
    """Whether all rows of `x` are one matrix that libraries multiply column by column, as it lies in a CPU's memory.

    >>> import torch
    >>> is_by_columns(torch.zeros(8, 3).t()), is_by_columns(torch.zeros(8, 2, 3).permute(1, 2, 0)), is_by_columns(torch.zeros(2, 8, 3).mT)
    (True, True, False)
    """
    sizes, strides = x.shape, x.stride()
    if not x.is_cpu:
        return False
    if len(sizes) == 2:
        return strides[0] == 1 and strides[1] == sizes[0]
    if not sizes or strides[-1] == 1:  # as a view of it, a matrix of more than one number lies row by row
        return x.numel() == 1
    rows = 1
    for dim in range(len(sizes) - 2, -1, -1):
        if sizes[dim] != 1 and strides[dim] != rows:
            return False
        rows *= sizes[dim]
    return strides[-1] == rows > 1


def can_be_stacked(x: Tensor, session: Session) -> bool:
    """Whether the executor can be asked for a product for each matrix. What masks rows knows rows only, and very many go in parts."""
    return not session.keeps_secrets and x.numel() * x.element_size() <= LARGEST


def _strides(session: Session, layer: int, op: Op, taken: int, width: int) -> tuple[int, int]:
    """Return those of the matrix of `taken` rows by which `op` multiplies."""
    return (1, taken) if session.manifest[layer].transposes(op) else (width, 1)


def product_of_stack(x: Tensor, session: Session, layer: int, op: Op, width: int, priority: Priority) -> Tensor:
    """Multiply each matrix of `x` by the layer's weight, as `op` does."""
    taken = x.shape[-1]
    x_GTK = x.reshape(-1, *x.shape[-2:])
    along = _strides(session, layer, op, taken, width)
    at_once = max(1, min(LARGEST, session.welcome.limits.max_call_bytes) // (taken * width * x.element_size()))
    parts = []
    for part in x_GTK.split(at_once):  # as many as libraries may copy the weight for
        view = View((len(part), taken, width), (0, *along), 0)
        parts.append(session.call(Op.PRODUCT, layer, part, view=view, priority=priority, gradient=op is Op.DGRAD))
    return unshared(parts[0] if len(parts) == 1 else torch.cat(parts), (*x.shape[:-1], width))


def product_of_columns(
    x: Tensor, session: Session, layer: int, op: Op, width: int, bias: bool, priority: Priority
) -> Tensor:
    """Multiply rows that are one matrix, which lies column by column."""
    taken = x.shape[-1]
    view = View((taken, width), _strides(session, layer, op, taken, width), 0)
    x_TK = x.reshape(-1, taken)
    y = session.call(Op.PRODUCT, layer, x_TK, bias=bias, view=view, priority=priority, gradient=op is Op.DGRAD)
    return unshared(y, (*x.shape[:-1], width))


def gradient_by_columns(dy: Tensor, session: Session, layer: int, op: Op, width: int, priority: Priority) -> Tensor:
    """Return the gradient of rows that lie column by column: the columns of `dy`, multiplied by the layer's weight from the left."""
    given = dy.shape[-1]
    down, along = _strides(session, layer, op, given, width)
    view, dy_NT = View((width, given), (along, down), 0), dy.reshape(-1, given).t()
    dx_KT = session.call(Op.LEFT, layer, dy_NT, view=view, priority=priority, gradient=True)
    return unshared(dx_KT.t(), (*dy.shape[:-1], width))
