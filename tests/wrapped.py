"""What tests of wrapped models have in common."""

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}


def adapted(model: nn.Module, **options: object) -> nn.Module:
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(**{**LORA, **options}))


def step(model: nn.Module, ids: Tensor, **options: object) -> dict[str, Tensor]:
    """Gradients of one training step."""
    model.train()
    torch.manual_seed(5)
    with torch.autocast("cpu", enabled=bool(options.get("autocast")), dtype=torch.bfloat16):
        model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits
