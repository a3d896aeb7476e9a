"""Calls of several GPU clients that run as one product: what each gets is right to within the rounding of one product.

The bound, for each value of a result `y` of a product `x W (+ b)` over K terms, compared with the exact value in float64:

    |y - exact| <= gamma * (|x| |W| + |b|)  +  u * (|exact| + the former)        gamma = K' u32 / (1 - K' u32)

The first part is what K' additions in float32 may come to, in any order (u32 = 2^-23, because tensor cores cut off instead of
rounding; K' = K and what joins partial sums and the bias). The second is the one rounding to the dtype of the result. A call
alone keeps the same bound, so batched and alone differ by at most twice as much. Sums of partial results are kept in float32 for
that (torch lets cuBLAS round them to 16 bits otherwise, in split and in unsplit models alike).
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from symbiosis.errors import Code
from symbiosis.executor.call_kinds import DeviceCall
from symbiosis.executor.calls.call_plan import make_plan
from symbiosis.executor.compute.batch_runner import BatchRunner
from symbiosis.executor.gpu.launcher import GRAPH_AFTER
from symbiosis.executor.model.store import Store
from symbiosis.executor.options import Options
from symbiosis.executor.scheduling.queue import Batch, Item, Slice
from symbiosis.executor.scheduling.ranking import AGING_S
from symbiosis.protocol import Call, Op
from symbiosis.transport.tensors import DTYPE_NAME

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICE = "cuda"
GUARD = 256  # bytes around each result, which nobody may write
TURNS = 4  # the first is not captured, the second captures, the others replay


class Bounded(NamedTuple):
    """An exact value, and how far from it a computed one may be."""

    value: Tensor
    error: Tensor


def bounded_product(x_TK: Tensor, v_KN: Tensor, bias_N: Tensor | None) -> Bounded:
    """`x V (+ b)`, computed in the dtype of `x`."""
    x, v = x_TK.double(), v_KN.double()
    b = 0.0 if bias_N is None else bias_N.double()
    size = x.abs() @ v.abs() + (0.0 if bias_N is None else bias_N.double().abs())
    additions = (1.25 * v_KN.shape[0] + 16) * 2.0**-23
    return rounded(Bounded(x @ v + b, size * additions / (1 - additions)), x_TK.dtype)


def rounded(y: Bounded, dtype: torch.dtype) -> Bounded:
    """... to that dtype: by half a unit of the last place, which does not become smaller near zero."""
    info = torch.finfo(dtype)
    return Bounded(y.value, y.error + info.eps / 2 * ((y.value.abs() + y.error) + info.smallest_normal))


def summed(parts: list[Bounded], dtype: torch.dtype) -> Bounded:
    """One after the other, each sum rounded."""
    total, *others = parts
    for part in others:
        total = rounded(Bounded(total.value + part.value, total.error + part.error), dtype)
    return total


class Client:
    """What the engine sees of a client on its GPU: where its rows and results lie, and the word that answers it."""

    here, transport, session = True, "cuda", None

    def __init__(self) -> None:
        self.word = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.replies = 0

    def answer(self, number: int) -> tuple[int, int]:
        return self.word.data_ptr(), number

    def reply(self, reply: Any, result: Tensor) -> None:
        assert reply.code is Code.OK, bytes(result.cpu().numpy())
        self.replies += 1

    def count(self, batch: int) -> None:
        raise AssertionError("only graphs of single calls count by themselves")


def call_of(client: Client, store: Store, call: Call, number: int) -> tuple[DeviceCall, Tensor]:
    """A registered call with rows of its own, and the memory around its result."""
    plan = make_plan(call, store, Options())
    x = torch.empty(call.shape, dtype=getattr(torch, call.dtype), device=DEVICE)
    out = torch.empty(plan.shape, dtype=x.dtype)
    memory = torch.zeros(GUARD + out.nbytes + GUARD, dtype=torch.uint8, device=DEVICE)
    out = memory[GUARD : GUARD + out.nbytes].view(x.dtype).view(plan.shape)
    work = DeviceCall(
        peer=client, plan=plan, number=number, priority=0, call=call, payload=(x,), results=(out,), seq=number
    )
    return work, memory


def one_layer() -> tuple[BatchRunner, Store, Client]:
    """An engine with a layer of 256 × 512, and a client whose calls it may launch alone."""
    torch.manual_seed(1)
    store = Store(nn.Sequential(nn.Linear(256, 512)).to(DEVICE))
    engine = BatchRunner(store, lambda *_: None, lambda _: None)
    engine.gpu.use_stream()
    client = Client()
    client.count = lambda batch: None  # type: ignore[method-assign]
    client.enqueue_reply = lambda: None  # type: ignore[attr-defined]
    return engine, store, client


def new_call(client: Client, store: Store, number: int) -> DeviceCall:
    """A call of few rows that hold something."""
    work, _ = call_of(client, store, Call(Op.FORWARD, 0, "float32", (3, 256)), number)
    work.payload[0].normal_()
    return work


@pytest.fixture(autouse=True)
def partial_sums_in_float32() -> Iterator[None]:
    settings = torch.backends.cuda.matmul
    assert not settings.allow_tf32
    before = settings.allow_bf16_reduced_precision_reduction, settings.allow_fp16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = settings.allow_fp16_reduced_precision_reduction = False
    yield
    settings.allow_bf16_reduced_precision_reduction, settings.allow_fp16_reduced_precision_reduction = before


@pytest.fixture
def own_stream() -> Iterator[None]:
    """The engine makes its stream this thread's: take that back at the end."""
    with torch.cuda.stream(torch.cuda.current_stream()), torch.no_grad():
        yield


class Case(NamedTuple):
    inputs: int
    outputs: tuple[int, ...]  # of each member of a group
    rows: tuple[int, ...]  # of each client


CASES = {
    "few": Case(64, (96,), (1, 1)),
    "uneven": Case(256, (512,), (1, 3, 17, 40)),
    "long sums": Case(11008, (64,), (2, 5, 1)),
    "group": Case(512, (512, 128, 128), (3, 1, 9)),
    "crowd": Case(128, (64, 64), (1,) * 32),
    "many rows": Case(512, (256,), (100, 130, 28)),
}


@pytest.mark.usefixtures("own_stream")
@pytest.mark.parametrize("kind", ["forward", "with bias", "gradient"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAME.get)
def test_joined_calls_are_right_to_within_one_rounding(dtype: torch.dtype, case: str, kind: str) -> None:
    inputs, outputs, rows = CASES[case]
    torch.manual_seed(1)
    layers = [nn.Linear(inputs, width, bias=kind == "with bias") for width in outputs]
    store = Store(nn.Sequential(*layers).to(DEVICE, dtype))
    first, *others = (n for n, layer in enumerate(store.manifest) if layer.kind == "linear")
    op = Op.DGRAD if kind == "gradient" else Op.FORWARD
    joined: list[Batch] = []
    engine = BatchRunner(store, lambda *_: None, joined.append)
    engine.gpu.use_stream()
    width = sum(outputs) if op is Op.DGRAD else inputs
    works, memories = [], []
    for number, count in enumerate(rows, 1):
        call = Call(op, first, DTYPE_NAME[dtype], (count, width), bias=kind == "with bias", also=tuple(others))
        work, memory = call_of(Client(), store, call, number)
        engine.gpu.note_addresses(work)
        assert work.can_be_batched, "rows of whole words can be batched"
        works.append(work)
        memories.append(memory)
    for turn in range(TURNS):
        for work, memory in zip(works, memories, strict=True):
            work.payload[0].normal_()
            memory.fill_(0xFF)  # NaN, should it not be written
            work.peer.word.zero_()
        items = [Item(n, work.plan.key, work.plan.rows, 0, 0.0, work) for n, work in enumerate(works)]
        engine.step(Batch(works[0].plan.key, [Slice(item, 0, item.rows) for item in items], 0.0))
        torch.cuda.synchronize()
        assert len(joined) == turn + 1 and all(item.finished for item in items)
        assert [work.peer.word.item() for work in works] == [work.number for work in works]
        for work, memory in zip(works, memories, strict=True):
            check(work, store)
            assert (memory[:GUARD] == 0xFF).all() and (memory[-GUARD:] == 0xFF).all()
    for work in works:  # and alone, of the same rows
        together = work.out.clone()
        work.out.fill_(torch.nan)
        engine.gpu.launch(work)
        torch.cuda.synchronize()
        assert work.peer.replies == 1
        for y, one, expected in zip(
            work.outputs, replace(work, results=(together,)).outputs, exact(work, store), strict=True
        ):
            assert ((y.double() - one.double()).abs() <= 2 * expected.error).all()
        check(work, store)


@pytest.mark.usefixtures("own_stream")
def test_few_rows_overtake_many_but_not_for_ever() -> None:
    """While the stream of large calls is held up: each large call is answered behind that, the others until they have to wait."""
    engine, store, client = one_layer()
    rows = (1, engine.gpu.batch_below)
    (small, _), (large, _) = (
        call_of(client, store, Call(Op.FORWARD, 0, "float32", (count, 256)), number)
        for number, count in enumerate(rows)
    )
    for work in (small, large):
        engine.gpu.note_addresses(work)
        work.payload[0].normal_()
    large.large = True
    for turn in range(TURNS):
        for work in (small, large):
            work.out.fill_(torch.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(engine.gpu._aside):
            torch.cuda._sleep(10**9)  # half a second or more
        engine.gpu.launch(large)
        engine.gpu.launch(small)
        if turn > 2:  # memory for a graph is not allocated meanwhile
            engine.gpu._stream.synchronize()
            assert not engine.gpu._aside.query() and small.out.isfinite().all()
        time.sleep(2 * AGING_S)
        engine.gpu.launch(small)
        engine.gpu._stream.synchronize()
        assert engine.gpu._aside.query(), "it waited for the large one"
        engine.gpu.drain(client, lambda: None)
        for work in (small, large):
            check(work, store)


@pytest.mark.usefixtures("own_stream")
def test_calls_are_captured_also_when_all_that_were_have_gone() -> None:
    """Torch does not use a pool of memory again whose graphs are all gone."""
    engine, store, client = one_layer()
    for number, large in enumerate((False, False, True, True), 1):
        work = new_call(client, store, number)
        work.large = large
        for _ in range(GRAPH_AFTER + 1):
            engine.gpu.launch(work)
        assert work.graph is not None
        engine.gpu.forget([work])
        check(work, store)


@pytest.mark.usefixtures("own_stream")
@pytest.mark.parametrize(("error", "again"), [(RuntimeError, False), (torch.OutOfMemoryError, True)])
def test_a_call_that_cannot_be_captured_keeps_no_other_from_it(
    error: type[Exception], again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that asks the GPU for sizes is not captured again; one for which there was no memory is. Torch does not use a pool again in which a
    capture failed."""
    engine, store, client = one_layer()
    bad, good = (new_call(client, store, number) for number in (1, 2))
    run, failing = engine.gpu._run, [True]

    def run_or_fail(call: DeviceCall) -> None:
        run(call)
        if call is bad and failing and torch.cuda.is_current_stream_capturing():
            if error is RuntimeError:
                call.out.sum().item()  # spoils the capture
            raise error("no memory")

    monkeypatch.setattr(engine.gpu, "_run", run_or_fail)
    for _ in range(GRAPH_AFTER + 1):
        engine.gpu.launch(bad)
    assert bad.graph is None
    failing.clear()
    for _ in range(GRAPH_AFTER + 1):
        engine.gpu.launch(good)
        engine.gpu.launch(bad)
    assert good.graph is not None and (bad.graph is not None) is again
    engine.gpu.wait()
    torch.rand(1, device=DEVICE)
    for work in (good, bad):
        check(work, store)


def exact(work: DeviceCall, store: Store) -> list[Bounded]:
    """What each member of the group makes of the rows; of a gradient, the sum of all."""
    call, x = work.call, work.payload[0]
    if call.op is Op.FORWARD:
        return [
            bounded_product(x, store.weights[layer].t(), store.biases[layer] if call.bias else None)
            for layer in call.layers
        ]
    weights = [store.weights[layer] for layer in call.layers]
    flat, start, parts = x.reshape(-1), 0, []
    for weight in weights:  # one member's rows after the other's, as a group has them
        stop = start + len(x) * len(weight)
        parts.append(bounded_product(flat[start:stop].view(len(x), -1), weight, None))
        start = stop
    return [summed(parts[::-1], x.dtype)]


def check(work: DeviceCall, store: Store) -> None:
    """Every value of the result against its bound."""
    start = 0
    for expected in exact(work, store):
        stop = start + expected.value.numel()
        y = work.out.reshape(-1)[start:stop].view(expected.value.shape).double()
        excess = (y - expected.value).abs() / expected.error
        assert excess.max() <= 1, f"{excess.max().item():.2f} times the bound"
        start = stop
    assert start == work.out.numel()


def test_the_bound_tells_wrong_results() -> None:
    """Of the rows of somebody else, and of a coarser dtype."""
    torch.manual_seed(1)
    for dtype in DTYPES:
        x, w = torch.randn(2, 512, dtype=dtype, device=DEVICE), torch.randn(512, 64, dtype=dtype, device=DEVICE)
        expected = bounded_product(x, w, None)
        assert ((x @ w).double() - expected.value).abs().div(expected.error).max() <= 1
        assert ((x.flip(0) @ w).double() - expected.value).abs().div(expected.error).max() > 100
    coarser = (x.double() @ w.double()).to(torch.bfloat16)
    assert (coarser.double() - expected.value).abs().div(expected.error).max() > 1
