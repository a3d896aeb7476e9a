"""Adapters elsewhere than at inner layers: at the head, in front of a sequence, and the base's biases; each as PEFT alone."""

import importlib
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, TaskType
from transformers import BloomConfig, BloomForCausalLM

import symbiosis
from symbiosis.errors import AdapterError, ConfigError
from symbiosis.training import Datum, Engine
from tests.conftest import tiny_llama
from tests.inproc.test_training import batch, lora

CLM = TaskType.CAUSAL_LM


def bloom() -> Any:
    return BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4)).eval()


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    return importlib.import_module("train_exact")


def biased(bias: str, **options: Any) -> LoraConfig:
    words = {"r": 4, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "bias": bias, **options}
    return LoraConfig(task_type=CLM, **words)


FAMILIES: dict[str, list[Any]] = {
    "GPT-2": [
        lambda: biased("none"),
        lambda: biased("lora_only"),
        lambda: biased("all"),
        lambda: biased("all", use_dora=True),
        lambda: PrefixTuningConfig(task_type=CLM, num_virtual_tokens=3),
    ],
    "Llama": [
        lambda: lora(target_modules=["lm_head", "v_proj"], task_type=CLM),
        lambda: lora(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type=CLM),
        lambda: PromptTuningConfig(task_type=CLM, num_virtual_tokens=5),
        lambda: lora(target_modules=["lm_head"], task_type=CLM),
        lambda: PromptEncoderConfig(task_type=CLM, num_virtual_tokens=3, encoder_hidden_size=32),
    ],
    "Gemma2": [
        lambda: PromptTuningConfig(task_type=CLM, num_virtual_tokens=5),
        lambda: lora(task_type=CLM),
        lambda: PrefixTuningConfig(task_type=CLM, num_virtual_tokens=7),  # longer than its window
        lambda: PrefixTuningConfig(task_type=CLM, num_virtual_tokens=2),
    ],
    "Qwen3": [
        lambda: PrefixTuningConfig(task_type=CLM, num_virtual_tokens=4),
        lambda: PrefixTuningConfig(task_type=CLM, num_virtual_tokens=2, prefix_projection=True, encoder_hidden_size=32),
        lambda: lora(lora_dropout=0.2, task_type=CLM),
    ],
    "gpt-oss": [
        lambda: PrefixTuningConfig(task_type=CLM, num_virtual_tokens=4),
        lambda: lora(target_modules=["q_proj"], task_type=CLM),
    ],
    "Mamba": [
        lambda: lora(target_modules=["lm_head", "in_proj"], task_type=CLM),
        lambda: lora(target_modules=["x_proj"], task_type=CLM),
    ],
}
if hasattr(peft, "CartridgeConfig"):  # since 0.19
    FAMILIES["Qwen3"].append(lambda: peft.CartridgeConfig(task_type=CLM, num_virtual_tokens=3, num_frozen_tokens=1))


@pytest.mark.parametrize("pieces", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_is_as_alone(exact: Any, family: str, pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if pieces:
        monkeypatch.setattr("symbiosis.training.logit_pieces.LOGITS_BYTES", 8 * 96 * 30)  # thirty rows of the head
    configs = FAMILIES[family]
    batches = [exact.batches_of(number, 3) for number in range(len(configs))]
    with Engine(exact.build(family)) as engine:
        runs = [engine.create(config(), seed=number) for number, config in enumerate(configs)]
        for number, (run, config) in enumerate(zip(runs, configs, strict=True)):
            alone = exact.train_alone(family, config(), number, batches[number])
            found = exact.train_run(run, batches[number], exact.random.Random(0))
            # AdamW makes steps of rounding where a gradient is zero, as that of a key's bias is: so not the adapters
            assert exact.relative(found.gradients, alone.gradients) < 1e-5, config()
            assert found.losses == pytest.approx(alone.losses, rel=1e-5), config()


def test_they_leave_memory_and_are_saved(tmp_path: Path, exact: Any) -> None:
    configs = {
        "biases": lambda: biased("all"),
        "prompt": lambda: PromptTuningConfig(task_type=CLM, num_virtual_tokens=5),
        "prefix": lambda: PrefixTuningConfig(task_type=CLM, num_virtual_tokens=5),
    }
    before: dict[str, torch.Tensor] = {}
    with Engine(exact.build("GPT-2"), state=tmp_path / "runs", in_memory=1) as engine:
        for name, config in configs.items():
            run, other = engine.create(config(), seed=1, name=name), engine.create(config(), seed=1)
            for each in (run, other):
                each.forward_backward(exact.batches_of(1, 1)[0]).result(60)
                each.step(1e-2).result(60)
            loaded = engine.load(run.save(tmp_path / name))
            found = [each.forward(exact.batches_of(2, 1)[0]).result(60).logprobs[0] for each in (run, other, loaded)]
            assert torch.equal(found[0], found[1]) and torch.allclose(found[0], found[2], atol=1e-6)
            before[name] = found[0]
    with Engine(exact.build("GPT-2"), state=tmp_path / "runs") as engine:
        for name, logprobs in before.items():
            again = engine.open(name).forward(exact.batches_of(2, 1)[0]).result(60).logprobs[0]
            assert torch.equal(again, logprobs)


def test_over_an_executor() -> None:
    configs = [
        lora(target_modules=["lm_head"]),
        PromptTuningConfig(task_type=CLM, num_virtual_tokens=2),
        PrefixTuningConfig(task_type=CLM, num_virtual_tokens=2),
    ]
    with (
        symbiosis.Executor(tiny_llama()) as executor,
        Engine(executor.endpoint) as split,
        Engine(tiny_llama()) as whole,
    ):
        for config in configs:
            losses = []
            for engine in (split, whole):
                run = engine.create(config, seed=1)
                run.forward_backward(batch(1)).result(60)
                run.step(1e-2).result(60)
                losses.append(run.forward(batch(1)).result(60).logprobs[0])
            assert torch.allclose(*losses, atol=1e-5)


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_what_is_in_front_takes_its_part_of_the_length(kind: Any) -> None:
    with Engine(tiny_llama()) as engine:
        run = engine.create(kind(task_type=CLM, num_virtual_tokens=5))
        assert run.forward(Datum([5] * 123, [5] * 123)).result(60)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="this model reads 123"):
            run.forward(Datum([5] * 124, [5] * 124))  # type: ignore[arg-type]


def test_prefixes_are_refused_where_attention_is_not_ours(exact: Any) -> None:
    with Engine(bloom()) as engine, pytest.raises(AdapterError, match="in a way of its own|does not fit"):
        engine.create(PrefixTuningConfig(task_type=CLM, num_virtual_tokens=2))


@pytest.mark.parametrize(
    "config",
    [
        PromptEncoderConfig(task_type=CLM, num_virtual_tokens=3, encoder_hidden_size=32),
        PrefixTuningConfig(task_type=CLM, num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=32),
    ],
    ids=["P-tuning", "prefix"],
)
def test_an_encoder_is_not_gone_on_with_from_what_peft_saves(config: Any, tmp_path: Path) -> None:
    with Engine(tiny_llama()) as engine:
        run = engine.create(config)
        with pytest.raises(AdapterError, match="not the encoder"):
            engine.load(run.save(tmp_path / "one"))
