"""Grouped products (mixture of experts): the rows of group g times matrix g. Several such calls can be merged into one."""

from collections.abc import Sequence

import torch
from torch import Tensor


def grouped(x_TK: Tensor, v_GKN: Tensor, ends_G: Tensor) -> Tensor:
    """Return rows `ends[g-1]:ends[g]` of x times `V[g]`. Rows behind the last end belong to no group and come back as zeros."""
    y_TN = torch._grouped_mm(x_TK, v_GKN, offs=ends_G)
    rows_T = torch.arange(len(y_TN), device=y_TN.device)
    return y_TN.masked_fill_((rows_T >= ends_G[-1]).unsqueeze(1), 0)  # without waiting for a GPU to tell the number


def merge(ends: Sequence[Tensor], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Merge the concatenated rows of several grouped calls. Return the order that sorts them by group, and the ends of its groups."""
    groups = [_group_of_rows(e, n) for e, n in zip(ends, rows, strict=True)]
    group_T = torch.cat(groups)
    counts_G = torch.bincount(group_T, minlength=len(ends[0]) + 1)[: len(ends[0])]
    return group_T.argsort(stable=True), counts_G.cumsum(0).to(torch.int32)


def _group_of_rows(ends_G: Tensor, rows: int) -> Tensor:
    """Return the group of every row (the number of groups for a row of none)."""
    return torch.searchsorted(ends_G, torch.arange(rows, device=ends_G.device, dtype=ends_G.dtype), right=True)
