"""Choosing tokens: as transformers does it where it does, as the distribution says, and alike whatever else runs."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from symbiosis.serving.lora.adapter import Adapter
from symbiosis.serving.request import Request, Sampling
from symbiosis.serving.sampling.sampler import begin_choice, logprobs_of, seed_of, uniform
from symbiosis.serving.scheduler.scheduler_output import Sequence

VOCABULARY = 11


def sequence(prompt: tuple[int, ...] = (0,), own: tuple[int, ...] = (), completion: int = 0, **how: Any) -> Sequence:
    request = Request(id=1, prompt=prompt, sampling=Sampling(**how))
    return Sequence(request, completion, [*prompt, *own], None, 0.0)


def ids(logits: Tensor, sequences: list[Sequence], **more: Any) -> list[int | None]:
    return [token and token.id for token in begin_choice(logits, sequences, **more).tokens()]


def logits_of(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def frequencies(logits: Tensor, draws: int = 4000, **how: Any) -> Tensor:
    rows = [sequence(seed=seed, **how) for seed in range(draws)]
    drawn = torch.tensor(ids(logits.expand(draws, -1), rows))
    return torch.bincount(drawn, minlength=VOCABULARY) / draws


def test_greedy_is_the_most_likely() -> None:
    logits = logits_of(7)
    assert ids(logits, [sequence(temperature=0.0)] * 7) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("how", "processors"),
    [
        ({}, []),
        ({"temperature": 0.5}, []),
        ({"top_k": 3}, [TopKLogitsWarper(3)]),
        ({"top_k": 100}, []),
        ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
        ({"top_p": 1e-9}, [TopPLogitsWarper(1e-9)]),
        ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
        ({"top_k": 5, "top_p": 0.8, "min_p": 0.1}, [TopKLogitsWarper(5), TopPLogitsWarper(0.8), MinPLogitsWarper(0.1)]),
        ({"repetition_penalty": 1.7}, [RepetitionPenaltyLogitsProcessor(1.7)]),
    ],
)
def test_draws_follow_the_distribution_that_transformers_makes(how: dict[str, Any], processors: list[Any]) -> None:
    logits = logits_of(1, seed=3)
    expected = logits / how.get("temperature", 1.0)
    for processor in processors:
        expected = processor(torch.tensor([[0]]), expected)
    expected = expected.softmax(-1)[0]
    got = frequencies(logits, **how)
    assert (got - expected).abs().max() < 0.04  # five times the standard deviation of 4,000 draws
    assert not got[expected == 0].any()


def test_biases_and_penalties_act_on_what_was_said() -> None:
    flat = torch.zeros(1, VOCABULARY)
    assert ids(flat, [sequence(temperature=0.0, logit_bias={4: 1.0})]) == [4]
    assert ids(flat, [sequence(temperature=0.0, logit_bias={0: -100.0})]) == [1]
    logits = flat.clone()
    logits[0, 2], logits[0, 3] = 1.0, 0.9
    said = {"own": (2,), "temperature": 0.0}
    assert ids(logits, [sequence(**said, presence_penalty=0.2)]) == [3]
    assert ids(logits, [sequence(**said, frequency_penalty=0.05)]) == [2]
    assert ids(logits, [sequence(own=(2, 2, 2), temperature=0.0, frequency_penalty=0.05)]) == [3]
    assert ids(logits, [sequence(prompt=(2,), temperature=0.0, presence_penalty=0.2)]) == [
        2
    ]  # the prompt does not count
    assert ids(logits, [sequence(prompt=(2,), temperature=0.0, repetition_penalty=1.5)]) == [3]  # ... but for this one


@pytest.mark.parametrize(
    "how",
    [
        {"repetition_penalty": 2.0},
        {"presence_penalty": 1.0, "frequency_penalty": 1.0},
        {"logit_bias": {}, "min_tokens": 1},
        {"stop_tokens": (), "min_tokens": 1},
        {"logprobs": 0},
        {"temperature": 0.0},
    ],
)
def test_where_nothing_was_said_nothing_is_penalized(how: dict[str, Any]) -> None:
    """As behind the virtual tokens of an adapter, where a prompt may be empty."""
    adapter, logits = Adapter(name="soft", kind="PROMPT_TUNING", bytes=1, version=1, virtual=2), logits_of(1)
    request = Request(id=1, prompt=(), sampling=Sampling(seed=3, **how))
    plain = sequence(seed=3, temperature=how.get("temperature", 1.0))
    assert ids(logits, [Sequence(request, 0, [0, 0], adapter, 0.0)]) == ids(logits, [plain])


def test_an_end_does_not_come_before_the_least_length() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 5], logits[0, 6], logits[0, 7] = 3.0, 2.0, 1.0
    how: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_tokens": (6,)}
    assert ids(logits, [sequence(**how)], ends=frozenset({5})) == [7]
    assert ids(logits, [sequence(own=(7, 7), **how)], ends=frozenset({5})) == [5]


def test_only_what_is_allowed_comes() -> None:
    allowed = torch.zeros(VOCABULARY, dtype=torch.bool)
    allowed[[3, 8]] = True
    logits = logits_of(2)
    first, second = ids(logits, [sequence(seed=1), sequence(temperature=0.0)], allowed={0: allowed})
    assert first in (3, 8) and second == logits[1].argmax()
    assert ids(logits, [sequence(), sequence()], allowed={1: torch.zeros_like(allowed)})[1] is None


def test_numbers_that_are_none_choose_nothing_and_harm_nobody() -> None:
    logits = logits_of(3)
    logits[1] = float("nan")
    got = ids(logits, [sequence(temperature=0.0), sequence(seed=1), sequence(temperature=0.0)])
    assert got == [logits[0].argmax(), None, logits[2].argmax()]


HOW = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-30, 0.3, 1.0, 2.0]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "top_k": st.sampled_from([0, 1, 4]),
        "top_p": st.sampled_from([1.0, 0.9, 0.1]),
        "min_p": st.sampled_from([0.0, 0.3, 1.0]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "logprobs": st.sampled_from([None, 0, 3, 20]),
    }
)


@settings(deadline=None, max_examples=60)
@given(st.lists(HOW, min_size=1, max_size=6), st.integers(0, 1000))
def test_a_row_draws_the_same_whatever_else_runs(hows: list[dict[str, Any]], seed: int) -> None:
    logits = logits_of(len(hows), seed)
    sequences = [sequence(own=(1, 2), **how) for how in hows]
    together = begin_choice(logits, sequences).tokens()
    for row, one in enumerate(sequences):
        alone = begin_choice(logits[row : row + 1], [one]).tokens()[0]
        assert alone == together[row]


def test_completions_positions_and_seeds_draw_their_own() -> None:
    flat = torch.zeros(1, 100_000)
    rows = [sequence(seed=1), sequence(seed=2), sequence(seed=1, completion=1), sequence(seed=1, own=(5,))]
    assert len(set(ids(flat.expand(4, -1), rows))) == 4


def test_uniform_numbers_are_uniform() -> None:
    seeds, positions = torch.arange(100).repeat_interleave(100), torch.arange(100).repeat(100)
    numbers = uniform(seeds, positions)
    assert numbers.min() >= 0 and numbers.max() < 1 and len(numbers.unique()) == 10_000
    assert (torch.histc(numbers, 10, 0, 1) - 1000).abs().max() < 150
    assert torch.equal(numbers, torch.cat([uniform(seeds[:7], positions[:7]), uniform(seeds[7:], positions[7:])]))
    assert -(2**63) <= seed_of(sequence(seed=2**64 - 1, completion=3)) < 2**63


def test_log_probabilities_are_the_models_own() -> None:
    logits = logits_of(1)
    one = sequence(seed=5, temperature=0.3, top_k=2, logit_bias={1: 5.0}, logprobs=4)
    (token,) = begin_choice(logits, [one]).tokens()
    expected = logits.log_softmax(-1)[0]
    assert token is not None and token.logprob == pytest.approx(expected[token.id].item())
    values, which = expected.topk(4)
    assert [id for id, _ in token.top] == which.tolist()
    assert [value for _, value in token.top] == pytest.approx(values.tolist())
    assert len(logprobs_of(logits, [0], 50)[0].top) == VOCABULARY
    assert begin_choice(logits, [sequence(temperature=0.0)]).tokens()[0].logprob is None  # type: ignore[union-attr]


def test_log_probabilities_at_the_temperature_are_those_of_the_draw() -> None:
    """Each row's own, beside others that want the model's."""
    logits = logits_of(3)
    rows = [sequence(seed=5, temperature=heat, logprobs=2, scaled_logprobs=heat != 1.0) for heat in (0.3, 1.0, 0.0)]
    tokens = begin_choice(logits, rows).tokens()
    for row, (token, heat) in enumerate(zip(tokens, (0.3, 1.0, 1.0), strict=True)):
        expected = (logits[row] / heat).log_softmax(-1)
        assert token is not None and token.logprob == pytest.approx(float(expected[token.id]), abs=1e-6)
        assert [each for _, each in token.top] == pytest.approx(expected.topk(2).values.tolist(), abs=1e-6)


def test_the_least_temperature_is_greedy() -> None:
    cold = sequence(temperature=1e-300, seed=1)
    assert [token and token.id for token in begin_choice(torch.tensor([[0.5, 2.0, 1.0]]), [cold]).tokens()] == [1]


def test_log_probabilities_over_a_large_vocabulary_are_within_a_rounding() -> None:
    logits = torch.randn(16, 50_000, generator=torch.Generator().manual_seed(0)) * 3
    expected = logits.double().log_softmax(-1)[:, 7]
    found = torch.tensor([each.logprob for each in logprobs_of(logits, [7] * 16, 0)], dtype=torch.float64)
    assert (found - expected).abs().max() < 2e-6
