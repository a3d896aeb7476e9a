"""Rows times a frozen matrix, with the bias inside the product, as `nn.Linear` and `Conv1D` compute it."""

import torch
from torch import Tensor


def product(x_TK: Tensor, v_KN: Tensor, bias_N: Tensor | None, out_TN: Tensor | None = None) -> Tensor:
    """Return `x V (+ b)`, where the sum with the bias rounds once. With three dimensions there is one product per leading index."""
    if x_TK.dim() == 3:
        return torch.bmm(x_TK, v_KN, out=out_TN)
    if bias_N is not None:
        return torch.addmm(bias_N, x_TK, v_KN, out=out_TN)
    return torch.mm(x_TK, v_KN, out=out_TN)
