"""Joined rows on a CPU: whatever formula is the fastest computes the product, to within the rounding of one product."""

import pytest
import torch
from torch import Tensor, nn

from symbiosis.executor.batch import Batch, Item, Slice
from symbiosis.executor.engine import Engine, Work
from symbiosis.executor.store import Store
from symbiosis.kernels import few_rows
from symbiosis.kernels.few_rows import FewRows, by_columns, by_onednn, by_rows
from symbiosis.protocol import Call, Op
from symbiosis.transport.inproc import Peer
from symbiosis.transport.tensors import DTYPE_NAME

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def bound(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What the rounding of one product may come to: K sums, and the result's own."""
    size = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
    exact = x.dtype if x.dtype is torch.float64 else torch.float32  # products of bfloat16 are added in float32
    return size * (weight.shape[1] * torch.finfo(exact).eps + torch.finfo(x.dtype).eps)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("formula", [by_rows, by_columns, by_onednn], ids=lambda formula: formula.__name__)
def test_every_formula_is_the_product(formula: few_rows.Formula, dtype: torch.dtype, bias: bool) -> None:
    for rows in (1, 2, 3, 7, 32):
        x, weight = torch.randn(rows, 48, dtype=dtype), torch.randn(80, 48, dtype=dtype)
        b = torch.randn(80, dtype=dtype) if bias else None
        try:
            y = formula(x, weight, b)
        except (AttributeError, NotImplementedError, RuntimeError):
            assert formula is by_onednn  # not on every processor, nor for every dtype: then it is not chosen
            return
        expected = x.double() @ weight.double().t() + (0 if b is None else b.double())
        assert y.shape == expected.shape
        assert ((y.double() - expected).abs() <= bound(x, weight, b)).all()


def test_the_fastest_is_chosen_for_each_shape_and_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {by_rows: 1.0, by_columns: 0.5, by_onednn: 0.8}

    def seconds(formula: few_rows.Formula, x: Tensor, weights: list[Tensor]) -> float:
        if len(weights[0]) == 8:
            return took[formula]
        return 0.95 if formula is by_onednn else 1.0  # hardly less than the usual one: not worth it

    monkeypatch.setattr(few_rows, "_seconds", seconds)
    few = FewRows([torch.zeros(8, 4), torch.zeros(6, 4)], tried=(2, 5))
    assert few._chosen[torch.Size((8, 4)), torch.float32] == [by_rows, by_rows, *[by_columns] * 4]
    assert few._chosen[torch.Size((6, 4)), torch.float32] == [by_rows] * 6


def test_a_formula_that_this_machine_lacks_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> Tensor:
        raise NotImplementedError("no oneDNN here")

    monkeypatch.setattr(few_rows, "by_onednn", missing)
    few = FewRows([torch.randn(64, 64)])
    assert all(missing is not formula for formulas in few._chosen.values() for formula in formulas)


def test_weights_without_values_are_left_alone() -> None:
    few = FewRows([torch.empty(0, 8), torch.empty(8, 0)])
    assert few(torch.ones(2, 8), torch.empty(0, 8).t(), None).shape == (2, 0)
    assert few(torch.ones(2, 0), torch.empty(8, 0).t(), None).tolist() == torch.zeros(2, 8).tolist()


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_calls_that_run_together_get_their_own_rows(dtype: torch.dtype, rows: int, biased: bool) -> None:
    torch.manual_seed(0)
    store = Store(nn.Sequential(nn.Linear(32, 48), nn.Linear(32, 24)).to(dtype))  # a group: both take the same rows
    peers = [Peer() for _ in range(3)]
    first, second = (n for n, layer in enumerate(store.manifest) if layer.kind == "linear")
    call = Call(Op.FORWARD, first, DTYPE_NAME[dtype], (rows, 32), bias=biased, also=(second,))
    x = [torch.randn(rows, 32, dtype=dtype) for _ in peers]
    works = [
        Work(peer, 1, call, (rows_TK,), torch.empty(rows, 72, dtype=dtype), parts=((rows, 48), (rows, 24)))
        for peer, rows_TK in zip(peers, x, strict=True)
    ]
    items = [Item(number, None, rows, 0, 0.0, work) for number, work in enumerate(works)]
    with torch.no_grad():
        Engine(store, lambda *_: None, lambda *_: None).step(Batch(None, [Slice(item, 0, rows) for item in items], 0.0))
    for rows_TK, work in zip(x, works, strict=True):
        for layer, made in ((first, work.out.reshape(-1)[: rows * 48]), (second, work.out.reshape(-1)[rows * 48 :])):
            weight, bias = store.weights[layer], store.biases[layer] if biased else None
            expected = nn.functional.linear(rows_TK.double(), weight.double(), None if bias is None else bias.double())
            assert ((made.view(expected.shape) - expected).abs() <= bound(rows_TK, weight, bias)).all()
