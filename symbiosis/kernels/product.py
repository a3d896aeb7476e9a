"""Rows times a frozen matrix, with the bias inside the product, as `nn.Linear` and `Conv1D` compute it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def product(
    x_TK: Tensor, v_KN: Tensor, bias_N: Tensor | None, out_TN: Tensor | None = None, of: int | None = None
) -> Tensor:
    """Return `x V (+ b)`, where the sum with the bias rounds once. With three dimensions there is one product per leading index. `of`: the
    columns of the matrix of which V has some."""
    if x_TK.dim() == 3:
        return torch.bmm(x_TK, v_KN, out=out_TN)
    if bias_N is not None:
        return torch.addmm(bias_N, x_TK, v_KN, out=out_TN)
    return torch.mm(x_TK, v_KN, out=out_TN)


def sum_of_products(
    members: Sequence[tuple[Tensor, Tensor]], out_TK: Tensor | None = None, multiply: Callable[..., Tensor] = product
) -> Tensor:
    """Return the gradient of a group's rows: the sum of what each member's gradient and matrix make, the last one's first. Whoever computes
    it adds in this order, so that bits are the same."""
    *others, (dy_TN, v_NK) = members
    dx_TK = multiply(dy_TN, v_NK, None, out_TK)
    for dy_TN, v_NK in reversed(others):
        dx_TK += multiply(dy_TN, v_NK, None)
    return dx_TK
