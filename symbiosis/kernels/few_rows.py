"""Products of few rows on a CPU, where libraries differ by a factor of two: the fastest formula is measured, not guessed.

Each formula rounds in its own way. So these are for the joined rows of several calls only; a call by itself is computed as
`nn.Linear` would.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter

import torch
from torch import Tensor

ROWS_TRIED = (2, 3, 4, 6, 8, 12, 16, 24, 32)
BYTES_TRIED = 1 << 26  # of matrices in turn, so that they come from memory and not from a cache
TIMES_TRIED = 3
WORTH = 0.9  # another formula than the usual one must take less than this much of its time
Formula = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Kind = tuple[torch.Size, torch.dtype]


def by_rows(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """As `nn.Linear` computes it."""
    return torch.nn.functional.linear(x_TK, weight_NK, bias_N)


def by_columns(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """The weight is multiplied by the rows, and what comes is transposed."""
    if bias_N is None:
        return torch.mm(weight_NK, x_TK.t()).t()
    return torch.addmm(bias_N[:, None], weight_NK, x_TK.t()).t()


def by_onednn(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """As `torch.compile` does it on x86."""
    return torch.ops.mkldnn._linear_pointwise(x_TK, weight_NK, bias_N, "none", [], "")


class FewRows:
    """Takes the place of `product`: the formula to use, by the shape of the weight and the number of rows.

    >>> few = FewRows([torch.randn(64, 32) for _ in range(4)])
    >>> few(torch.zeros(3, 32), torch.randn(64, 32).t(), None).shape
    torch.Size([3, 64])
    """

    def __init__(self, weights: Iterable[Tensor], tried: Sequence[int] = ROWS_TRIED) -> None:
        same: dict[Kind, list[Tensor]] = defaultdict(list)
        for weight in weights:
            if weight.numel():
                same[weight.shape, weight.dtype].append(weight)
        self._most = max(tried)
        self._chosen = {kind: _choose(some, tried) for kind, some in same.items()}

    def __call__(self, x_TK: Tensor, v_KN: Tensor, bias_N: Tensor | None, out_TN: None = None) -> Tensor:
        weight_NK = v_KN.t()
        chosen = self._chosen.get((weight_NK.shape, weight_NK.dtype))
        if chosen is None or len(x_TK) > self._most:
            return by_rows(x_TK, weight_NK, bias_N)
        return chosen[len(x_TK)](x_TK, weight_NK, bias_N)


def _choose(weights: list[Tensor], tried: Sequence[int]) -> list[Formula]:
    """By the number of rows, for weights of one shape."""
    weights = weights[: math.ceil(BYTES_TRIED / weights[0].nbytes)]
    chosen: list[Formula] = [by_rows, by_rows]
    for rows in tried:
        x_TK = torch.ones(rows, weights[0].shape[1], dtype=weights[0].dtype)
        seconds = {formula: _seconds(formula, x_TK, weights) for formula in (by_rows, by_columns, by_onednn)}
        best = min(seconds, key=lambda formula: seconds[formula])
        chosen += [best if seconds[best] < WORTH * seconds[by_rows] else by_rows] * (rows + 1 - len(chosen))
    return chosen


def _seconds(formula: Formula, x_TK: Tensor, weights: list[Tensor]) -> float:
    """What the products with all the weights take, the best of some; infinity if this machine has no such formula."""
    best = math.inf
    try:
        for _ in range(TIMES_TRIED):
            begun = perf_counter()
            for weight_NK in weights:
                formula(x_TK, weight_NK, None)
            best = min(best, perf_counter() - begun)
    except (AttributeError, NotImplementedError, RuntimeError):
        return math.inf
    return best
