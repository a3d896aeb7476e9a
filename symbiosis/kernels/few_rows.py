"""Products of few rows on a CPU, where libraries differ by a factor of two: the fastest formula is measured, not guessed.

Each formula rounds in its own way. So they are used for the batched rows of several calls only. A call by itself is computed as
`nn.Linear` would.

One formula is written in C, in `few_rows.c`. It is compiled for this processor when an executor of a large model starts. Without a C
compiler, the others remain.
"""

import ctypes
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from symbiosis.kernels import compile_c

ROWS_TRIED = (2, 3, 4, 6, 8, 12, 16, 24, 32)
LEAST_BYTES = 1 << 16  # of a matrix: a smaller one is multiplied sooner than it is called
BYTES_TRIED = 1 << 26  # so many bytes of matrices are tried in turn, so that they come from memory and not from a cache
TIMES_TRIED = 3
SOURCE = Path(__file__).with_suffix(".c")
MOST_ROWS, MULTIPLE = 8, 16  # the C formula takes at most so many rows, of a width that is such a multiple
WORTH = 0.9  # another formula must take less than this part of the usual one's time
Formula = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Kind = tuple[tuple[int, ...], torch.dtype]


def by_rows(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Multiply as `nn.Linear` does."""
    return torch.nn.functional.linear(x_TK, weight_NK, bias_N)


def by_columns(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Multiply the weight by the transposed rows, and transpose the result."""
    if bias_N is None:
        return torch.mm(weight_NK, x_TK.t()).t()
    return torch.addmm(bias_N[:, None], weight_NK, x_TK.t()).t()


def by_onednn(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Multiply as `torch.compile` does on x86."""
    return torch.ops.mkldnn._linear_pointwise(x_TK, weight_NK, bias_N, "none", [], "")


def by_stripes(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, threads: int = 1) -> Tensor:
    """Multiply in C: each stripe of the weight is read once for all rows."""
    (T, K), N, multiply = x_TK.shape, len(weight_NK), compiled_kernel()
    if multiply is None or T > MOST_ROWS or K % MULTIPLE or {x_TK.dtype, weight_NK.dtype} != {torch.float32}:
        raise NotImplementedError
    x_TK, weight_NK, y_TN = x_TK.contiguous(), weight_NK.contiguous(), torch.empty(T, N)
    multiply(T, x_TK.data_ptr(), weight_NK.data_ptr(), y_TN.data_ptr(), K, N, threads)
    return y_TN if bias_N is None else y_TN.add_(bias_N)


@lru_cache(maxsize=1)
def compiled_kernel() -> Callable[..., None] | None:
    """Return the function of `few_rows.c`, compiled for this processor, or None if that cannot be."""
    arguments = [ctypes.c_long, *[ctypes.c_void_p] * 3, *[ctypes.c_long] * 3]
    library = compile_c.load(SOURCE, *compile_c.FAST, few_rows=(arguments, None))
    return None if library is None else library.few_rows


class FewRows:
    """Takes the place of `product`, with the fastest formula for the weight's shape and the number of rows.

    >>> few = FewRows([torch.randn(64, 32) for _ in range(4)])
    >>> few(torch.zeros(3, 32), torch.randn(64, 32).t(), None).shape
    torch.Size([3, 64])
    """

    def __init__(self, weights: Iterable[Tensor], tried: Sequence[int] = ROWS_TRIED, threads: int = 1) -> None:
        """`threads` may compute one product, if there are so many cores, but no fewer than torch's."""
        threads = max(torch.get_num_threads(), min(threads, len(os.sched_getaffinity(0))))
        same: dict[Kind, list[Tensor]] = defaultdict(list)
        for weight in weights:
            if weight.nbytes >= LEAST_BYTES:
                same[weight.shape, weight.dtype].append(weight)
        formulas: list[Formula] = [by_rows, by_columns, by_onednn]
        if sum(weight.nbytes for some in same.values() for weight in some) > BYTES_TRIED:
            # Compiling takes a second: not for what a cache holds.
            formulas.append(partial(by_stripes, threads=threads))
        self._most = max(tried)
        self._chosen = {kind: _choose(some, tried, formulas) for kind, some in same.items()}

    def __call__(
        self, x_TK: Tensor, v_KN: Tensor, bias_N: Tensor | None, out_TN: None = None, of: int | None = None
    ) -> Tensor:
        """`of`: the columns of the matrix of which V has some. They are multiplied as the whole matrix would be."""
        weight_NK = v_KN.t()
        chosen = self._chosen.get(((of or len(weight_NK), weight_NK.shape[1]), weight_NK.dtype))
        if chosen is None or len(x_TK) > self._most or not weight_NK.is_contiguous():  # views were not measured
            return by_rows(x_TK, weight_NK, bias_N)
        return chosen[len(x_TK)](x_TK, weight_NK, bias_N)


def _choose(weights: list[Tensor], tried: Sequence[int], formulas: Sequence[Formula]) -> list[Formula]:
    """Return the fastest formula for each number of rows, for weights of one shape."""
    weights = weights[: math.ceil(BYTES_TRIED / weights[0].nbytes)]
    chosen: list[Formula] = [by_rows, by_rows]
    for rows in tried:
        x_TK = torch.ones(rows, weights[0].shape[1], dtype=weights[0].dtype)
        seconds = {formula: _seconds(formula, x_TK, weights) for formula in formulas}
        best = min(seconds, key=lambda formula: seconds[formula])
        chosen += [best if seconds[best] < WORTH * seconds[by_rows] else by_rows] * (rows + 1 - len(chosen))
    return chosen


def _seconds(formula: Formula, x_TK: Tensor, weights: list[Tensor]) -> float:
    """Return the time of the products with all the weights, the best of several; infinity if this machine lacks the formula."""
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
