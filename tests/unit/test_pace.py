"""How long products take on a GPU, and from how many rows on batching them gains nothing: found from what is measured at the start."""

import pytest
import torch

from symbiosis.executor.gpu import timing as measured
from symbiosis.executor.gpu.timing import ROWS_TRIED, GpuTiming

MATRIX = torch.zeros(8, 4)


@pytest.mark.parametrize("knee", [64, 256, 1024])
def test_rows_that_are_worth_joining(knee: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the knee a product takes as long as reading its weight, from there on its time grows with its rows."""
    monkeypatch.setattr(measured, "_seconds", lambda matrix, rows: 1e-5 * max(1.0, rows / knee))
    pace = GpuTiming([MATRIX, torch.zeros(8)], MATRIX.device)
    assert pace.batch_below == knee
    assert pace.seconds(MATRIX, 1) == pytest.approx(1e-5)
    assert pace.seconds(MATRIX, 8 * knee) == pytest.approx(8e-5)
    assert pace.seconds(torch.zeros(3, 8, 4), 1) == pytest.approx(3e-5), "experts are read one by one"


def test_a_gpu_that_reads_the_weight_longer_than_it_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_seconds", lambda matrix, rows: 1e-5)
    assert GpuTiming([MATRIX], MATRIX.device).batch_below == ROWS_TRIED[-1]
