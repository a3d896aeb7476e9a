"""Layers that are computed again in the backward pass: the same bits, and less memory; where the free memory would not suffice, or as is said."""

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig
from torch import nn

import symbiosis
from symbiosis.errors import ConfigError
from symbiosis.training import Engine, Run, activations
from tests.conftest import MODELS, tiny_llama
from tests.inproc.test_training import batch, held, lora

CONFIGS: list[Any] = [
    lora(),
    lora(lora_dropout=0.3, target_modules=["o_proj", "up_proj"]),
    lora(use_dora=True),
    lora(target_modules=["lm_head", "v_proj"]),
    PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=16),
]


def trained(engine: Engine, configs: list[Any]) -> list[torch.Tensor]:
    """What two steps of joined runs come to: losses, norms and parameters."""
    runs = [engine.create(config, seed=number) for number, config in enumerate(configs)]
    found = []
    for step in range(2):
        go, _ = held(engine, runs[0])  # so that all are in one pass
        passes = [run.forward_backward(batch(10 * step + n, length=5 + n)) for n, run in enumerate(runs)]
        go.set()
        found += [each.result(60).loss for each in passes]
        found += [run.step(1e-2).result(60) for run in runs]
    return [torch.tensor(found), *(p.detach() for run in runs for p in _parameters(run))]


def _parameters(run: Run) -> list[nn.Parameter]:
    return [p for p in run.model.parameters() if p.requires_grad]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_the_same_bits() -> None:
    with Engine(tiny_llama(), recompute=False) as engine:
        expected = trained(engine, CONFIGS)
    with Engine(tiny_llama(), recompute=True) as engine:
        assert same(trained(engine, CONFIGS), expected)


@pytest.mark.parametrize(
    "family", [each if n < 2 else pytest.param(each, marks=pytest.mark.full) for n, each in enumerate(MODELS)]
)
def test_of_other_families_and_over_an_executor(family: str) -> None:
    targets = {"gpt2": ["c_attn", "c_proj"], "mixtral": ["q_proj", "o_proj"]}.get(family, ["q_proj", "down_proj"])
    found = []
    for recompute in (False, True):
        with symbiosis.Executor(MODELS[family]()) as executor, Engine(executor.endpoint, recompute=recompute) as engine:
            found.append(trained(engine, [lora(target_modules=targets, r=r) for r in (2, 5)]))
    assert same(*found)


@pytest.mark.parametrize(("recompute", "kept", "calls"), [(False, 2, 2), (True, 0, 4)])
def test_what_a_layer_computed_is_gone_before_the_backward_pass(recompute: bool, kept: int, calls: int) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[object] = []

    def note(module: Any, inputs: Any, y: torch.Tensor) -> None:
        made.append(weakref.ref(y))

    def look(module: Any, inputs: Any, y: Any) -> None:
        gc.collect()
        alive[:] = [ref for ref in made if ref() is not None]

    with Engine(tiny_llama(), recompute=recompute) as engine:
        run = engine.create(lora())
        for name, module in engine._model._model.named_modules():
            if name.endswith("mlp.act_fn"):
                module.register_forward_hook(note)
        engine._model.head.module.register_forward_hook(look)
        run.forward_backward(batch(1)).result(60)
    assert (len(alive), len(made)) == (kept, calls)


def test_the_free_memory_decides(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with Engine(tiny_llama()) as engine, caplog.at_level(logging.INFO, "symbiosis"):
        run, plan = engine.create(lora()), engine._model._plan
        run.forward_backward(batch(1)).result(60)
        assert "KiB for each token" in caplog.text and "computed again" not in caplog.messages[-1].partition(",")[0]
        least = plan.needs(18) / activations.SHARE
        for free, again in ((least * 1.01, False), (least * 0.99, True)):
            monkeypatch.setattr(activations, "free_bytes", lambda device, free=free: free)
            assert plan.recomputes(18) == again
        run.forward_backward(batch(1)).result(60)
        assert "their layers are computed again" in caplog.text
        assert engine._model._recomputed


def test_the_estimate_grows_with_what_layers_compute() -> None:
    """A layer of Llama keeps at least what its products are given and return."""
    model = tiny_llama()
    config: Any = model.config
    hidden, inner = config.hidden_size, config.intermediate_size
    products = 4 * config.num_hidden_layers * (5 * hidden + 3 * inner)
    with Engine(model) as engine:
        of_row = (engine._model._kept_bytes(40) - engine._model._kept_bytes(8)) / 32
        assert products < of_row < 4 * products


def test_a_model_without_such_layers_is_refused_or_keeps_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("symbiosis.training.recomputed_layers._outermost", lambda model: ())
    with pytest.raises(ConfigError, match="leave recompute out"):
        Engine(tiny_llama(), recompute=True)
    monkeypatch.setattr(activations, "free_bytes", lambda device: 0)
    with Engine(tiny_llama()) as engine:
        assert engine.create(lora()).forward_backward(batch(1)).result(60).loss > 0
    assert "cannot be computed again" in caplog.text
