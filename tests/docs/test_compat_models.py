"""A slice of `scripts/compat_models.py`: one architecture of each shape, split and unsplit, bit by bit."""

import pytest

from scripts.compat_models import (
    EXCEPTIONS,
    GROUPS,
    MOSTLY,
    STAGES,
    Outcome,
    architectures,
    build,
    compare,
    examine,
)

FIRST = [
    ("causal", "llama"),
    ("causal", "gpt2"),  # Conv1D
    ("causal", "mixtral"),  # experts as three-dimensional parameters
]
OTHERS = [
    ("causal", "falcon"),  # a subclass of nn.Linear with a forward of its own
    ("causal", "phi"),  # biases
    ("causal", "qwen3"),
    ("causal", "gemma3_text"),  # sliding and full attention
    ("causal", "gpt_oss"),  # experts as three-dimensional parameters, with biases and transposed
    ("causal", "dbrx"),  # ... and one below the other
    ("masked", "bert"),
    ("seq2seq", "t5"),
    ("vision-language", "llava"),
]


@pytest.mark.parametrize(("group", "name"), [*FIRST, *(pytest.param(*each, marks=pytest.mark.full) for each in OTHERS)])
def test_split_equals_unsplit(group: str, name: str) -> None:
    outcome = examine(name, group)
    stages = [stage for stage in STAGES if group != "masked" or stage != "generate"]
    assert outcome.equal == dict.fromkeys(stages, True), outcome.notes
    assert not outcome.reads
    assert outcome.covered >= MOSTLY


def test_weights_used_as_left_factors() -> None:
    """Mamba computes `W @ x` for a stack of x: one call. With W frozen, torch multiplies matrix by matrix, and so does the executor."""
    outcome = examine("mamba", "causal")
    assert outcome.equal == {"forward": True, "generate": True, "step": True}, outcome.notes


def test_weights_used_as_left_factors_of_one() -> None:
    """... and the same for a stack of one, which torch flattens, too."""
    model, inputs = build("causal", "falcon_mamba")
    outcome = Outcome("falcon_mamba")
    compare(outcome, "forward", model, {"input_ids": inputs["input_ids"][:1]}, allow_read=False)
    assert outcome.equal == {"forward": True}, outcome.notes


def test_reads_are_marked() -> None:
    """RWKV scales weights in place while it does not train; the weights that MobileBERT concatenates are a head's."""
    outcome = examine("rwkv", "causal")
    assert outcome.equal == {"forward": True, "generate": True, "step": True}
    assert outcome.reads == ["forward", "generate"]
    assert "modeling_rwkv.py" in outcome.notes[0]
    outcome = examine("mobilebert", "masked")
    assert outcome.equal == {"forward": True, "step": True} and not outcome.reads


def test_exceptions_name_architectures_and_stages() -> None:
    known = {name for group in GROUPS for name in architectures(group)}
    assert {name for name, _ in EXCEPTIONS} <= known
    assert {stage for _, stage in EXCEPTIONS} <= {*STAGES, "served"}
