"""Attention over keys and values that lie in pages, on a GPU. `attend` in `symbiosis/kernels/paged_attention.py` is the formula.

Tables say which rows look at what. One has the pages of each slot, int32 [slots, layers, pages]; the others name rows of the batch. An
entry that is not in use is -1, or has no rows, and its program ends at once. So a launch depends on the size of the tables only, and can be
part of a CUDA graph.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from symbiosis.kernels.gpu.adapter_rows import SUPPORTED
from symbiosis.kernels.paged_attention import How

QUERIES = 32  # rows of a block of a longer segment; of 64, Triton 3.6 makes products that are wrong where values have at most 16 elements
KEYS = 64  # that a block of a longer segment looks at together
MOST_PARTS = 32  # into which the tokens that a row sees are cut
LOG2_E = tl.constexpr(1.4426950408889634)


class Memory(NamedTuple):
    """Where keys and values lie. A page holds the keys of `block` tokens, a row of all heads for each, and from `values_at` on their
    values. The pages of a sequence's slot: int32 [slots, layers, pages]."""

    flat: Tensor
    pages: Tensor
    block: int
    page: int  # elements
    values_at: int
    heads: int
    key: int
    value: int
    layer: int


class Decode(NamedTuple):
    """How a launch is divided."""

    pages: int  # at once
    warps: int
    stages: int
    programs: int = 1  # that occupy a GPU


# Measured: on average over many loads, 3 % and 7 % over the best that each has (`scripts/bench_serve.py attention`).
DECODE, DECODE_ALONE = Decode(4, 4, 3, 512), Decode(2, 2, 3, 2048)


@triton.jit(do_not_specialize=["layer"])
def _store(  # type: ignore[no-untyped-def]
    k, v, flat, pages, slots, positions, layer, layers, most, page, values_at, k_row, k_head, v_row, v_head, HEADS: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    if slot >= 0:
        number = tl.load(pages + (slot * layers + layer).to(tl.int64) * most + position // BLOCK).to(tl.int64)
        e = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
        to, inside = flat + number * page, position % BLOCK
        keys = tl.load(k + row * k_row + e // KEY * k_head + e % KEY, mask=e < HEADS * KEY)
        tl.store(to + inside * HEADS * KEY + e, keys, mask=e < HEADS * KEY)
        values = tl.load(v + row * v_row + e // VALUE * v_head + e % VALUE, mask=e < HEADS * VALUE)
        tl.store(to + values_at + inside * HEADS * VALUE + e, values, mask=e < HEADS * VALUE)


@triton.jit
def _capped(scores, softcap, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    if SOFTCAP:
        scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
    return scores * LOG2_E


@triton.jit
def _within(seen, d, SIZE: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return which elements [tokens, d] are to be loaded."""
    mask = seen[:, None]
    if SIZE != PADDED:
        mask = mask & (d < SIZE)[None, :]
    return mask


@triton.jit
def _part_of_row(  # type: ignore[no-untyped-def]
    singles, number, s, window, BLOCK: tl.constexpr, PAGES: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """Return which row this is (-1: none), its slot, which tokens it sees, from and up to, and which pages of these are in part `s`."""
    at = singles + 3 * number
    row, slot, end = tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2)
    begin = tl.where(window > 0, tl.maximum(end - window, 0), 0)
    first, last = begin // BLOCK, tl.cdiv(end, BLOCK)
    each = tl.cdiv(tl.cdiv(last - first, SPLIT), PAGES) * PAGES
    low = first + s * each
    return row, slot, begin, end, low, tl.minimum(low + each, last)


@triton.jit
def _kept(  # type: ignore[no-untyped-def]
    part, stats, sinks, result, at, head, row, heads, acc, most, sum, d, mask, head_mask, VALUE: tl.constexpr,
    SPLIT: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Store the results of heads, or, if `_join` is to join them with other parts, sums and their weights."""
    if SPLIT == 1:
        if SINKS:
            sink = tl.load(sinks + head, mask=head_mask, other=0.0).to(tl.float32) * LOG2_E
            new = tl.maximum(most, sink)
            acc = acc * tl.exp2(most - new)[:, None]
            sum = sum * tl.exp2(most - new) + tl.exp2(sink - new)
        to = result + ((row * heads + head) * VALUE)[:, None] + d[None, :]
        tl.store(to, (acc / sum[:, None]).to(result.dtype.element_ty), mask=mask)
    else:
        tl.store(part + (at * VALUE)[:, None] + d[None, :], acc, mask=mask)
        tl.store(stats + at * 2, most, mask=head_mask)
        tl.store(stats + at * 2 + 1, sum, mask=head_mask)


@triton.jit(do_not_specialize=["layer", "window"])
def _decode(  # type: ignore[no-untyped-def]
    q, flat, pages, singles, result, part, stats, sinks, layer, layers, most, page, values_at, q_row, q_head, window, scaling,
    softcap, HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PAGES: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Compute one row and one head of keys, with all heads of queries that share it. ROWS is their number, padded. Long: one loop over
    pointers that it has just laid out."""
    head, number, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, slot, begin, end, low, high = _part_of_row(singles, number, s, window, BLOCK, PAGES, SPLIT)
    if row >= 0:
        g, j = tl.arange(0, ROWS), tl.arange(0, PAGES * BLOCK)
        dk, dv = tl.arange(0, KEYS), tl.arange(0, VALUES)
        mine = g < GROUP
        table = pages + (slot * layers + layer).to(tl.int64) * most
        q_GD = tl.load(
            q + row * q_row + ((head * GROUP + g) * q_head)[:, None] + dk[None, :],
            mask=mine[:, None] & (dk < KEY)[None, :],
            other=0.0,
        )
        top = tl.full((ROWS,), -float("inf"), tl.float32)
        sum = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, VALUES), tl.float32)
        for at in tl.range(low, high, PAGES, num_stages=STAGES):  # without dots, only told loops fetch ahead
            there = at + j // BLOCK < high
            number_of = tl.load(table + at + j // BLOCK, mask=there, other=0).to(tl.int64)
            token = at * BLOCK + j
            seen = there & (token < end) & (token >= begin)
            where = flat + number_of * page
            k = where + (j % BLOCK * HEADS + head) * KEY
            v = where + values_at + (j % BLOCK * HEADS + head) * VALUE
            k_JD = tl.load(k[:, None] + dk[None, :], mask=_within(seen, dk, KEY, KEYS), other=0.0)
            v_JD = tl.load(v[:, None] + dv[None, :], mask=_within(seen, dv, VALUE, VALUES), other=0.0)
            scores = tl.dot(q_GD, k_JD.T, input_precision="ieee")
            scores = tl.where(seen[None, :], _capped(scores * scaling, softcap, SOFTCAP), -float("inf"))
            new = tl.maximum(top, tl.max(scores, 1))
            weights, old = tl.exp2(scores - new[:, None]), tl.exp2(top - new)
            acc = acc * old[:, None] + tl.dot(weights.to(v_JD.dtype), v_JD, input_precision="ieee")
            sum = sum * old + tl.sum(weights, 1)
            top = new
        query = head * GROUP + g
        to = (number * (HEADS * GROUP) + query) * SPLIT + s
        mask = mine[:, None] & (dv < VALUE)[None, :]
        _kept(
            part, stats, sinks, result, to, query, row, HEADS * GROUP, acc, top, sum, dv, mask, mine, VALUE, SPLIT, SINKS
        )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "window"])
def _decode_alone(  # type: ignore[no-untyped-def]
    q, flat, pages, singles, result, part, stats, sinks, layer, layers, most, page, values_at, q_row, q_head, window, scaling,
    softcap, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    BLOCK: tl.constexpr, PAGES: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Compute one row and one head of keys with its only head of queries. A product of matrices would multiply by padding, so this adds up."""
    head, number, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, slot, begin, end, low, high = _part_of_row(singles, number, s, window, BLOCK, PAGES, SPLIT)
    if row >= 0:
        j, dk, dv = tl.arange(0, PAGES * BLOCK), tl.arange(0, KEYS), tl.arange(0, VALUES)
        table = pages + (slot * layers + layer).to(tl.int64) * most
        q_D = tl.load(q + row * q_row + head * q_head + dk, mask=dk < KEY, other=0.0).to(tl.float32)
        inside_k, inside_v = (
            j % BLOCK * (HEADS * KEY) + head * KEY,
            values_at + j % BLOCK * (HEADS * VALUE) + head * VALUE,
        )
        top, sum, acc = -float("inf"), 0.0, tl.zeros((VALUES,), tl.float32)
        for start in tl.range(low, high, PAGES, num_stages=STAGES):
            there = start + j // BLOCK < high
            where = flat + tl.load(table + start + j // BLOCK, mask=there, other=0).to(tl.int64) * page
            token = start * BLOCK + j
            seen = there & (token < end) & (token >= begin)
            k_JD = tl.load((where + inside_k)[:, None] + dk[None, :], mask=_within(seen, dk, KEY, KEYS), other=0.0)
            v_JD = tl.load((where + inside_v)[:, None] + dv[None, :], mask=_within(seen, dv, VALUE, VALUES), other=0.0)
            scores = _capped(tl.sum(k_JD.to(tl.float32) * q_D[None, :], 1) * scaling, softcap, SOFTCAP)
            scores = tl.where(seen, scores, -float("inf"))
            new = tl.maximum(top, tl.max(scores, 0))
            weights, old = tl.exp2(scores - new), tl.exp2(top - new)
            acc = acc * old + tl.sum(weights[:, None] * v_JD.to(tl.float32), 0)
            sum = sum * old + tl.sum(weights, 0)
            top = new
        one = tl.arange(0, 1)
        query = head + one
        _kept(
            part, stats, sinks, result, (number * HEADS + query) * SPLIT + s, query, row, HEADS, acc[None, :],
            top + one.to(tl.float32), sum + one.to(tl.float32), dv, (dv < VALUE)[None, :], query >= 0, VALUE, SPLIT, SINKS,
        )  # fmt: skip


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    part, stats, sinks, singles, result, heads, VALUE: tl.constexpr, VALUES: tl.constexpr, SPLIT: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Join the parts into which the tokens of a row were cut."""
    number, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(singles + 3 * number).to(tl.int64)
    if row >= 0:
        s, d = tl.arange(0, SPLIT), tl.arange(0, VALUES)
        at = (number * heads + head) * SPLIT + s
        top, sum = tl.load(stats + 2 * at), tl.load(stats + 2 * at + 1)
        most = tl.max(top, 0)
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
            most = tl.maximum(most, sink)
        weight = tl.where(sum > 0, tl.exp2(top - most), 0.0)
        whole = tl.sum(sum * weight, 0)
        if SINKS:
            whole += tl.exp2(sink - most)
        acc = tl.load(
            part + (at * VALUE)[:, None] + d[None, :], mask=(d < VALUE)[None, :] & (sum > 0)[:, None], other=0.0
        )
        y = tl.sum(acc * weight[:, None], 0) / whole
        tl.store(result + (row * heads + head) * VALUE + d, y.to(result.dtype.element_ty), mask=d < VALUE)


@triton.jit(do_not_specialize=["layer", "window"])
def _prefill(  # type: ignore[no-untyped-def]
    q, flat, pages, blocks, result, sinks, layer, layers, most, page, values_at, q_row, q_head, window, scaling, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Compute consecutive rows of one sequence, and one head: each row sees all tokens up to its own. Long: one loop over pointers that it
    has just laid out."""
    number, head = tl.program_id(0), tl.program_id(1)
    at = blocks + 4 * number
    first, count, slot, position = tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    if count > 0:
        t, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        dk, dv = tl.arange(0, KEYS), tl.arange(0, VALUES)
        rows, mine = first + t, t < count
        table = pages + (slot * layers + layer).to(tl.int64) * most
        q_TD = tl.load(
            q + (rows * q_row)[:, None] + head * q_head + dk[None, :],
            mask=mine[:, None] & (dk < KEY)[None, :],
            other=0.0,
        )
        top = tl.full((ROWS,), -float("inf"), tl.float32)
        sum = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, VALUES), tl.float32)
        begin = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
        end = position + count
        for start in range(begin // COLUMNS * COLUMNS, end, COLUMNS):
            token = start + j
            seen = (token < end) & (token >= begin)
            numbers = tl.load(table + tl.where(seen, token // BLOCK, 0), mask=seen, other=0).to(tl.int64)
            where = flat + numbers * page
            k = where + (token % BLOCK * HEADS + head // GROUP) * KEY
            v = where + values_at + (token % BLOCK * HEADS + head // GROUP) * VALUE
            k_JD = tl.load(k[:, None] + dk[None, :], mask=_within(seen, dk, KEY, KEYS), other=0.0)
            scores = _capped(tl.dot(q_TD, k_JD.T, input_precision="ieee") * scaling, softcap, SOFTCAP)
            own = (position + t)[:, None]
            sees = seen[None, :] & (token[None, :] <= own) & ((window <= 0) | (token[None, :] > own - window))
            scores = tl.where(sees, scores, -float("inf"))
            new = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(new == -float("inf"), 0.0, new)  # a row that sees none of these
            weights, old = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
            v_JD = tl.load(v[:, None] + dv[None, :], mask=_within(seen, dv, VALUE, VALUES), other=0.0)
            acc = acc * old[:, None] + tl.dot(weights.to(v_JD.dtype), v_JD, input_precision="ieee")
            sum = sum * old + tl.sum(weights, 1)
            top = new
        sum = tl.where(mine, sum, 1.0)
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
            new = tl.maximum(top, sink)
            acc = acc * tl.exp2(top - new)[:, None]
            sum = sum * tl.exp2(top - new) + tl.exp2(sink - new)
        to = result + ((rows * (HEADS * GROUP) + head) * VALUE)[:, None] + dv[None, :]
        tl.store(to, (acc / sum[:, None]).to(result.dtype.element_ty), mask=mine[:, None] & (dv < VALUE)[None, :])


def store(memory: Memory, key: Tensor, value: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Store rows [heads, rows, size] as keys and values of the tokens at these positions of these slots, int32; slot -1: nowhere."""
    key, value = (each if each.stride(2) == 1 else each.contiguous() for each in (key, value))
    elements = 1024
    blocks = triton.cdiv(memory.heads * max(memory.key, memory.value), elements)
    _store[(key.shape[1], blocks)](
        key, value, memory.flat, memory.pages, slots, positions, memory.layer, *memory.pages.shape[1:], memory.page,
        memory.values_at, key.stride(1), key.stride(0), value.stride(1), value.stride(0), memory.heads, memory.key,
        memory.value, memory.block, elements, num_warps=4,
    )  # fmt: skip


def split_for(programs: int, rows: int, heads: int, pages: int) -> int:
    """Return into how many parts the tokens that a row sees are cut, so that few rows occupy a GPU that so many programs occupy."""
    wanted = triton.next_power_of_2(triton.cdiv(programs, rows * heads))
    return int(max(1, min(wanted, triton.next_power_of_2(pages), MOST_PARTS)))


def cut_to_fit(cut: Decode, page_bytes: int, shared: int) -> Decode:
    """Return the cut with as many of its pages and stages as fit into so many bytes of shared memory. A page has so many bytes of keys and
    values that a program reads."""
    pages = cut.pages
    while pages > 1 and 2 * pages * page_bytes > shared:
        pages //= 2
    return cut._replace(pages=pages, stages=max(1, min(cut.stages, shared // (pages * page_bytes))))


def decode(
    memory: Memory, how: How, query: Tensor, singles: Tensor, result: Tensor, cut: Decode | None = None, split: int = 0
) -> None:
    """Compute attention of single rows. `singles`, int32 [rows, 3], has for each: which row of the queries [heads, rows, size] and of the
    result [rows, heads, size] it is, its slot, and how many tokens it sees."""
    query = query if query.stride(2) == 1 else query.contiguous()
    heads, count = query.shape[0], len(singles)
    group = heads // memory.heads
    sizes = memory.key, memory.value, _padded(memory.key), _padded(memory.value)
    if cut is None:
        page_bytes = memory.block * (sizes[2] + sizes[3]) * query.element_size()
        cut = cut_to_fit(DECODE_ALONE if group == 1 else DECODE, page_bytes, _shared_bytes(query.device))
    split = split or split_for(cut.programs, count, memory.heads, memory.pages.shape[2])
    part = query.new_empty(count * heads * split * memory.value if split > 1 else 0, dtype=torch.float32)
    stats = query.new_empty(count * heads * split * 2 if split > 1 else 0, dtype=torch.float32)
    sinks = part if how.sinks is None else how.sinks
    assert query.dtype in SUPPORTED
    given = (
        query, memory.flat, memory.pages, singles, result, part, stats, sinks, memory.layer, *memory.pages.shape[1:],
        memory.page, memory.values_at, query.stride(1), query.stride(0), how.window or 0, how.scaling, how.softcap or 0.0,
        memory.heads,
    )  # fmt: skip
    cuts = memory.block, cut.pages, split, cut.stages, how.softcap is not None, how.sinks is not None
    grid, cuts_of = (memory.heads, count, split), {"num_warps": cut.warps, "num_stages": cut.stages}
    if group == 1:
        _decode_alone[grid](*given, *sizes, *cuts, **cuts_of)
    else:
        _decode[grid](*given, group, *sizes, max(16, triton.next_power_of_2(group)), *cuts, **cuts_of)
    if split > 1:
        _join[(count, heads)](
            part, stats, sinks, singles, result, heads, memory.value, _padded(memory.value), split, how.sinks is not None,
            num_warps=1,
        )  # fmt: skip


def prefill(memory: Memory, how: How, query: Tensor, blocks: Tensor, result: Tensor) -> None:
    """Compute attention of blocks of up to `QUERIES` consecutive rows. `blocks`, int32 [blocks, 4], has for each: its first row, how many,
    their slot, and the first row's position."""
    query = query if query.stride(2) == 1 else query.contiguous()
    heads = query.shape[0]
    keys, values = _padded(memory.key), _padded(memory.value)
    columns = 32 if max(keys, values) > 128 or query.dtype == torch.float32 else KEYS
    sinks = query if how.sinks is None else how.sinks
    _prefill[(len(blocks), heads)](
        query, memory.flat, memory.pages, blocks, result, sinks, memory.layer, *memory.pages.shape[1:], memory.page,
        memory.values_at, query.stride(1), query.stride(0), how.window or 0, how.scaling, how.softcap or 0.0, memory.heads,
        heads // memory.heads, memory.key, memory.value, keys, values, memory.block, QUERIES, columns,
        how.softcap is not None, how.sinks is not None, num_warps=4, num_stages=2,
    )  # fmt: skip


def _shared_bytes(device: torch.device) -> int:
    """Return how much shared memory a program may take. Some is left for what Triton keeps there besides."""
    if device.type != "cuda":  # Triton's interpreter
        return 1 << 20
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin * 7 // 8  # type: ignore[attr-defined, no-any-return]


def _padded(size: int) -> int:
    return int(max(16, triton.next_power_of_2(size)))
