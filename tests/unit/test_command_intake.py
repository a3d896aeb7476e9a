"""How large the parts are in which large passes are computed, so that a neighbour waits no longer than its own pass takes."""

from typing import Any

import pytest

from symbiosis.training.command_intake import CommandIntake
from tests.unit.test_command_queue import Asker

PACE = 10_000  # tokens per second


def intake_of(*names: str) -> tuple[CommandIntake, list[Any]]:
    """An intake with a run of each tenant."""
    intake = CommandIntake(64, None, together=16_384)
    intake.tokens_in = lambda seconds: round(PACE * seconds)
    runs: list[Any] = [Asker(name, name) for name in names]
    intake.runs = {run.name: run for run in runs}
    return intake, runs


@pytest.mark.parametrize(("took_s", "tokens"), [(9.0, 1000), (0.05, 500), (0.001, 300)])
def test_a_part_takes_as_long_as_a_neighbour_s_pass_within_bounds(took_s: float, tokens: int) -> None:
    intake, (eve, bob, carol) = intake_of("eve", "bob", "carol")
    assert intake.part([eve]) == 1000  # nobody has had a pass lately, but others are there
    intake.passed([bob], 1, took_s)
    intake.passed([carol], 2, 10.0)
    assert intake.part([eve]) == tokens and intake.share == 1000


def test_who_is_alone_computes_as_much_as_fits() -> None:
    intake, (eve,) = intake_of("eve")
    intake.passed([eve], 1, 0.05)
    assert intake.part([eve]) == 16_384
