"""What adapters add to a product, of rows that lie anywhere, compared with whole matrices."""

import pytest
import torch
from torch import Tensor

from symbiosis.kernels.adapter_rows import (
    FewAdapterRows,
    MatrixPiece,
    PlacedAdapter,
    adapt_rows_,
    before_rows,
    compiled,
    shrink,
)

RANKS = (1, 3, 7, 65, 256)


def scattered(matrix: Tensor, rows: int, columns: int) -> tuple[MatrixPiece, ...]:
    """In pieces of so many rows and columns."""
    return tuple(
        MatrixPiece(row, column, matrix[row : row + rows, column : column + columns].clone())
        for column in range(0, matrix.shape[1], columns)
        for row in range(0, len(matrix), rows)
    )


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("rows", "columns"), [(300, 400), (2, 400), (5, 33)])
def test_groups_of_any_rows(rank: int, rows: int, columns: int) -> None:
    torch.manual_seed(rank)
    K, N = 77, 131
    x_TK, y_TN = torch.randn(20, K, dtype=torch.float64), torch.randn(20, N, dtype=torch.float64)
    down, up = torch.randn(rank, K, dtype=torch.float64), torch.randn(rank, N, dtype=torch.float64)
    gain, shift = torch.randn(1, N, dtype=torch.float64), torch.randn(1, N, dtype=torch.float64)
    low = PlacedAdapter(rank, scattered(down, rows, columns), scattered(up, rows, columns))
    scale = PlacedAdapter(gain=scattered(gain, 1, columns), shift=scattered(shift, 1, columns))
    both = PlacedAdapter(rank, low.down, low.up, gain=scale.gain, shift=scale.shift)
    groups = [(slice(0, 4), low), (slice(4, 4), low), (torch.tensor([5, 11, 7]), both), (slice(12, 13), scale)]
    expected = y_TN.clone()
    expected[:4] += x_TK[:4] @ down.t() @ up
    expected[[5, 11, 7]] = expected[[5, 11, 7]] * gain + shift + x_TK[[5, 11, 7]] @ down.t() @ up
    expected[12] = expected[12] * gain[0] + shift[0]
    untouched = [4, 6, 8, 9, 10, *range(13, 20)]
    before = y_TN[untouched].clone()
    adapt_rows_(y_TN, x_TK, groups)
    torch.testing.assert_close(y_TN, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(y_TN[untouched], before)


def test_rows_as_a_layer_is_to_see_them() -> None:
    x_TK, vector = torch.randn(6, 50), torch.randn(1, 50)
    kept = x_TK.clone()
    seen = before_rows(
        x_TK, [(slice(1, 3), PlacedAdapter(before=scattered(vector, 1, 7))), (torch.tensor([5]), PlacedAdapter())]
    )
    expected = kept.clone()
    expected[1:3] *= vector
    assert torch.equal(seen, expected)
    assert torch.equal(x_TK, kept), "others may look at it"


def test_no_rows() -> None:
    assert shrink(torch.empty(0, 5), (MatrixPiece(0, 0, torch.ones(2, 5)),), 2).shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("rows", "columns"), [(300, 2000), (2, 2000), (5, 33)])
def test_few_rows_in_c(rank: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    assert compiled(dtype) is not None, "there is no C compiler"
    torch.manual_seed(rank)
    K, N = 77, 1031
    x_TK, y_TN = torch.randn(20, K).to(dtype), torch.randn(20, N).to(dtype)
    down, up = (torch.randn(rank, K) / K).to(dtype), torch.randn(rank, N).to(dtype)
    gain, shift = torch.randn(1, N).to(dtype), torch.randn(1, N).to(dtype)
    low = PlacedAdapter(rank, scattered(down, rows, columns), scattered(up, rows, columns))
    both = PlacedAdapter(rank, low.down, low.up, gain=scattered(gain, 1, columns), shift=scattered(shift, 1, columns))
    groups = [[0, 1, 2, 3, 4], [5], [11, 8, 19, 6, 7, 10], [12]]
    expected = y_TN.double()
    for numbers, placed in zip(groups, (low, both, both, None), strict=True):
        if placed is both:
            expected[numbers] = expected[numbers] * gain.double() + shift.double()
        if placed is not None:
            expected[numbers] += x_TK[numbers].double() @ down.double().t() @ up.double()
    untouched = [9, *range(12, 19)]
    before = y_TN[untouched].clone()
    FewAdapterRows(groups).adapt_(y_TN, x_TK, [low, both, both, None])
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]  # rounded once for each piece
    assert float((y_TN.double() - expected).abs().max() / expected.abs().max()) < bound
    assert torch.equal(y_TN[untouched], before)


def test_other_numbers_and_higher_ranks_are_not_for_c() -> None:
    cpu = torch.device("cpu")
    assert FewAdapterRows.fits([[1], [2, 3]], 256, torch.float32, cpu)
    assert not FewAdapterRows.fits([[1]], 257, torch.float32, cpu)
    assert not FewAdapterRows.fits([[1]], 4, torch.float64, cpu)
    assert not FewAdapterRows.fits([list(range(17))], 4, torch.float32, cpu)
    assert not FewAdapterRows.fits([[1]], 4, torch.float32, torch.device("meta"))
