"""With keys and values in the host's memory, models write the same tokens: every kind of attention, of batch and of step."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn

import symbiosis
from symbiosis.errors import ConfigError, OutOfHostMemory
from symbiosis.kernels.paged_attention import How
from symbiosis.offload.copies import AllCopies
from symbiosis.offload.host_layer import FEW_ROWS, SLACK, HostLayer
from symbiosis.offload.host_memory import HostMemory
from symbiosis.offload.masks import Masks
from tests.conftest import tiny_llama
from tests.inproc.test_serving_models import CONFIGS, ONE_BY_ONE, built

pytestmark = pytest.mark.long

REFUSED = {"latent": CONFIGS["latent"], **ONE_BY_ONE}
KINDS = [name for name in CONFIGS if name not in REFUSED]
PROMPT, NEW = 30, 20
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Two prompts, one of which is shorter and padded at the left."""
    ids = torch.randint(3, 60, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symbiosis.offload.host_layer.compiled", lambda dtype: None)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens fill several."""
    monkeypatch.setattr("symbiosis.offload.host_blocks.MOST", 16)
    monkeypatch.setattr("symbiosis.offload.host_layer.SLACK", 0)


def made(name: str) -> nn.Module:
    model = built(CONFIGS[name]())
    if name == "soft caps":  # which sdpa leaves out in older versions of transformers
        model.set_attn_implementation("eager")  # type: ignore[operator]
    return model


def continued(model: nn.Module, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    return model.generate(**inputs, **{**GREEDY, **options})  # type: ignore[operator, no-any-return]


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_the_same(name: str, batch: dict[str, torch.Tensor], small_blocks: None) -> None:
    own, model = made(name), made(name)
    expected, cache = continued(own, batch), symbiosis.offload_cache(model)
    assert torch.equal(continued(model, batch, past_key_values=cache), expected)
    assert torch.equal(continued(model, batch), expected)  # without such a cache, it is as before
    pieces = symbiosis.offload_cache(model)
    assert torch.equal(continued(model, batch, past_key_values=pieces, prefill_chunk_size=11), expected)
    assert pieces.get_seq_length() == cache.get_seq_length() == PROMPT + NEW - 1


@pytest.mark.parametrize("name", ["llama", "soft caps", "sinks"])
def test_without_a_c_compiler(name: str, batch: dict[str, torch.Tensor], small_blocks: None, no_compiler: None) -> None:
    own, model = made(name), made(name)
    cache = symbiosis.offload_cache(model)
    assert torch.equal(continued(model, batch, past_key_values=cache), continued(own, batch))


@pytest.mark.parametrize(
    "name",
    ["window", *(pytest.param(name, marks=pytest.mark.full) for name in ("soft caps", "sinks")), "two kinds of layers"],
)
def test_what_no_window_shows_any_more_is_given_back(
    name: str, batch: dict[str, torch.Tensor], small_blocks: None
) -> None:
    own, model = made(name), made(name)
    cache = symbiosis.offload_cache(model)
    long = {"max_new_tokens": 60, "min_new_tokens": 60}
    assert torch.equal(continued(model, batch, past_key_values=cache, **long), continued(own, batch, **long))
    kept = [len(layer._sequences[0].blocks) for layer in cache.layers if layer.is_sliding]
    assert kept and max(kept) <= 2  # 16 tokens each, for a window of 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "window", "sinks", "soft caps"])
def test_half_types_are_within_rounding(name: str, dtype: torch.dtype, batch: dict[str, torch.Tensor]) -> None:
    """As far off what float32 computes as the model's own attention is. (Where there are experts, most tokens: rounding chooses others.)"""
    exact = made(name)
    own, model = copy.deepcopy(exact).to(dtype), copy.deepcopy(exact).to(dtype)
    cache, ids = symbiosis.offload_cache(model), batch["input_ids"]
    with torch.no_grad():
        expected, usual = exact(ids).logits, own(ids).logits.float()
        steps = [model(ids[:, :20], past_key_values=cache).logits, model(ids[:, 20:25], past_key_values=cache).logits]
        steps += [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(25, PROMPT)]
    off, usually = ((each.float() - expected).abs().amax(-1) for each in (torch.cat(steps, dim=1), usual))
    if name == "sinks":
        assert off.median() <= 1.5 * usually.median()
    else:
        assert off.max() <= 1.5 * usually.max()


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
    ],
)
def test_every_way_to_choose_tokens(
    options: dict[str, Any], batch: dict[str, torch.Tensor], small_blocks: None
) -> None:
    own, model = built(CONFIGS["llama"]()), built(CONFIGS["llama"]())
    cache = symbiosis.offload_cache(model)
    torch.manual_seed(5)
    expected = continued(own, batch, **options)
    torch.manual_seed(5)
    assert torch.equal(continued(model, batch, past_key_values=cache, **options), expected)


def test_beams_share_what_they_have_in_common(batch: dict[str, torch.Tensor], small_blocks: None) -> None:
    model = built(CONFIGS["llama"]())
    cache = symbiosis.offload_cache(model)
    continued(model, batch, past_key_values=cache, num_beams=4)
    sequences = cache.layers[0]._sequences
    assert len(sequences) == 8
    held = [block for sequence in sequences for block in sequence.blocks]
    assert len({id(block) for block in held}) < len(held)
    assert all(block.owners == held.count(block) for block in held)


def test_a_text_goes_on_from_its_cache(batch: dict[str, torch.Tensor]) -> None:
    own, model = built(CONFIGS["llama"]()), built(CONFIGS["llama"]())
    cache = symbiosis.offload_cache(model)
    first = continued(model, batch, past_key_values=cache)
    more = torch.cat([first, torch.full((2, 12), 9)], dim=1)
    mask = torch.cat([batch["attention_mask"], torch.ones(2, NEW + 12, dtype=torch.long)], dim=1)
    inputs = {"input_ids": more, "attention_mask": mask}
    assert torch.equal(continued(model, inputs, past_key_values=cache), continued(own, inputs))


def test_tokens_can_be_taken_back(batch: dict[str, torch.Tensor], small_blocks: None) -> None:
    model = built(CONFIGS["llama"]())
    cache, ids = symbiosis.offload_cache(model), batch["input_ids"]
    with torch.no_grad():
        expected = model(ids).logits
        model(ids, past_key_values=cache)
        cache.crop(-13)
        assert cache.get_seq_length() == PROMPT - 13
        again = model(ids[:, -13:], past_key_values=cache).logits
        torch.testing.assert_close(again, expected[:, -13:], rtol=1e-4, atol=1e-4)
        cache.crop(5)  # as older versions of transformers say how many stay
        assert cache.get_seq_length() == 5
        cache.reset()
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, expected, rtol=1e-4, atol=1e-4)


def test_what_a_window_has_lost_cannot_be_taken_back() -> None:
    model = built(CONFIGS["window"]())
    cache = symbiosis.offload_cache(model)
    with torch.no_grad():
        for _ in range(20):
            model(torch.randint(3, 60, (1, 100)), past_key_values=cache)
    with pytest.raises(ValueError, match="older ones are gone"):
        cache.crop(-SLACK - 1024)


def test_blocks_that_are_gone_are_not_looked_at() -> None:
    """A block that is freed, and the next one in its place, may look alike in everything but their address."""
    layer, how = HostLayer(HostMemory(), Masks(), AllCopies(), 1), How(0.125)
    keys = values = torch.empty(1, 2, 0, 64)
    taken = []

    def is_right(count: int) -> bool:
        nonlocal keys, values
        query, k, v = torch.randn(3, 1, 2, count, 64)
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        layer.update(k, v)
        seen = torch.ones(count, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - count)
        expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, seen)
        return torch.allclose(layer.attend(query, k, v, None, how).transpose(1, 2), expected, atol=1e-5)

    def take_back(count: int) -> None:
        nonlocal keys, values
        layer.crop(-count)
        keys, values = keys[:, :, :-count], values[:, :, :-count]

    assert is_right(1) and is_right(layer.shape.tokens - 3)
    for _ in range(20):
        assert is_right(4)  # two of these tokens begin a second block
        take_back(4)
        taken.append(torch.empty(layer.shape.tokens * layer.shape.token_bytes, dtype=torch.uint8))
        assert is_right(4)
        take_back(4)


def test_an_assistant_guesses(batch: dict[str, torch.Tensor]) -> None:
    """Some of what it guesses is taken back."""
    own, model, assistant = built(CONFIGS["llama"]()), built(CONFIGS["llama"]()), tiny_llama(layers=1)
    assistant.resize_token_embeddings(64)
    prompt = {name: each[1:] for name, each in batch.items()}
    expected = continued(own, prompt)
    cache = symbiosis.offload_cache(model)
    assert torch.equal(continued(model, prompt, past_key_values=cache, assistant_model=assistant), expected)


@pytest.mark.parametrize("share", [False, True], ids=["called", "direct"])
def test_a_split_model_with_an_adapter(
    share: bool, serve: Callable, tmp_path: Any, batch: dict[str, torch.Tensor]
) -> None:
    own = tiny_llama()
    executor = serve(own, listen=[f"local://{tmp_path}/executor.sock"], share_weights=share)
    model = symbiosis.from_executor(executor.endpoint, share=share)
    adapted = []
    for each in (own, model):
        torch.manual_seed(3)
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
        adapted.append(peft.get_peft_model(each, config).eval())
    expected = continued(adapted[0], batch)
    cache = symbiosis.offload_cache(adapted[1])
    assert torch.equal(continued(adapted[1], batch, past_key_values=cache), expected)


def test_keys_and_values_are_there_once(batch: dict[str, torch.Tensor]) -> None:
    model = built(CONFIGS["llama"]())
    cache = symbiosis.offload_cache(model)
    continued(model, batch, past_key_values=cache)
    addresses = [block.keys.data_ptr() for layer in cache.layers for s in layer._sequences for block in s.blocks]
    continued_ids = {"input_ids": torch.full((2, PROMPT + NEW), 5), "attention_mask": torch.ones(2, PROMPT + NEW)}
    continued(model, continued_ids, past_key_values=cache)
    assert [
        block.keys.data_ptr() for layer in cache.layers for s in layer._sequences for block in s.blocks
    ] == addresses
    assert all(layer.keys is None and layer.values is None for layer in cache.layers)


def test_masks_are_read_once_for_all_layers_and_not_kept(batch: dict[str, torch.Tensor]) -> None:
    """That of a long chunk takes much memory."""
    model = built(CONFIGS["two kinds of layers"]())
    cache = symbiosis.offload_cache(model)
    with torch.no_grad():
        for at in range(0, PROMPT, 10):
            mask = batch["attention_mask"][:, : at + 10]
            model(batch["input_ids"][:, at : at + 10], attention_mask=mask, past_key_values=cache)
            assert [read.tokens for _, read in cache.layers[0]._masks._read] in ([at + 10], [at + 10] * 2)


def test_memory_is_given_back_with_the_cache(batch: dict[str, torch.Tensor]) -> None:
    """At once, and not when Python next looks for circles."""
    model = built(CONFIGS["two kinds of layers"]())
    cache = symbiosis.offload_cache(model)
    continued(model, batch, past_key_values=cache)
    block = weakref.ref(cache.layers[0]._sequences[0].blocks[0].keys)
    gc.disable()
    try:
        del cache
        assert block() is None
    finally:
        gc.enable()


def test_a_mask_of_ones_own(batch: dict[str, torch.Tensor]) -> None:
    model, ids = built(CONFIGS["llama"]()), batch["input_ids"][:1]
    mask = torch.ones(1, 1, PROMPT, PROMPT, dtype=torch.bool).tril()
    mask[..., 3:9] &= torch.eye(PROMPT, dtype=torch.bool)[:, 3:9]
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        cache = symbiosis.offload_cache(model)
        found = [model(ids[:, :20], attention_mask=mask[:, :, :20, :20], past_key_values=cache).logits]
        biases = torch.where(mask[:, :, 20:], 0.0, torch.finfo(torch.float32).min)
        found.append(model(ids[:, 20:22], attention_mask=biases[:, :, :2, :22], past_key_values=cache).logits)
        found.append(model(ids[:, 22:], attention_mask=mask[:, :, 22:], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_by_name(name: str) -> None:
    if name == "latent":
        pytest.importorskip(
            "transformers", minversion="5.17", reason="older ones cache whole keys, which may lie anywhere"
        )
    model = built(REFUSED[name]())
    before = model.config._attn_implementation  # type: ignore[union-attr]
    with pytest.raises(
        ConfigError, match=f"{type(model).__name__} cannot have its keys and values in the host's memory"
    ):
        symbiosis.offload_cache(model)
    assert model.config._attn_implementation == before  # type: ignore[union-attr]


@pytest.mark.parametrize("threads", [0, -1, 1 << 20, 2.0, True, "all"])
def test_threads_that_are_not_there_are_refused(threads: Any) -> None:
    with pytest.raises(ConfigError, match="this process may use 1 to"):
        symbiosis.offload_cache(tiny_llama(), threads=threads)


def test_what_cannot_be_is_refused(batch: dict[str, torch.Tensor]) -> None:
    ids, model = batch["input_ids"], built(CONFIGS["llama"]())
    with pytest.raises(ConfigError, match="no causal language model"):
        symbiosis.offload_cache(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="call its eval"):
        symbiosis.offload_cache(built(CONFIGS["llama"]()).train())
    prefixed = peft.get_peft_model(
        built(CONFIGS["llama"]()), peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    ).eval()
    with pytest.raises(ConfigError, match="prefix tuning"):
        symbiosis.offload_cache(prefixed)
    with pytest.raises(ConfigError, match=r"use torch\.no_grad"):
        model(ids, past_key_values=symbiosis.offload_cache(model))
    with torch.no_grad():
        cache = symbiosis.offload_cache(model)
        model(ids, past_key_values=cache)
        with pytest.raises(ConfigError, match=r"a batch of 1 .* holds 2"):
            model(ids[:1], past_key_values=cache)
        with pytest.raises(TypeError, match="the model that was given to"):
            built(CONFIGS["llama"]())(ids, past_key_values=symbiosis.offload_cache(model))
        with pytest.raises(ConfigError, match="other values than 0 and -inf"):
            model(ids, past_key_values=symbiosis.offload_cache(model), attention_mask=torch.rand(2, 1, PROMPT, PROMPT))
        with pytest.raises(ConfigError, match="all heads alike"):
            odd = torch.ones(2, 4, PROMPT, PROMPT, dtype=torch.bool)
            model(ids, past_key_values=symbiosis.offload_cache(model), attention_mask=odd)


def test_a_context_that_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(CONFIGS["llama"]())
    cache = symbiosis.offload_cache(model)
    monkeypatch.setattr("symbiosis.offload.host_memory.free_memory", lambda: 1 << 20)
    with torch.no_grad(), pytest.raises(OutOfHostMemory, match="shorten the context"):
        model(torch.ones(1, FEW_ROWS + 1, dtype=torch.long), past_key_values=cache)
