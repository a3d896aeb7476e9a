"""A split model gives what the unsplit one gives: logits, generated tokens, adapter gradients, bit for bit."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import symbiosis
from tests.conftest import MODELS

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytestmark = pytest.mark.usefixtures("memory_is_filled_with_nan")


def gradients(model: nn.Module, ids: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Loss and adapter gradients of one LoRA step, with dropout, from fixed seeds."""
    torch.manual_seed(3)
    peft_model = get_peft_model(
        model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.1)
    )
    peft_model.train()
    torch.manual_seed(5)
    loss = peft_model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in peft_model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_split_equals_unsplit(name: str, url: str, serve: Callable, ids: Tensor) -> None:
    model = MODELS[name]()
    executor = serve(model, listen=[url])
    split = symbiosis.wrap(copy.deepcopy(model), executor.endpoint)
    with torch.no_grad():
        assert torch.equal(split(ids).logits, model(ids).logits)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(split.generate(ids, **options), model.generate(ids, **options))
    if name != "mixtral":  # its LoRA on experts has tests of its own
        loss, expected = gradients(model, ids)
        split_loss, got = gradients(split, ids)
        assert split_loss == loss
        assert got.keys() == expected.keys()
        for parameter in expected:
            assert torch.equal(got[parameter], expected[parameter]), parameter


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=(pytest.mark.gpu, needs_gpu))])
@pytest.mark.parametrize("within", [False, True], ids=["", "under torch.device"])
@pytest.mark.parametrize("name", MODELS)
def test_buffers_are_those_of_a_model_that_is_loaded(
    name: str, within: bool, device: str, serve: Callable, tmp_path: Path
) -> None:
    """Bit for bit, and on the same device: rotary frequencies differ between a CPU and a GPU."""
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    endpoint = serve(model).endpoint
    with torch.device(device) if within else nullcontext():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device)
        built = symbiosis.from_executor(endpoint, device=device)
    expected, found = dict(loaded.named_buffers()), dict(built.named_buffers())
    assert expected.keys() == found.keys()
    for buffer, value in expected.items():
        assert found[buffer].device == value.device and torch.equal(found[buffer], value), buffer


@pytest.mark.parametrize("name", MODELS)
def test_model_from_executor_equals_the_original(name: str, serve: Callable, ids: Tensor) -> None:
    model = MODELS[name]()
    built = symbiosis.from_executor(serve(model).endpoint)
    with torch.no_grad():
        assert torch.equal(built(ids).logits, model(ids).logits)
