"""Products of integers modulo 2^32 or 2^64 with frozen weights of 8 or 16 bits. They are exact in any order of summing.

Rows and weights are split into signed digits of 8 bits. The digits are multiplied as bytes into 32-bit sums, and the sums are shifted and
added, modulo the width. For rows of 32 bits and weights of 8 bits that is one product of four times as many rows.

NVIDIA's Hopper GPUs have a kernel for all of it (`integer_products.py`), and the code here is its reference.
"""

import warnings
from collections.abc import Callable
from functools import cache
from time import perf_counter

import torch
from torch import Tensor

LONGEST = 1 << 17  # a sum of fewer products of digits than this surely fits into 32 bits
LARGEST = {8: 127, 16: 127 * 256 + 127}  # the largest weight in one digit, and in two
AT_ONCE = 1 << 16  # values that a CPU splits into digits at once
BLOCK = 1 << 24  # weights that are quantised at once
DTYPE = {4: torch.int32, 8: torch.int64}  # by the number of digits
FUSED = (4, 8)  # bytes of the integers that our kernel multiplies
ROWS_WARMED = (1, 9, 17, 33, 257)
TRIED = 3  # times that a product is timed
FEW = 32  # least rows for CUDA's product of bytes


def quantise(v_KN: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the weights as digits (int8, D x K x N, the lowest first), and the value of one unit in each of the N columns.

    Everybody with the same weights gets the same digits, because the division is IEEE's, in float32.

    >>> digits, unit = quantise(torch.tensor([[1.0, 0.0], [-0.5, 0.0]]), 8)
    >>> digits.tolist(), (digits[0] * unit * 1000).round()[:, 0].tolist()
    ([[[127, 0], [-64, 0]]], [1000.0, -504.0])
    """
    if len(v_KN) >= LONGEST:
        raise ValueError(f"sums of {len(v_KN)} products do not fit into 32 bits: {LONGEST - 1} is the most")
    largest_N = v_KN.abs().amax(0).float()
    unit_N = largest_N / torch.full_like(largest_N, LARGEST[bits])  # by a number, CUDA would multiply by its reciprocal
    unit_N[unit_N == 0] = 1.0
    parts = []
    for v, unit in zip(*(t.split(max(1, BLOCK // len(v_KN)), dim=-1) for t in (v_KN, unit_N)), strict=True):
        q = (v.float() / unit).round_().to(torch.int16)
        parts.append(digits(q)[: bits // 8])
    return torch.cat(parts, dim=-1), unit_N


def digits(x: Tensor) -> Tensor:
    """Return the signed 8-bit digits of integers, the lowest first.

    Adding 0x80 to every byte carries into the next one exactly if the byte, read with its sign, stands for 256 less.

    >>> [int(digit) for digit in digits(torch.tensor([-1000], dtype=torch.int32))]
    [24, -4, 0, 0]
    """
    size = x.element_size()
    if x.numel() > AT_ONCE and len(x) > 1 and not x.is_cuda:  # a part at a time stays in a cache
        found = x.new_empty((size, *x.shape), dtype=torch.int8)
        rows = max(1, AT_ONCE // x[0].numel())
        for part, into in zip(x.split(rows), found.split(rows, dim=1), strict=True):
            into.copy_(digits(part))
        return found
    half = int.from_bytes(b"\x80" * size, "little", signed=True)
    return ((x + half) ^ half).contiguous().view(torch.int8).view(*x.shape, size).movedim(-1, 0).contiguous()


def modular_product(x_TK: Tensor, w_DKN: Tensor, bias: None = None, out_TN: Tensor | None = None) -> Tensor:
    """Return `x W` modulo 2^32 (for int32 rows) or 2^64 (for int64 rows). `w_DKN` are the digits of W.

    >>> x = torch.tensor([[2**30, 3]], dtype=torch.int32)
    >>> int(modular_product(x, torch.tensor([[[5], [7]]], dtype=torch.int8))) == 5 * 2**30 + 21 - 2**32
    True
    """
    if not len(x_TK):
        return x_TK.new_empty(0, w_DKN.shape[-1]) if out_TN is None else out_TN
    if x_TK.is_cuda and x_TK.element_size() in FUSED and len(w_DKN) <= 2 and (fused := _fused(x_TK.device)):
        with torch.cuda.device(x_TK.device):
            return fused(x_TK, w_DKN, out_TN)
    return product_by_parts(x_TK, w_DKN, out_TN)


def warm(w_DKN: Tensor) -> None:
    """Compile all kernels that products with such weights need, so that no call waits for that later."""
    dtype = torch.int32 if len(w_DKN) == 1 else torch.int64
    for w in (w_DKN, w_DKN.transpose(1, 2)):
        for rows in ROWS_WARMED:
            modular_product(w.new_zeros(rows, w.shape[1], dtype=dtype), w)


def product_by_parts(x_TK: Tensor, w_DKN: Tensor, out_TN: Tensor | None = None) -> Tensor:
    """Compute a product modulo 2^32 or 2^64 digit by digit, with torch's own operations."""
    return product_of_digits(digits(x_TK), w_DKN, None, out_TN)


def product_of_digits(
    x_DTK: Tensor, w_DKN: Tensor, bias: None = None, out_TN: Tensor | None = None, of: int | None = None
) -> Tensor:
    """Return what `product_by_parts` does, for rows of which the digits are known."""
    size, rows, width = x_DTK.shape
    if out_TN is None:
        out_TN = x_DTK.new_empty(rows, w_DKN.shape[-1], dtype=DTYPE[size])
    out_TN.zero_()
    for place, w_KN in enumerate(w_DKN):
        sums = product_of_bytes(x_DTK[: size - place].reshape(-1, width), w_KN)
        for up, sum_TN in enumerate(sums.view(-1, *out_TN.shape), place):
            out_TN += sum_TN.to(out_TN.dtype) << (8 * up)
    return out_TN


@cache
def _fused(device: torch.device) -> Callable[..., Tensor] | None:
    """Return the Triton kernel, or None on a GPU that it was not written for or without Triton."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        from symbiosis.kernels.gpu.integer_products import fused_product

        with torch.cuda.device(device):
            w_DKN = torch.zeros(1, 16, 16, dtype=torch.int8, device=device)
            fused_product(w_DKN.new_zeros(1, 16, dtype=torch.int32), w_DKN)
    except Exception as error:  # no Triton, or no compiler for it
        warnings.warn(
            f"integer products will be slow: there is no kernel for them ({type(error).__name__})", stacklevel=2
        )
        return None
    return fused_product


def product_of_bytes(x_TK: Tensor, w_KN: Tensor) -> Tensor:
    """Multiply int8 matrices into int32."""
    if x_TK.is_cuda:
        return _product_on_cuda(x_TK, w_KN)
    return torch._int_mm(x_TK, w_KN) if _bytes_are_worth_it() else _product_by_doubles(x_TK, w_KN)


def _product_by_doubles(x_TK: Tensor, w_KN: Tensor) -> Tensor:
    return (x_TK.double() @ w_KN.double()).to(torch.int32)


def _product_on_cuda(x_TK: Tensor, w_KN: Tensor) -> Tensor:
    """Multiply on a GPU, padded: cuBLAS wants more than 16 rows, and multiples of 8."""
    (rows, width), columns = x_TK.shape, w_KN.shape[1]
    missing = max(FEW, -(-rows // 8) * 8) - rows, -width % 8, -columns % 8
    if any(missing):
        x_TK = torch.nn.functional.pad(x_TK, (0, missing[1], 0, missing[0]))
        w_KN = torch.nn.functional.pad(w_KN, (0, missing[2], 0, missing[1]))
    return torch._int_mm(x_TK, w_KN)[:rows, :columns]


@cache
def _bytes_are_worth_it() -> bool:
    """Whether this CPU multiplies bytes correctly, and faster than doubles. Without VNNI, pairs of products are added in 16 bits, which
    saturate, so that sums are wrong; or torch multiplies one number after the other."""
    x = torch.tensor([[-128], [127], [-127], [85]], dtype=torch.int8).repeat(16, 512)
    w = torch.tensor([-128, 127, 113, 85], dtype=torch.int8).repeat_interleave(8).repeat(512, 16)
    both_ways = (w, w.t().contiguous().t())
    for rows, columns in ((4, 24), (len(x), w.shape[1])):
        expected = _product_by_doubles(x[:rows], w[:, :columns])
        if not all(torch.equal(torch._int_mm(x[:rows], w[:, :columns]), expected) for w in both_ways):
            return False
    return sum(_seconds(torch._int_mm, x, w) - _seconds(_product_by_doubles, x, w) for w in both_ways) < 0


def _seconds(multiply: Callable[[Tensor, Tensor], Tensor], x_TK: Tensor, w_KN: Tensor) -> float:
    """Return the time of a product, the best of several."""
    times = []
    for _ in range(TRIED):
        begun = perf_counter()
        multiply(x_TK, w_KN)
        times.append(perf_counter() - begun)
    return min(times)
