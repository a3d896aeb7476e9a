"""Few rows times packed weights of every format, by their codes, beside the whole matrices."""

from typing import Any

import pytest
import torch
from torch import Tensor

from symbiosis.kernels.packed import GroupedWeight, PackedWeight, ScaledWeight
from symbiosis.kernels.packing import pack
from symbiosis.kernels.product import product

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DTYPES = [torch.bfloat16, torch.float16]


def blocks(weight: Tensor) -> PackedWeight:
    """Floats of 8 bits with a scale for each 128 x 128 of them."""
    N, K = weight.shape
    scale = torch.rand(-(-N // 128), -(-K // 128), device="cuda") + 0.5
    return ScaledWeight((N, K), "fp8", weight.to(torch.float8_e4m3fn), scale, (128, 128))


def rounded(weight: PackedWeight) -> PackedWeight:
    assert isinstance(weight, ScaledWeight)
    return ScaledWeight(weight.shape, weight.format, weight.codes, weight.scale.bfloat16().float(), weight.block)


def groups(weight: Tensor, group: int = 128, ordered: bool = True) -> GroupedWeight:
    """Integers of 4 bits, as those of GPTQ and AWQ."""
    N, K = weight.shape
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device="cuda")
    scale = (torch.rand(N, K // group, device="cuda") / 100).half()
    zero = torch.randint(0, 16, (N, K // group), dtype=torch.uint8, device="cuda")
    of_columns = torch.arange(K, device="cuda") // group
    return GroupedWeight((N, K), "gptq", codes, scale, zero, of_columns if ordered else of_columns.flip(0))


def every_code(weight: Tensor, dtype: torch.dtype, scale: float = 1.0, has_nan: bool = False) -> ScaledWeight:
    """All codes that there are, with scales of bfloat16."""
    N, K = weight.shape
    codes = torch.arange(N * K, device="cuda").to(torch.uint8).view(N, K)
    if dtype is not torch.int8 and not has_nan:
        codes = torch.where((codes & 127) == 127, codes - 1, codes)
    scales = (torch.rand(N, 1, device="cuda") + 0.1).mul_(scale).bfloat16().float()
    return ScaledWeight((N, K), "int8" if dtype is torch.int8 else "fp8", codes.view(dtype), scales, (1, K))


MADE: dict[str, Any] = {
    "every int8": lambda weight: every_code(weight, torch.int8),
    "every fp8": lambda weight: every_code(weight, torch.float8_e4m3fn),
    "every fp8, small": lambda weight: every_code(weight, torch.float8_e4m3fn, 1e-6),
    "every fp8, large": lambda weight: every_code(weight, torch.float8_e4m3fn, 20.0),
    "blocks of bfloat16": lambda weight: rounded(blocks(weight)),
    **{format: lambda weight, format=format: pack(weight, format) for format in ("int8", "fp8")},
    "blocks": blocks,
    "groups": groups,
    "groups of 32": lambda weight: groups(weight, 32),
    "one group": lambda weight: groups(weight, weight.shape[1]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", MADE)
def test_products_are_those_of_the_whole_matrix(format: str, dtype: torch.dtype) -> None:
    from symbiosis.kernels.gpu.packed_rows import prepared

    torch.manual_seed(0)
    for K, widths, has_bias in (
        (1024, (512,), False),
        (4096, (72, 200, 8), True),
        (2304, (1000, 24), True),
        (11008, (96,), False),
    ):
        packed = [MADE[format](torch.randn(n, K, device="cuda") / K**0.5) for n in widths]
        biases = [torch.randn(n, device="cuda").to(dtype) if has_bias else None for n in widths]
        rows = prepared(packed, biases, dtype)
        assert rows is not None or (format == "one group" and K % 128), (format, K)
        for T in (1, 2, 16, 17, 33, 64) if rows is not None else ():
            x = torch.randn(T, K, device="cuda").to(dtype)
            wide = torch.full((T, 2 * widths[0]), 7.0, device="cuda", dtype=dtype)
            outs = [wide[:, : widths[0]], *[None] * (len(widths) - 1)]
            found = rows.multiply(x, outs)
            assert found[0] is outs[0] and (wide[:, widths[0] :] == 7).all()
            for got, weight, bias in zip(found, packed, biases, strict=True):
                whole = weight.whole(dtype).t()
                exact = x.double() @ whole.double() + (0 if bias is None else bias.double())
                theirs = torch.dist(product(x, whole, bias).double(), exact)
                assert torch.dist(got.double(), exact) <= 1.2 * theirs + 1e-9, (format, K, T)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_values_of_pairs_are_those_of_the_whole_matrix(dtype: torch.dtype) -> None:
    """Bit for bit: a row of a one and zeros has no sums."""
    from symbiosis.kernels.gpu.packed_rows import prepared

    for scale in (1.0, 1e-5, 100.0, 300.0):  # the largest cannot be lifted
        packed = every_code(torch.empty(96, 256), dtype, scale)
        rows = prepared([packed], [None], torch.bfloat16)
        assert rows is not None
        whole = packed.whole(torch.bfloat16)
        for begin in range(0, 256, 64):
            ones = torch.zeros(64, 256, device="cuda", dtype=torch.bfloat16)
            ones[torch.arange(64), torch.arange(begin, begin + 64)] = 1
            assert torch.equal(rows.multiply(ones, [None])[0], whole[:, begin : begin + 64].t())


def test_parts_fill_the_gpu() -> None:
    from symbiosis.kernels.gpu.packed_rows import steps_of_part

    assert [steps_of_part(tiles, 32, 264) for tiles in (32, 86, 172, 1000)] == [4, 11, 11, 32]
    assert steps_of_part(1, 1, 264) == 1 and steps_of_part(1, 3, 264) == 2 and steps_of_part(1, 320, 264) >= 10


def test_codes_that_are_not_numbers_stay_so() -> None:
    from symbiosis.kernels.gpu.packed_rows import prepared

    packed = every_code(torch.empty(96, 256), torch.float8_e4m3fn, has_nan=True)
    rows = prepared([packed], [None], torch.bfloat16)
    assert rows is not None and rows.multiply(torch.ones(1, 256, device="cuda").bfloat16(), [None])[0].isnan().all()


def test_graphs_go_on_with_other_rows() -> None:
    from symbiosis.kernels.gpu.packed_rows import load, prepared

    packed = [pack(torch.randn(256, 1024, device="cuda"), "fp8"), pack(torch.randn(64, 1024, device="cuda"), "fp8")]
    load([(packed[0], torch.bfloat16)])
    rows = prepared(packed, [None, None], torch.bfloat16)
    assert rows is not None
    x, outs = (
        torch.randn(5, 1024, device="cuda").bfloat16(),
        [torch.empty(5, n, device="cuda").bfloat16() for n in (256, 64)],
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows.multiply(x, outs)
    for _ in range(3):
        x.copy_(torch.randn(5, 1024, device="cuda"))
        graph.replay()
        for got, expected in zip(outs, rows.multiply(x, [None, None]), strict=True):
            assert torch.equal(got, expected)


def test_what_is_not_read() -> None:
    from symbiosis.kernels.gpu.packed_rows import prepared

    int8 = pack(torch.randn(64, 256, device="cuda"), "int8")
    assert prepared([int8], [None], torch.bfloat16) is not None
    assert prepared([int8, None], [None, None], torch.bfloat16) is None
    assert prepared([int8], [None], torch.float32) is None
    assert prepared([pack(torch.randn(64, 256, device="cuda"), "nf4")], [None], torch.bfloat16) is None
    assert prepared([pack(torch.randn(64, 250, device="cuda"), "int8")], [None], torch.bfloat16) is None
    assert prepared([groups(torch.randn(64, 256, device="cuda"), ordered=False)], [None], torch.bfloat16) is None
    assert prepared([pack(torch.randn(2, 64, 256, device="cuda"), "int8")], [None], torch.bfloat16) is None
