"""What adapters of low rank add to the products of a group of layers that see the same rows, on a GPU: one kernel shrinks the rows for
all layers of the group, one expands them for all. `symbiosis/kernels/adapter_rows.py` is the formula.

Rows of the batch come in tiles: up to `TILE` consecutive rows of one adapter; a tile of no rows, or without a record, is
left at once. So a launch depends on how many tiles there may be, and not on the adapters: it can be part of a CUDA graph. If every
sequence has one row, tiles have one row, too, and other kernels (`_shrink_one`, `_expand_one`) compute them: their time is that of reading
memory, so they ask for all that they read at once.

A record says what an adapter does, in 64-bit words in the GPU's memory. The rows of its matrices may lie anywhere, so a record has the
address of each. A row that is longer than a page is in pieces of a page each, with an address for each piece:

    shrink    rank of all layers of the group together; then the addresses of the rows of `down` of all of them
    expand    rank of the layer, which of the group's is its first, where in the record the addresses of `gain` and of `shift` are (0: none);
              then the addresses of the rows of `up`

The first word of either has `IS_WIDE` added if the adapter's numbers are float32, and the rows' are narrower: such an adapter is multiplied in
float32, too. A launch that has none (`Tiles.wide`) does not ask.

A record is followed by at least `BEHIND` words that may be read.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from symbiosis.kernels.gpu.records import BLOCKS, EXPAND_HEAD, MOST_MEMBERS, RANKS, SHRINK_HEAD

TILE = 16  # rows: a matrix unit multiplies at least so many
SUPPORTED = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
ALIGNED = 8  # elements: 16 bytes of the narrowest


class Cut(NamedTuple):
    """How a launch is divided. Measured."""

    columns: int  # at once
    warps: int
    stages: int = 3


SHRINK, EXPAND = Cut(256, 4), Cut(256, 4)
SHRINK_ONE, EXPAND_ONE = Cut(512, 4), Cut(512, 2)  # of single rows


@triton.jit
def _pointers(  # type: ignore[no-untyped-def]
    record, r, ranks, at, columns, chunks, width, FLOAT: tl.constexpr, CHUNKED: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Return pointers to the elements [r, columns] of the rows whose addresses begin at word `at`."""
    if CHUNKED:
        chunk = columns // width
        address = tl.load(record + at + (r * chunks)[:, None] + chunk[None, :], mask=(r < ranks)[:, None], other=0)
        pointers = address.to(tl.pointer_type(FLOAT)) + (columns - chunk * width)[None, :]
    else:
        address = tl.load(record + at + r)
        pointers = address.to(tl.pointer_type(FLOAT))[:, None] + columns[None, :]
        if ALIGNED:
            pointers = tl.multiple_of(pointers, [16, 16])
    return pointers


@triton.jit
def _weights(  # type: ignore[no-untyped-def]
    record, start, ranks, at, columns, inside, chunks, width, wide, FLOAT: tl.constexpr, RANKS: tl.constexpr, CHUNKED: tl.constexpr,
    ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Load rows [rows, columns] from number `start` on, of those whose addresses begin at word `at`. Where some adapters are `wide`, all are
    loaded as float32."""
    r = start + tl.arange(0, RANKS)
    mask = (r < ranks)[:, None] & inside[None, :]
    if WIDE:
        if wide != 0:
            of = _pointers(record, r, ranks, at, columns, chunks, width, tl.float32, CHUNKED, False)
            w = tl.load(of, mask=mask, other=0.0)
        else:
            narrow = _pointers(record, r, ranks, at, columns, chunks, width, FLOAT, CHUNKED, ALIGNED)
            w = tl.load(narrow, mask=mask, other=0.0).to(tl.float32)
    else:
        w = tl.load(
            _pointers(record, r, ranks, at, columns, chunks, width, FLOAT, CHUNKED, ALIGNED), mask=mask, other=0.0
        )
    return w


@triton.jit
def _head(record, width, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the rank that a record tells, how many elements a page has for its adapter, and whether that is float32."""
    word = tl.load(record)
    wide = (word >> 32).to(tl.int32)
    if WIDE:
        width = tl.where(wide != 0, width // 2, width)
    return word.to(tl.int32), width, wide


@triton.jit
def _member_at(  # type: ignore[no-untyped-def]
    block, y0, y1, y2, y3, N0, N1, N2, N3, COLUMNS: tl.constexpr
):  # fmt: skip
    """Return which layer of a group a block of columns belongs to, where that layer's results begin, its width, and how many blocks come
    before its first."""
    end0 = tl.cdiv(N0, COLUMNS)
    end1 = end0 + tl.cdiv(N1, COLUMNS)
    end2 = end1 + tl.cdiv(N2, COLUMNS)
    member = (block >= end0).to(tl.int32) + (block >= end1).to(tl.int32) + (block >= end2).to(tl.int32)
    before = tl.where(member == 0, 0, tl.where(member == 1, end0, tl.where(member == 2, end1, end2)))
    N = tl.where(member == 0, N0, tl.where(member == 1, N1, tl.where(member == 2, N2, N3)))
    y = tl.where(member == 1, y1.to(tl.int64), y0.to(tl.int64))
    y = tl.where(member == 2, y2.to(tl.int64), y)
    return member, tl.where(member == 3, y3.to(tl.int64), y), N, before


@triton.jit(do_not_specialize=["entry"])
def _shrink_one(  # type: ignore[no-untyped-def]
    x, low, tiles, records, entry, most, K, stride, room, width, FLOAT: tl.constexpr, SPLIT: tl.constexpr, RANKS: tl.constexpr,
    COLUMNS: tl.constexpr, HEAD: tl.constexpr, CHUNKED: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Shrink one row, of which each program reads one part of the columns."""
    tile, part = tl.program_id(0), tl.program_id(2)
    row, count = tl.load(tiles + 2 * tile).to(tl.int64), tl.load(tiles + 2 * tile + 1)
    address = tl.load(records + entry * most + tile)
    if (count > 0) & (address != 0):
        record = address.to(tl.pointer_type(tl.int64))
        ranks, width, wide = _head(record, width, WIDE)
        chunks = tl.cdiv(K, width)
        columns = part * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < K
        x_K = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
        start, step, r = tl.program_id(1) * RANKS, tl.num_programs(1) * RANKS, tl.arange(0, RANKS)
        w_RK = _weights(
            record, start, ranks, HEAD, columns, inside, chunks, width, wide, FLOAT, RANKS, CHUNKED, ALIGNED, WIDE
        )
        to = low + (row * SPLIT + part) * room + r
        tl.store(to + start, tl.sum(w_RK.to(tl.float32) * x_K[None, :], 1), mask=start + r < ranks)
        for more in range(start + step, ranks, step):
            w_RK = _weights(
                record, more, ranks, HEAD, columns, inside, chunks, width, wide, FLOAT, RANKS, CHUNKED, ALIGNED, WIDE
            )
            tl.store(to + more, tl.sum(w_RK.to(tl.float32) * x_K[None, :], 1), mask=more + r < ranks)


@triton.jit(do_not_specialize=["entry"])
def _expand_one(  # type: ignore[no-untyped-def]
    y0, y1, y2, y3, N0, N1, N2, N3, low, tiles, records, entry, most, room, width, FLOAT: tl.constexpr, SPLIT: tl.constexpr,
    PARTS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr, HEAD: tl.constexpr, CHUNKED: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Expand one row. PARTS is SPLIT, padded to a power of two. Long for the same reason as `_expand`."""
    tile = tl.program_id(0)
    row, count = tl.load(tiles + 2 * tile).to(tl.int64), tl.load(tiles + 2 * tile + 1)
    member, y, N, before = _member_at(tl.program_id(1), y0, y1, y2, y3, N0, N1, N2, N3, COLUMNS)
    address = tl.load(records + (entry + member) * most + tile)
    if (count > 0) & (address != 0):
        record = address.to(tl.pointer_type(tl.int64))
        ranks, width, wide = _head(record, width, WIDE)
        begin = tl.load(record + 1).to(tl.int32)
        gain, shift = tl.load(record + 2), tl.load(record + 3)
        chunks, columns = tl.cdiv(N, width), (tl.program_id(1) - before) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < N
        to = y.to(tl.pointer_type(FLOAT)) + row * N + columns
        if ALIGNED:
            to = tl.multiple_of(to, 16)
        w_RN = _weights(
            record, 0, ranks, HEAD, columns, inside, chunks, width, wide, FLOAT, RANKS, CHUNKED, ALIGNED, WIDE
        )
        sums = tl.load(to, mask=inside, other=0.0).to(tl.float32)
        part, r = tl.arange(0, PARTS), tl.arange(0, RANKS)
        of = low + ((row * SPLIT + part) * room + begin)[:, None] + r[None, :]
        low_R = tl.sum(tl.load(of, mask=(part < SPLIT)[:, None] & (r < ranks)[None, :], other=0.0), 0)
        if gain != 0:
            by = _weights(record, 0, 1, gain, columns, inside, chunks, width, wide, FLOAT, 1, CHUNKED, ALIGNED, WIDE)
            sums *= tl.sum(by.to(tl.float32), 0)
        if shift != 0:
            more = _weights(record, 0, 1, shift, columns, inside, chunks, width, wide, FLOAT, 1, CHUNKED, ALIGNED, WIDE)
            sums += tl.sum(more.to(tl.float32), 0)
        sums += tl.sum(w_RN.to(tl.float32) * low_R[:, None], 0)
        for start in range(RANKS, ranks, RANKS):
            w_RN = _weights(
                record, start, ranks, HEAD, columns, inside, chunks, width, wide, FLOAT, RANKS, CHUNKED, ALIGNED, WIDE
            )
            mask = (part < SPLIT)[:, None] & (start + r < ranks)[None, :]
            low_R = tl.sum(tl.load(of + start, mask=mask, other=0.0), 0)
            sums += tl.sum(w_RN.to(tl.float32) * low_R[:, None], 0)
        tl.store(to, sums.to(FLOAT), mask=inside)


@triton.jit(do_not_specialize=["entry"])
def _shrink(  # type: ignore[no-untyped-def]
    x, low, tiles, records, entry, most, K, stride, room, width, FLOAT: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
    RANKS: tl.constexpr, COLUMNS: tl.constexpr, HEAD: tl.constexpr, CHUNKED: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(2)
    first, count = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    address = tl.load(records + entry * most + tile)
    if (count > 0) & (address != 0):
        record = address.to(tl.pointer_type(tl.int64))
        ranks, width, wide = _head(record, width, WIDE)
        chunks = tl.cdiv(K, width)
        t, k = tl.arange(0, TILE), tl.arange(0, COLUMNS)
        each = tl.cdiv(tl.cdiv(K, SPLIT), COLUMNS) * COLUMNS
        rows = (first + t).to(tl.int64)
        for start in range(tl.program_id(1) * RANKS, ranks, tl.num_programs(1) * RANKS):
            r = start + tl.arange(0, RANKS)
            sums = tl.zeros((TILE, RANKS), tl.float32)
            for begin in range(part * each, tl.minimum(K, (part + 1) * each), COLUMNS):
                columns = begin + k
                inside = columns < K
                w_RK = _weights(
                    record,
                    start,
                    ranks,
                    HEAD,
                    columns,
                    inside,
                    chunks,
                    width,
                    wide,
                    FLOAT,
                    RANKS,
                    CHUNKED,
                    ALIGNED,
                    WIDE,
                )
                x_TK = tl.load(
                    x + rows[:, None] * stride + columns[None, :],
                    mask=(t < count)[:, None] & inside[None, :],
                    other=0.0,
                )
                sums = tl.dot(x_TK.to(w_RK.dtype), w_RK.T, sums, input_precision="ieee")
            there = (t < count)[:, None] & (r < ranks)[None, :]
            tl.store(low + ((rows * SPLIT + part) * room)[:, None] + r[None, :], sums, mask=there)


@triton.jit(do_not_specialize=["entry"])
def _expand(  # type: ignore[no-untyped-def]
    y0, y1, y2, y3, N0, N1, N2, N3, low, tiles, records, entry, most, room, width, FLOAT: tl.constexpr, SPLIT: tl.constexpr,
    TILE: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr, HEAD: tl.constexpr, CHUNKED: tl.constexpr,
    ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Expand a tile of rows. The layers' records are consecutive entries, from `entry` on. Long: one loop over pointers that it has just
    laid out."""
    tile, block = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    member, y, N, before = _member_at(block, y0, y1, y2, y3, N0, N1, N2, N3, COLUMNS)
    address = tl.load(records + (entry + member) * most + tile)
    if (count > 0) & (address != 0):
        record = address.to(tl.pointer_type(tl.int64))
        ranks, width, wide = _head(record, width, WIDE)
        begin = tl.load(record + 1).to(tl.int32)
        gain, shift = tl.load(record + 2), tl.load(record + 3)
        t, chunks = tl.arange(0, TILE), tl.cdiv(N, width)
        columns = (block - before) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < N
        rows = (first + t).to(tl.int64)
        to = y.to(tl.pointer_type(FLOAT)) + rows[:, None] * N + columns[None, :]
        if ALIGNED:
            to = tl.multiple_of(to, [16, 16])
        there = (t < count)[:, None] & inside[None, :]
        sums = tl.load(to, mask=there, other=0.0).to(tl.float32)
        if gain != 0:
            by = _weights(record, 0, 1, gain, columns, inside, chunks, width, wide, FLOAT, 1, CHUNKED, ALIGNED, WIDE)
            sums *= by.to(tl.float32)
        if shift != 0:
            more = _weights(record, 0, 1, shift, columns, inside, chunks, width, wide, FLOAT, 1, CHUNKED, ALIGNED, WIDE)
            sums += more.to(tl.float32)
        for start in range(0, ranks, RANKS):
            r = start + tl.arange(0, RANKS)
            w_RN = _weights(
                record, start, ranks, HEAD, columns, inside, chunks, width, wide, FLOAT, RANKS, CHUNKED, ALIGNED, WIDE
            )
            known = (t < count)[:, None] & (r < ranks)[None, :]
            low_TR = tl.zeros((TILE, RANKS), tl.float32)
            for part in range(SPLIT):
                low_TR += tl.load(
                    low + ((rows * SPLIT + part) * room + begin)[:, None] + r[None, :], mask=known, other=0.0
                )
            sums = tl.dot(low_TR.to(w_RN.dtype), w_RN, sums, input_precision="ieee")
        tl.store(to, sums.to(FLOAT), mask=there)


@triton.jit(do_not_specialize=["stage"])
def _wait_until_come(come, awaited, stage):  # type: ignore[no-untyped-def]
    wanted = tl.load(awaited)
    seen = tl.atomic_add(come + stage, 0, sem="acquire")
    while seen < wanted:
        seen = tl.atomic_add(come + stage, 0, sem="acquire")


def wait_until_come(come: Tensor, stage: int, awaited: Tensor) -> None:
    """Keep the stream waiting until `come[stage]` is at least `awaited`: adapters are numbered in the order in which they are copied to the
    device, by another stream, which was told to before this kernel is launched."""
    _wait_until_come[(1,)](come, awaited, stage, num_warps=1)


def parts_of(width: int) -> int:
    """Return into how many parts the rows of a `down` of this width are cut, so that few rows occupy the whole GPU."""
    return int(triton.cdiv(width, SHRINK_ONE.columns))


class Tiles(NamedTuple):
    """Which rows of a batch belong to which adapter. `words`, int32 [tiles, 2], has the first row of each tile, and how many rows it has.
    `records`, int64 [entries, tiles], has the address of each tile's record for each entry, or 0 if there is nothing to do. `singly` says
    that no tile has more than one row, `wide` that some adapters may be float32 where the rows are not."""

    words: Tensor
    records: Tensor
    singly: bool = False
    wide: bool = False


def _least_page(page: int, tiles: Tiles) -> int:
    """Return how many elements a page has for those adapters for which it has fewest."""
    return page // 2 if tiles.wide else page


def shrink(x_TK: Tensor, tiles: Tiles, count: int, entry: int, page: int, low: Tensor) -> None:
    """Multiply rows by all `down` of the group whose record is `entry`. Each part of the columns has its own sum, in `low`: float32 [rows,
    parts, ranks of the group at most]. `count` is the number of tiles, and `page` the elements of a page."""
    (_, K), (_, parts, room) = x_TK.shape, low.shape
    aligned = K % ALIGNED == 0 and page % ALIGNED == 0 and x_TK.dtype != torch.float32
    grid = count, min(BLOCKS, triton.cdiv(room, RANKS)), parts
    given = x_TK, low, tiles.words, tiles.records, entry, tiles.records.shape[1], K, x_TK.stride(0), room, page
    how = SHRINK_HEAD, _least_page(page, tiles) < K, aligned, tiles.wide
    if tiles.singly:
        assert parts == parts_of(K)
        cut = SHRINK_ONE
        _shrink_one[grid](*given, SUPPORTED[x_TK.dtype], parts, RANKS, cut.columns, *how, num_warps=cut.warps)
    else:
        cut = SHRINK
        _shrink[grid](
            *given, SUPPORTED[x_TK.dtype], parts, TILE, RANKS, cut.columns, *how, num_warps=cut.warps, num_stages=cut.stages
        )  # fmt: skip


def expand_(ys: Sequence[Tensor], tiles: Tiles, count: int, entry: int, page: int, low: Tensor) -> None:
    """Complete the products `ys`, [rows, N], of the layers of a group, whose records are the entries from `entry` on: multiply and shift
    them where adapters do that, and add what `shrink` has put into `low`, times `up`."""
    assert 0 < len(ys) <= MOST_MEMBERS and all(y.is_contiguous() for y in ys)
    padded = [*ys, *[ys[0]] * (MOST_MEMBERS - len(ys))]
    widths = [y.shape[1] for y in ys] + [0] * (MOST_MEMBERS - len(ys))
    aligned = all(n % ALIGNED == 0 for n in widths) and page % ALIGNED == 0 and ys[0].dtype != torch.float32
    cut, (_, parts, room) = EXPAND_ONE if tiles.singly else EXPAND, low.shape
    grid = count, sum(triton.cdiv(n, cut.columns) for n in widths)
    given = *padded, *widths, low, tiles.words, tiles.records, entry, tiles.records.shape[1], room, page
    how = RANKS, cut.columns, EXPAND_HEAD, _least_page(page, tiles) < max(widths), aligned, tiles.wide
    kind = SUPPORTED[ys[0].dtype]
    if tiles.singly:
        _expand_one[grid](*given, kind, parts, triton.next_power_of_2(parts), *how, num_warps=cut.warps)
    else:
        _expand[grid](*given, kind, parts, TILE, *how, num_warps=cut.warps, num_stages=cut.stages)


def tiles_of(runs: Sequence[tuple[int, int]], size: int = TILE) -> list[tuple[int, int, int]]:
    """Cut runs of rows, each (first row, rows), into tiles: (first row, rows, number of the run).

    >>> tiles_of([(0, 2), (2, 20)])
    [(0, 2, 0), (2, 16, 1), (18, 4, 1)]
    """
    return [
        (row, min(size, first + rows - row), number)
        for number, (first, rows) in enumerate(runs)
        for row in range(first, first + rows, size)
    ]
