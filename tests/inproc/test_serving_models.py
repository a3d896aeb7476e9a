"""Sequences that are computed side by side, in pieces and over pages, have the logits that each has alone."""

import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OpenAIGPTConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    RecurrentGemmaConfig,
)  # fmt: skip

import symbiosis
from symbiosis.errors import ConfigError
from symbiosis.server.launch.serve_processes import Ending
from symbiosis.serving.request import Request
from symbiosis.serving.runner.dense_runner import DenseRunner, make_ready
from symbiosis.serving.runner.model_runner import ModelRunner
from symbiosis.serving.runner.paged_runner import PagedRunner
from symbiosis.serving.scheduler.scheduler_output import ScheduledRequest, SchedulerOutput, Sequence
from tests.conftest import tiny_llama

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EIGHT = {**TINY, "head_dim": 8}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOW = {"sliding_window": 8}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**TINY),
    "qwen3": lambda: Qwen3Config(**EIGHT),
    "window": lambda: MistralConfig(**TINY, **WINDOW),
    "soft caps": lambda: Gemma2Config(**EIGHT, **WINDOW, attn_logit_softcapping=2.0),
    "two kinds of layers": lambda: Gemma3TextConfig(**EIGHT, **WINDOW),
    "sinks": lambda: GptOssConfig(**EIGHT, **WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "experts": lambda: Qwen3MoeConfig(**EIGHT, **MOE, num_experts=4),
    "learned positions": lambda: GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3),
    "positions from 2": lambda: OPTConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, word_embed_proj_dim=32, init_std=0.3
    ),
    "joint projections": lambda: Phi3Config(**TINY),
    "parallel layers": lambda: GPTNeoXConfig(**{**TINY, "num_key_value_heads": 4}),
    "latent": lambda: DeepseekV3Config(
        **{**TINY, "num_key_value_heads": 4}, **LATENT, **MOE, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1
    ),
}  # fmt: skip
ONE_BY_ONE: dict[str, Callable[[], PretrainedConfig]] = {
    "bloom": lambda: BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3),
    "falcon": lambda: FalconConfig(**{k: v for k, v in TINY.items() if k not in ("intermediate_size",)}),
    "mamba": lambda: MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, initializer_range=0.3),
    "no cache": lambda: OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3),
    "a cache of few tokens": lambda: RecurrentGemmaConfig(
        **{**TINY, "num_hidden_layers": 3}, lru_width=32, attention_window_size=8
    ),
}


def built(config: PretrainedConfig) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-any-return]


def alone(model: nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0]


def started(served: ModelRunner, tokens: list[int]) -> Sequence:
    sequence = Sequence(Request(id=0, prompt=tuple(tokens)), 0, tokens, None, 0.0)
    served.blocks.find(sequence)
    assert served.blocks.grow(sequence, len(tokens))
    return sequence


def spoil(served: ModelRunner) -> None:
    """What lies in pages that are nobody's is no number."""
    pages = served.arena.flat.view(served.arena.pool.total, -1)
    pages[served.arena.pool._free] = float("nan")


def run_at_random(served: ModelRunner, texts: list[list[int]], seed: int) -> list[list[torch.Tensor]]:
    """Each sequence's logits where a piece ended; all sequences in pieces of random lengths, in random company."""
    rng = random.Random(seed)
    sequences = [started(served, tokens) for tokens in texts]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    while left := [s for s in sequences if s.computed < len(s.tokens)]:
        segments, first = [], 0
        for sequence in rng.sample(left, rng.randint(1, len(left))):
            most = len(sequence.tokens) - sequence.computed
            rows = rng.choice([1, rng.randint(1, most)])
            segments.append(ScheduledRequest(sequence, first, rows, sequence.computed, True))
            first += rows
        for segment, logits in zip(segments, served.forward(SchedulerOutput(tuple(segments))), strict=True):
            segment.sequence.computed = segment.end
            found[sequences.index(segment.sequence)].append((segment.end, logits))  # type: ignore[arg-type]
            served.blocks.keep(segment.sequence)
        served.blocks.trim(rng.sample(sequences, 2) if len(sequences) > 1 else ())
        spoil(served)
    for sequence in sequences:
        served.release(sequence)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_side_by_side_as_alone(name: str) -> None:
    if name == "soft caps":
        pytest.importorskip(
            "transformers", minversion="5.17", reason="older ones start it with an attention without caps"
        )
    own, model = built(CONFIGS[name]()), built(CONFIGS[name]())
    served = make_ready(model, 1 << 22)
    assert isinstance(served, PagedRunner)
    rng = random.Random(name)
    texts = [[rng.randrange(64) for _ in range(rng.randint(1, 45))] for _ in range(5)]
    texts.append([*texts[0], 7, 8])  # shares a prefix
    for seed in range(2):
        for text, pieces in zip(texts, run_at_random(served, [list(t) for t in texts], seed), strict=True):
            expected = alone(own, text)
            for end, logits in pieces:  # type: ignore[misc]
                torch.testing.assert_close(
                    logits, expected[end - 1], rtol=1e-5, atol=1e-5 * float(expected.abs().max())
                )
    assert served.blocks.spare() == served.arena.pool.total


@pytest.mark.parametrize("name", ["soft caps", "sinks", "latent", "window"])
def test_without_a_c_compiler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symbiosis.serving.runner.attention.compiled", lambda dtype: None)
    test_side_by_side_as_alone(name)


def test_positions_that_a_model_cannot_find_itself_are_told() -> None:
    """Bamba's first layer counts no tokens, so that its attention would take every token for the first."""
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2}
    config = BambaConfig(**{**TINY, "num_hidden_layers": 3}, **sizes, attn_layer_indices=[1])
    own, served = built(config), make_ready(built(config), 1 << 22)
    assert isinstance(served, DenseRunner) and served.uses_cache
    text = [random.Random(0).randrange(64) for _ in range(30)]
    sequence = started(served, text)
    for position, rows in ((0, 20), *((at, 1) for at in range(20, 30))):
        (logits,) = served.forward(SchedulerOutput((ScheduledRequest(sequence, 0, rows, position, True),)))
        torch.testing.assert_close(logits, alone(own, text)[position + rows - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_models_that_cannot_batch_are_served_one_by_one(name: str, caplog: pytest.LogCaptureFixture) -> None:
    own, model = built(ONE_BY_ONE[name]()), built(ONE_BY_ONE[name]())
    served = make_ready(model, 1 << 22)
    assert isinstance(served, DenseRunner) and "one request at a time" in caplog.text
    texts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]
    sequences = [started(served, text) for text in texts]
    first = SchedulerOutput(
        (ScheduledRequest(sequences[0], 0, 8, 0, True), ScheduledRequest(sequences[1], 8, 3, 0, True))
    )
    logits = [served.forward(first)]
    for sequence in sequences:
        sequence.computed = len(sequence.tokens)
        sequence.tokens.append(11)
        assert served.blocks.grow(sequence, len(sequence.tokens))
    logits.append(
        served.forward(
            SchedulerOutput(
                (ScheduledRequest(sequences[1], 0, 1, 3, True), ScheduledRequest(sequences[0], 1, 1, 8, True))
            )
        )
    )
    expected = [alone(own, text) for text in ([*texts[0]], [*texts[1]])]
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(logits[0], torch.stack([expected[0][7], expected[1][2]]), **close)
    torch.testing.assert_close(logits[1], torch.stack([expected[1][3], expected[0][8]]), **close)


def test_a_wrapped_model_without_weights(serve: Callable) -> None:
    own = tiny_llama()
    executor = serve(tiny_llama())
    served = make_ready(symbiosis.from_executor(executor.endpoint), 1 << 22)
    texts = [[5, 6, 7, 8, 9], [1, 2, 3]]
    for text, pieces in zip(texts, run_at_random(served, [list(t) for t in texts], 0), strict=True):
        for end, logits in pieces:  # type: ignore[misc]
            torch.testing.assert_close(logits, alone(own, text)[end - 1], rtol=1e-5, atol=1e-5)


def test_caches_that_cannot_be_used_are_not() -> None:
    assert make_ready(built(ONE_BY_ONE["bloom"]()), 1 << 22).uses_cache  # type: ignore[attr-defined]
    assert not make_ready(built(ONE_BY_ONE["no cache"]()), 1 << 22).uses_cache  # type: ignore[attr-defined]


class Silent:
    """A configuration that keeps its window to itself."""

    sliding_window = None

    def __init__(self, config: PretrainedConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> object:
        return getattr(self._config, name)


def test_a_window_that_no_layer_tells_is_noticed_though_the_probe_is_shorter(caplog: pytest.LogCaptureFixture) -> None:
    model = built(MistralConfig(**TINY, sliding_window=64))
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.config = Silent(model.config)  # type: ignore[arg-type, union-attr]
    assert isinstance(make_ready(model, 1 << 22), DenseRunner)
    assert "masks what lies 64 tokens back" in caplog.text


def test_positions_that_depend_on_others_limit_texts() -> None:
    """Beyond so many tokens, the positions of a whole batch are encoded by other factors."""
    factors = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    config = Phi3Config(
        **TINY, max_position_embeddings=512, original_max_position_embeddings=128, rope_parameters=factors
    )
    assert make_ready(built(config), 1 << 22).longest == 128


def test_what_is_no_language_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear writes no text"):
        make_ready(nn.Linear(2, 2))


def test_too_little_memory_is_told() -> None:
    with pytest.raises(ConfigError, match="give the server more"):
        make_ready(tiny_llama(), 1000)


@pytest.mark.parametrize("calls", range(4))
def test_an_end_that_is_told_while_a_model_is_tried_is_no_error_of_the_model(calls: int) -> None:
    model, left = tiny_llama(), [calls]
    forward = model.forward

    def interrupted(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise Ending
        return forward(*args, **options)

    interrupted.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    model.forward = interrupted
    with pytest.raises(Ending):
        make_ready(model, 1 << 22)
