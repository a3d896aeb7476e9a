"""On a CUDA device: an executor there, clients there or on the CPU, over every transport, bit for bit."""

import copy
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import symbiosis
from tests.conftest import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def step(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Gradients of one LoRA step."""
    torch.manual_seed(3)
    peft_model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()
    peft_model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in peft_model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_split_equals_unsplit(name: str, dtype: torch.dtype, serve: Callable, url: str, ids: Tensor) -> None:
    model, ids = MODELS[name]().to("cuda", dtype), ids.cuda()
    split = symbiosis.wrap(copy.deepcopy(model), serve(model, listen=[url]).endpoint)
    with torch.no_grad():
        assert torch.equal(split(ids).logits, model(ids).logits)
    if name != "mixtral":
        expected, got = step(model, ids), step(split, ids)
        assert got.keys() == expected.keys()
        for parameter in expected:
            assert torch.equal(got[parameter], expected[parameter]), parameter


def test_client_on_the_cpu_of_a_gpu_executor(serve: Callable, url: str, ids: Tensor) -> None:
    model = MODELS["llama"]()
    split = symbiosis.wrap(copy.deepcopy(model), serve(copy.deepcopy(model).cuda(), listen=[url]).endpoint)
    with torch.no_grad():
        difference = (split(ids).logits - model(ids).logits).abs().max()
    assert difference < 1e-4, "float32 products of two devices differ in rounding only"


def test_model_from_a_gpu_executor(serve: Callable, ids: Tensor) -> None:
    model = MODELS["llama"]().cuda()
    built = symbiosis.from_executor(serve(model).endpoint, device="cuda")
    with torch.no_grad():
        assert torch.equal(built(ids.cuda()).logits, model(ids.cuda()).logits)
