"""Freivalds' test of floats, by itself: what rounding makes of a right answer passes, and a lie does not, in every dtype and at any width."""

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from symbiosis.client.privacy.drift import WINDOW
from symbiosis.client.privacy.fixed_point import INTEGERS
from symbiosis.client.privacy.verify import Proofs
from symbiosis.errors import CallError, Code
from symbiosis.kernels.integers import modular_product, quantise
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


# ---------------------------------------------------------------- what was asked for


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("answered", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_an_answer_has_the_dtype_of_the_call_and_its_tolerance(sent: torch.dtype, answered: torch.dtype) -> None:
    """Else who answers in bfloat16 may be wrong by 3 % where float32 was sent."""
    x_TK, w_KN, proofs = layer(torch.float32, 64, 64)
    x_TK = x_TK.to(sent)
    y_TN = (1.03 * (x_TK.double() @ w_KN.double())).to(answered)
    if sent is answered and sent is torch.bfloat16:
        return  # for one row, that is within what it rounds
    with pytest.raises(CallError, match="answered FORWARD of 0 w") as found:
        proofs.check(EXECUTOR, Op.FORWARD, 0, x_TK, y_TN)  # type: ignore[arg-type]
    assert found.value.code is Code.WRONG_ANSWER


@pytest.mark.parametrize("bits", [8, 16])
def test_integers_are_those_that_were_asked_for(bits: int) -> None:
    dtype = INTEGERS[bits]
    w_DKN, _ = quantise(torch.randn(64, 32), bits)
    proofs, x_TK = Proofs(), torch.randint(-1000, 1000, (5, 64)).to(dtype)
    proofs.learn_integers(0, w_DKN)
    y_TN = modular_product(x_TK, w_DKN)
    assert not wrong_rows(proofs, Op.FORWARD, x_TK, y_TN)
    other = torch.int64 if dtype is torch.int32 else torch.int32
    for wrong in (y_TN.to(other), y_TN.double(), y_TN[:, :-1], y_TN[:-1], y_TN.flatten()):
        with pytest.raises(CallError, match="answered FORWARD of 0 with torch"):
            proofs.check(EXECUTOR, Op.FORWARD, 0, x_TK, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_overflow_excuses_what_can_overflow_and_nothing_else(dtype: torch.dtype) -> None:
    """One value of a row is beyond the dtype: it alone may be infinite, and the others are right or found."""
    most = torch.finfo(dtype).max
    w_KN = torch.eye(64) + torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) / 64
    w_KN[6, 5] = 1.0
    w_KN[:, 40] /= 8
    proofs, x_TK = Proofs(), torch.zeros(3, 64, dtype=torch.float64)
    x_TK[:2, 5:7] = 0.9 * most
    proofs.learn_floats(0, w_KN.to(dtype))
    x_TK = x_TK.to(dtype)
    x_TK[2] = 1.0
    y_TN = (x_TK.double() @ w_KN.to(dtype).double()).to(dtype)
    assert y_TN.isinf().nonzero().tolist() == [[0, 5], [1, 5]]
    assert not wrong_rows(proofs, Op.FORWARD, x_TK, y_TN)
    lies: dict[str, Callable[[Tensor], object]] = {
        "another value is infinite": lambda y: y[1].__setitem__(40, math.inf),
        "the others are garbage": lambda y: y[1].__setitem__(slice(6, None), 0.5 * most),
        "all is infinite": lambda y: y[1].fill_(math.inf),
        "not a number": lambda y: y[1].fill_(math.nan),
        "a row that never came near": lambda y: y[2].__setitem__(5, math.inf),
    }
    for name, lie in lies.items():
        wrong_TN = y_TN.clone()
        lie(wrong_TN)
        assert wrong_rows(proofs, Op.FORWARD, x_TK, wrong_TN) == 1, name


# ---------------------------------------------------------------- many answers together

BATCH = 64


def answers(
    dtype: torch.dtype,
    answer: Callable[[Tensor, Tensor], Tensor],
    rows: Callable[[int], Tensor] | None = None,
    width: int = 256,
) -> int | None:
    """After how many rows somebody who answers so is found, within a window; None if never."""
    generator = torch.Generator().manual_seed(3)
    w_KN = (torch.randn(width, width, generator=generator) / width**0.5).to(dtype)
    proofs = Proofs()
    proofs.learn_floats(0, w_KN)
    for number in range(WINDOW // BATCH - 1):
        x_TK = torch.randn(BATCH, width, generator=generator) if rows is None else rows(number)
        x_TK = x_TK.to(dtype)
        y_TN = answer(x_TK, w_KN)
        assert not proofs.wrong(Op.FORWARD, 0, x_TK, y_TN).any()  # row by row nothing is seen
        try:
            proofs.check(EXECUTOR, Op.FORWARD, 0, x_TK, y_TN)  # type: ignore[arg-type]
        except CallError as error:
            assert "many answers, taken together" in str(error)
            return (number + 1) * BATCH
    return None


def of(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The answer, changed before it is rounded."""
    return lambda x, w: change(x.float() @ w.float()).to(x.dtype)


def with_weights(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: (x.float() @ change(w.float())).to(x.dtype)


def by_eight_bits(w_KN: Tensor) -> Tensor:
    unit_N = w_KN.abs().amax(0) / 127
    return (w_KN / unit_N).round() * unit_N


COLUMN = (torch.arange(256) == 3).float()
BIAS = torch.randn(256, generator=torch.Generator().manual_seed(4))
SMALL_LIES = {  # in roundings of the dtype where they have a size
    "a factor": lambda eps: of(lambda y: y * (1 + 0.4 * eps)),
    "a smaller factor": lambda eps: of(lambda y: y * (1 - 0.1 * eps)),
    "a constant": lambda eps: of(lambda y: y + eps),
    "a bias": lambda eps: of(lambda y: y + eps * BIAS),
    "one column moved": lambda eps: of(lambda y: y + 10 * eps * COLUMN),
    "cut off instead of rounded": lambda eps: of(lambda y: y * (1 - 0.36 * eps)),
    "noise": lambda eps: of(lambda y: y + 2 * eps * torch.randn(y.shape, generator=torch.Generator().manual_seed(5))),
    "one row of 16 twice as wrong": lambda eps: of(
        lambda y: y * (1 + 4 * eps * (torch.arange(len(y)) % 16 == 3))[:, None]
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lie", SMALL_LIES)
def test_a_small_lie_is_found_after_a_while(lie: str, dtype: torch.dtype) -> None:
    found = answers(dtype, SMALL_LIES[lie](torch.finfo(dtype).eps))
    assert found is not None and found > BATCH


def test_weights_of_eight_bits_are_found_in_bfloat16() -> None:
    assert answers(torch.bfloat16, with_weights(by_eight_bits)) is not None


def test_weights_of_bfloat16_are_found_in_float16() -> None:
    assert answers(torch.float16, with_weights(lambda w: w.bfloat16().float())) is not None


def repeated(number: int) -> Tensor:
    return torch.randn(BATCH, 256, generator=torch.Generator().manual_seed(0))


def hardly_changed(number: int) -> Tensor:
    """As in training, by a small rate, on one batch."""
    return repeated(0) * (1 + 1e-4 * number)


def alike(number: int) -> Tensor:
    return 1.0 + 0.01 * torch.randn(BATCH, 256, generator=torch.Generator().manual_seed(number))


def with_outliers(number: int) -> Tensor:
    x_TK = torch.randn(BATCH, 256, generator=torch.Generator().manual_seed(number))
    x_TK[:, 3] += 30
    return x_TK


def small(number: int) -> Tensor:
    """Values of which many underflow in float16."""
    return 1e-4 * torch.randn(BATCH, 256, generator=torch.Generator().manual_seed(number))


@every_dtype
@pytest.mark.parametrize("rows", [None, repeated, hardly_changed, alike, with_outliers, small])
@pytest.mark.parametrize("parts", [1, 8])
def test_right_answers_are_right_together(dtype: torch.dtype, rows: Callable[[int], Tensor] | None, parts: int) -> None:
    """Also where the sum is rounded part by part, as GPUs may do."""
    assert answers(dtype, (lambda x, w: x @ w) if parts == 1 else (lambda x, w: in_parts(x, w, parts)), rows) is None


@every_dtype
def test_right_answers_in_many_parts_are_right_together(dtype: torch.dtype) -> None:
    def rows(number: int) -> Tensor:
        return torch.cat([with_outliers(number), *(with_outliers(-number - n) for n in (1, 2, 3))], dim=1)

    assert answers(dtype, lambda x, w: in_parts(x, w, 32), rows, 1024) is None


def test_a_lie_that_depends_on_the_direction_is_found_in_that_one() -> None:
    x_TK, w_KN, proofs = layer(torch.bfloat16, 64, 64)
    generator = torch.Generator().manual_seed(1)

    def call(op: Op, factor: float) -> None:
        x_TK = torch.randn(BATCH, 64, generator=generator).bfloat16()
        y_TN = (factor * (x_TK.float() @ (w_KN if op is Op.FORWARD else w_KN.t()).float())).bfloat16()
        proofs.check(EXECUTOR, op, 0, x_TK, y_TN)  # type: ignore[arg-type]

    for _ in range(30):
        call(Op.FORWARD, 1.0)
    with pytest.raises(CallError, match="answered DGRAD of 0 wrongly: many"):
        for _ in range(30):
            call(Op.DGRAD, 1.003)


def test_calls_of_several_dtypes_are_judged_by_their_own() -> None:
    """As a model makes that is half under autocast."""
    w_KN, proofs = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16(), Proofs()
    proofs.learn_floats(0, w_KN)
    for seed in range(60):
        dtype = (torch.bfloat16, torch.float32)[seed % 2]
        x_TK = torch.randn(BATCH - 1, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)
        proofs.check(EXECUTOR, Op.FORWARD, 0, x_TK, x_TK @ w_KN.to(dtype))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_rows_that_are_no_numbers_have_no_numbers_for_answers(dtype: torch.dtype) -> None:
    """What cannot be measured is not taken for right."""
    torch.manual_seed(0)
    w, proofs = torch.randn(64, 48, dtype=torch.float64), Proofs()
    proofs.learn_floats(0, w)
    x = torch.randn(3, 64, dtype=torch.float64)
    x[1, 5], x[2, 7] = torch.inf, torch.nan
    x = x.to(dtype)
    right = (x.double() @ w).to(dtype)
    assert not proofs.wrong(Op.FORWARD, 0, x, right).any()
    lie = right.clone()
    lie[1:] = 0
    assert proofs.wrong(Op.FORWARD, 0, x, lie).tolist() == [False, True, True]


def test_rows_too_large_to_be_measured_are_not_taken_for_right() -> None:
    w, proofs = torch.randn(64, 48, dtype=torch.float64), Proofs()
    proofs.learn_floats(0, w)
    x = torch.randn(4, 64, dtype=torch.float64) * 1e153
    for answer in (torch.zeros(4, 48), torch.full((4, 48), torch.inf)):
        assert proofs.wrong(Op.FORWARD, 0, x, answer.double()).all()
