"""Cuts the work of a call: its result is a grid of cells, and a turn computes a run of them. Plain numbers, no torch."""

from collections.abc import Callable, Iterator, Sequence
from math import prod

from symbiosis.protocol import Call, Op

BLOCK = 64  # rows of a cell; with fewer, each row costs more
PANEL = 256  # columns of a cell

Grid = tuple[int, ...]
Box = tuple[slice, ...]


def grid_of(call: Call, shape: Sequence[int], widths: Sequence[int]) -> Grid:
    """Return the grid of a result of this `shape`. A call that goes by rows is cut into slices before, which leaves the columns of each
    member, of these `widths`. Cells are ordered so that a run of them needs as little of a weight as possible."""
    return (sum(map(panels, widths)),) if call.by_rows else GRIDS[call.op](shape)


def leading(shape: Sequence[int]) -> Grid:
    """Return the first dimensions of `shape`, as many as are needed for the rest to be small.

    >>> leading((30, 20, 500)), leading((3, 1 << 20))
    ((30, 20), (3, 1048576))
    """
    depth = 1
    while depth < len(shape) and prod(shape[depth:]) > BLOCK * PANEL // 8:
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


def row_blocks(rows: int) -> int:
    return max(1, rows // BLOCK)


def panels(columns: int) -> int:
    return max(1, columns // PANEL)


def rows_of(side: slice, rows: int) -> slice:
    """Return the rows of these blocks. The last block includes the rows left over, because few rows by themselves would be multiplied
    by another formula.

    >>> rows_of(slice(1, 2), 150)
    slice(64, 150, None)
    """
    return _scaled(side, BLOCK, row_blocks(rows), rows)


def columns_of(side: slice, columns: int) -> slice:
    """Return the columns of these panels. The last panel includes the columns left over."""
    return _scaled(side, PANEL, panels(columns), columns)


def _scaled(side: slice, step: int, count: int, most: int) -> slice:
    return slice(side.start * step, most if side.stop >= count else side.stop * step)


GRIDS: dict[Op, Callable[[Sequence[int]], Grid]] = {  # for calls that do not go by rows
    Op.PRODUCT: lambda shape: (*shape[:-2], panels(shape[-1]), row_blocks(shape[-2])),
    Op.LEFT: lambda shape: (*shape[:-2], row_blocks(shape[-2]), panels(shape[-1])),
    Op.GROUPED: lambda shape: (panels(shape[1]), row_blocks(shape[0])),
    Op.LOOKUP: lambda shape: (shape[0],),
    Op.NORMS: lambda shape: (shape[0],),
    Op.READ: leading,
    Op.ECHO: lambda shape: (prod(shape),),  # values
}
