"""Adds low-rank adapters to a product, or multiplies it by vectors. The adapters' rows lie anywhere in memory, in pieces.

An adapter at one layer is `y = (x * before) Wᵀ * gain + shift + (x downᵀ) up`, each part of which may be absent. Its rows lie in pages:
`down` is R rows of the layer's input width K, `up` R rows of its output width N, the others one row each. A piece is some rows that lie
one behind the other, with all their columns, or with some of them if a row is longer than a page.

On a CPU, one call of a C function computes all groups of few rows (`adapter_rows.c`). It is compiled when first needed.
"""

import ctypes
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from symbiosis.kernels import compile_c
from symbiosis.kernels.row_invariant import add_low_rank_, is_row_invariant

SOURCE = Path(__file__).with_suffix(".c")
DEFINED: dict[torch.dtype, list[str]] = {torch.float32: [], torch.bfloat16: ["-DBFLOAT16"]}
FEW_ROWS, HIGHEST_RANK = 16, 256  # most that the C function takes of a group
Rows = slice | Tensor  # rows of a batch: a range, or numbers


class MatrixPiece(NamedTuple):
    """Rows of a matrix from `row` on, of the columns from `column` on."""

    row: int
    column: int
    values: Tensor


@dataclass(frozen=True, slots=True)
class PlacedAdapter:
    """An adapter at one layer, as it lies in memory."""

    rank: int = 0
    down: Sequence[MatrixPiece] = ()
    up: Sequence[MatrixPiece] = ()
    before: Sequence[MatrixPiece] = ()
    gain: Sequence[MatrixPiece] = ()
    shift: Sequence[MatrixPiece] = ()
    _words: "array[int]" = field(init=False, repr=False, compare=False, default_factory=lambda: array("q"))

    @property
    def dtype(self) -> torch.dtype | None:
        """That of its numbers; None: it has none."""
        kinds = (self.down, self.up, self.before, self.gain, self.shift)
        return next((kind[0].values.dtype for kind in kinds if kind), None)

    @property
    def address(self) -> int:
        """The address of this adapter in the layout that the C function reads."""
        if not self._words:
            kinds = (self.down, self.up, self.gain, self.shift)
            self._words.extend(map(len, kinds))
            for piece in (piece for kind in kinds for piece in kind):
                rows, width = piece.values.shape
                self._words.extend((piece.row, rows, piece.column, width, piece.values.data_ptr()))
        return self._words.buffer_info()[0]


def shrink(x_TK: Tensor, down: Sequence[MatrixPiece], rank: int) -> Tensor:
    """Return `x downᵀ`, [T, R]."""
    if len(down) == 1:
        return x_TK @ down[0].values.t()
    low_TR = x_TK.new_zeros(len(x_TK), rank)
    for row, column, values in down:
        rows, width = values.shape
        low_TR[:, row : row + rows].addmm_(x_TK[:, column : column + width], values.t())
    return low_TR


def expand_(y_TN: Tensor, low_TR: Tensor, up: Sequence[MatrixPiece]) -> None:
    """Add `low up` to y."""
    for row, column, values in up:
        rows, width = values.shape
        y_TN[:, column : column + width].addmm_(low_TR[:, row : row + rows], values)


def multiply_(y_TN: Tensor, vector: Sequence[MatrixPiece]) -> None:
    for _, column, values in vector:
        y_TN[:, column : column + values.shape[1]].mul_(values)


def add_(y_TN: Tensor, vector: Sequence[MatrixPiece]) -> None:
    for _, column, values in vector:
        y_TN[:, column : column + values.shape[1]].add_(values)


def whole(pieces: Sequence[MatrixPiece]) -> Tensor:
    """Return a matrix of its pieces."""
    if len(pieces) == 1:
        return pieces[0].values
    rows, columns = (
        max(ends) for ends in zip(*((p.row + len(p.values), p.column + p.values.shape[1]) for p in pieces), strict=True)
    )
    matrix = pieces[0].values.new_empty(rows, columns)
    for row, column, values in pieces:
        matrix[row : row + len(values), column : column + values.shape[1]] = values
    return matrix


def adapt_(y_TN: Tensor, x_TK: Tensor, placed: PlacedAdapter) -> None:
    """Apply an adapter to `y = x Wᵀ`, in place. If its numbers are of a wider dtype, all is computed in that, and the result is rounded."""
    if is_row_invariant() and placed.down and placed.up and not placed.gain and not placed.shift:
        add_low_rank_(y_TN, x_TK, whole(placed.down), whole(placed.up))
        return
    if (dtype := placed.dtype) not in (None, y_TN.dtype):
        wide_TN = y_TN.to(dtype)
        adapt_(wide_TN, x_TK.to(dtype), placed)
        y_TN.copy_(wide_TN)
        return
    if placed.gain:
        multiply_(y_TN, placed.gain)
    if placed.shift:
        add_(y_TN, placed.shift)
    if placed.rank:
        expand_(y_TN, shrink(x_TK, placed.down, placed.rank), placed.up)


def adapt_rows_(y_TN: Tensor, x_TK: Tensor, groups: Sequence[tuple[Rows, PlacedAdapter]]) -> None:
    """Apply each group's adapter to its rows, in place. Other rows are not touched."""
    for rows, placed in groups:
        y_SN = y_TN[rows]
        adapt_(y_SN, x_TK[rows], placed)
        if not isinstance(rows, slice):
            y_TN.index_copy_(0, rows, y_SN)


class FewAdapterRows:
    """Applies adapters to groups of few rows on a CPU, for many layers in turn."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._count = len(groups)
        self._rows = array("q", [row for rows in groups for row in rows])
        self._first = array("q", [0])
        for rows in groups:
            self._first.append(self._first[-1] + len(rows))
        self._threads = min(torch.get_num_threads(), len(os.sched_getaffinity(0)), len(groups))
        self._where = self._first.buffer_info()[0], self._rows.buffer_info()[0]

    @staticmethod
    def fits(groups: Sequence[Sequence[int]], rank: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the C function can compute these groups."""
        few = device.type == "cpu" and rank <= HIGHEST_RANK and all(len(rows) <= FEW_ROWS for rows in groups)
        return few and compiled(dtype) is not None

    def adapt_(self, y_TN: Tensor, x_TK: Tensor, placed: Sequence[PlacedAdapter | None]) -> None:
        """Apply the layer's adapters, given in the order of the groups, as `adapt_rows_` does."""
        function = compiled(y_TN.dtype)
        assert function is not None and y_TN.is_contiguous() and x_TK.is_contiguous() and x_TK.dtype == y_TN.dtype
        addresses = array("q", [0 if each is None else each.address for each in placed])
        (_, K), (_, N) = x_TK.shape, y_TN.shape
        which = addresses.buffer_info()[0]
        function(self._count, *self._where, which, x_TK.data_ptr(), K, y_TN.data_ptr(), N, self._threads)


@cache
def compiled(dtype: torch.dtype) -> Callable[..., None] | None:
    """Return the function of `adapter_rows.c`, compiled for this processor, or None if that cannot be or for other dtypes."""
    if dtype not in DEFINED:
        return None
    number, pointer = ctypes.c_long, ctypes.c_void_p
    arguments = [number, pointer, pointer, pointer, pointer, number, pointer, number, number]
    library = compile_c.load(SOURCE, *compile_c.FAST, *DEFINED[dtype], adapter_rows=(arguments, None))
    return None if library is None else library.adapter_rows


def before_rows(x_TK: Tensor, groups: Sequence[tuple[Rows, PlacedAdapter]]) -> Tensor:
    """Return a copy of the rows, each group's multiplied by its adapter's `before`."""
    x_TK = x_TK.clone()
    for rows, placed in groups:
        x_SK = x_TK[rows]
        multiply_(x_SK, placed.before)
        if not isinstance(rows, slice):
            x_TK.index_copy_(0, rows, x_SK)
    return x_TK
