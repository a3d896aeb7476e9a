"""LoRA that is trained, on a GPU, for the layers of a group that see the same rows: forward and backward, for any number of adapters at once.

    shrink      low_m = x A_mᵀ             its gradient   g_m B_m
    expand      y_m += s low_m B_mᵀ        dx += s Σ_m (g_m B_m) A_m
    gradient    dB_m += s g_mᵀ low_m       dA_m += s (g_m B_m)ᵀ x

Rows of a segment belong to one adapter. Tables on the device say which rows these are, and where that adapter's matrices and their gradients
lie: so a launch depends on how many segments there may be, not on the adapters, and can be part of a CUDA graph. Sums do not depend on what else
is in the step: each is made in one order, by one program.

A record, of which there is one for each segment and layer, has six words: the addresses of A [rank, K], B [N, rank], dA, dB (float32), the rank,
and the bits of the scale as float32.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from symbiosis.kernels.gpu.adapter_rows import Cut
from symbiosis.kernels.gpu.records import MOST_MEMBERS

WORDS = 6  # of a record
MEMBERS = MOST_MEMBERS
TILE = 64  # rows of one program
SPLIT = 4  # parts of the columns that are summed by programs of their own
WIDE = 64  # ranks beyond this take half the columns at once
FLOAT = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


SHRINK_A, SHRINK_B, EXPAND, GRADIENT = Cut(128, 4), Cut(64, 4, 4), Cut(128, 4, 2), Cut(64, 4, 4)  # measured


class RowTables(NamedTuple):
    """Where the rows of a step lie, on the device."""

    tiles: Tensor  # int32 [tiles, 3]: first row, rows, segment
    segments: Tensor  # int32 [segments, 2]: first row, end
    records: Tensor  # int64 [groups, segments, MEMBERS, WORDS]
    ranks: int  # a power of two that no rank exceeds, at least 16


@triton.jit
def _chosen(member, p0, p1, p2, p3, FLOAT: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the pointer of this number. What is not said about it is unknown then."""
    p = tl.where(member == 1, p1.to(tl.int64), p0.to(tl.int64))
    p = tl.where(member == 2, p2.to(tl.int64), p)
    p = tl.where(member == 3, p3.to(tl.int64), p).to(tl.pointer_type(FLOAT))
    return tl.multiple_of(p, 16) if ALIGNED else p


@triton.jit
def _width(member, w0, w1, w2, w3):  # type: ignore[no-untyped-def]
    return tl.where(member == 0, w0, tl.where(member == 1, w1, tl.where(member == 2, w2, w3)))


@triton.jit
def _scale(record):  # type: ignore[no-untyped-def]
    return tl.load(record + 5).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _matrix(at, r, c, rank, width, OF_B: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return pointers to elements [r, c] of A, or of the transposed B, and where they are inside."""
    inside = (r < rank) & (c < width)
    matrix = tl.multiple_of(at.to(tl.pointer_type(tl.float32)), 16)
    if OF_B:
        return matrix + c * rank + r, inside
    return matrix + r * width + c, inside


@triton.jit
def _shrink(  # type: ignore[no-untyped-def]
    x0, x1, x2, x3, w0, w1, w2, w3, parts, tiles, records, segments, rows, FLOAT: tl.constexpr, ALIGNED: tl.constexpr, OF_B: tl.constexpr,
    MEMBERS: tl.constexpr, WORDS: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    member, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, count, segment = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    record = records + (segment * MEMBERS + member) * WORDS
    at = tl.load(record + (1 if OF_B else 0))
    if (count > 0) & (at != 0):
        rank, width = tl.load(record + 4).to(tl.int32), _width(member, w0, w1, w2, w3)
        x = _chosen(member, x0, x1, x2, x3, FLOAT, ALIGNED)
        t, r, c = tl.arange(0, TILE), tl.arange(0, RANKS), tl.arange(0, COLUMNS)
        row = (first + t).to(tl.int64)
        each = tl.cdiv(tl.cdiv(width, SPLIT), COLUMNS) * COLUMNS
        sums = tl.zeros((TILE, RANKS), tl.float32)
        for begin in range(part * each, tl.minimum(width, (part + 1) * each), COLUMNS):
            columns = begin + c
            x_TC = tl.load(
                x + row[:, None] * width + columns[None, :],
                mask=(t < count)[:, None] & (columns < width)[None, :],
                other=0.0,
            )
            of, inside = _matrix(at, r[None, :], columns[:, None], rank, width, OF_B)
            w_CR = tl.load(of, mask=inside, other=0.0).to(FLOAT)
            sums = tl.dot(x_TC, w_CR, sums, input_precision="ieee")
        to = parts + ((part * MEMBERS + member) * rows + row[:, None]) * RANKS + r[None, :]
        tl.store(to, sums * _scale(record), mask=(t < count)[:, None])


@triton.jit
def _sum(parts, low, each, FLOAT: tl.constexpr, SPLIT: tl.constexpr, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up what the parts have found."""
    at = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    sums = tl.zeros((NUMBERS,), tl.float32)
    for part in tl.static_range(SPLIT):
        sums += tl.load(parts + part * each + at, mask=at < each, other=0.0)
    tl.store(low + at, sums.to(FLOAT), mask=at < each)


@triton.jit
def _expand(  # type: ignore[no-untyped-def]
    y0, y1, y2, y3, w0, w1, w2, w3, low, tiles, records, rows, members, FLOAT: tl.constexpr, ALIGNED: tl.constexpr, OF_B: tl.constexpr,
    SUM: tl.constexpr, MEMBERS: tl.constexpr, WORDS: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add to y_m, or the sum over all layers to y_0."""
    block, tile = tl.program_id(0), tl.program_id(1)
    first, count, segment = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    t, r = tl.arange(0, TILE), tl.arange(0, RANKS)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    row, there = (first + t).to(tl.int64), t < count
    own = tl.program_id(2)
    width = _width(own, w0, w1, w2, w3)
    if (count > 0) & (block * COLUMNS < width):
        y = _chosen(own, y0, y1, y2, y3, FLOAT, ALIGNED) + row[:, None] * width + columns[None, :]
        inside = there[:, None] & (columns < width)[None, :]
        sums = tl.zeros((TILE, COLUMNS), tl.float32)
        acts = 0
        for member in range(own, members if SUM else own + 1):
            record = records + (segment * MEMBERS + member) * WORDS
            at = tl.load(record + (1 if OF_B else 0))
            if at != 0:
                acts = 1
                rank = tl.load(record + 4).to(tl.int32)
                low_TR = tl.load(
                    low + (member * rows + row[:, None]) * RANKS + r[None, :], mask=there[:, None], other=0.0
                )
                of, known = _matrix(at, r[:, None], columns[None, :], rank, width, OF_B)
                sums = tl.dot(low_TR, tl.load(of, mask=known, other=0.0).to(FLOAT), sums, input_precision="ieee")
        if acts:
            tl.store(y, (tl.load(y, mask=inside, other=0.0).to(tl.float32) + sums).to(FLOAT), mask=inside)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    x0, x1, x2, x3, w0, w1, w2, w3, low, of_segment, records, rows, FLOAT: tl.constexpr, ALIGNED: tl.constexpr, OF_B: tl.constexpr, MEMBERS: tl.constexpr,
    WORDS: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the products of a segment's rows, [columns, rows] [rows, ranks], to the gradient of A or B."""
    block, segment, member = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(of_segment + 2 * segment), tl.load(of_segment + 2 * segment + 1)
    width = _width(member, w0, w1, w2, w3)
    record = records + (segment * MEMBERS + member) * WORDS
    at = tl.load(record + (3 if OF_B else 2))
    if (first < end) & (at != 0) & (block * COLUMNS < width):
        rank = tl.load(record + 4).to(tl.int32)
        x = _chosen(member, x0, x1, x2, x3, FLOAT, ALIGNED)
        t, r, columns = tl.arange(0, TILE), tl.arange(0, RANKS), block * COLUMNS + tl.arange(0, COLUMNS)
        sums = tl.zeros((COLUMNS, RANKS), tl.float32)
        for begin in range(first, end, TILE):
            row = (begin + t).to(tl.int64)
            there = begin + t < end
            x_TC = tl.load(
                x + row[:, None] * width + columns[None, :], mask=there[:, None] & (columns < width)[None, :], other=0.0
            )
            low_TR = tl.load(low + (member * rows + row[:, None]) * RANKS + r[None, :], mask=there[:, None], other=0.0)
            sums = tl.dot(tl.trans(x_TC), low_TR, sums, input_precision="ieee")
        of, inside = _matrix(at, r[None, :], columns[:, None], rank, width, OF_B)
        tl.store(of, tl.load(of, mask=inside, other=0.0) + sums, mask=inside)


def adapt_(ys: Sequence[Tensor], x: Tensor, tables: RowTables, group: int) -> Tensor:
    """Add what the adapters make of the rows [T, K] to the products [T, N_m] of a group's layers. Returns what the rows were shrunk to,
    [MEMBERS, T, ranks]."""
    low = _shrunk([x] * len(ys), tables, group, of_b=False)
    _expanded(ys, low, tables, group, of_b=True, add_up=False)
    return low


def gradients_(dx: Tensor | None, gs: Sequence[Tensor], x: Tensor, low: Tensor, tables: RowTables, group: int) -> None:
    """Add to the gradients of the adapters' matrices, and to that of the rows, [T, K]."""
    _outer(gs, low, tables, group, of_b=True)
    low = _shrunk(gs, tables, group, of_b=True)
    if dx is not None:
        _expanded([dx] * len(gs), low, tables, group, of_b=False, add_up=True)
    _outer([x] * len(gs), low, tables, group, of_b=False)


def _shrunk(xs: Sequence[Tensor], tables: RowTables, group: int, of_b: bool) -> Tensor:
    rows = len(xs[0])
    parts = xs[0].new_empty(SPLIT, MEMBERS, rows, tables.ranks, dtype=torch.float32)
    _shrink[(len(xs), len(tables.tiles), SPLIT)](
        *_four(xs), parts, tables.tiles, tables.records[group], len(tables.segments), rows, TILE=TILE, SPLIT=SPLIT,
        **_how(xs, tables, of_b, SHRINK_B if of_b else SHRINK_A),
    )  # fmt: skip
    low = xs[0].new_empty(MEMBERS, rows, tables.ranks)
    _sum[(triton.cdiv(low.numel(), 1024),)](parts, low, low.numel(), FLOAT=FLOAT[low.dtype], SPLIT=SPLIT, NUMBERS=1024)
    return low


def _expanded(ys: Sequence[Tensor], low: Tensor, tables: RowTables, group: int, of_b: bool, add_up: bool) -> None:
    rows, how = len(ys[0]), _how(ys, tables, of_b, EXPAND)
    blocks = triton.cdiv(max(y.shape[1] for y in ys), how["COLUMNS"])
    _expand[(blocks, len(tables.tiles), 1 if add_up else len(ys))](
        *_four(ys), low, tables.tiles, tables.records[group], rows, len(ys), SUM=add_up, TILE=TILE, **how
    )  # fmt: skip


def _outer(xs: Sequence[Tensor], low: Tensor, tables: RowTables, group: int, of_b: bool) -> None:
    how = _how(xs, tables, of_b, GRADIENT)
    blocks = triton.cdiv(max(x.shape[1] for x in xs), how["COLUMNS"])
    _gradient[(blocks, len(tables.segments), len(xs))](
        *_four(xs), low, tables.segments, tables.records[group], len(xs[0]),
        TILE=TILE if tables.ranks <= WIDE else TILE // 2, **how,
    )  # fmt: skip


def _how(xs: Sequence[Tensor], tables: RowTables, of_b: bool, cut: Cut) -> dict[str, Any]:
    wide = tables.ranks > WIDE
    columns = cut.columns // 2 if wide and cut.columns > 32 else cut.columns
    return {
        "FLOAT": FLOAT[xs[0].dtype],
        "ALIGNED": all(x.data_ptr() % 16 == 0 and x.shape[1] * x.element_size() % 16 == 0 for x in xs),
        "OF_B": of_b,
        "MEMBERS": MEMBERS,
        "WORDS": WORDS,
        "RANKS": tables.ranks,
        "COLUMNS": columns,
        "num_warps": cut.warps,
        "num_stages": cut.stages,
    }


def _four(tensors: Sequence[Tensor]) -> list[Any]:
    """Return four tensors and their widths: the last of these stands for those that there are not."""
    assert all(tensor.is_contiguous() for tensor in tensors)
    padded = [*tensors, *[tensors[-1]] * (MEMBERS - len(tensors))]
    return [*padded, *(tensor.shape[1] for tensor in padded)]
