"""Vectors and classes of texts, computed beside completions, are those that transformers and PEFT make of each text alone."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MambaConfig,
)

from symbiosis.errors import AdapterError
from symbiosis.serving import Engine
from symbiosis.serving.engine.limits import Unfit
from tests.adapters import off, saved

CONFIG = LlamaConfig(
    vocab_size=96, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    initializer_range=0.1, bos_token_id=1, eos_token_id=2, pad_token_id=0, num_labels=3,
)  # fmt: skip
TARGETS = ["q_proj", "v_proj", "down_proj"]
AS_ALONE = 1e-5  # sums in another order
LONG = [3 + (7 * place) % 90 for place in range(75)]
TEXTS = [LONG, [5, 9, 11], LONG[:40], [8]]


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(deepcopy(CONFIG)).eval()


def classifier() -> LlamaForSequenceClassification:
    """The model's layers, with a head of three classes."""
    torch.manual_seed(1)
    made = LlamaForSequenceClassification(deepcopy(CONFIG)).eval()
    made.model.load_state_dict(model().model.state_dict())
    return made


def lora(task: TaskType) -> LoraConfig:
    return LoraConfig(task_type=task, r=4, target_modules=TARGETS)


@torch.no_grad()
def hidden(alone: nn.Module, tokens: list[int]) -> Tensor:
    found: Tensor = alone(input_ids=torch.tensor([tokens]))[0][0]
    return found


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, nn.Module]]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "writes": saved(model(), lora(TaskType.CAUSAL_LM), folder / "writes"),
        "features": saved(model().model, lora(TaskType.FEATURE_EXTRACTION), folder / "features", seed=1),
        "classes": saved(classifier(), lora(TaskType.SEQ_CLS), folder / "classes", seed=2),
        "prompt": saved(model(), PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=5), folder / "prompt"),
    }  # fmt: skip


@pytest.fixture(scope="module")
def engine(adapters: dict[str, tuple[Path, nn.Module]]) -> Iterator[Engine]:
    """One whose steps hold pieces of a long text only."""
    with Engine(model(), memory=1 << 22, prefill_tokens=32) as engine:
        for name, (folder, _) in adapters.items():
            engine.add(name, folder)
        yield engine


def test_vectors_beside_completions(engine: Engine, adapters: dict[str, tuple[Path, nn.Module]]) -> None:
    bodies = {
        None: model().model,
        "writes": adapters["writes"][1].base_model.model.model,
        "features": adapters["features"][1],
        "classes": adapters["classes"][1].base_model.model.model,
    }
    asked = [(name, text, kind) for name in bodies for text in TEXTS for kind in ("last", "mean")]
    with ThreadPoolExecutor(len(asked) + 4) as threads:
        alone = engine.generate(LONG, adapter="writes", max_tokens=20, temperature=0.0)
        texts = [
            threads.submit(engine.generate, LONG, adapter="writes", max_tokens=20, temperature=0.0) for _ in range(4)
        ]
        found = list(threads.map(lambda each: engine.embed(each[1], adapter=each[0], pooling=each[2]), asked))
        assert all(each.result().tokens == alone.tokens for each in texts)
    for (name, text, kind), vector in zip(asked, found, strict=True):
        rows = hidden(bodies[name], text)
        expected = normalize(rows[-1] if kind == "last" else rows.mean(dim=0), dim=0)
        assert off(torch.tensor(vector), expected) < AS_ALONE, (name, len(text), kind)
    plain = engine.embed(LONG, normalizes=False)
    assert off(torch.tensor(plain), hidden(bodies[None], LONG)[-1]) < AS_ALONE


def test_classes_are_those_of_peft(engine: Engine, adapters: dict[str, tuple[Path, nn.Module]]) -> None:
    peft_model = adapters["classes"][1]
    for text in TEXTS:
        with torch.no_grad():
            expected = peft_model(input_ids=torch.tensor([text])).logits[0].softmax(dim=0)
        assert off(torch.tensor(engine.classify(text, adapter="classes")), expected) < AS_ALONE
    assert engine.classes_of("classes") == 3 and engine.classes_of("writes") == 0


def test_virtual_tokens_are_no_part_of_a_mean(engine: Engine, adapters: dict[str, tuple[Path, nn.Module]]) -> None:
    peft_model = adapters["prompt"][1]
    with torch.no_grad():
        made = peft_model(input_ids=torch.tensor([LONG]), output_hidden_states=True)
    rows = made.hidden_states[-1][0, 5:]
    assert (
        off(torch.tensor(engine.embed(LONG, adapter="prompt", pooling="mean")), normalize(rows.mean(0), dim=0))
        < AS_ALONE
    )
    assert off(torch.tensor(engine.embed(LONG, adapter="prompt")), normalize(rows[-1], dim=0)) < AS_ALONE


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3),
        MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
    ],
)
def test_other_models(config: GPT2Config | MambaConfig) -> None:
    """One whose sequences are computed one by one, too."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config).eval()
    alone = AutoModelForCausalLM.from_config(deepcopy(config)).eval()
    alone.load_state_dict(made.state_dict())
    tokens = [3, 9, 40, 21]
    with Engine(made, memory=1 << 22) as engine, ThreadPoolExecutor(4) as threads:
        writes = threads.submit(engine.generate, tokens, max_tokens=12, temperature=0.0)
        found = list(threads.map(lambda _: engine.embed(tokens, pooling="mean"), range(3)))
        assert len(writes.result().tokens) > 0
    for vector in found:
        assert off(torch.tensor(vector), normalize(hidden(alone.base_model, tokens).mean(dim=0), dim=0)) < AS_ALONE


def test_a_text_that_gives_way_is_read_again() -> None:
    """Where there is memory for one long text, short ones take its pages. The mean of all its rows is right all the same."""
    layers, block = 2, 16
    with Engine(model(), memory=6 * layers * block * 2 * 2 * 16 * 4, prefill_tokens=16) as engine:
        with ThreadPoolExecutor(6) as threads:
            long = threads.submit(engine.embed, LONG, pooling="mean")
            short = list(threads.map(lambda n: engine.embed([n, 4, 5], pooling="mean"), range(3, 8)))
            assert len(short) == 5
        rows = hidden(model().model, LONG)
        assert off(torch.tensor(long.result()), normalize(rows.mean(dim=0), dim=0)) < AS_ALONE
        assert engine.figures().finished == {"stop": 6}


def test_what_a_model_has_not_got_is_refused(engine: Engine, adapters: dict[str, tuple[Path, nn.Module]]) -> None:
    with pytest.raises(Unfit, match="classifies texts, and writes none"):
        engine.generate([5, 6], adapter="classes")
    with pytest.raises(Unfit, match="no classification head"):
        engine.classify([5, 6], adapter="writes")
    with pytest.raises(Unfit, match="prompt is empty"):
        engine.embed([])
    with pytest.raises(Unfit, match="prompt of 3000 tokens"):
        engine.embed([5] * 3000)


def test_a_head_of_another_size_is_refused(engine: Engine, tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = LlamaForSequenceClassification(LlamaConfig(**{**CONFIG.to_dict(), "hidden_size": 32})).eval()
    folder, _ = saved(small, lora(TaskType.SEQ_CLS), tmp_path)
    with pytest.raises(AdapterError, match="its classification head is 3 x 32, and this base's width is 64"):
        engine.add("small", folder)


@pytest.mark.parametrize("bias", [torch.zeros(3, 5), torch.zeros(1, 4000), torch.tensor(0.0)])
def test_a_head_with_another_bias_is_refused(engine: Engine, tmp_path: Path, bias: torch.Tensor) -> None:
    torch.manual_seed(0)
    folder, _ = saved(LlamaForSequenceClassification(deepcopy(CONFIG)).eval(), lora(TaskType.SEQ_CLS), tmp_path)
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.score.bias": bias}, file)
    with pytest.raises(AdapterError, match="its classification head is 3 x 64 with a bias of"):
        engine.add("biased", folder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tensors, config: tensors.pop("base_model.model.score.weight"), "it lacks its classification head"),
        (
            lambda tensors, config: tensors.update({"base_model.model.classifier.weight": torch.zeros(2, 64)}),
            "it has two classification heads",
        ),
        (lambda tensors, config: config.update(task_type="WHATEVER"), "its task_type is WHATEVER"),
        (lambda tensors, config: config.update(task_type=["SEQ_CLS"]), "its task_type is"),
    ],
    ids=["no head", "two heads", "no task", "a list of tasks"],
)
def test_a_classifier_that_is_none_is_refused(
    engine: Engine, tmp_path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], Any], told: str
) -> None:
    torch.manual_seed(0)
    folder, _ = saved(LlamaForSequenceClassification(deepcopy(CONFIG)).eval(), lora(TaskType.SEQ_CLS), tmp_path)
    file, described = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors, config = load_file(file), json.loads(described.read_text())
    change(tensors, config)
    save_file(tensors, file)
    described.write_text(json.dumps(config))
    with pytest.raises(AdapterError, match=told):
        engine.add("none", folder)


def test_figures_count_vectors(engine: Engine) -> None:
    before = engine.figures()
    engine.embed(LONG)
    after = engine.figures()
    assert after.prompt_tokens - before.prompt_tokens == len(LONG)
    assert after.finished["stop"] - before.finished.get("stop", 0) == 1
    assert (after.running, after.waiting) == (0, 0)
