"""Runs beside others: over the ranks of an executor, beside wrapped programs on it, and beside runs whose numbers are bad."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import symbiosis
from symbiosis.training import Datum, Engine
from tests.conftest import tiny_llama
from tests.inproc.test_training import alone, are_close, batch, gradients, held, lora
from tests.ranks import ranks_of


@pytest.mark.parametrize("scheme", ["local://{}/a.sock", "inproc://trains{}"])
@pytest.mark.parametrize("shard", ["layers", "fsdp"])
def test_two_runs_over_ranks(shard: str, scheme: str, model: Path, tmp_path: Path) -> None:
    url = scheme.format(tmp_path)
    with ranks_of(model, url, shard=shard), Engine(url) as engine:
        runs = [engine.create(lora(r=rank), seed=rank) for rank in (2, 5)]
        passes = [run.forward_backward(batch(number)) for number, run in enumerate(runs)]
        assert all(each.result(60).loss > 0 for each in passes)
        for number, (run, rank) in enumerate(zip(runs, (2, 5), strict=True)):
            assert are_close(gradients(run), alone([batch(number)], lora(r=rank), rank))


def test_beside_a_wrapped_trainer_and_one_that_generates() -> None:
    """Each gets on, and computes what it computes alone."""
    ids = batch(5, rows=1)["input_ids"]
    text = tiny_llama().generate(ids, max_new_tokens=8, do_sample=False)  # type: ignore[operator]
    steps, ends = {"engine": 0, "trainer": 0, "writer": 0}, time.monotonic() + 5
    failures: list[BaseException] = []
    with symbiosis.Executor(tiny_llama()) as executor, Engine(executor.endpoint) as engine:
        runs = [engine.create(lora(), seed=seed) for seed in (1, 2)]
        expected = [run.forward(batch(1)).result(60).logprobs[0] for run in runs]

        def train_runs() -> None:
            while time.monotonic() < ends or not steps["engine"]:
                passes = [run.forward_backward(batch(1)) for run in runs]
                found = [each.result(60).logprobs[0] for each in passes]
                assert all(torch.allclose(*each, atol=1e-5) for each in zip(found, expected, strict=True))
                steps["engine"] += 1

        def train() -> None:
            while time.monotonic() < ends or not steps["trainer"]:
                model: Any = symbiosis.from_executor(executor.endpoint, priority="train")
                torch.manual_seed(1)
                model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")).train()
                assert model(**batch(1)).loss.isfinite()
                model(**batch(1)).loss.backward()
                steps["trainer"] += 1

        def write() -> None:
            model: Any = symbiosis.from_executor(executor.endpoint)
            while time.monotonic() < ends or not steps["writer"]:
                assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), text)
                steps["writer"] += 1

        def noting(work: Any) -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=noting, args=(work,)) for work in (train_runs, train, write)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert not failures and min(steps.values()) >= 1, (failures, steps)


def with_company(loss: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a run finds beside one with this loss, in the same pass."""
    with Engine(tiny_llama()) as engine:
        good, company = engine.create(lora(), seed=1), engine.create(lora(), seed=2)
        go, _ = held(engine)
        passes = [good.forward_backward(batch(1)), company.forward_backward(batch(2), loss)]
        go.set()
        assert {each.result(60).joined for each in passes} == {2}
        return gradients(good), passes[0].result(60).logprobs


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1e38])
def test_numbers_of_one_run_are_nothing_to_another(factor: float) -> None:
    expected = with_company(lambda found, _: -sum(each.sum() for each in found))
    found = with_company(lambda found, _: -sum(each.sum() for each in found) * factor)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_nobody_waits_for_a_client_that_vanishes() -> None:
    with Engine(tiny_llama()) as engine:
        gone, other = engine.create(lora(), tenant="gone"), engine.create(lora(), tenant="other")
        gone.submit(7, "step", lr=1e-2)  # what it waits for never comes
        for number in range(20):
            gone.forward_backward(Datum([5, 6], [6, 7]))  # nobody holds these futures
            assert other.forward(batch(number)).result(60)
