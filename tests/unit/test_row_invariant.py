"""Rows that are computed by themselves: the same bits among any others, and the numbers that torch's own formulas have."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from symbiosis.kernels.paged_attention import How
from symbiosis.kernels.row_invariant import (
    KEYS,
    add_low_rank_,
    attend_in_blocks,
    is_row_invariant,
    row_invariant,
    total_of,
)

COUNTS = [1, 3, 17, 40]


@pytest.fixture(autouse=True, params=[2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def by_parts(compute: object, x: Tensor, count: int) -> Tensor:
    with row_invariant():
        return torch.cat([compute(part.clone()) for part in x.split(count)])  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("width, outputs", [(10, 3), (60, 7), (64, 96), (90, 11), (300, 211), (1000, 9)])
def test_products(width: int, outputs: int, dtype: torch.dtype) -> None:
    x, w, b = (torch.randn(*shape).to(dtype) for shape in ((280, width), (outputs, width), (outputs,)))
    columns = w.t().contiguous()
    for compute in (
        lambda rows: F.linear(rows, w),
        lambda rows: F.linear(rows[None], w, b)[0],
        lambda rows: rows @ columns,
        lambda rows: torch.addmm(b, rows, columns),
    ):
        whole = by_parts(compute, x, len(x))
        assert all(torch.equal(by_parts(compute, x, count), whole) for count in COUNTS)
        assert (whole - compute(x)).abs().max() <= (1e-5 if dtype is torch.float32 else 4e-2) * whole.abs().max()


@pytest.mark.parametrize("width", [1, 7, 64, 90, 211, 4864])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_activations(width: int, dtype: torch.dtype) -> None:
    x = (3 * torch.randn(150, width)).to(dtype)
    for compute in (
        F.silu,
        F.gelu,
        lambda t: F.gelu(t, approximate="tanh"),
        torch.sigmoid,
        lambda t: t.float().rsqrt(),
    ):
        given = x.abs() + 0.1
        whole = by_parts(compute, given, len(given))
        assert all(torch.equal(by_parts(compute, given, count), whole) for count in (1, 3, 16, 29))
        assert torch.allclose(whole.float(), compute(given).float(), rtol=1e-2 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("rank", [1, 5, 16, 33])
def test_adapters(rank: int) -> None:
    """However their matrices lie."""
    x, y = torch.randn(100, 60), torch.randn(100, 90)
    flat = torch.randn(rank * 150 + 1)[1:]
    down, up = flat[: rank * 60].view(rank, 60), flat[rank * 60 :].view(rank, 90)
    expected = y.clone()
    low = add_low_rank_(expected, x, down, up)
    assert torch.allclose(expected, y + x @ down.t() @ up, atol=1e-3) and torch.allclose(low, x @ down.t(), atol=1e-4)
    for count in COUNTS:
        made = y.clone()
        for part, rows in zip(made.split(count), x.split(count), strict=True):
            add_low_rank_(part, rows, down.clone(), up.t().contiguous().t())
        assert torch.equal(made, expected)


HOWS = {
    "plain": How(0.3), "window": How(0.3, window=21), "softcap": How(0.3, softcap=2.0), "sinks": How(0.3, sinks=torch.linspace(-1, 1, 6)),
    "all": How(0.3, window=70, softcap=2.0, sinks=torch.linspace(-1, 1, 6)),
}  # fmt: skip


@pytest.mark.parametrize("kinds, size", [(6, 10), (2, 16), (1, 9), (3, 24)])
@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_attention(how: How, kinds: int, size: int) -> None:
    count = 3 * KEYS - 20
    q, k, v = (torch.randn(2, heads, count, size) for heads in (6, kinds, kinds))
    whole = attend_in_blocks(q, k, v, torch.tensor([0, 0]), how)
    assert torch.allclose(whole, naive(q, k, v, how), atol=1e-5)
    for rows in (1, 2, 29, KEYS):
        for first in [*range(0, count - rows, 31), count - rows]:
            end = first + rows
            given = q[:, :, first:end], k[:, :, :end], v[:, :, :end]
            assert torch.equal(attend_in_blocks(*given, torch.tensor([first, first]), how), whole[:, :, first:end])
    # two sequences that end at different places: what follows the shorter one is not seen
    firsts = torch.tensor([9, 150])
    mine = torch.stack([q[0, :, 9:10], q[1, :, 150:151]])
    expected = torch.stack([whole[0, :, 9:10], whole[1, :, 150:151]])
    assert torch.equal(attend_in_blocks(mine, k, v, firsts, how), expected)


def naive(q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores, at = q @ k.transpose(2, 3) * how.scaling, torch.arange(q.shape[2])
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    seen = (at <= at[:, None]) & (at > at[:, None] - (how.window or len(at)))
    scores = scores.masked_fill(~seen, float("-inf"))
    if how.sinks is not None:
        scores = torch.cat([scores, how.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : len(at)] @ v


def test_totals() -> None:
    logits = 4 * torch.randn(5, 151_936)
    whole = total_of(logits)
    assert all(torch.equal(total_of(logits[row : row + 1]), whole[row : row + 1]) for row in range(5))
    assert torch.allclose(whole, logits.logsumexp(-1, keepdim=True))


def test_blocks_end() -> None:
    assert not is_row_invariant()
    with row_invariant(), row_invariant(False):
        assert is_row_invariant()
    with pytest.raises(ZeroDivisionError), row_invariant():
        1 / 0  # noqa: B018
    assert not is_row_invariant()
