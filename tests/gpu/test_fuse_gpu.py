"""`fuse` on a GPU: its kernels, and steps under autocast, eager and captured, as near to float32 as PEFT's own."""

import copy
from collections.abc import Callable
from math import hypot
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F

import symbiosis
from symbiosis.training.fused.fused_modules import gate_of
from tests.conftest import tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def adapted(dtype: torch.dtype, seed: int = 1) -> nn.Module:
    """A model with random weights and an adapter."""
    model = tiny_llama()
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.03)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model.to("cuda", dtype), config).train()  # type: ignore[arg-type]


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
    """The length of the difference, relative."""
    differences = [float((a - b).norm()) for a, b in zip(found, expected, strict=True)]
    return hypot(*differences) / hypot(*(float(each.norm()) for each in expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 7), (2, 2049), (40, 512)], ids=str)
def test_gated_product(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from symbiosis.training.fused.fused_kernels import SiluMul

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
    """No farther from float32's gradients than PEFT's own."""
    far = [0.0, 0.0]
    for seed in range(6):
        model = adapted(dtype, seed)
        _, exact = step(copy.deepcopy(model).float())
        for way, change in enumerate((symbiosis.unfuse, symbiosis.fuse)):
            _, found = step(change(model), autocast)
            far[way] += off(found, exact)
    assert far[1] <= 1.3 * far[0] and "leaves" not in caplog.text
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "keys"), [((1, 1, 1, 2), 1), ((2, 9, 5, 96), 3), ((3, 32, 40, 128), 8)], ids=str)
def test_rotary_positions(shape: tuple[int, ...], keys: int, dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from symbiosis.training.fused.fused_kernels import Rotary

    torch.manual_seed(0)
    batch, heads, length, width = shape
    q, k = (torch.randn(batch, length, n, width, device="cuda").to(dtype).transpose(1, 2) for n in (heads, keys))
    cos, sin = (torch.randn(1, length, width, device="cuda").to(dtype) for _ in range(2))
    given, exact = [q.clone(), k.clone()], [q.double(), k.double()]
    for each in (*given, *exact):
        each.requires_grad_()
    made, expected = Rotary.apply(*given, cos, sin), apply_rotary_pos_emb(*exact, cos.double(), sin.double())
    dy = [torch.randn_like(each.transpose(1, 2)).transpose(1, 2) for each in made]
    found = [*made, *torch.autograd.grad(made, given, dy)]
    wanted = [*expected, *torch.autograd.grad(expected, exact, [each.double() for each in dy])]
    near = 4 * torch.finfo(dtype).eps
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype is dtype and torch.allclose(one.double(), other, rtol=near, atol=near)


def test_captured() -> None:
    """A captured step makes what an eager one does."""
    is_as_eager(adapted)


def test_captured_with_ligers_modules() -> None:
    """Those that `apply_liger_kernel_to_llama` puts into all models that are made after it."""
    liger = pytest.importorskip("liger_kernel.transformers")
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama)), dict(vars(modeling_llama.LlamaForCausalLM))
    liger.apply_liger_kernel_to_llama()
    try:
        is_as_eager(adapted)
    finally:
        vars(modeling_llama).update(before[0])
        modeling_llama.LlamaForCausalLM.forward = before[1]["forward"]


def test_ligers_kernels() -> None:
    """They take the place of ours where the package is there."""
    pytest.importorskip("liger_kernel")
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    model = symbiosis.fuse(adapted(torch.float32))
    mlp = model.base_model.model.model.layers[0].mlp  # type: ignore[union-attr, index]
    assert gate_of(type(mlp.act_fn)) == LigerSiLUMulFunction.apply and "forward" in vars(mlp)


def is_as_eager(adapted: Callable[[torch.dtype], nn.Module]) -> None:
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
