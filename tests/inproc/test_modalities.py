"""Models whose inputs are not only text: the layers that see images and sounds are served like any others."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import symbiosis
from tests.conftest import products

SEES = {
    LlavaForConditionalGeneration: "vision_tower",
    WhisperForConditionalGeneration: ".encoder.",
    ViTForImageClassification: "vit",
}
IMAGE = 99  # the token in whose places the image's patches come
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def llava() -> tuple[nn.Module, dict[str, Tensor]]:
    vision = CLIPVisionConfig(**SMALL, image_size=16, patch_size=8, projection_dim=32)
    text = LlamaConfig(**SMALL, vocab_size=100, num_key_value_heads=2)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, vision_feature_layer=-1)
    ids = torch.tensor([[1, *[IMAGE] * 4, 5, 6, 7], [1, *[IMAGE] * 4, 8, 9, 3]])
    inputs = {"input_ids": ids, "pixel_values": noise(2, 3, 16, 16), "attention_mask": torch.ones_like(ids)}
    return LlavaForConditionalGeneration(config), inputs | {"labels": ids}


def whisper() -> tuple[nn.Module, dict[str, Tensor]]:
    config = WhisperConfig(
        vocab_size=100, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=20, max_target_positions=20,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    ids = torch.tensor([[4, 5, 6], [7, 8, 9]])
    return WhisperForConditionalGeneration(config), {"input_features": noise(2, 8, 40), "labels": ids}


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    config = ViTConfig(**SMALL, image_size=16, patch_size=8, num_labels=5)
    return ViTForImageClassification(config), {"pixel_values": noise(3, 3, 16, 16), "labels": torch.tensor([0, 1, 2])}


@pytest.fixture(params=[llava, whisper, vit], ids=lambda build: build.__name__)
def case(request: pytest.FixtureRequest, serve: Callable) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """The model, the same one split, and inputs of all its kinds."""
    torch.manual_seed(0)
    model, inputs = request.param()
    model.eval()
    return model, symbiosis.wrap(copy.deepcopy(model), serve(model).endpoint), inputs


def step(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of an adapter on all linear layers."""
    torch.manual_seed(3)
    tuned = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    tuned(**inputs).loss.backward()
    return {name: p.grad for name, p in tuned.named_parameters() if p.grad is not None}


def test_forward_and_step(case: tuple[nn.Module, nn.Module, dict[str, Tensor]]) -> None:
    model, split, inputs = case
    with torch.no_grad():
        assert torch.equal(split(**inputs).logits, model(**inputs).logits)
    before = products(split)
    expected, got = step(model, inputs), step(split, inputs)
    assert products(split) > before
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)
    assert any(SEES[type(model)] in name for name in got), "the layers that see or hear are among those trained"


def test_generation(case: tuple[nn.Module, nn.Module, dict[str, Tensor]]) -> None:
    model, split, inputs = case
    if not hasattr(model, "generate"):
        return
    given = {name: value for name, value in inputs.items() if name != "labels"}
    tokens = [m.generate(**given, max_new_tokens=5, do_sample=False) for m in (model, split)]  # type: ignore[operator]
    assert torch.equal(*tokens)
