"""On a GPU, with keys and values in the host's memory: what is copied there and back is what was computed."""

from typing import Any

import pytest
import torch

import symbiosis
from tests.inproc.test_host_cache import PROMPT, batch, continued, made, small_blocks  # noqa: F401  (fixtures)
from tests.inproc.test_serving_models import CONFIGS, built

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch, small_blocks: None) -> None:  # noqa: F811
    """What comes back does so in several."""
    monkeypatch.setattr("symbiosis.offload.copies.PIECE_BYTES", 1)


@pytest.mark.parametrize("chunk", [None, 11])
@pytest.mark.parametrize("name", ["llama", "window", "soft caps", "sinks", "learned positions"])
def test_tokens_are_the_same(
    name: str,
    chunk: int | None,
    batch: dict[str, torch.Tensor],  # noqa: F811
    small_pieces: None,
) -> None:
    own, model = made(name).cuda(), made(name).cuda()
    inputs = {key: each.cuda() for key, each in batch.items()}
    options = {} if chunk is None else {"prefill_chunk_size": chunk}
    cache = symbiosis.offload_cache(model)
    assert torch.equal(continued(model, inputs, past_key_values=cache, **options), continued(own, inputs))
    blocks = [block for layer in cache.layers for sequence in layer._sequences for block in sequence.blocks]
    assert all(block.keys.is_pinned() and block.values.device.type == "cpu" for block in blocks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 20])
def test_a_long_prompt_in_half_types(dtype: torch.dtype, size: int) -> None:
    """In chunks, of which the later ones look at several pieces that come back."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=size, max_position_embeddings=8192, pad_token_id=0,
    )  # fmt: skip
    exact = LlamaForCausalLM(config).cuda().eval()
    own, ids = LlamaForCausalLM(config).cuda().eval(), torch.randint(3, 60, (1, 5000)).cuda()
    own.load_state_dict(exact.state_dict())
    own = own.to(dtype)
    with torch.no_grad():
        expected, usual = exact(ids).logits, own(ids).logits.float()
        cache: Any = symbiosis.offload_cache(own)
        chunks = [own(ids[:, at : at + 1500], past_key_values=cache).logits for at in range(0, 4500, 1500)]
        chunks += [own(ids[:, 4500:4990], past_key_values=cache).logits]
        chunks += [own(ids[:, at : at + 1], past_key_values=cache).logits for at in range(4990, 5000)]
    off = (torch.cat(chunks, dim=1).float() - expected).abs()
    assert off.max() <= 1.5 * (usual - expected).abs().max()
    assert cache.get_seq_length() == 5000


def test_a_model_that_moves_takes_its_cache_along(batch: dict[str, torch.Tensor]) -> None:  # noqa: F811
    """It reads on the GPU and writes on the CPU."""
    own, model = built(CONFIGS["llama"]()), built(CONFIGS["llama"]())
    expected = continued(own, batch)
    cache = symbiosis.offload_cache(model)
    with torch.no_grad():
        read = {key: each[:, : PROMPT - 1].cuda() for key, each in batch.items()}
        places = (read["attention_mask"].cumsum(1) - 1).clamp(min=0)  # as `generate` counts them
        model.cuda()(**read, position_ids=places, past_key_values=cache)
    assert torch.equal(continued(model.cpu(), batch, past_key_values=cache), expected)


def test_a_captured_step_refuses_it(batch: dict[str, torch.Tensor]) -> None:  # noqa: F811
    model = built(CONFIGS["llama"]()).cuda()
    cache, token = symbiosis.offload_cache(model), batch["input_ids"][:, :1].cuda()
    step = symbiosis.capture(torch.no_grad()(lambda: model(token, past_key_values=cache).logits))
    with pytest.raises(symbiosis.SymbiosisError, match="cannot be part of a CUDA graph"):
        for _ in range(4):
            step()
