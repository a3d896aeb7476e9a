"""The operands that calls take from a frozen weight. The executor and clients that map the weights both use these, so that bits
agree."""

from collections.abc import Sequence

import torch
from torch import Tensor

from symbiosis.kernels.packed import PackedWeight

Strides = tuple[Sequence[int], Sequence[int], int]  # size, stride, offset


def matrix_of(weight: Tensor, transposed: bool, view: Strides | None) -> Tensor:
    """Return the weight, its transpose, or a strided view of it, without a copy.

    >>> matrix_of(torch.tensor([[0, 1], [2, 3]]), True, None).tolist()
    [[0, 2], [1, 3]]
    >>> matrix_of(torch.arange(4)[1:], False, ((2,), (1,), 1)).tolist()
    [2, 3]
    """
    if view is not None:
        size, stride, offset = view
        return weight.as_strided(size, stride, weight.storage_offset() + offset)
    return weight.t() if transposed else weight


def rows_of(part: Tensor, weight: Tensor) -> slice:
    """Return the rows of a weight, those of a stack one below the other, in which a strided part of it lies.

    >>> rows_of(torch.zeros(8, 4).t()[:, 2:5], torch.zeros(8, 4))
    slice(2, 5, None)
    """
    first = part.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    columns = weight.shape[-1]
    return slice(first // columns, last // columns + 1) if part.numel() else slice(0, 0)


def columns_of(part: Tensor, weight: Tensor) -> slice:
    """Return the columns of a weight in which a part of it lies that is a matrix, or its transpose; all of them for any other part.

    >>> columns_of(torch.zeros(8, 4)[:, 1:3].t(), torch.zeros(8, 4))
    slice(1, 3, None)
    """
    columns = weight.shape[-1]
    if part.dim() != 2 or sorted(part.stride()) != [1, columns]:
        return slice(0, columns)
    first = part.storage_offset() % columns
    width = part.shape[part.stride().index(1)]
    return slice(first, first + width) if first + width <= columns else slice(0, columns)


def cast(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a matrix to the dtype of the rows, as autocast would. A stack that repeats one matrix is cast once."""
    if matrix.dtype is not dtype and matrix.dim() == 3 and matrix.stride(0) == 0:
        return matrix[:1].to(dtype).expand_as(matrix)
    return matrix.to(dtype)


def whole_part(packed: PackedWeight, wanted: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a part of a packed weight's matrix in this dtype, with the strides that it has in the whole one. Only the rows and columns in which
    it lies are made whole. `wanted`: the part as a view of `weight`, which has the packed one's shape and no values."""
    rows = rows_of(wanted, weight)
    whole = packed.whole(dtype, rows, columns_of(wanted, weight))
    return whole.as_strided(wanted.shape, wanted.stride(), wanted.storage_offset() - rows.start * weight.shape[-1])


def norms(weight: Tensor, kind: str, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
    """Return the squared norm of each of these output rows, which a Conv1D holds as columns."""
    by_output = weight if kind == "linear" else weight.t()
    return by_output[rows].to(dtype).square().sum(-1)
