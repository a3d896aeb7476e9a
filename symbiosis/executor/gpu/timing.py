"""Measures at the start how long products take on a GPU, and from how many rows on batching them gains nothing.

Later nobody waits for a product, so its time has to be estimated.
"""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from symbiosis.kernels.product import product

ROWS_TRIED = (64, 128, 256, 512, 1024, 2048, 4096)
TIMES_TRIED = 8
NEARLY = 0.85  # of twice the time, for twice the rows


class GpuTiming:
    """Estimates the time of a product: by the bytes of its matrices, or by its rows if these are many. It measures the commonest matrix, and zeros
    for one that is packed."""

    def __init__(self, weights: Sequence[Tensor], device: torch.device) -> None:
        shapes = Counter(weight.shape for weight in weights if weight.dim() == 2)
        matrix = next(weight for weight in weights if weight.shape == shapes.most_common(1)[0][0])
        if matrix.is_meta:
            matrix = torch.zeros_like(matrix, device=device)
        seconds = {rows: _seconds(matrix, rows) for rows in ROWS_TRIED}
        self._per_byte = seconds[ROWS_TRIED[0]] / matrix.nbytes
        self._per_row = seconds[ROWS_TRIED[-1]] / ROWS_TRIED[-1] / matrix.nbytes
        pairs = zip(ROWS_TRIED, ROWS_TRIED[1:], strict=False)
        self.batch_below = next(
            (rows for rows, double in pairs if seconds[double] > NEARLY * 2 * seconds[rows]), ROWS_TRIED[-1]
        )

    def seconds(self, weight: Tensor, rows: int) -> float:
        """Return the seconds of a product of so many rows, each with one of the weight's matrices."""
        matrix = weight if weight.dim() == 2 else weight[0]
        return max(self._per_byte * weight.nbytes, self._per_row * rows * matrix.nbytes)


def _seconds(matrix: Tensor, rows: int) -> float:
    """Return the seconds of a product, the shortest of several."""
    x_TK = torch.zeros(rows, matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = math.inf
    for _ in range(TIMES_TRIED):
        begin.record()
        for _ in range(TIMES_TRIED):
            product(x_TK, matrix.t(), None)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3 / TIMES_TRIED)
    return best
