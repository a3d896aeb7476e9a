"""Freivalds' test of floats, by itself: what rounding makes of a right answer passes, and a lie does not, in every dtype and at any width."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from symbiosis.client.verify import Proofs
from symbiosis.errors import CallError
from symbiosis.protocol import Op

EXECUTOR = SimpleNamespace(endpoint="local:///nowhere", name=str)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [(64, 64), (64, 1024), (4096, 64), (4096, 256)]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_width = pytest.mark.parametrize(("inputs", "outputs"), WIDTHS)


def layer(dtype: torch.dtype, inputs: int, outputs: int, kind: str = "normal") -> tuple[Tensor, Tensor, Proofs]:
    """Rows, a weight, and what a client knows of it. Models have columns and features that are much larger than the others, and rows
    whose values are all positive."""
    generator = torch.Generator().manual_seed(inputs + outputs)
    x_TK = torch.randn(20, inputs, generator=generator)
    w_KN = torch.randn(inputs, outputs, generator=generator) / inputs**0.5
    if kind == "outliers":
        x_TK[:, 3] *= 100
        w_KN[:, 0] *= 30
        w_KN[5] *= 10
    if kind == "positive":
        x_TK, w_KN = x_TK.abs(), w_KN.abs()
    if kind == "sparse":
        x_TK *= torch.rand(x_TK.shape, generator=generator) < 0.02
    if kind == "constant":  # whatever is rounded is rounded in the same direction
        x_TK, w_KN = torch.full_like(x_TK, 0.3), torch.full_like(w_KN, 0.1)
    if kind == "cancelling":  # the second half of a sum undoes the first
        x_TK, w_KN = x_TK.abs(), w_KN.abs()
        x_TK[:, inputs // 2 :] = -x_TK[:, : inputs // 2]
    if kind == "tiny":
        x_TK *= 10 * torch.finfo(dtype).tiny
    proofs = Proofs()
    proofs.learn_floats(0, w_KN.to(dtype))
    return x_TK.to(dtype), w_KN.to(dtype), proofs


def wrong_rows(proofs: Proofs, op: Op, x_TK: Tensor, y_TN: Tensor) -> int:
    try:
        proofs.check(EXECUTOR, op, 0, x_TK, y_TN)  # type: ignore[arg-type]
    except CallError as error:
        return int(str(error).split("wrongly: ")[1].split()[0])
    return 0


def in_parts(x_TK: Tensor, w_KN: Tensor, parts: int = 8) -> Tensor:
    """As a GPU may sum: each part of the sum is rounded to the dtype."""
    y_TN = torch.zeros(len(x_TK), w_KN.shape[1], dtype=x_TK.dtype)
    for x, w in zip(x_TK.chunk(parts, 1), w_KN.chunk(parts), strict=True):
        y_TN += (x.float() @ w.float()).to(x.dtype)
    return y_TN


@every_dtype
@every_width
@pytest.mark.parametrize("kind", ["normal", "outliers", "positive", "sparse", "tiny", "constant", "cancelling"])
def test_right_answers_pass(dtype: torch.dtype, inputs: int, outputs: int, kind: str) -> None:
    x_TK, w_KN, proofs = layer(dtype, inputs, outputs, kind)
    for right in (x_TK @ w_KN, in_parts(x_TK, w_KN), in_parts(x_TK, w_KN, 32)):
        assert not wrong_rows(proofs, Op.FORWARD, x_TK, right)
        assert not wrong_rows(proofs, Op.FORWARD, x_TK[:1], right[:1])
    dy_TN = x_TK @ w_KN
    assert not wrong_rows(proofs, Op.DGRAD, dy_TN, dy_TN @ w_KN.t())
    assert not wrong_rows(proofs, Op.DGRAD, dy_TN, in_parts(dy_TN, w_KN.t()))


@every_dtype
@every_width
@pytest.mark.parametrize("kind", ["normal", "outliers"])
def test_lies_do_not(dtype: torch.dtype, inputs: int, outputs: int, kind: str) -> None:
    x_TK, w_KN, proofs = layer(dtype, inputs, outputs, kind)
    y_TN = x_TK @ w_KN
    others_KN = w_KN[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))]
    lies = {
        "zeros": torch.zeros_like(y_TN),
        "rows swapped": y_TN.roll(1, 0),
        "negated": -y_TN,
        "doubled": 2 * y_TN,
        "a half more": (1.5 * y_TN.float()).to(dtype),
        "of other weights": x_TK @ others_KN,
        "huge": torch.full_like(y_TN, torch.finfo(dtype).max),
        "not a number": torch.full_like(y_TN, torch.nan),
    }
    few = len(x_TK) // 5 if kind == "outliers" else 0  # rows that are one large feature, and much alike
    for lie, wrong_TN in lies.items():
        assert wrong_rows(proofs, Op.FORWARD, x_TK, wrong_TN) >= len(x_TK) - few, lie
    one_TN = y_TN.clone()
    one_TN[7] = -one_TN[7]
    assert wrong_rows(proofs, Op.FORWARD, x_TK, one_TN) == 1
    dy_TN, dx_TK = y_TN, y_TN @ w_KN.t()
    for wrong_TK in (torch.zeros_like(dx_TK), dx_TK.roll(1, 0), -dx_TK, 2 * dx_TK):
        assert wrong_rows(proofs, Op.DGRAD, dy_TN, wrong_TK) >= len(dx_TK) - few


@pytest.mark.parametrize(("dtype", "part"), [(torch.float32, 2e-3), (torch.float16, 0.032), (torch.bfloat16, 0.26)])
@every_width
def test_noise_of_so_small_a_part_of_an_answer_is_noticed(
    dtype: torch.dtype, part: float, inputs: int, outputs: int
) -> None:
    x_TK, w_KN, proofs = layer(dtype, inputs, outputs)
    y_TN = (x_TK @ w_KN).float()
    noise_TN = torch.randn(y_TN.shape, generator=torch.Generator().manual_seed(2))
    noise_TN *= part * y_TN.norm(dim=1, keepdim=True) / noise_TN.norm(dim=1, keepdim=True)
    assert wrong_rows(proofs, Op.FORWARD, x_TK, (y_TN + noise_TN).to(dtype)) == len(x_TK)
