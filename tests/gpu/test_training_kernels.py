"""Kernels of training against torch: adapters with gradients, by segments, and log probabilities of tokens."""

import struct
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from symbiosis.kernels import with_triton

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
OFF = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # of the largest value


def off(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-9))


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, device="cuda") / shape[-1] ** 0.5).to(dtype)


class Segments:
    """Adapters of several runs at a group of layers, as the kernels find them."""

    def __init__(self, lengths: list[int], ranks: list[list[int]], K: int, widths: list[int]) -> None:
        kernels: Any = with_triton("gpu.trained_rows")
        ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        self.places = list(pairwise(ends))
        tiles = [
            (at, min(kernels.TILE, end - at), number)
            for number, (first, end) in enumerate(self.places)
            for at in range(first, end, kernels.TILE)
        ] + [(0, 0, 0)] * 3
        records = torch.zeros(2, len(lengths) + 1, kernels.MEMBERS, kernels.WORDS, dtype=torch.int64)
        self.matrices: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self.scales: dict[tuple[int, int], float] = {}
        for number, of_layers in enumerate(ranks):
            for member, rank in enumerate(of_layers):
                if rank:
                    mine = rand(rank, K), rand(widths[member], rank), rand(rank, K), rand(widths[member], rank)
                    self.matrices[number, member], self.scales[number, member] = mine, 0.5 + member
                    bits = struct.unpack("<i", struct.pack("<f", 0.5 + member))[0]
                    records[1, number, member] = torch.tensor([*(m.data_ptr() for m in mine), rank, bits])
        most = max(16, 1 << (max(map(max, ranks)) - 1).bit_length())
        where = torch.tensor([*self.places, (0, 0)], dtype=torch.int32)
        self.tables = kernels.RowTables(
            torch.tensor(tiles, dtype=torch.int32).cuda(), where.cuda(), records.cuda(), most
        )


@pytest.mark.parametrize("dtype", OFF, ids=str)
@pytest.mark.parametrize(
    ("lengths", "ranks", "K", "widths"),
    [
        ([5, 0, 70, 130], [[3, 3, 3], [8, 8, 8], [16, 0, 20], [1, 5, 7]], 96, [80, 40, 300]),
        ([1], [[64]], 4096, [11008]),
        ([513, 64, 1], [[16, 16], [128, 100], [1, 2]], 333, [257, 1024]),
        ([300] * 9, [[4, 4, 4, 4]] * 9, 512, [512, 128, 128, 512]),
    ],
)
def test_adapters_and_their_gradients(
    lengths: list[int], ranks: list[list[int]], K: int, widths: list[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    kernels: Any = with_triton("gpu.trained_rows")
    made = Segments(lengths, ranks, K, widths)
    rows = sum(lengths) + 3
    x, dx = rand(rows, K, dtype=dtype), rand(rows, K, dtype=dtype)
    ys, gs = ([rand(rows, n, dtype=dtype) for n in widths] for _ in range(2))
    expected_ys, expected_dx = [y.double() for y in ys], dx.double()
    expected = {}
    for (number, member), (a, b, da, db) in made.matrices.items():
        span, scale = slice(*made.places[number]), made.scales[number, member]
        low = x[span].double() @ a.double().t()
        expected_ys[member][span] += scale * low @ b.double().t()
        back = scale * gs[member][span].double() @ b.double()
        expected_dx[span] += back @ a.double()
        expected[number, member] = (
            da.double() + back.t() @ x[span].double(),
            db.double() + scale * gs[member][span].double().t() @ low,
        )
    untouched = ys[0][-3:].clone(), dx[-3:].clone()
    low = kernels.adapt_(ys, x, made.tables, 1)
    kernels.gradients_(dx, gs, x, low, made.tables, 1)
    assert max(off(y, each) for y, each in zip(ys, expected_ys, strict=True)) < OFF[dtype]
    assert off(dx, expected_dx) < OFF[dtype]
    for place, (_, _, da, db) in made.matrices.items():
        assert off(da, expected[place][0]) < OFF[dtype] and off(db, expected[place][1]) < OFF[dtype], place
    assert torch.equal(ys[0][-3:], untouched[0]) and torch.equal(dx[-3:], untouched[1])


def test_the_same_sums_in_any_company() -> None:
    kernels: Any = with_triton("gpu.trained_rows")
    found = []
    for others in ([], [70, 200]):
        torch.manual_seed(1)
        made = Segments([150, *others], [[8], *[[16]] * len(others)], 256, [256])
        torch.manual_seed(2)
        x, y, g = (rand(150, 256, dtype=torch.bfloat16) for _ in range(3))
        x, y, g = (torch.cat([each, rand(sum(others) + 1, 256, dtype=torch.bfloat16)]) for each in (x, y, g))
        low = kernels.adapt_([y], x, made.tables, 1)
        kernels.gradients_(None, [g], x, low, made.tables, 1)
        found.append((y[:150], *made.matrices[0, 0][2:]))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", OFF, ids=str)
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 3), (7, 5001), (300, 32000)])
def test_log_probabilities_and_their_gradient(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kernels: Any = with_triton("gpu.token_logprobs")
    logits = (4 * torch.randn(rows, vocabulary, device="cuda")).to(dtype)
    targets, slopes = torch.randint(0, vocabulary, (rows,), device="cuda"), torch.randn(rows, device="cuda")
    leaf = logits.double().requires_grad_()
    expected = leaf.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (expected * slopes).sum().backward()
    found, totals = kernels.find(logits, targets)
    assert off(found, expected.detach()) < 1e-5
    kernels.differentiate_(logits, targets, totals, slopes)
    assert leaf.grad is not None and off(logits, leaf.grad) < OFF[dtype]
