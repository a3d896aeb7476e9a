"""Training and generation frameworks on a split model: Trainer, TRL, Accelerate, DDP, every mode of generate."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from peft import IA3Config, LoraConfig, PeftConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoTokenizer, ContinuousBatchingConfig, GenerationConfig, Trainer, TrainingArguments

import symbiosis
from symbiosis.executor.model.load import DEMO_MODEL, load_model
from tests import programs
from tests.conftest import tiny_gpt2, tiny_llama
from tests.processes import Client

datasets = pytest.importorskip("datasets")  # comes with TRL


@pytest.fixture
def pair(llama: nn.Module, serve: Callable) -> tuple[nn.Module, nn.Module]:
    """The unsplit model, and one that is split."""
    return llama, symbiosis.wrap(copy.deepcopy(llama), serve(llama).endpoint)


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM", **options)


def train(model: nn.Module, config: PeftConfig, folder: Path, resume: bool = False, **options: Any) -> dict[str, Any]:
    """Adapter weights and logged losses after a few Trainer steps."""
    torch.manual_seed(3)
    peft_model = get_peft_model(model, config)
    rows = torch.randint(3, 100, (16, 12), generator=torch.Generator().manual_seed(7)).tolist()
    data = datasets.Dataset.from_dict({"input_ids": rows, "labels": rows})
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1, seed=11,
        report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="steps", save_steps=2, **options,
    )  # fmt: skip
    trainer = Trainer(peft_model, arguments, train_dataset=data, callbacks=[])
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, **{n: p.detach() for n, p in peft_model.named_parameters() if p.requires_grad}}


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    assert got["losses"] == expected["losses"]
    for name in expected:
        if name != "losses":
            assert torch.equal(got[name], expected[name]), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bf16": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_accumulation_steps": 2, "neftune_noise_alpha": 5},
    ],
    ids=["plain", "bf16", "checkpointing", "accumulation"],
)
def test_trainer(pair: tuple[nn.Module, nn.Module], tmp_path: Path, options: dict[str, Any]) -> None:
    plain, split = pair
    expected = train(plain, lora(), tmp_path / "plain", **options)
    assert_same(train(split, lora(), tmp_path / "split", **options), expected)


def test_trainer_resumes(llama: nn.Module, serve: Callable, tmp_path: Path) -> None:
    endpoint = serve(llama).endpoint
    whole = train(symbiosis.wrap(copy.deepcopy(llama), endpoint), lora(), tmp_path)
    resumed = train(symbiosis.wrap(copy.deepcopy(llama), endpoint), lora(), tmp_path, resume=True)
    assert_same(resumed, whole)


def test_trainer_with_ia3(pair: tuple[nn.Module, nn.Module], tmp_path: Path) -> None:
    config = IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
    plain, split = pair
    assert_same(train(split, config, tmp_path / "s"), train(plain, config, tmp_path / "p"))


# ---------------------------------------------------------------- TRL


@pytest.fixture(scope="module")
def demo() -> Any:
    model = load_model("demo")
    with symbiosis.Executor(copy.deepcopy(model)) as executor:
        yield model, executor.endpoint, AutoTokenizer.from_pretrained(DEMO_MODEL)


def trl_adapter(kind: str, model: nn.Module, tokenizer: Any, folder: Path) -> dict[str, Any]:
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    common = {
        "output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True,
        "logging_steps": 1, "seed": 5, "disable_tqdm": True, "save_strategy": "no", "learning_rate": 1e-3, "bf16": False,
        "gradient_checkpointing": False,
    }  # fmt: skip
    torch.manual_seed(2)
    words = ["the module", "a function", "this class", "an object"]
    if kind == "sft":
        data = datasets.Dataset.from_dict({"text": [f"{word} returns a value" for word in words]})
        trainer: Any = SFTTrainer(
            model,
            SFTConfig(max_length=32, **common),
            train_dataset=data,
            processing_class=tokenizer,
            peft_config=lora(),
        )
    elif kind == "dpo":
        data = datasets.Dataset.from_dict({"prompt": words, "chosen": [" is good"] * 4, "rejected": [" is bad"] * 4})
        trainer = DPOTrainer(
            model, args=DPOConfig(max_length=32, **common), train_dataset=data, processing_class=tokenizer,
            peft_config=lora(),
        )  # fmt: skip
    else:
        data = datasets.Dataset.from_dict({"prompt": words})
        trainer = GRPOTrainer(
            model, reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
            args=GRPOConfig(num_generations=2, max_completion_length=6, **common), train_dataset=data,
            processing_class=tokenizer, peft_config=lora(),
        )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, **{n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad}}


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_trl(demo: Any, tmp_path: Path, kind: str) -> None:
    model, endpoint, tokenizer = demo
    split = symbiosis.wrap(copy.deepcopy(model), endpoint)
    expected = trl_adapter(kind, copy.deepcopy(model), tokenizer, tmp_path / "plain")
    assert_same(trl_adapter(kind, split, tokenizer, tmp_path / "split"), expected)
    assert any(value.abs().sum() > 0 for name, value in expected.items() if "lora_B" in name)


# ---------------------------------------------------------------- Accelerate, DDP


def test_accelerate(pair: tuple[nn.Module, nn.Module], ids: Tensor) -> None:
    from accelerate import Accelerator

    results = []
    for model in pair:
        torch.manual_seed(3)
        accelerator = Accelerator(cpu=True)
        peft_model = get_peft_model(model, lora())
        optimizer = torch.optim.AdamW([p for p in peft_model.parameters() if p.requires_grad], lr=1e-2)
        peft_model, optimizer = accelerator.prepare(peft_model, optimizer)
        for _ in range(2):
            accelerator.backward(peft_model(input_ids=ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()
        results.append({n: p.detach() for n, p in peft_model.named_parameters() if p.requires_grad})
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value), name


def test_distributed_data_parallel(llama: nn.Module, serve: Callable, processes: list, tmp_path: Path) -> None:
    """Two ranks, each with data of its own and a client of its own; their gradients are averaged."""
    endpoint = serve(llama, listen=[f"local://{tmp_path}/x.sock"], batch_invariant=True).endpoint
    for rank in range(2):
        processes.append(Client(programs.data_parallel, endpoint, tmp_path / "store", rank))
    results = [process.result() for process in processes]
    expected = results[0]["plain"]
    assert len(expected) > 5 and any(gradient.any() for gradient in expected.values())
    for result in results:
        assert result["calls"] > 20
        for gradients in (result["plain"], result["split"]):
            assert gradients.keys() == expected.keys()
            for name, gradient in expected.items():
                assert numpy.array_equal(gradients[name], gradient), name
    assert any((results[0]["alone"][name] != results[1]["alone"][name]).any() for name in expected)


# ---------------------------------------------------------------- generation

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "no_cache": {"use_cache": False},
    "sampling": {"do_sample": True, "top_k": 10},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "beam": {"num_beams": 3},
    "beam_sample": {"num_beams": 2, "do_sample": True},
    "static_cache": {"cache_implementation": "static", "disable_compile": True},
    "prompt_lookup": {"prompt_lookup_num_tokens": 2},
    "guidance": {"guidance_scale": 1.5},
    "chunked_prefill": {"prefill_chunk_size": 4},
}


@pytest.mark.parametrize("mode", MODES)
def test_generate(pair: tuple[nn.Module, nn.Module], ids: Tensor, mode: str) -> None:
    if mode in ("prompt_lookup", "chunked_prefill"):
        ids = ids[:1]
    options = {"max_new_tokens": 8, "attention_mask": torch.ones_like(ids), **{"do_sample": False, **MODES[mode]}}
    tokens = []
    for model in pair:
        torch.manual_seed(4)
        tokens.append(model.generate(ids, **options))
    assert torch.equal(tokens[0], tokens[1])


@pytest.mark.parametrize("split_draft", [False, True])
def test_assisted_generation(
    pair: tuple[nn.Module, nn.Module], ids: Tensor, serve: Callable, split_draft: bool
) -> None:
    plain, split = pair
    draft = tiny_llama()
    draft.model.layers = draft.model.layers[:1]
    draft.config.num_hidden_layers = 1
    assistant = symbiosis.wrap(copy.deepcopy(draft), serve(draft).endpoint) if split_draft else draft
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids[:1])}
    expected = plain.generate(ids[:1], assistant_model=draft, **options)
    assert torch.equal(split.generate(ids[:1], assistant_model=assistant, **options), expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_continuous_batching(pair: tuple[nn.Module, nn.Module], attention: str) -> None:
    prompts = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
    config = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=2, pad_token_id=0)
    room = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)  # else it takes most of the machine's memory
    results = []
    for model in pair:
        model.set_attn_implementation(f"paged|{attention}")
        outputs = model.generate_batch(inputs=prompts, generation_config=config, continuous_batching_config=room)
        results.append([outputs[key].generated_tokens for key in sorted(outputs)])
    assert results[0] == results[1] and all(len(tokens) for tokens in results[0])


def test_compiled_generation_with_static_cache(pair: tuple[nn.Module, nn.Module], ids: Tensor) -> None:
    torch._dynamo.reset()
    plain, split = pair
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = plain.generate(ids, **options)
    split.forward = torch.compile(split.forward, backend="aot_eager", fullgraph=True)
    assert torch.equal(split.generate(ids, cache_implementation="static", disable_compile=True, **options), expected)


def test_gpt2_generates(serve: Callable, ids: Tensor) -> None:
    model = tiny_gpt2()
    split = symbiosis.wrap(copy.deepcopy(model), serve(model).endpoint)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(split.generate(ids, **options), model.generate(ids, **options))
