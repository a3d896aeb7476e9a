"""Where an adapter's pages go, for a GPU's kernels."""

import pytest
import torch

from symbiosis.serving.lora import gpu_staging


@pytest.mark.parametrize(
    "numbers", [[], [3], [2, 3, 4], [0, 2, 3, 7], list(range(0, 80, 2)), [*range(5, 25), *range(30, 90, 3)]]
)
@pytest.mark.parametrize("staged", [1, 24, 1 << 20])
def test_pages_go_where_they_are_told(numbers: list[int], staged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_staging, "STAGED_BYTES", staged)
    table, pages = torch.zeros(100, 3), 1.0 + torch.arange(3.0 * len(numbers)).view(-1, 3)
    gpu_staging._copy_pages(table, pages, numbers)
    expected = torch.zeros(100, 3)
    expected[numbers] = pages
    assert torch.equal(table, expected)
