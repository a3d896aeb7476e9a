"""`fuse` on a GPU: its kernels, and steps under autocast, eager and captured, as near to float32 as PEFT's own."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F

import symbiosis
from tests.conftest import tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def adapted(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(tiny_llama().to("cuda", dtype), config).train()  # type: ignore[arg-type]


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(2)).cuda()
    return {"input_ids": ids, "labels": ids.where(ids % 3 != 0, -100)}


def step(model: nn.Module, autocast: bool = False) -> tuple[Tensor, list[Tensor]]:
    for parameter in model.parameters():
        parameter.grad = None
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = model(**batch(), use_cache=False).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def off(found: list[Tensor], expected: list[Tensor]) -> float:
    largest = max(float(each.abs().max()) for each in expected)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 7), (2, 2049), (40, 512)], ids=str)
def test_gated_product(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from symbiosis.training.fused.gated_kernels import SiluMul

    torch.manual_seed(0)
    gate, up, dy = (torch.randn(shape, device="cuda").to(dtype) for _ in range(3))
    mine = [each.clone().requires_grad_() for each in (gate, up)]
    exact = [each.double().requires_grad_() for each in (gate, up)]
    y, expected = SiluMul.apply(*mine), F.silu(exact[0]) * exact[1]
    found = [y, *torch.autograd.grad(y, mine, dy)]
    wanted = [expected, *torch.autograd.grad(expected, exact, dy.double())]
    near = 2 * torch.finfo(dtype).eps
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype is dtype and torch.allclose(one.double(), other, rtol=near, atol=near)


def test_float32_as_before() -> None:
    model = adapted(torch.float32)
    loss, expected = step(model)
    mine, found = step(symbiosis.fuse(model))
    assert abs(mine - loss) <= 1e-5 * loss and off(found, expected) <= 1e-4


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)]
)
def test_bfloat16(dtype: torch.dtype, autocast: bool, caplog: Any) -> None:
    model = adapted(dtype)
    _, exact = step(copy.deepcopy(model).float())
    far = []
    for change in (symbiosis.unfuse, symbiosis.fuse):
        _, found = step(change(model), autocast)
        far.append(off(found, exact))
    assert far[1] <= 1.5 * far[0] and "leaves" not in caplog.text
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_captured() -> None:
    def trained(change: Callable[[nn.Module], nn.Module], how: Callable[[Any], Any]) -> list[Tensor]:
        model = change(adapted(torch.bfloat16))
        parameters = [p for p in model.parameters() if p.requires_grad]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, capturable=True)
        given = batch()

        def one() -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(**given, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return loss.detach()

        run = how(one)
        return [run().clone() for _ in range(8)]

    eager = trained(symbiosis.fuse, lambda one: one)
    captured = trained(symbiosis.fuse, symbiosis.capture)
    before = trained(symbiosis.unfuse, lambda one: one)
    assert torch.allclose(torch.stack(captured), torch.stack(eager), rtol=1e-3)
    assert torch.allclose(torch.stack(captured), torch.stack(before), rtol=2e-2)
    assert captured[-1] < captured[0]
