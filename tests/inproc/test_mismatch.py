"""How far a sampler is from its trainer: told with each pass, and exactly zero only where every token agrees."""

from pathlib import Path

import pytest
import torch

import symbiosis
from symbiosis.serving import Engine as Sampler
from symbiosis.training import Datum, Engine
from tests.conftest import tiny_llama
from tests.inproc.test_training import batch, lora

PROMPT = [5, 6, 7, 8]


def sampled(tokens: list[int], logprobs: list[float], prompt: list[int] = PROMPT) -> Datum:
    """What RL sends: log probabilities and advantages of what was drawn, and zeros of the prompt."""
    blank = [0.0] * (len(prompt) - 1)
    return Datum(
        [*prompt, *tokens][:-1],  # type: ignore[arg-type]
        [*prompt, *tokens][1:],  # type: ignore[arg-type]
        logprobs=[*blank, *logprobs],  # type: ignore[arg-type]
        advantages=[*blank, *[1.0] * len(tokens)],  # type: ignore[arg-type]
    )


def test_of_what_an_engine_samples_by_the_run_itself() -> None:
    """Rounding while the sampler has the run's adapter, and seen when it was left behind by a step."""
    with (
        symbiosis.Executor(tiny_llama()) as executor,
        Sampler(executor.endpoint, memory=1 << 24) as sampler,
        Engine(executor.endpoint) as trainer,
    ):
        run = trainer.create(lora(), seed=0)
        sampler.publish("policy", run)

        def passed() -> symbiosis.training.Mismatch:
            answer = sampler.generate(PROMPT, adapter="policy", max_tokens=12, logprobs=0, seed=1, ignore_eos=True)
            datum = sampled(list(answer.tokens), [token.logprob or 0.0 for token in answer.logprobs])
            found = run.forward_backward(datum, "importance_sampling").result(60).mismatch
            assert found is not None and found.tokens == 12
            return found

        same = passed()
        assert abs(same.kl_v1) < 1e-6 and same.kl_v2 < 1e-12 and same.largest < 1e-5
        run.step(1e-2).result(60)
        older = passed()
        assert older.largest > 1e-3 and older.kl_v2 > 1e-8 and not older.is_zero
        sampler.publish("policy", run)
        assert passed().largest < 1e-5


@pytest.mark.parametrize("verb", ["forward", "forward_backward"])
def test_is_zero_only_where_every_token_agrees(verb: str) -> None:
    """Differences that cancel out are not zero, nor is that of a token which the sampler was certain of."""
    with Engine(tiny_llama(), batch_invariant=True) as engine:
        run = engine.create(lora(), seed=0)
        tokens = [9, 10, 11, 12]
        [own] = run.forward(sampled(tokens, [-1.0] * 4)).result(60).logprobs

        def passed(change: list[float]) -> symbiosis.training.Mismatch:
            datum = sampled(tokens, (own[3:] + torch.tensor(change)).tolist())
            more = () if verb == "forward" else ("importance_sampling",)
            found = getattr(run, verb)(datum, *more).result(60).mismatch
            assert found is not None and found.tokens == 4
            return found

        assert passed([0.0] * 4).is_zero
        cancelled = passed([0.5, -0.5, 0.0, 0.0])
        assert not cancelled.is_zero and abs(cancelled.kl_v1) < 1e-6
        assert cancelled.kl_v2 == pytest.approx(0.0625, rel=1e-4) and cancelled.largest == pytest.approx(0.5, rel=1e-4)
        certain = passed([0.0, 0.0, 0.0, -float(own[-1])])  # a log probability of 0
        assert not certain.is_zero and certain.largest == pytest.approx(-float(own[-1]))


def test_of_data_that_nobody_sampled() -> None:
    with Engine(tiny_llama()) as engine:
        run = engine.create(lora(), seed=0)
        assert run.forward_backward(batch(1)).result(60).mismatch is None
        mixed = [Datum([1, 2], [2, 3]), Datum([1, 2], [2, 3], logprobs=[0.0, 0.0])]  # type: ignore[arg-type]
        assert run.forward(mixed).result(60).mismatch is None


def test_a_result_that_is_asked_for_again_after_a_restart_has_it(tmp_path: Path) -> None:
    given = sampled([9, 10], [-1.0, -2.0])
    with Engine(tiny_llama(), state=tmp_path) as engine:
        run = engine.create(lora(), seed=0, name="mine")
        first = run.submit(1, "forward_backward", given, "importance_sampling").result(60).mismatch
    with Engine(tiny_llama(), state=tmp_path) as engine:
        again = engine.open("mine").submit(1, "forward_backward", given, "importance_sampling").result(60).mismatch
    assert first is not None and first.tokens == 2 and again == first
