"""Cuts the work of a call: its result is a grid of cells (`price.py`), and a turn computes a run of them. Plain numbers, no torch."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class Grain(NamedTuple):
    """The rows and the columns of a cell."""

    rows: int
    columns: int


# From coarse to fine. With fewer than 64 rows, each row costs more. With fewer than 8 rows, or columns that do not begin at such a multiple,
# libraries take other kernels for what they are fast at, which round differently. So what every CPU is fast at is not cut into values.
GRAINS = (Grain(64, 16), Grain(8, 16), Grain(1, 1))
GRAINS_OF = {"float32": GRAINS[:2], "float64": (Grain(64, 24), Grain(8, 24))}
SMALL = 2048  # values that are copied together

Grid = tuple[int, ...]
Box = tuple[slice, ...]


def grains_for(dtype: str) -> Sequence[Grain]:
    """Return the grains by which a product of this dtype can be cut without a change of its bits."""
    return GRAINS_OF.get(dtype, GRAINS)


def leading(shape: Sequence[int], grain: Grain) -> Grid:
    """Return the first dimensions of `shape`, as many as are needed for the rest to be small.

    >>> leading((30, 20, 500), GRAINS[0]), leading((3, 1 << 20), GRAINS[0])
    ((30, 20), (3, 1048576))
    """
    depth = 1
    while depth < len(shape) and prod(shape[depth:]) > SMALL:
        depth += 1
    return tuple(shape[:depth])


def boxes(grid: Grid, first: int, last: int) -> Iterator[Box]:
    """Yield the cells from `first` to `last` of a grid, counted row by row, as few boxes as possible.

    >>> [tuple((side.start, side.stop) for side in box) for box in boxes((3, 4), 2, 9)]
    [((0, 1), (2, 4)), ((1, 2), (0, 4)), ((2, 3), (0, 1))]
    """
    inner = prod(grid[1:])
    if first % inner == 0 and last % inner == 0:
        if first < last:
            yield slice(first // inner, last // inner), *(slice(0, side) for side in grid[1:])
        return
    row, start = divmod(first, inner)
    stop = min(last, (row + 1) * inner)
    if start:  # the rest of a row that was begun
        yield from _in_row(grid, row, start, stop - row * inner)
        yield from boxes(grid, stop, last) if stop < last else ()
        return
    full = last // inner
    yield from boxes(grid, first, full * inner)
    yield from _in_row(grid, full, 0, last - full * inner)


def _in_row(grid: Grid, row: int, first: int, last: int) -> Iterator[Box]:
    for box in boxes(grid[1:], first, last):
        yield slice(row, row + 1), *box


def cells(length: int, step: int) -> int:
    """Return how many cells of `step` lie side by side in `length`."""
    return max(1, length // step)


def part_of(side: slice, length: int, step: int) -> slice:
    """Return the rows or columns of these cells. The last cell includes those left over, because few by themselves would be multiplied by
    another formula.

    >>> part_of(slice(1, 2), 150, 64)
    slice(64, 150, None)
    """
    return slice(side.start * step, length if side.stop >= cells(length, step) else side.stop * step)
