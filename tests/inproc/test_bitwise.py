"""`bitwise`: what a sampler says of its tokens are the very bits that the trainer computes of them, however texts were cut and joined on both sides."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

import symbiosis
from symbiosis.errors import AdapterError, ConfigError
from symbiosis.kernels import row_invariant
from symbiosis.serving import Engine as Sampler
from symbiosis.serving.request import Output, Request
from symbiosis.serving.runner import attention
from symbiosis.training import Datum, Engine, Mismatch
from tests.conftest import tiny_gpt2, tiny_llama, tiny_mixtral
from tests.inproc.test_training import are_close, batch, gradients, held

SMALL: dict[str, Any] = {
    "hidden_size": 56, "intermediate_size": 92, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 211,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MEMORY = 1 << 24
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def made(config: Any) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def llama() -> nn.Module:
    """Its widths are such that rows do not end where vectors do."""
    return tiny_llama(60, 90, 6, 2)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "gpt2": tiny_gpt2,
    "mixtral": tiny_mixtral,
    "qwen2": lambda: made(Qwen2Config(**SMALL)),
    "qwen3": lambda: made(Qwen3Config(**SMALL, head_dim=24)),
    "mistral": lambda: made(MistralConfig(**SMALL, sliding_window=21)),
    "phi3": lambda: made(Phi3Config(**SMALL)),
    "gemma2": lambda: made(Gemma2Config(**SMALL, head_dim=16, sliding_window=19, final_logit_softcapping=5.0)),
    "gpt_oss": lambda: made(
        GptOssConfig(**SMALL, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=17)
    ),
}


def lora(rank: int, **options: Any) -> LoraConfig:
    return LoraConfig(
        **{"r": rank, "lora_alpha": 3 * rank + 1, "target_modules": "all-linear", "init_lora_weights": False, **options}
    )


def prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Several share their beginning, which is found again; one is longer than a step takes of prompts."""
    generator = torch.Generator().manual_seed(5)
    begin = torch.randint(3, vocabulary, (40,), generator=generator).tolist()
    lengths = [1, 3, 17, 40, 70, 12][:count]
    own = [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]
    return [[*begin, *each] if number % 2 else each for number, each in enumerate(own)]


def sampled(sampler: Any, policy: str | None, given: list[list[int]], tokens: int = 15) -> list[Datum]:
    """What RL sends of completions that were made side by side."""

    def one(number: int) -> Datum:
        prompt = given[number]
        answer = sampler.generate(prompt, adapter=policy, max_tokens=tokens, logprobs=0, seed=number, ignore_eos=True)
        blank = [0.0] * (len(prompt) - 1)
        whole = [*prompt, *answer.tokens]
        found = [*blank, *(token.logprob for token in answer.logprobs)]
        return Datum(whole[:-1], whole[1:], logprobs=found, advantages=[*blank, *[1.0] * len(answer.tokens)])  # type: ignore[arg-type]

    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(one, range(len(given))))


def passed(run: Any, data: list[Datum]) -> Mismatch:
    found = run.forward_backward(data, "importance_sampling").result(120).mismatch
    assert isinstance(found, Mismatch) and found.tokens == sum(int((each.logprobs != 0).sum()) for each in data)
    return found


def check(sampler: Any, trainer: Engine, config: LoraConfig, seed: int = 0) -> None:
    """All tokens agree before and after a step, told together and one by one."""
    run = trainer.create(config, seed=seed)
    given = prompts(6, sampler.vocabulary)
    for _ in range(2):
        sampler.publish("policy", run)
        data = [
            *sampled(sampler, "policy", given),
            *sampled(sampler, "policy", given[3:4]),
        ]  # the last finds a prompt again
        assert (together := passed(run, data)).is_zero and together.kl_v1 == together.kl_v2 == 0.0, together
        assert all(passed(run, [each]).is_zero for each in data[:4])
        run.step(1e-2).result(60)
    older = passed(run, data)
    assert not older.is_zero


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_agrees(family: str, dtype: torch.dtype) -> None:
    model = FAMILIES[family]().to(dtype)
    with (
        symbiosis.Executor(model, batch_invariant=True) as executor,
        Sampler(executor.endpoint, memory=MEMORY, prefill_tokens=29, bitwise=True) as sampler,
        Engine(executor.endpoint, bitwise=True) as trainer,
    ):
        targets = ATTENTION if family in ("mixtral", "gpt_oss") else "all-linear"  # PEFT would adapt experts, too
        check(sampler, trainer, lora(5, target_modules=targets))


@contextmanager
def both(model: Callable[[], nn.Module] = llama, **options: Any) -> Iterator[tuple[Any, Engine]]:
    """A sampler and a trainer that hold the model themselves, as where weights are mapped."""
    sampling = {
        name: options.pop(name) for name in list(options) if name in ("prefill_tokens", "max_batch", "speculate")
    }
    with (
        Sampler(model(), memory=MEMORY, bitwise=True, **sampling) as sampler,
        Engine(model(), bitwise=True, **options) as trainer,
    ):
        yield sampler, trainer


@pytest.mark.parametrize("rank", [1, 3, 16, 40])
def test_at_any_rank(rank: int) -> None:
    with both() as (sampler, trainer):
        check(sampler, trainer, lora(rank, use_rslora=rank == 3))


def test_prompts_that_are_found_again_and_cut() -> None:
    with both(prefill_tokens=7, max_batch=3) as (sampler, trainer):
        check(sampler, trainer, lora(4))
        assert sampler.figures().prefix_hits


def long() -> nn.Module:
    """Its passes have more rows than a product, and its texts more keys than a few blocks."""
    return made(Qwen2Config(**{**SMALL, "max_position_embeddings": 1024}))


def test_long_texts() -> None:
    with both(long, prefill_tokens=300, recompute=True) as (sampler, trainer):
        run = trainer.create(lora(4), seed=0)
        sampler.publish("policy", run)
        generator = torch.Generator().manual_seed(1)
        texts = [torch.randint(3, 211, (length,), generator=generator).tolist() for length in (700, 250, 63)]
        data = sampled(sampler, "policy", texts, tokens=6)
        assert passed(run, data).is_zero and passed(run, data[1:2]).is_zero


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_texts_of_few_tokens(dtype: torch.dtype) -> None:
    """Of which the trainer has as few rows as the sampler."""
    with both(lambda: llama().to(dtype)) as (sampler, trainer):
        run = trainer.create(lora(4), seed=0)
        sampler.publish("policy", run)
        for tokens in (1, 2, 3):
            data = sampled(sampler, "policy", [[prompt] for prompt in range(3, 11)], tokens)
            assert all(passed(run, [each]).is_zero for each in data)


def test_drafted_tokens() -> None:
    with both(speculate="ngram:3") as (sampler, trainer):
        run = trainer.create(lora(4), seed=0)
        sampler.publish("policy", run)
        assert passed(run, sampled(sampler, "policy", [[5, 6, 7, 8] * 8, [9, 10] * 9])).is_zero


def test_runs_that_are_computed_together() -> None:
    """Each has its own rows of one pass, and its adapter its own rows of one step."""
    with both() as (sampler, trainer):
        runs = [trainer.create(lora(rank), seed=rank) for rank in (2, 5, 8)]
        for number, run in enumerate(runs):
            sampler.publish(f"policy-{number}", run)
        with ThreadPoolExecutor(3) as pool:
            data = list(pool.map(lambda n: sampled(sampler, f"policy-{n}", prompts(3 + n, 100)), range(3)))
        go, _ = held(trainer)
        futures = [run.forward_backward(each, "importance_sampling") for run, each in zip(runs, data, strict=True)]
        go.set()
        assert all(future.result(60).mismatch.is_zero for future in futures)  # type: ignore[union-attr]
        assert trainer.joined > 1


def test_an_adapter_that_is_read_from_its_folder(tmp_path: Path) -> None:
    """Its matrices lie in pages, in several pieces."""
    for dtype in (torch.float32, torch.bfloat16):
        with both(lambda: llama().to(dtype)) as (sampler, trainer):  # noqa: B023
            run = trainer.create(lora(40), seed=0)
            run.save(tmp_path / str(dtype))
            sampler.add("policy", tmp_path / str(dtype))
            assert passed(run, sampled(sampler, "policy", prompts(4, 100))).is_zero


def test_log_probabilities_of_prompts() -> None:
    with both() as (sampler, trainer):
        run = trainer.create(lora(4), seed=0)
        sampler.publish("policy", run)
        text = prompts(6, 100)[4]
        request, outputs = Request(id=1, prompt=tuple(text), adapter="policy", prompt_logprobs=0), Queue[Output]()
        sampler.submit(request, outputs.put)
        told = outputs.get(timeout=60).prompt_logprobs
        [found] = run.forward(Datum(text[:-1], text[1:])).result(60).logprobs  # type: ignore[arg-type]
        assert [token.logprob for token in told[1:]] == found.tolist()


def test_gradients_are_those_of_any_trainer() -> None:
    found = []
    for bitwise in (True, False):
        with Engine(FAMILIES["mistral"](), bitwise=bitwise) as trainer:
            run = trainer.create(lora(4), seed=0)
            run.forward_backward(batch(1, rows=3, length=40)).result(60)
            found.append(gradients(run))
    assert are_close(*found) and not all(map(torch.equal, *found))


def test_the_proof() -> None:
    with both() as (sampler, trainer):
        assert trainer.prove_bitwise(sampler) == 40
        assert trainer.names == [] and sampler.adapter_names() == []


def test_the_proof_finds_what_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler whose attention adds up what blocks make in another order."""

    def backwards(query: Any, key: Any, value: Any, firsts: Any, how: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(row_invariant, "KEYS", 16)
            return row_invariant.attend_in_blocks(query, key, value, firsts, how)

    monkeypatch.setattr(attention, "attend_in_blocks", backwards)
    with both() as (sampler, trainer):
        with pytest.raises(ConfigError, match="bitwise does not hold here: of 40 tokens"):
            trainer.prove_bitwise(sampler)
        assert trainer.names == [] and sampler.adapter_names() == []


def test_what_cannot_be_bitwise_is_refused() -> None:
    with symbiosis.Executor(llama()) as executor:
        for engine in (Sampler, Engine):
            with pytest.raises(
                ConfigError, match="bitwise needs products that do not depend on others.*--batch-invariant"
            ):
                engine(executor.endpoint, bitwise=True)  # type: ignore[operator]
    bloom = made(BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=50))
    for engine in (Sampler, Engine):
        with pytest.raises(ConfigError, match="bitwise needs sequences"):
            engine(bloom, bitwise=True)  # type: ignore[operator]
    with pytest.raises(ConfigError, match="bitwise is for one device"):
        Sampler("inproc://none", devices=("cpu", "cpu"), bitwise=True)
    with Engine(llama(), bitwise=True) as trainer:
        for config in (
            lora(4, use_dora=True),
            lora(4, lora_dropout=0.1),
            lora(4, target_modules=["q_proj", "lm_head"]),
        ):
            with pytest.raises(AdapterError, match="with bitwise, adapters are LoRA without dropout"):
                trainer.create(config)
