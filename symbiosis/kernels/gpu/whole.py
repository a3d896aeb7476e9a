"""Makes packed weights whole on a GPU: each value is read once and written once. The values are those that `PackedWeight` makes, bit for bit."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from symbiosis.kernels.packed import GroupedWeight, PackedWeight, ScaledWeight, TableWeight

BLOCK = 1024  # columns of one program
VALUES = 2048  # of one program that makes whole runs
WITH_FP8 = (8, 9)  # the first GPUs whose instructions know floats of 8 bits


@triton.jit
def _at(numbers, first, left, WIDTH, HAS_NUMBERS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return which row of the weight this program makes, which row of the result that is, and the columns of both."""
    made = tl.program_id(0).to(tl.int64)
    row = tl.load(numbers + made).to(tl.int64) if HAS_NUMBERS else made + first
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return made, row, place, place + left, place < WIDTH


@triton.jit(do_not_specialize=["first", "left"])
def _scaled(  # type: ignore[no-untyped-def]
    out,
    codes,
    scale,
    numbers,
    first,
    left,
    K,
    WIDTH,
    STRIDE,
    OF_EACH,
    SCALE_ROWS,
    SCALES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    HAS_NUMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    made, row, place, column, mask = _at(numbers, first, left, WIDTH, HAS_NUMBERS, BLOCK)
    scale_row = row // OF_EACH * SCALE_ROWS + row % OF_EACH // BLOCK_ROWS
    code = tl.load(codes + row * K + column, mask=mask).to(tl.float32)
    if SCALES == 1:
        factor = tl.load(scale + scale_row).to(tl.float32)
    else:
        factor = tl.load(scale + scale_row * SCALES + column // BLOCK_COLUMNS, mask=mask).to(tl.float32)
    tl.store(out + made * STRIDE + place, (code * factor).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first", "left"])
def _from_table(  # type: ignore[no-untyped-def]
    out,
    codes,
    table,
    absmax,
    nested_absmax,
    nested_table,
    offset,
    numbers,
    first,
    left,
    K,
    WIDTH,
    STRIDE,
    RUN: tl.constexpr,
    NESTED_RUN: tl.constexpr,
    IS_NESTED: tl.constexpr,
    HAS_NUMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    made, row, place, column, mask = _at(numbers, first, left, WIDTH, HAS_NUMBERS, BLOCK)
    value = row * K + column
    pair = tl.load(codes + value // 2, mask=mask).to(tl.int32)
    code = tl.where(value % 2 == 0, pair >> 4, pair & 15)
    run = value // RUN
    largest = tl.load(absmax + run, mask=mask)
    if IS_NESTED:
        of_runs = tl.load(nested_absmax + run // NESTED_RUN, mask=mask)
        factor = tl.load(nested_table + largest.to(tl.int32), mask=mask) * of_runs + offset
    else:
        factor = largest.to(tl.float32)
    whole = tl.load(table + code, mask=mask) * factor
    tl.store(out + made * STRIDE + place, whole.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_run"])
def _whole_runs(  # type: ignore[no-untyped-def]
    out,
    codes,
    table,
    absmax,
    nested_absmax,
    nested_table,
    offset,
    first_run,
    count,
    RUN: tl.constexpr,
    NESTED_RUN: tl.constexpr,
    IS_NESTED: tl.constexpr,
    RUNS: tl.constexpr,
):
    """As `_from_table`, of runs that follow one another, each of which has one scale."""
    made = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)
    run, mask = made + first_run, made < count
    largest = tl.load(absmax + run, mask=mask)
    if IS_NESTED:
        of_runs = tl.load(nested_absmax + run // NESTED_RUN, mask=mask)
        factor = tl.load(nested_table + largest.to(tl.int32), mask=mask) * of_runs + offset
    else:
        factor = largest.to(tl.float32)
    at = tl.arange(0, RUN // 2)
    pair = tl.load(codes + run[:, None] * (RUN // 2) + at[None, :], mask=mask[:, None]).to(tl.int32)
    high = tl.load(table + (pair >> 4), mask=mask[:, None]) * factor[:, None]
    low = tl.load(table + (pair & 15), mask=mask[:, None]) * factor[:, None]
    whole = tl.interleave(high, low).to(out.dtype.element_ty)
    tl.store(out + made[:, None] * RUN + tl.arange(0, RUN)[None, :], whole, mask=mask[:, None])


@triton.jit(do_not_specialize=["first", "left"])
def _grouped(  # type: ignore[no-untyped-def]
    out,
    codes,
    scale,
    zero,
    group,
    numbers,
    first,
    left,
    K,
    WIDTH,
    STRIDE,
    GROUPS,
    HAS_NUMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    made, row, place, column, mask = _at(numbers, first, left, WIDTH, HAS_NUMBERS, BLOCK)
    pair = tl.load(codes + row * ((K + 1) // 2) + column // 2, mask=mask).to(tl.int32)
    code = tl.where(column % 2 == 0, pair & 15, pair >> 4).to(tl.float32)
    which = row * GROUPS + tl.load(group + column, mask=mask).to(tl.int32)
    less = tl.load(zero + which, mask=mask).to(tl.float32)
    factor = tl.load(scale + which, mask=mask).to(tl.float32)
    tl.store(out + made * STRIDE + place, ((code - less) * factor).to(out.dtype.element_ty), mask=mask)


def fill(packed: PackedWeight, out: Tensor, first: int = 0, left: int = 0, numbers: Tensor | None = None) -> bool:
    """Make rows from `first` on and columns from `left` on whole in `out`, or the rows of these numbers. Return False, with nothing done, for a
    format that has no kernel here."""
    if not has_kernel(packed):
        return False
    rows, width = out.shape
    if not out.numel():
        return True
    at = out if numbers is None else numbers, first, left, packed.shape[-1], width, out.stride(0)
    grid = rows, -(-width // BLOCK)
    how: dict[str, Any] = {"HAS_NUMBERS": numbers is not None, "BLOCK": BLOCK, "enable_fp_fusion": False}
    with torch.cuda.device(out.device):
        if isinstance(packed, ScaledWeight):
            places = packed.shape[-2], packed.scale.shape[-2], packed.scale.shape[-1], *packed.block
            _scaled[grid](out, packed.codes, packed.scale, *at, *places, **how)
        elif isinstance(packed, TableWeight):
            nested = packed.nested_absmax, packed.nested_table
            is_nested = nested[0] is not None and nested[1] is not None
            absmax, table = (packed.absmax, *nested) if is_nested else (packed.absmax,) * 3, packed.table
            given = out, packed.codes, table, *absmax, packed.offset
            runs = packed.blocksize, packed.nested_blocksize, is_nested
            K, run = packed.shape[-1], packed.blocksize
            is_plain = numbers is None and out.is_contiguous() and width == K
            if is_plain and not K % run and not run & (run - 1):
                count, each = out.numel() // run, max(1, VALUES // run)
                _whole_runs[(-(-count // each),)](
                    *given, first * K // run, count, *runs, RUNS=each, enable_fp_fusion=False
                )
            else:
                _from_table[grid](*given, *at, *runs, **how)
        elif isinstance(packed, GroupedWeight):
            _grouped[grid](
                out, packed.codes, packed.scale, packed.zero, packed.group, *at, packed.scale.shape[-1], **how
            )
    return True


def has_kernel(packed: PackedWeight) -> bool:
    """Whether a weight is in a format that is made whole here. All its parts are contiguous then."""
    if isinstance(packed, ScaledWeight):
        is_known = packed.codes.dtype is torch.int8 or (
            packed.codes.dtype is torch.float8_e4m3fn and torch.cuda.get_device_capability(packed.device) >= WITH_FP8
        )
    else:
        is_known = isinstance(packed, TableWeight | GroupedWeight)
    return is_known and all(part.is_contiguous() for part in packed.parts.values())
