"""A slice of scripts/compat_generation.py: modes of `generate` on families whose products differ in kind, with adapters that differ in kind."""

from pathlib import Path

import pytest
import torch

from scripts.compat_generation import FAMILIES, MODES, WAYS, compared, report, run

SLICES = [
    ("llama", "LoRA", ["greedy", "beam", "assisted", "static cache"]),
    ("gpt2", "IA3", ["sampling", "three sequences", "guidance"]),
    ("t5", "prompt", ["greedy", "beam, sampling"]),
    ("mixtral", "none", ["greedy, no cache", "prompt lookup"]),
    ("mamba", "LoRA", ["greedy", "sampling", "beam"]),  # stacks that are not contiguous, by a frozen base
    ("mamba", "VeRA", ["greedy"]),
    ("jamba", "LoRA", ["greedy", "three sequences"]),
    ("llama", "DoRA", ["greedy"]),
]


@pytest.mark.parametrize(
    ("family", "adapter", "modes"), SLICES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_is_generated_is_what_the_unsplit_model_generates(
    family: str, adapter: str, modes: list[str], tmp_path: Path
) -> None:
    if adapter == "DoRA":
        pytest.importorskip("peft", minversion="0.19", reason="DoRA of PEFT 0.18 reads the weights")
    outcomes, not_here = run(family, adapter, modes, tmp_path)
    assert not not_here and len(outcomes) == len(modes) * len(WAYS)
    expected = {"close", "equal"} if adapter == "DoRA" else {"equal"}
    assert {outcome.kind for outcome in outcomes} <= expected, outcomes


def test_a_difference_is_told() -> None:
    result = {"tokens": torch.tensor([1, 2]), "scores 0": torch.tensor([1.0, 2.0])}
    assert compared(result, result, False) == ("equal", "")
    nearly = result | {"scores 0": torch.tensor([1.0, 2.0 + 1e-6])}
    assert compared(nearly, result, False)[0] == "silent" and compared(nearly, result, True)[0] == "close"
    other = result | {"tokens": torch.tensor([1, 3])}
    assert compared(other, result, True)[0] == "silent"
    assert compared({"tokens": result["tokens"]}, result, True)[0] == "silent"


def test_nothing_tried_is_no_success() -> None:
    assert len(FAMILIES) >= 10 and len(MODES) >= 30
    assert not report([], []).holds
