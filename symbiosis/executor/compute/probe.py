"""Measures how long one multiplication takes on this CPU, in every dtype, so that no first call is taken for a short one."""

from collections.abc import Callable, Hashable, Iterator
from functools import cache
from time import perf_counter

import torch
from torch import Tensor

from symbiosis.executor.calls.price import products_of_bytes
from symbiosis.kernels.integers import modular_product
from symbiosis.protocol import WEIGHT_BITS, Op
from symbiosis.transport.tensors import TORCH_DTYPE

ROWS, WIDTH, STRIDE, COLUMNS = 8, 2048, 512, 16  # a fiftieth of a second for all dtypes, where none is fast
TRIED = 3
FLOATS = ("float32", "float64", "bfloat16", "float16")


@cache
def seconds_by_kind(integers: bool) -> dict[Hashable, float]:
    """Return the seconds of a multiplication for each kind of call (`kind_of`). It is measured once in a process."""
    return dict(_measured(integers))


def _measured(integers: bool) -> Iterator[tuple[Hashable, float]]:
    ops = [op for op in Op if op.traits.multiplies]
    for dtype in FLOATS + tuple(WEIGHT_BITS) * integers:
        for by_rows in (False, True):
            seconds = _seconds(dtype, by_rows)
            yield from (((op, dtype, by_rows), seconds) for op in ops)


def _seconds(dtype: str, by_rows: bool) -> float:
    """Return the seconds of a multiplication by a matrix that lies row by row, or column by column."""
    x_TK, count = torch.ones(ROWS, WIDTH, dtype=TORCH_DTYPE[dtype]), ROWS * WIDTH * COLUMNS
    shape = (WIDTH, STRIDE) if by_rows else (COLUMNS, WIDTH)
    if dtype in WEIGHT_BITS:
        w_DKN = torch.ones(WEIGHT_BITS[dtype] // 8, *shape, dtype=torch.int8)
        digits_DKN = (w_DKN if by_rows else w_DKN.mT)[..., :COLUMNS]
        return _best(lambda: modular_product(x_TK, digits_DKN)) / (count * products_of_bytes(dtype))
    w_KN = torch.ones(shape, dtype=x_TK.dtype)
    matrix_KN = (w_KN if by_rows else w_KN.t())[:, :COLUMNS]
    return _best(lambda: torch.mm(x_TK, matrix_KN)) / count


def _best(multiply: Callable[[], Tensor]) -> float:
    times = []
    for _ in range(TRIED):
        begun = perf_counter()
        multiply()
        times.append(perf_counter() - begun)
    return min(times)
