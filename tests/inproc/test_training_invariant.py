"""`Engine(batch_invariant=True)`: what a run comes to are the same bits, whatever else is in the engine, or if its commands are done again."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import dora

import symbiosis
from symbiosis.errors import ConfigError
from symbiosis.training import Datum, Engine
from symbiosis.training.run_journal import RunJournal
from tests.conftest import tiny_llama
from tests.inproc.test_training import batch, held, lora

COMPANY: list[tuple[Any, Any]] = [
    (lora(r=7, target_modules=["o_proj"]), batch(3, rows=1, length=23)),
    (lora(use_dora=True), batch(4, rows=5, length=9)),
    (lora(lora_dropout=0.3), [Datum([5] * 13, [6] * 13)]),  # type: ignore[arg-type]
]


def trained(engine: Engine, company: list[tuple[Any, Any]], name: str | None = None) -> list[torch.Tensor]:
    """What a run comes to whose commands wait at the same time as those of others. It has three rows: products of so few are made otherwise."""
    run = engine.create(lora(lora_dropout=0.2, target_modules="all-linear"), seed=1, name=name)
    others = [(engine.create(config, seed=3), given) for config, given in company]
    found = []
    for step in range(2):
        go, _ = held(engine)
        before = [other.forward_backward(given) for other, given in others[:2]]
        passed = run.forward_backward(batch(step, rows=1, length=3))
        after = [other.forward_backward(given) for other, given in others[2:]]
        norm, *_ = [each.step(1e-2) for each in (run, *(other for other, _ in others))]
        go.set()
        assert all(each.result(60) for each in (*before, *after))
        found += [*passed.result(60).logprobs, torch.tensor([passed.result(60).loss, norm.result(60)])]
    return [*found, *(p.detach().clone() for p in run.model.parameters() if p.requires_grad)]


def test_the_same_bits_in_any_company() -> None:
    found = []
    for company in ([], COMPANY, COMPANY[1:], COMPANY * 3):
        with Engine(tiny_llama(), batch_invariant=True) as engine:
            found.append(trained(engine, company))
            assert engine.joined == 1
    for each in found[1:]:
        assert len(each) == len(found[0]) and all(map(torch.equal, each, found[0]))


def test_commands_that_are_done_again_come_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunJournal, "is_due", False)  # so that all are done again
    with Engine(tiny_llama(), state=tmp_path / "runs", batch_invariant=True) as engine:
        trained(engine, COMPANY, "mine")
        engine.open("mine").forward_backward(batch(7)).result(60)  # waits for a step
        expected = engine.open("mine").forward(batch(8)).result(60).logprobs
        shutil.copytree(tmp_path / "runs", tmp_path / "killed")  # as if this process were killed here
    (tmp_path / "killed/lock").unlink(missing_ok=True)
    with Engine(tiny_llama(), state=tmp_path / "killed", batch_invariant=True) as engine:
        run = engine.open("mine")
        assert run.steps == 2 and all(map(torch.equal, run.forward(batch(8)).result(60).logprobs, expected))


def test_an_executor_has_to_be_so_too() -> None:
    with (
        symbiosis.Executor(tiny_llama()) as executor,
        pytest.raises(ConfigError, match="start it with --batch-invariant"),
    ):
        Engine(executor.endpoint, batch_invariant=True)
    readable = [each for each in COMPANY if hasattr(dora, "cache_decorator") or not each[0].use_dora]  # of PEFT 0.19
    with symbiosis.Executor(tiny_llama(), batch_invariant=True) as executor:
        found = []
        for company in ([], readable):
            with Engine(executor.endpoint, batch_invariant=True) as engine:
                found.append(trained(engine, company))
        assert all(map(torch.equal, *found))
