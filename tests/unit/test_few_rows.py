"""Batched rows on a CPU: whatever formula is the fastest computes the product, to within the rounding of one product."""

import os
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from symbiosis.executor.call_kinds import HostCall
from symbiosis.executor.calls.call_plan import make_plan
from symbiosis.executor.compute.batch_runner import BatchRunner
from symbiosis.executor.model.store import Store
from symbiosis.executor.options import Options
from symbiosis.executor.scheduling.queue import Batch, Item, Slice
from symbiosis.kernels import few_rows
from symbiosis.kernels.few_rows import FewRows, by_columns, by_onednn, by_rows, by_stripes
from symbiosis.protocol import Call, Op
from symbiosis.transport.inproc import InprocPeer
from symbiosis.transport.tensors import DTYPE_NAME

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.fixture(autouse=True)
def small_matrices_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "LEAST_BYTES", 1)


def bound(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What the rounding of one product may come to: K sums, and the result's own."""
    size = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
    exact = x.dtype if x.dtype is torch.float64 else torch.float32  # products of bfloat16 are added in float32
    return size * (weight.shape[1] * torch.finfo(exact).eps + torch.finfo(x.dtype).eps)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("formula", [by_rows, by_columns, by_onednn, by_stripes], ids=lambda formula: formula.__name__)
def test_every_formula_is_the_product(formula: few_rows.Formula, dtype: torch.dtype, bias: bool) -> None:
    for rows in (1, 2, 3, 7, 32):
        x, weight = torch.randn(rows, 48, dtype=dtype), torch.randn(80, 48, dtype=dtype)
        b = torch.randn(80, dtype=dtype) if bias else None
        try:
            y = formula(x, weight, b)
        except (AttributeError, NotImplementedError, RuntimeError):
            assert formula in (by_onednn, by_stripes)  # not everywhere, nor for every dtype: then it is not chosen
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


@pytest.mark.skipif(few_rows.compiled_kernel() is None, reason="no C compiler here")
@pytest.mark.parametrize("outputs", [1, 5, 96, 131])
@pytest.mark.parametrize("rows", range(1, few_rows.MOST_ROWS + 1))
def test_stripes_of_every_width_for_every_number_of_threads(rows: int, outputs: int) -> None:
    threads = torch.get_num_threads()
    x, weight, b = torch.randn(rows, 80), torch.randn(outputs, 80), torch.randn(outputs)
    expected = x.double() @ weight.double().t() + b
    try:
        for some in (1, 2, 7):
            torch.set_num_threads(some)
            assert ((by_stripes(x, weight, b) - expected).abs() <= bound(x, weight, b)).all()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(few_rows.compiled_kernel() is None, reason="no C compiler here")
def test_stripes_let_infinities_and_tiny_numbers_through() -> None:
    """Compiled with -ffast-math, the library would have flushed tiny numbers to zero in all of the process."""
    x = torch.zeros(2, 16)
    x[0, 3], x[1, 5] = torch.inf, 1e-40
    assert by_stripes(x, torch.ones(4, 16), None)[0].isinf().all()
    assert (by_stripes(x, torch.ones(4, 16), None)[1] == x[1, 5]).all()
    assert (torch.tensor(1e-40) * 0.5).item() > 0


def test_without_a_compiler_the_other_formulas_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nonexistent/cc")
    monkeypatch.setattr(few_rows, "compiled_kernel", few_rows.compiled_kernel.__wrapped__)
    monkeypatch.setattr(few_rows, "BYTES_TRIED", 1)
    assert few_rows.compiled_kernel() is None
    few = FewRows([torch.randn(64, 64)])
    assert all(not isinstance(formula, partial) for formulas in few._chosen.values() for formula in formulas)


def test_only_large_models_are_worth_compiling_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[few_rows.Formula] = []
    monkeypatch.setattr(few_rows, "_seconds", lambda formula, *_: tried.append(formula) or 1.0)
    FewRows([torch.zeros(64, 64)])
    assert set(tried) == {by_rows, by_columns, by_onednn}
    monkeypatch.setattr(few_rows, "BYTES_TRIED", 1 << 13)
    for workers, threads in ((1, torch.get_num_threads()), (64, max(torch.get_num_threads(), os.cpu_count() or 1))):
        tried.clear()
        FewRows([torch.zeros(64, 64)], threads=workers)
        (stripes,) = {formula for formula in tried if isinstance(formula, partial)}
        assert stripes.func is by_stripes and stripes.keywords["threads"] <= threads


def test_a_view_that_has_the_shape_of_a_weight_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "_seconds", lambda formula, *_: 0.0 if formula is by_columns else 1.0)
    weight, x = torch.randn(64, 64), torch.randn(4, 64)
    few = FewRows([weight])
    assert few._chosen[weight.shape, weight.dtype][4] is by_columns
    assert torch.equal(few(x, weight, None), by_rows(x, weight.t(), None))
    few._chosen[weight.shape, weight.dtype][4] = lambda *_: pytest.fail("it knows nothing of this view")
    few(x, weight, None)


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
    peers = [InprocPeer() for _ in range(3)]
    first, second = (n for n, layer in enumerate(store.manifest) if layer.kind == "linear")
    call = Call(Op.FORWARD, first, DTYPE_NAME[dtype], (rows, 32), bias=biased, also=(second,))
    x = [torch.randn(rows, 32, dtype=dtype) for _ in peers]
    works = [
        HostCall(peer, 1, call, (rows_TK,), torch.empty(rows, 72, dtype=dtype), make_plan(call, store, Options()))
        for peer, rows_TK in zip(peers, x, strict=True)
    ]
    items = [Item(number, None, rows, 0, 0.0, work) for number, work in enumerate(works)]
    with torch.no_grad():
        BatchRunner(store, lambda *_: None, lambda *_: None).step(
            Batch(None, [Slice(item, 0, rows) for item in items], 0.0)
        )
    for rows_TK, work in zip(x, works, strict=True):
        for layer, made in ((first, work.out.reshape(-1)[: rows * 48]), (second, work.out.reshape(-1)[rows * 48 :])):
            weight, bias = store.weights[layer], store.biases[layer] if biased else None
            expected = nn.functional.linear(rows_TK.double(), weight.double(), None if bias is None else bias.double())
            assert ((made.view(expected.shape) - expected).abs() <= bound(rows_TK, weight, bias)).all()


def test_what_is_small_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert FewRows([torch.zeros(128, 64), torch.zeros(128, 128)])._chosen.keys() == {
        (torch.Size((128, 128)), torch.float32)
    }
