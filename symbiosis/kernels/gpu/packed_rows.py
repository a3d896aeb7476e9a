"""Few rows times packed matrices, on a GPU: values are made of the codes as they are read, and nothing is held whole.

A value is what `PackedWeight` makes of it, bit for bit; sums are in float32, in another order than those of a product by the whole matrix. The columns
that are summed up are cut into parts, so that enough of the GPU reads at once; a second kernel adds the parts, always in the same order.

Shapes: T rows, K what goes in, N what comes out.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from symbiosis.kernels.gpu.whole import has_kernel
from symbiosis.kernels.packed import GroupedWeight, PackedWeight, ScaledWeight


class PackedTiling(NamedTuple):
    """The outputs and inputs of a step, the warps, the stages of the pipeline that loads, and how many programs run at once. The values were
    measured."""

    N: int
    K: int
    warps: int
    stages: int
    programs: int
    transposed: bool = False  # whether a step multiplies the matrix by the rows


FEWEST, MOST_ROWS = 16, 64  # that a matrix unit multiplies at least, and that are taken at most
MOST_MEMBERS = 4  # matrices of one launch
FLOATS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
BYTES, GROUPS, FP8_PAIRS, INT8_PAIRS = range(4)  # how codes stand for values
LEAST_STEP = 32  # columns
ALIGNED = 16  # values of a row, and bytes of where it lies
SIZES = ["N0", "N1", "N2", "N3", "first1", "first2", "first3"]
# By what codes are, and the rows that there is room for.
TILINGS = {
    (BYTES, 16): PackedTiling(64, 128, 4, 4, 528),
    (BYTES, 32): PackedTiling(64, 128, 4, 4, 528, True),
    (BYTES, 64): PackedTiling(128, 128, 8, 4, 1056, True),
    (GROUPS, 16): PackedTiling(64, 128, 4, 4, 1056),
    (GROUPS, 32): PackedTiling(64, 128, 4, 4, 1056, True),
    (GROUPS, 64): PackedTiling(128, 128, 8, 3, 1056, True),
}
for how in (FP8_PAIRS, INT8_PAIRS):
    TILINGS[how, 16] = PackedTiling(64, 128, 4, 4, 528)
    TILINGS[how, 32] = PackedTiling(128, 128, 8, 3, 264)
    TILINGS[how, 64] = PackedTiling(128, 128, 4, 3, 264)
MOST_PARTS = 32  # of the columns that are summed up
PART_S = 0.01  # what one more costs, of the time in which one program would sum up all
NAN_OF_FP8 = 0x7F
HOPPER = (9, 0)
LIFT = 2.0**120  # the bits of an fp8, as those of a bfloat16, are a value so many times too small
MOST_SCALE = 2.0**7  # which can be lifted
# Four codes to bfloat16, two pairs at a time. Of fp8 sign, exponent and mantissa go where bfloat16 has them.
OF_FP8 = tl.constexpr("""{
.reg .b32 t, u, a, b;
prmt.b32 t, $2, 0, 0x1404;
prmt.b32 u, $2, 0, 0x3424;
shr.b32 a, t, 4;
shr.b32 b, u, 4;
and.b32 a, a, 0x07f007f0;
and.b32 b, b, 0x07f007f0;
lop3.b32 $0, t, 0x80008000, a, 0xEA;
lop3.b32 $1, u, 0x80008000, b, 0xEA;
}""")
# Of an integer the low bits are added to 128, of which 128 is taken again, or 256 if it is negative.
OF_INT8 = tl.constexpr("""{
.reg .b32 t, u, a, b, c, d;
prmt.b32 t, $2, 0, 0x4140;
prmt.b32 u, $2, 0, 0x4342;
lop3.b32 a, t, 0x007f007f, 0x43004300, 0xEA;
lop3.b32 b, t, 0x00800080, 0x43004300, 0xEA;
lop3.b32 c, u, 0x007f007f, 0x43004300, 0xEA;
lop3.b32 d, u, 0x00800080, 0x43004300, 0xEA;
sub.rn.bf16x2 $0, a, b;
sub.rn.bf16x2 $1, c, d;
}""")
TIMES = tl.constexpr("mul.rn.bf16x2 $0, $1, $2;")


class Codes(NamedTuple):
    """How a weight of N x K is read. Each step takes columns that have one scale."""

    how: int
    codes: Tensor
    scale: Tensor
    per: int  # columns with one scale; 0 if a whole row has one
    rows: int = 1  # with one scale
    zero: Tensor | None = None  # of groups: what stands for 0

    @property
    def kind(self) -> tuple[Any, ...]:
        """What is alike in weights that one kernel multiplies."""
        return self.how, self.codes.dtype, self.scale.dtype, self.per, self.rows


@triton.jit
def _member(at, a, b, c, d):  # type: ignore[no-untyped-def]
    """Return the one of four addresses or numbers that is `at` a place."""
    found = a
    if at == 1:
        found = b
    if at == 2:
        found = c
    if at == 3:
        found = d
    return found


@triton.jit
def _multiplied(x_TK, w_NK, sums, TRANSPOSED: tl.constexpr):  # type: ignore[no-untyped-def]
    if TRANSPOSED:
        sums = tl.dot(w_NK, x_TK.T, sums)
    else:
        sums = tl.dot(x_TK, w_NK.T, sums)
    return sums


@triton.jit
def _of_pairs(w_NK, factor, HOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the values of codes of 8 bits, with factors of bfloat16: rounded once, as everywhere."""
    if HOW == 2:
        code = tl.inline_asm_elementwise(OF_FP8, "=r,=r,r", [w_NK], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        code = tl.inline_asm_elementwise(OF_INT8, "=r,=r,r", [w_NK], dtype=tl.bfloat16, is_pure=True, pack=4)
    return tl.inline_asm_elementwise(
        TIMES, "=r,r,r", [code, tl.broadcast_to(factor, code.shape)], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _factor(scales, at, real, HOW: tl.constexpr):  # type: ignore[no-untyped-def]
    factor = tl.load(scales + at, mask=real, other=0.0)
    if HOW < 2:
        factor = factor.to(tl.float32)
    return factor[:, None]


@triton.jit(do_not_specialize=["T", "STEPS", *SIZES])
def _parts(  # type: ignore[no-untyped-def]
    x, parts, T, K, STEPS, codes0, codes1, codes2, codes3, scale0, scale1, scale2, scale3, zero0, zero1, zero2, zero3, N0, N1, N2, N3,
    first1, first2, first3, HOW: tl.constexpr, PER: tl.constexpr, OF_ROWS: tl.constexpr, FLOAT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, TRANSPOSED: tl.constexpr
):  # fmt: skip
    """Sum up a part of the columns for some outputs of one of up to four matrices."""
    tile, part = tl.program_id(0), tl.program_id(1)
    member = (tile >= first1).to(tl.int32) + (tile >= first2).to(tl.int32) + (tile >= first3).to(tl.int32)
    codes = _member(member, codes0, codes1, codes2, codes3)
    scales = _member(member, scale0, scale1, scale2, scale3)
    N = _member(member, N0, N1, N2, N3)
    n = (tile - _member(member, 0, first1, first2, first3)) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = n < N
    row = tl.arange(0, ROWS)
    there = (row < T)[:, None]
    count = K // PER if PER else 1  # scales of an output
    scale_row = n // OF_ROWS * count
    if TRANSPOSED:
        sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    else:
        sums = tl.zeros((ROWS, BLOCK_N), tl.float32)
    if not PER:
        factor = _factor(scales, scale_row, real, HOW)
    if HOW != 1:
        k = tl.arange(0, BLOCK_K)
        w = tl.multiple_of(codes + n.to(tl.int64)[:, None] * K + k[None, :], [16, 16])
        x_at = x + row[:, None] * K + k[None, :]
    else:
        k = tl.arange(0, BLOCK_K // 2)
        w = tl.multiple_of(codes + n.to(tl.int64)[:, None] * (K // 2) + k[None, :], [16, 16])
        x_at = x.to(tl.pointer_type(tl.int32)) + row[:, None] * (K // 2) + k[None, :]
    for number in range(part * STEPS, min(part * STEPS + STEPS, tl.cdiv(K, BLOCK_K))):
        start = number * BLOCK_K  # so that it is known to be a multiple
        if PER:
            at = scale_row + start // PER
            factor = _factor(scales, at, real, HOW)
        else:
            at = scale_row
        if HOW != 1:
            inside = True if EVEN else (start + k < K)[None, :]
            w_NK = tl.load(w + start, mask=real[:, None] & inside, other=0.0)
            x_TK = tl.load(x_at + start, mask=there & inside, other=0.0)
            if HOW == 0:
                values = (w_NK.to(tl.float32) * factor).to(FLOAT)
            else:
                values = _of_pairs(w_NK, factor, HOW)
            sums = _multiplied(x_TK, values, sums, TRANSPOSED)
        else:  # two codes in a byte, and two of the row's values in a word
            pair = tl.load(w + number * (BLOCK_K // 2), mask=real[:, None], other=0).to(tl.int32)
            both = tl.load(x_at + number * (BLOCK_K // 2), mask=there, other=0)
            even = (both & 0xFFFF).to(tl.int16).to(FLOAT, bitcast=True)
            odd = ((both >> 16) & 0xFFFF).to(tl.int16).to(FLOAT, bitcast=True)
            zeros = _member(member, zero0, zero1, zero2, zero3)
            zero = tl.load(zeros + at, mask=real, other=0).to(tl.float32)[:, None]
            of_even = ((pair & 15).to(tl.float32) - zero) * factor
            of_odd = ((pair >> 4).to(tl.float32) - zero) * factor
            sums = _multiplied(even, of_even.to(FLOAT), sums, TRANSPOSED)
            sums = _multiplied(odd, of_odd.to(FLOAT), sums, TRANSPOSED)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    width = tl.num_programs(0) * BLOCK_N
    to = parts + part.to(tl.int64) * T * width
    if TRANSPOSED:
        tl.store(to + row[None, :] * width + column[:, None], sums, mask=(row < T)[None, :])
    else:
        tl.store(to + row[:, None] * width + column[None, :], sums, mask=there)


@triton.jit(do_not_specialize=["T", *SIZES])
def _added(  # type: ignore[no-untyped-def]
    parts, T, y0, y1, y2, y3, bias0, bias1, bias2, bias3, N0, N1, N2, N3, first1, first2, first3, HAS_BIAS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr
):  # fmt: skip
    """Add the parts of one row."""
    tile, row = tl.program_id(0), tl.program_id(1)
    member = (tile >= first1).to(tl.int32) + (tile >= first2).to(tl.int32) + (tile >= first3).to(tl.int32)
    N = _member(member, N0, N1, N2, N3)
    n = (tile - _member(member, 0, first1, first2, first3)) * BLOCK_N + tl.arange(0, BLOCK_N)
    width = tl.num_programs(0) * BLOCK_N
    source = parts + row.to(tl.int64) * width + tile * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.load(source)
    for other in tl.static_range(1, PARTS):
        sums += tl.load(source + other * T * width)
    if HAS_BIAS:
        sums += tl.load(_member(member, bias0, bias1, bias2, bias3) + n, mask=n < N, other=0.0).to(tl.float32)
    y = _member(member, y0, y1, y2, y3)
    tl.store(y + row * N + n, sums.to(y0.dtype.element_ty), mask=n < N)


class PackedMatrix(NamedTuple):
    """A matrix of a launch."""

    codes: Codes
    shape: tuple[int, ...]
    bias: Tensor | None

    def goes_with(self, other: "PackedMatrix") -> bool:
        """Whether one kernel multiplies by both."""
        alike = self.codes.kind == other.codes.kind and self.shape[1] == other.shape[1]
        return alike and (self.bias is None) == (other.bias is None)


class PackedRows:
    """The products of few rows with several packed matrices and their biases."""

    def __init__(self, members: Sequence[PackedMatrix], dtype: torch.dtype) -> None:
        self.width, self._dtype, self._launches = (
            members[0].shape[1],
            dtype,
            list[list[PackedMatrix]](),
        )  # width: of a row
        for member in members:
            last = self._launches[-1] if self._launches else []
            if last and len(last) < MOST_MEMBERS and last[0].goes_with(member):
                last.append(member)
            else:
                self._launches.append([member])

    def multiply(self, x_TK: Tensor, outs: Sequence[Tensor | None]) -> list[Tensor]:
        """Return `x W' (+ b)` for each matrix, in `outs` if these are given."""
        x = x_TK.contiguous()
        x = x if x.data_ptr() % ALIGNED == 0 else x.clone()
        widths = [member.shape[0] for members in self._launches for member in members]
        results = [x.new_empty(len(x), N) if out is None else out for out, N in zip(outs, widths, strict=True)]
        there = [result if result.is_contiguous() else torch.empty_like(result) for result in results]
        begun = 0
        with torch.cuda.device(x.device):
            for members in self._launches:
                self._launch(members, x, there[begun : begun + len(members)])
                begun += len(members)
        for result, made in zip(results, there, strict=True):
            if result is not made:
                result.copy_(made)
        return results

    def _launch(self, members: Sequence[PackedMatrix], x: Tensor, outs: Sequence[Tensor]) -> None:
        first, (T, K) = members[0].codes, x.shape
        room = max(FEWEST, triton.next_power_of_2(T))
        tiling = TILINGS[first.how, room]
        step = min(tiling.K, first.per or tiling.K)
        tiles = [triton.cdiv(member.shape[0], tiling.N) for member in members]
        steps = triton.cdiv(K, step)
        each = steps_of_part(sum(tiles), steps, tiling.programs)
        parts = triton.cdiv(steps, each)
        sums = torch.empty(parts, T, sum(tiles) * tiling.N, dtype=torch.float32, device=x.device)
        begins = [sum(tiles[:number]) for number in range(1, MOST_MEMBERS)]
        sizes = *_four([member.shape[0] for member in members]), *begins
        names = "codes", "scale", "zero"
        read = [part for name in names for part in _four([getattr(member.codes, name) for member in members])]
        _parts[(sum(tiles), parts)](
            x, sums, T, K, each, *read, *sizes, first.how, first.per, first.rows, FLOATS[self._dtype], room, tiling.N, step, K % step == 0,
            tiling.transposed, num_warps=tiling.warps, num_stages=tiling.stages, enable_fp_fusion=False,
        )  # fmt: skip
        biases, has_bias = _four([member.bias for member in members]), members[0].bias is not None
        _added[(sum(tiles), T)](sums, T, *_four(outs), *biases, *sizes, has_bias, parts, tiling.N, num_warps=1)


class PackedProducts:
    """What multiplies few rows by packed matrices as they lie there, prepared once for each set of them."""

    def __init__(self, matrices: Mapping[int, PackedWeight]) -> None:
        self._matrices = matrices
        self._prepared: dict[Any, PackedRows | None] = {}

    def by(
        self,
        numbers: tuple[int, ...],
        rows: int,
        biases: Callable[[], Sequence[Tensor | None]] | None,
        dtype: torch.dtype,
    ) -> PackedRows | None:
        """Return what multiplies so many rows of this dtype by these matrices and adds biases, or None if the matrices have to be made whole."""
        if rows > MOST_ROWS:
            return None
        key = numbers, biases is None, dtype
        if key not in self._prepared:
            each = biases() if biases else [None] * len(numbers)
            self._prepared[key] = prepared([self._matrices.get(number) for number in numbers], each, dtype)
        return self._prepared[key]


def prepared(
    weights: Sequence[PackedWeight | None], biases: Sequence[Tensor | None], dtype: torch.dtype
) -> PackedRows | None:
    """Return what multiplies rows of this dtype by these weights, or None if one of them is not read here."""
    found = [None if weight is None else codes_of(weight, dtype) for weight in weights]
    members = [
        PackedMatrix(codes, weight.shape, bias)
        for codes, weight, bias in zip(found, weights, biases, strict=True)
        if codes is not None and weight is not None
    ]
    return PackedRows(members, dtype) if len(members) == len(weights) else None


@cache
def steps_of_part(tiles: int, steps: int, programs: int) -> int:
    """Return how many steps each part of the columns has: the GPU runs so many programs at once, and those that are left over take as long as all.

    >>> [steps_of_part(tiles, 32, 264) for tiles in (32, 86, 172, 1000)]
    [4, 11, 11, 32]
    """

    def cost(each: int) -> float:
        parts = triton.cdiv(steps, each)
        return float(triton.cdiv(tiles * parts, programs) * each / steps + PART_S * parts * max(1, tiles / programs))

    return min(range(steps, max(1, triton.cdiv(steps, MOST_PARTS), min(2, steps)) - 1, -1), key=cost)


def codes_of(weight: PackedWeight, dtype: torch.dtype) -> Codes | None:
    """Return how a weight is read for rows of this dtype, or None if it is not read here."""
    if dtype not in FLOATS or len(weight.shape) != 2 or weight.shape[1] % ALIGNED:
        return None
    if weight.device.type != "cuda" or not has_kernel(weight):
        return None
    K, found = weight.shape[1], None
    if isinstance(weight, ScaledWeight):
        per = 0 if weight.scale.shape[-1] == 1 else weight.block[1]
        found = Codes(BYTES, weight.codes, weight.scale, per, weight.block[0])
        if dtype is torch.bfloat16 and (how := _pairs_of(weight)) is not None:
            scale = weight.scale.float() * (LIFT if how == FP8_PAIRS else 1)
            found = found._replace(how=how, codes=weight.codes.view(torch.uint8), scale=scale.bfloat16())
    elif isinstance(weight, GroupedWeight):
        groups = weight.scale.shape[-1]
        per = 0 if groups == 1 else K // groups
        plain = torch.arange(K, device=weight.device) // (per or K)
        if torch.equal(weight.group.long(), plain):
            found = Codes(GROUPS, weight.codes, weight.scale, per, zero=weight.zero)
    if found is None or found.codes.data_ptr() % ALIGNED:
        return None
    is_step = found.per >= LEAST_STEP and found.per & (found.per - 1) == 0 and K % found.per == 0
    return found if is_step or (not found.per and (found.how != GROUPS or K % TILINGS[GROUPS, FEWEST].K == 0)) else None


def _pairs_of(weight: ScaledWeight) -> int | None:
    """Return how codes are read two at a time, or None if they are not: for that scales have to be bfloat16's, and of fp8 all codes numbers; and older
    GPUs multiply no pairs of bfloat16."""
    scale, codes = weight.scale.float(), weight.codes
    if torch.cuda.get_device_capability(weight.device) < HOPPER or not torch.equal(scale.bfloat16().float(), scale):
        return None
    if codes.dtype == torch.int8:
        return INT8_PAIRS
    if codes.dtype != torch.float8_e4m3fn or (scale.numel() and scale.abs().max() >= MOST_SCALE):
        return None
    return None if ((codes.view(torch.uint8) & NAN_OF_FP8) == NAN_OF_FP8).any() else FP8_PAIRS


def load(weights: Iterable[tuple[PackedWeight, torch.dtype]]) -> None:
    """Make CUDA load the kernels for these weights, with rows of this dtype, now, and not when somebody waits for them."""
    kinds: dict[Any, tuple[Codes, PackedWeight, torch.dtype]] = {}
    for weight, dtype in weights:
        if (codes := codes_of(weight, dtype)) is not None:
            kinds[(dtype, *codes.kind)] = codes, weight, dtype
    for codes, weight, dtype in kinds.values():
        N, K = weight.shape
        for bias in (None, torch.zeros(N, dtype=dtype, device=weight.device)):
            rows = PackedRows([PackedMatrix(codes, weight.shape, bias)], dtype)
            for T in (1, FEWEST + 1, MOST_ROWS):
                rows.multiply(torch.zeros(T, K, dtype=dtype, device=weight.device), [None])
    torch.cuda.synchronize()


def _four(values: Sequence[Any]) -> list[Any]:
    return [*values, *[values[0]] * (MOST_MEMBERS - len(values))]
