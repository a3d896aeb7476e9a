"""Products of integers on GPUs whose tensor cores multiply bytes, by Triton. `integers.py` holds the reference."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST = 1 << 16  # products of digits that are summed in 32 bits, give or take a block: half of what surely fits
SIDE = 128  # of the squares in which small kernels work
ALIGNED = 16  # bytes at which rows of digits begin


class BlockSizes(NamedTuple):
    """The blocks that a product is cut into. With `inside`, the wide kernel splits rows into digits itself. `turn` says how weights
    whose summed bytes do not lie side by side are transposed: `before`, `inside` by hand, or by Triton as it likes (`never`)."""

    M: int
    BN: int
    BK: int
    warps: int
    stages: int
    programs: int  # to have at most where sums are cut into parts, so that few blocks keep the whole GPU busy
    inside: bool
    turn: str


# The first whose number of rows is not less. M is at least 64, and P x 8.
FEW, MANY = 1 << 5, 1 << 62
CHOICES: dict[int, list[tuple[int, BlockSizes]]] = {  # by P; measured on an H200
    4: [
        (16, BlockSizes(64, 64, 128, 4, 4, 264, True, "inside")),
        (FEW, BlockSizes(128, 64, 128, 4, 4, 264, True, "inside")),
        (MANY, BlockSizes(128, 128, 128, 4, 3, 264, False, "before")),
    ],
    8: [
        (8, BlockSizes(64, 64, 128, 4, 4, 264, True, "inside")),
        (16, BlockSizes(128, 64, 128, 4, 4, 264, True, "inside")),
        (256, BlockSizes(128, 128, 128, 4, 3, 264, False, "before")),
        (MANY, BlockSizes(256, 128, 128, 8, 4, 132, False, "before")),
    ],
}


def fused_product(
    x_TK: Tensor, w_DKN: Tensor, out_TN: Tensor | None = None, blocks: BlockSizes | None = None
) -> Tensor:
    """Make `integers.modular_product` on a GPU."""
    (rows, width), (digits, _, columns) = x_TK.shape, w_DKN.shape
    places = x_TK.element_size()
    if out_TN is None:
        out_TN = x_TK.new_empty(rows, columns)
    if not out_TN.numel() or not width:
        return out_TN.zero_()
    if (width > 1 and x_TK.stride(1) != 1) or (columns > 1 and out_TN.stride(1) != 1):
        return out_TN.copy_(fused_product(x_TK.contiguous(), w_DKN, None, blocks))
    b = blocks or next(b for most, b in CHOICES[places] if rows <= most)
    BT = b.M // places
    tiles = triton.cdiv(rows, BT) * triton.cdiv(columns, b.BN)
    steps = triton.cdiv(width, b.BK)
    splits = max(1, b.programs // tiles, triton.cdiv(width * digits, LONGEST))
    per_split = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, per_split)
    turn = b.turn if w_DKN.stride(1) != 1 else "never"
    if turn == "before":
        w_DKN, turn = transposed(w_DKN), "never"
    if b.inside:
        x, stride, plane = x_TK, x_TK.stride(0), 0
        if splits > 1:
            out_TN.zero_()
    else:
        x = taken_apart(x_TK, digits - 1, out_TN, splits > 1)
        stride, plane = x.stride(1), x.stride(0)
    _multiply[(tiles, splits)](
        x, w_DKN, out_TN, rows, width, columns, stride, plane, *w_DKN.stride(), out_TN.stride(0), per_split,
        P=places, D=digits, BT=BT, BN=b.BN, BK=b.BK, SPLITS=splits > 1, INSIDE=b.inside, TURN=turn == "inside",
        EVEN=width % b.BK == 0 and columns % b.BN == 0, num_warps=b.warps, num_stages=b.stages,
    )  # fmt: skip
    return out_TN


@triton.jit
def _bytes(x, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the signed digits of x, BT x BK, as M x BK bytes: digit 2i + j of row 8r + s in row (i, r, j, s). So after the product most
    digits of a row are in the registers of one thread."""
    BT: tl.constexpr = x.shape[0]
    BK: tl.constexpr = x.shape[1]
    half = tl.full((1, 1), -0x7F7F7F80 if P == 4 else -0x7F7F7F7F7F7F7F80, x.dtype)
    parts = tl.reshape((x + half) ^ half, (1, BT // 8, 1, 8, BK)) >> _places(P).to(x.dtype)
    return tl.reshape(parts.to(tl.int8), (P * BT, BK))


@triton.jit
def _places(P: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the shift of each digit, in the order of `_bytes`."""
    upper = tl.reshape(tl.arange(0, P // 2), (P // 2, 1, 1, 1, 1))
    return 16 * upper + 8 * tl.reshape(tl.arange(0, 2), (1, 1, 2, 1, 1))


@triton.jit(do_not_specialize=["T", "per_split"])
def _multiply(  # type: ignore[no-untyped-def]
    x, w, out, T, K, N, stride_t, stride_p, stride_d, stride_k, stride_n, stride_out, per_split,
    P: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    INSIDE: tl.constexpr, TURN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute out += x W, or out = x W. x holds integers, or (unless INSIDE) their digits, D - 1 planes of zeros before them.

    It is long because a kernel is one loop over pointers that it has just laid out; its parts, if they were apart, would have to pass all
    of them to each other.
    """
    M: tl.constexpr = P * BT
    GROUP: tl.constexpr = 8  # blocks of rows that go through the same columns together, for the sake of the cache
    down, across = tl.cdiv(T, BT), tl.cdiv(N, BN)
    group = tl.program_id(0) // (GROUP * across)
    tall = min(down - group * GROUP, GROUP)
    block_t = group * GROUP + tl.program_id(0) % (GROUP * across) % tall
    block_n = tl.program_id(0) % (GROUP * across) // tall
    first = tl.program_id(1) * per_split * BK
    steps = min(per_split, tl.cdiv(K - first, BK))

    n = block_n * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if INSIDE:
        row = block_t * BT + tl.arange(0, BT)
        at = tl.minimum(row, T - 1).to(tl.int64) * stride_t
    else:
        m = tl.arange(0, M)
        row = block_t * BT + m // 16 % (BT // 8) * 8 + m % 8
        plane = m // (2 * BT) * 2 + m // 8 % 2
        at = tl.minimum(row, T - 1).to(tl.int64) * stride_t + plane.to(tl.int64) * stride_p
    x_at = x + at[:, None] + first + k[None, :]
    w_at = w + n.to(tl.int64)[None, :] * stride_n + first.to(tl.int64) * stride_k
    digit_w = tl.full((), 1, tl.int64) * stride_d
    digit_x = tl.full((), 1, tl.int64) * stride_p
    step_w = tl.full((), BK, tl.int64) * stride_k

    sums = tl.zeros((M, BN), tl.int32)
    for turn in range(D * steps):
        d = 0 if D == 1 else turn // steps
        step = turn - d * steps
        left = K - first - step * BK
        a_at = x_at + step * BK
        if not INSIDE:
            a_at += (D - 1 - d) * digit_x
        if EVEN:
            a = tl.load(a_at)
        else:
            a = tl.load(a_at, mask=k[None, :] < left, other=0)
        if INSIDE:
            a = _bytes(a << (8 * d), P)
        b_at = w_at + (step * step_w + d * digit_w)
        if TURN:
            b = _turned(b_at, n, left, N, stride_k, BK, EVEN)
        elif EVEN:
            b = tl.load(b_at + k[:, None] * stride_k)
        else:
            b = tl.load(b_at + k[:, None] * stride_k, mask=(k[:, None] < left) & (n[None, :] < N), other=0)
        sums = tl.dot(a, b, sums, out_dtype=tl.int32)

    whole = out.dtype.element_ty
    parts = tl.reshape(sums, (P // 2, BT // 8, 2, 8, BN)).to(whole) << _places(P).to(whole)
    y = tl.reshape(tl.sum(tl.sum(parts, 2), 0), (BT, BN))
    t = block_t * BT + tl.arange(0, BT)
    y_at = out + t.to(tl.int64)[:, None] * stride_out + n[None, :]
    inside = (t[:, None] < T) & (n[None, :] < N)
    if SPLITS:
        tl.atomic_add(y_at, y, mask=inside, sem="relaxed")
    else:
        tl.store(y_at, y, mask=inside)


@triton.jit
def _turned(w_at, n, left, N, stride_k, BK: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return BK x BN bytes turned, so that four which lie below each other are in one thread, which stores them as one word."""
    k = 4 * tl.arange(0, BK // 4)[:, None]
    at = w_at + k * stride_k
    if EVEN:
        w0, w1 = tl.load(at), tl.load(at + stride_k)
        w2, w3 = tl.load(at + 2 * stride_k), tl.load(at + 3 * stride_k)
    else:
        some = n[None, :] < N
        w0 = tl.load(at, mask=(k < left) & some, other=0)
        w1 = tl.load(at + stride_k, mask=(k + 1 < left) & some, other=0)
        w2 = tl.load(at + 2 * stride_k, mask=(k + 2 < left) & some, other=0)
        w3 = tl.load(at + 3 * stride_k, mask=(k + 3 < left) & some, other=0)
    four = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(tl.permute(four, (0, 2, 3, 1)), (BK, n.shape[0]))


def taken_apart(x_TK: Tensor, zeros: int, out_TN: Tensor, clear: bool) -> Tensor:
    """Return the digits of `x_TK`, planes x T x K, after so many planes of zeros. If `clear` is set, `out_TN` is made zero on the way."""
    (rows, width), places, columns = x_TK.shape, x_TK.element_size(), out_TN.shape[1]
    padded = triton.cdiv(width, ALIGNED) * ALIGNED
    planes = torch.empty(places + zeros, rows, padded, dtype=torch.int8, device=x_TK.device)
    grid = rows, triton.cdiv(max(padded, columns) if clear else padded, 1024)
    _take_apart[grid](
        x_TK, planes, out_TN, width, padded, columns, x_TK.stride(0), planes.stride(0), out_TN.stride(0),
        P=places, ZEROS=zeros, CLEAR=clear, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return planes


@triton.jit
def _take_apart(  # type: ignore[no-untyped-def]
    x, planes, out, K, padded, N, stride_t, stride_p, stride_out,
    P: tl.constexpr, ZEROS: tl.constexpr, CLEAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if CLEAR:
        tl.store(out + t * stride_out + k, tl.zeros((BLOCK,), out.dtype.element_ty), mask=k < N)
    digits = tl.load(x + t * stride_t + k, mask=k < K, other=0)
    half = tl.full((1,), -0x7F7F7F80 if P == 4 else -0x7F7F7F7F7F7F7F80, digits.dtype)
    digits = (digits + half) ^ half
    at = planes + t * padded + k
    for place in tl.static_range(ZEROS):
        tl.store(at + place * stride_p.to(tl.int64), tl.zeros((BLOCK,), tl.int8), mask=k < padded)
    for place in tl.static_range(P):
        tl.store(at + (ZEROS + place) * stride_p.to(tl.int64), (digits >> (8 * place)).to(tl.int8), mask=k < padded)


def transposed(w_DKN: Tensor) -> Tensor:
    """Copy the digits so that those of a column lie side by side."""
    digits, width, columns = w_DKN.shape
    padded = triton.cdiv(width, ALIGNED) * ALIGNED
    turned_DNK = torch.empty(digits, columns, padded, dtype=torch.int8, device=w_DKN.device)
    grid = triton.cdiv(width, SIDE), triton.cdiv(columns, SIDE), digits
    _transpose[grid](w_DKN, turned_DNK, width, columns, *w_DKN.stride(), padded, SIDE=SIDE, num_warps=8)
    return turned_DNK.transpose(1, 2)[:, :width]


@triton.jit
def _transpose(w, turned, K, N, stride_d, stride_k, stride_n, padded, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    d = tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * SIDE
    k = first + tl.arange(0, SIDE)
    n = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    w_at = w + d * stride_d + n.to(tl.int64)[None, :] * stride_n + first.to(tl.int64) * stride_k
    block = _turned(w_at, n, K - first, N, stride_k, SIDE, False)
    at = turned + d * N * padded + n.to(tl.int64)[None, :] * padded + k[:, None]
    tl.store(at, block, mask=(k[:, None] < K) & (n[None, :] < N))
