"""Rows of floating point as integers and back, so that products with them can be exact, and masked.

A layer's weights are about `q * unit`: `q` of 8 or 16 bits, a unit for each output (`kernels.integers.quantise`). A row is about
`x_int * step`, with a step for each row. The step is chosen so that `|x_int| * |q| < 2^(k-1)` for every column of q; therefore,
by Cauchy and Schwarz, no sum leaves the range of k bits, whatever the values are. Units and steps stay with the client.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from symbiosis.kernels.integers import BLOCK
from symbiosis.protocol import WEIGHT_BITS
from symbiosis.transport.tensors import TORCH_DTYPE

# The dtype of rows, by the bits of the weights.
INTEGERS = {bits: TORCH_DTYPE[name] for name, bits in WEIGHT_BITS.items()}
# What is left is for rounding: it adds at most sqrt(K)/2 to the norm of a row, and with less than 2^17 columns that is less.
NEARLY = 0.98
SMALLEST = 1e-290


class Quantum(NamedTuple):
    """What a client knows of a quantised layer: its units, and the largest norms of a column and of a row of `q`."""

    unit_N: Tensor
    column: float
    row: float

    @classmethod
    def of(cls, digits_DKN: Tensor, unit_N: Tensor) -> "Quantum":
        """Measure the layer that `quantise` made these digits and units of."""
        inputs = digits_DKN.shape[1]
        columns, rows = [], torch.zeros(inputs, dtype=torch.float64)
        for block_DKN in digits_DKN.split(max(1, BLOCK // inputs), dim=-1):
            q_KN: Tensor = sum(  # type: ignore[assignment]
                digit.float() * 256**place for place, digit in enumerate(block_DKN)
            )
            columns.append(_norms(q_KN, 0).max().item())
            rows += _norms(q_KN, 1).square_().cpu()
        return cls(unit_N.cpu(), max(1.0, *columns), max(1.0, rows.max().sqrt().item()))


def _norms(q_KN: Tensor, dim: int) -> Tensor:
    return torch.linalg.vector_norm(q_KN, dim=dim, dtype=torch.float64)


def to_integers(x_TK: Tensor, norm: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the rows as integers, and the step of each. `norm` is the largest norm of what they will be multiplied by.

    Rows that are not finite become zeros with a step that is not a number, so that their products are no numbers either.

    >>> x_int, step = to_integers(torch.tensor([[3.0, -4.0], [torch.inf, 1.0]]), 127.0, torch.int32)
    >>> [round(value, 4) for value in (x_int[0] * step[0]).tolist()], x_int[1].tolist(), step[1].item()
    ([3.0, -4.0], [0, 0], nan)
    """
    x_TK = x_TK.double()
    most = NEARLY * torch.iinfo(dtype).max / norm
    step_T1 = (torch.linalg.vector_norm(x_TK, dim=1, keepdim=True) / most).clamp_min(SMALLEST)
    finite = step_T1.isfinite()
    integers = (x_TK / step_T1).round_().where(finite, 0.0).to(dtype)
    return integers, step_T1.where(finite, torch.nan)


def to_floats(y_TN: Tensor, step_T1: Tensor, unit_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the values that integers stand for, in `dtype`."""
    worth = y_TN.double() * step_T1
    return (worth if unit_N is None else worth * unit_N).to(dtype)
