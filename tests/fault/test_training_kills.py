"""Processes that train are killed, and those that go on have every step that was acknowledged, once."""

import importlib
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.fault


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    return importlib.import_module("train_exact")


@pytest.mark.parametrize("kills", [2, pytest.param(4, marks=pytest.mark.full)])
def test_no_step_that_was_acknowledged_is_lost_or_done_twice(exact: Any, kills: int) -> None:
    off, acknowledged = exact.killed(steps=30, kills=kills)
    assert off < 1e-4 and acknowledged == 4 * 30
