"""With `verify=True` a wrong answer is an error, and a right one never is."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import symbiosis
from symbiosis.client.privacy.verify import Proofs
from symbiosis.errors import CallError, Code
from symbiosis.protocol import Op
from tests.conftest import tiny_llama
from tests.private import lora, one_step, tampered

LEVELS: dict[str, Callable[[symbiosis.Executor], Any]] = {
    "none": lambda _: None,
    "noise": lambda _: symbiosis.Noise(),
    "split": lambda other: symbiosis.Split(other.endpoint),
    "split16": lambda other: symbiosis.Split(other.endpoint, 16),
}


def one_value_off(y: Tensor) -> Tensor:
    y = y.clone()
    y[-1, 0] += 1 if not y.is_floating_point() else 0.05 * y.std()
    return y


def highest_bit(y: Tensor) -> Tensor:
    """Modulo 2^k half of all columns do not see it."""
    y = y.clone()
    y[-1, 0] ^= torch.iinfo(y.dtype).min
    return y


LIES = {"one value": one_value_off, "rows swapped": lambda y: y.roll(1, 0), "zeros": torch.zeros_like}


@pytest.mark.parametrize("op", [Op.FORWARD, Op.DGRAD])
@pytest.mark.parametrize("lie", [*LIES, "highest bit"])
@pytest.mark.parametrize("name", LEVELS)
def test_a_wrong_answer_is_an_error_that_names_the_call(name: str, lie: str, op: Op, two: Callable) -> None:
    if lie == "highest bit" and "split" not in name:
        pytest.skip("floating point has no highest bit that wraps")
    one, other = two(tiny_llama())
    for liar in (one, other) if "split" in name else (one,):
        wrapped = symbiosis.wrap(tiny_llama(), one.endpoint, privacy=LEVELS[name](other), verify=True)
        layer, x = wrapped.model.layers[1].mlp.gate_proj, torch.randn(6, 64, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        honest = liar.server.engine.slices.compute
        tampered(liar, LIES.get(lie, highest_bit))
        with pytest.raises(
            CallError, match=rf"{liar.endpoint} answered {op.name} of model.layers.1.mlp.gate_proj"
        ) as found:
            layer(x) if op is Op.FORWARD else gradient_of(layer, len(x))
        assert found.value.code is Code.WRONG_ANSWER
        liar.server.engine.slices.compute = honest


def gradient_of(layer: Any, rows: int) -> None:
    """The gradient's call alone."""
    handle = layer.weight.handle
    handle.session.call(Op.DGRAD, handle.index, torch.randn(rows, layer.out_features))


@pytest.mark.called
def test_other_weights_are_noticed(serve: Callable) -> None:
    """As of an operator who saves memory."""
    executor = serve(tiny_llama())
    wrapped = symbiosis.wrap(tiny_llama(), executor.endpoint, verify=True)
    layer, x = wrapped.model.layers[0].mlp.gate_proj, torch.randn(3, 64)
    layer(x)
    with torch.no_grad():
        for weight in executor.server.store.weights:
            weight.copy_(weight.bfloat16())
    with pytest.raises(CallError, match="are not the product of what was sent"):
        layer(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LEVELS)
def test_right_answers_pass(name: str, dtype: torch.dtype, two: Callable, ids: Tensor) -> None:
    model = tiny_llama().to(dtype)
    one, other = two(model)
    wrapped = lora(symbiosis.wrap(copy.deepcopy(model), one.endpoint, privacy=LEVELS[name](other), verify=True))
    for _ in range(10):
        one_step(wrapped, ids)
    level = next(
        m for m in wrapped.modules() if hasattr(m, "weight") and hasattr(m.weight, "handle")
    ).weight.handle.session.level
    assert level.proofs.checked >= 200


def test_rows_of_any_size_pass(serve: Callable) -> None:
    """No false alarm, whatever the scale is."""
    executor = serve(tiny_llama())
    layer = symbiosis.wrap(tiny_llama(), executor.endpoint, verify=True).model.layers[0].mlp.down_proj
    for scale in (0.0, 1e-38, 1e-20, 1.0, 1e20, 1e34):
        layer(torch.randn(512, 96) * scale)


def wide_llama(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=256, num_hidden_layers=1, num_attention_heads=8, vocab_size=64
    )
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wrong_answer_in_half_precision_is_an_error(dtype: torch.dtype, serve: Callable) -> None:
    model = wide_llama(dtype)
    executor = serve(model)
    wrapped, ids = symbiosis.wrap(copy.deepcopy(model), executor.endpoint, verify=True), torch.arange(20)[None]
    assert torch.equal(wrapped(ids).logits, model(ids).logits)
    honest = executor.server.engine.slices.compute
    for lie in (torch.zeros_like, lambda y: y.roll(1, 0), torch.neg, lambda y: 2 * y, lambda y: y.roll(1, 1)):
        tampered(executor, lie)
        with pytest.raises(CallError, match="20 of 20 rows"):
            wrapped(ids)
        executor.server.engine.slices.compute = honest


FLOATS = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])


def learned(v_KN: Tensor) -> Proofs:
    proofs = Proofs()
    proofs.learn_floats(0, v_KN)
    return proofs


@FLOATS
@pytest.mark.parametrize("op", [Op.FORWARD, Op.DGRAD])
@pytest.mark.parametrize("width", [64, pytest.param(4096, marks=pytest.mark.full)])
def test_lies_are_found_whatever_the_width(width: int, op: Op, dtype: torch.dtype) -> None:
    """Also beside a column of the layer that is much larger than the others."""
    v_KN, others_KN = ((torch.randn(width, width) / width**0.5).to(dtype) for _ in range(2))
    v_KN[:, 0] *= 20
    proofs, x_TK = learned(v_KN), torch.randn(5, width).to(dtype)
    y_TN, other_TN = (x_TK @ (v if op is Op.FORWARD else v.t()) for v in (v_KN, others_KN))
    lies = [
        torch.zeros_like(y_TN),
        -y_TN,
        2 * y_TN,
        y_TN.roll(1, 0),
        y_TN.roll(1, 1),
        other_TN,
        (1.25 * y_TN).to(dtype),
    ]
    lies += [torch.full_like(y_TN, value) for value in (math.inf, math.nan)]
    assert not proofs.wrong(op, 0, x_TK, y_TN).any()
    assert [proofs.wrong(op, 0, x_TK, lie).all() for lie in lies] == [True] * len(lies)
    for row in range(5):
        one_TN = y_TN.index_copy(0, torch.tensor([row]), other_TN[:1])
        assert proofs.wrong(op, 0, x_TK, one_TN).nonzero().flatten().tolist() == [row]


def rows_and_layer(kind: str, rows: int, width: int, columns: int) -> tuple[Tensor, Tensor]:
    x_TK, v_KN = torch.randn(rows, width), torch.randn(width, columns) / width**0.5
    if kind == "outliers":
        x_TK[:, 1] *= 200
        v_KN[:, 0] *= 50
    elif kind == "alike":  # every sum is rounded in the same direction
        x_TK, v_KN = torch.full_like(x_TK, 0.3), torch.full_like(v_KN, 0.1)
    elif kind == "cancelling":
        x_TK[:, width // 2 :] = -x_TK[:, : width // 2] + 0.02 * x_TK[:, width // 2 :]
        v_KN[width // 2 :] = v_KN[: width // 2]
    elif kind == "tiny":  # down to what processors take for zero
        x_TK *= torch.logspace(0, -40, rows)[:, None]
    return x_TK, v_KN


def in_parts(x_TK: Tensor, v_KN: Tensor, parts: int, in_place: bool) -> Tensor:
    """As GPUs may compute it: every part of the sum is rounded, or even every sum of parts."""
    sums = [
        (x.float() @ v.float()).to(x.dtype) for x, v in zip(x_TK.chunk(parts, 1), v_KN.chunk(parts, 0), strict=True)
    ]
    y_TN = sums[0].clone() if in_place else sums[0].float()
    for part in sums[1:]:
        y_TN += part
    return y_TN.to(x_TK.dtype)


@FLOATS
@pytest.mark.parametrize("kind", ["normal", "outliers", "alike", "cancelling", "tiny"])
def test_whatever_rounding_makes_of_a_right_answer_passes(kind: str, dtype: torch.dtype) -> None:
    for rows, width, columns in ((1, 64, 64), (40, 100, 32), (7, 4096, 128), (200, 2048, 64)):
        x_TK, v_KN = (t.to(dtype) for t in rows_and_layer(kind, rows, width, columns))
        proofs = learned(v_KN)
        answers = [x_TK @ v_KN, nn.functional.linear(x_TK, v_KN.t().contiguous()), (v_KN.t() @ x_TK.t()).t()]
        if dtype in (torch.bfloat16, torch.float16) and width % 1024 == 0:
            answers += [in_parts(x_TK, v_KN, parts, place) for parts in (2, 8, 32) for place in (False, True)]
        assert [int(proofs.wrong(Op.FORWARD, 0, x_TK, y).sum()) for y in answers] == [0] * len(answers)


def test_a_row_that_overflows_passes_where_it_can_overflow() -> None:
    """As gradients in float16 do before their scale is found."""
    v_KN = torch.randn(64, 64)
    proofs, x_TK = learned(v_KN.half()), torch.randn(4, 64) * torch.tensor([[1.0], [1e4], [6e4], [1.0]])
    x_TK = x_TK.clamp(-6e4, 6e4).half()
    y_TN = x_TK @ v_KN.half()
    assert y_TN.isinf().any(1).tolist() == [False, True, True, False]
    assert not proofs.wrong(Op.FORWARD, 0, x_TK, y_TN).any()
    y_TN[0, 0] = math.inf
    assert proofs.wrong(Op.FORWARD, 0, x_TK, y_TN).tolist() == [True, False, False, False]
