"""What is checked before a call is computed: wrong calls are refused with a code, and what passes can be computed."""

import msgspec
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from symbiosis.errors import CallError, Code
from symbiosis.executor.call_kinds import HostCall
from symbiosis.executor.calls.call_plan import make_plan
from symbiosis.executor.calls.validation import check_call, check_finite, must_be_finite
from symbiosis.executor.compute.batch_runner import BatchRunner
from symbiosis.executor.model.store import Store
from symbiosis.executor.options import Options
from symbiosis.executor.scheduling.queue import Batch, Item, Slice
from symbiosis.protocol import DTYPES, Call, Op, Reply, View, checked, view_of_outputs
from symbiosis.transport.inproc import InprocPeer
from symbiosis.transport.tensors import TORCH_DTYPE, check_values, split_payload
from tests.frames import only_used


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 16, 8))


class EveryKind(nn.Module):
    """One layer of each kind that an executor knows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 16)
        self.plain = nn.Linear(8, 16, bias=False)
        self.conv = Conv1D(16, 8)
        self.embedding = nn.Embedding(10, 8)
        self.experts = Experts()
        self.norm = nn.LayerNorm(8)


STORE = Store(EveryKind(), serve=["*"], integers=(8,))
NUMBER = {layer.name: number for number, layer in enumerate(STORE.manifest)}
OPTIONS = Options(allow_read=True, max_rows=64, max_call_bytes=8192)


def check(call: Call, payload: tuple[Tensor, ...] | None = None, options: Options = OPTIONS) -> tuple[int, ...]:
    """The shape of the reply, after all checks."""
    shape = check_call(checked(call), STORE, options)
    payload = zeros(call) if payload is None else payload
    check_values(call, payload, STORE.manifest[call.layer])
    if must_be_finite(call, options):
        check_finite(call, payload, slice(None), STORE)
    return shape


def zeros(call: Call) -> tuple[Tensor, ...]:
    return split_payload(call, torch.zeros(call.nbytes, dtype=torch.uint8))


def computed(call: Call, payload: tuple[Tensor, ...], shape: tuple[int, ...]) -> tuple[Reply, Tensor]:
    """What the engine answers."""
    peer = InprocPeer()
    out = torch.empty(shape, dtype=TORCH_DTYPE[call.dtype])
    work = HostCall(peer, 1, call, payload, out, make_plan(call, STORE, OPTIONS))
    rows = max(1, call.rows)
    with torch.no_grad():
        BatchRunner(STORE, lambda *_: None, lambda *_: None).step(
            Batch(None, [Slice(Item(1, None, rows, 0, 0.0, work), 0, rows)], 0.0)
        )
    answer = peer.replies.get_nowait()
    assert isinstance(answer, tuple)
    return answer


small = st.integers(0, 17) | st.sampled_from((3, 8, 16, 2**40, 2**62))
triples = st.lists(small, max_size=3).map(tuple)
views = st.integers(0, 3).flatmap(
    lambda n: st.builds(
        View,
        st.lists(small, min_size=n, max_size=n).map(tuple),
        st.lists(st.sampled_from((0, 1, 8, 16, 128, 2**62)), min_size=n, max_size=n).map(tuple),
        offset=st.integers(0, 20),
    )
)
whole_views = st.sampled_from(
    [
        View((8, 16), (1, 8), 0),
        View((16, 8), (8, 1), 0),
        View((3, 16, 8), (128, 8, 1), 0),
        View((3, 8, 16), (128, 1, 8), 0),
    ]
)
calls = st.builds(
    Call,
    st.sampled_from([op for op in Op if op is not Op.STATS]),
    st.integers(0, len(STORE.manifest)),
    st.sampled_from(DTYPES[:4]) | st.sampled_from(DTYPES),
    triples | st.sampled_from(((5, 8), (5, 16), (3, 5, 8), (3, 5, 16), (7,), (8, 5), (0, 8), (0,))),
    bias=st.booleans(),
    view=st.none() | views | whole_views,
    groups=st.sampled_from((0, 0, 3)),
    gradient=st.booleans(),
).map(only_used)


@settings(max_examples=1000)
@given(calls)
def test_what_passes_the_checks_is_computed(call: Call) -> None:
    """Whatever a client asks: it is refused with a code, or answered in the shape that was promised."""
    try:
        payload = zeros(call) if call.nbytes <= OPTIONS.max_call_bytes else ()
        shape = check(call, payload)
    except CallError as error:
        assert error.code not in (Code.OK, Code.INTERNAL)
        assert len(error.message) > 20
        return
    event("computed")
    reply, result = computed(call, payload, shape)
    assert (reply.code, reply.shape, tuple(result.shape)) == (Code.OK, shape, shape)


def test_slices_and_company_get_their_own_rows() -> None:
    """The last rows of a divided call run together with another call, and touch nothing but themselves."""
    x, other = torch.randn(10, 8), torch.randn(3, 8)
    calls = [Call(Op.FORWARD, PLAIN, "float32", tuple(rows.shape)) for rows in (x, other)]
    works = [
        HostCall(InprocPeer(), 1, call, (rows,), torch.full((len(rows), 16), 7.0), make_plan(call, STORE, OPTIONS))
        for call, rows in zip(calls, (x, other), strict=True)
    ]
    items = [Item(number, None, len(work.out), 0, 0.0, work) for number, work in enumerate(works)]
    items[0].ran = 8
    with torch.no_grad():
        BatchRunner(STORE, lambda *_: None, lambda *_: None).step(
            Batch(None, [Slice(items[0], 8, 10), Slice(items[1], 0, 3)], 0.0)
        )
    expected = torch.cat([x[8:], other]) @ STORE.weights[PLAIN].t()
    # joined ones may round in another way
    torch.testing.assert_close(torch.cat([works[0].out[8:], works[1].out]), expected)
    assert (works[0].out[:8] == 7.0).all()
    for work in works:
        assert work.peer.replies.get_nowait()[0].code is Code.OK  # type: ignore[attr-defined, index]


ROWS = (5, 8)
LINEAR, PLAIN, CONV, TABLE, UP = (NUMBER[name] for name in ("linear", "plain", "conv", "embedding", "experts.up"))


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (Call(Op.FORWARD, LINEAR, "float32", ROWS, bias=True), (5, 16)),
        (Call(Op.PRODUCT, LINEAR, "float32", ROWS, bias=True, view=View((8, 5), (1, 8), 24)), (5, 5)),
        (Call(Op.PRODUCT, CONV, "float32", ROWS, bias=True, view=View((8, 5), (16, 1), 3)), (5, 5)),
        (Call(Op.FORWARD, CONV, "bfloat16", ROWS, bias=True), (5, 16)),
        (Call(Op.DGRAD, PLAIN, "float16", (5, 16)), ROWS),
        (Call(Op.PRODUCT, UP, "float32", (3, 5, 8), view=View((3, 8, 16), (128, 1, 8), 0)), (3, 5, 16)),
        (Call(Op.PRODUCT, PLAIN, "float64", (5, 3), view=View((3, 2), (8, 1), 9)), (5, 2)),
        (Call(Op.LEFT, PLAIN, "float32", (8, 5), view=View((16, 8), (8, 1), 0)), (16, 5)),
        (Call(Op.GROUPED, UP, "float32", ROWS, view=View((3, 8, 16), (128, 1, 8), 0), groups=3), (5, 16)),
        (Call(Op.LOOKUP, TABLE, "float32", (7,)), (7, 8)),
        (Call(Op.NORMS, CONV, "float32"), (16,)),
        (Call(Op.READ, UP, "float32"), (3, 16, 8)),
        (Call(Op.ECHO, 0, "uint8", (3, 1, 2)), (3, 1, 2)),
        (Call(Op.FORWARD, LINEAR, "float32", (0, 8), bias=True), (0, 16)),
        (Call(Op.LOOKUP, TABLE, "float32", (0,)), (0, 8)),
        (Call(Op.GROUPED, UP, "float32", (0, 8), view=View((3, 8, 16), (128, 1, 8), 0), groups=3), (0, 16)),
        (Call(Op.ECHO, 0, "float32", (0, 8)), (0, 8)),
    ],
)
def test_every_op_says_what_it_answers(call: Call, shape: tuple[int, ...]) -> None:
    payload = zeros(call)
    assert check(call, payload) == shape
    reply, result = computed(call, payload, shape)
    assert (reply.code, tuple(result.shape)) == (Code.OK, shape)


GROUPED = {"view": View((3, 8, 16), (128, 1, 8), 0), "groups": 3}


@pytest.mark.parametrize(
    ("call", "code", "message"),
    [
        (Call(Op.FORWARD, 999, "float32", ROWS), Code.UNKNOWN_LAYER, "no layer number 999"),
        (Call(Op.FORWARD, NUMBER["norm.weight"], "float32", ROWS), Code.UNKNOWN_LAYER, "norm.weight is not served"),
        (Call(Op.FORWARD, LINEAR, "float32", (5, 9)), Code.BAD_SHAPE, "linear: FORWARD takes rows of 8 values, not 9"),
        (Call(Op.DGRAD, LINEAR, "float32", ROWS), Code.BAD_SHAPE, "linear: DGRAD takes rows of 16 values, not 8"),
        (Call(Op.FORWARD, LINEAR, "float32", (8,)), Code.BAD_SHAPE, "linear: rows"),
        (Call(Op.FORWARD, LINEAR, "float32", ()), Code.BAD_SHAPE, "linear: rows"),
        (Call(Op.FORWARD, LINEAR, "float32", (2, 5, 8)), Code.BAD_SHAPE, "linear: rows"),
        (Call(Op.FORWARD, LINEAR, "int64", ROWS), Code.BAD_DTYPE, "--integers 16"),
        (Call(Op.FORWARD, LINEAR, "int32", ROWS, bias=True), Code.BAD_DTYPE, "without bias"),
        (Call(Op.LEFT, PLAIN, "int32", (8, 5)), Code.BAD_DTYPE, "takes floating-point rows, not int32"),
        (Call(Op.FORWARD, LINEAR, "int32", (2, 5, 8), seeded=True), Code.BAD_DTYPE, "a seed stands"),
        (Call(Op.NORMS, LINEAR, "uint8"), Code.BAD_DTYPE, "takes floating-point rows, not uint8"),
        (Call(Op.GROUPED, UP, "float64", ROWS, **GROUPED), Code.BAD_DTYPE, "experts.up"),
        (Call(Op.FORWARD, PLAIN, "float32", ROWS, bias=True), Code.UNKNOWN_OP, "plain has no bias"),
        (Call(Op.PRODUCT, LINEAR, "float32", ROWS, bias=True), Code.BAD_VIEW, "and to no others"),
        (
            Call(Op.PRODUCT, LINEAR, "float32", ROWS, bias=True, view=View((8, 5), (1, 8), 25)),
            Code.BAD_VIEW,
            "and to no others",
        ),
        (
            Call(Op.PRODUCT, CONV, "float32", ROWS, bias=True, view=View((8, 5), (15, 1), 3)),
            Code.BAD_VIEW,
            "and to no others",
        ),
        (Call(Op.PRODUCT, UP, "float32", ROWS, bias=True), Code.UNKNOWN_OP, "has no bias"),
        (
            Call(Op.PRODUCT, PLAIN, "float32", ROWS, bias=True, view=View((8, 5), (1, 8), 24)),
            Code.UNKNOWN_OP,
            "has no bias",
        ),
        (Call(Op.DGRAD, LINEAR, "float32", (5, 16), bias=True), Code.UNKNOWN_OP, "DGRAD does not use bias"),
        (Call(Op.FORWARD, UP, "float32", ROWS), Code.UNKNOWN_OP, "experts.up is a tensor"),
        (Call(Op.LOOKUP, LINEAR, "float32", (7,)), Code.UNKNOWN_OP, "linear is a linear"),
        (Call(Op.LOOKUP, TABLE, "float32", (7, 1)), Code.UNKNOWN_OP, "flat ids"),
        (Call(Op.NORMS, UP, "float32"), Code.UNKNOWN_OP, "experts.up is a tensor"),
        (Call(Op.LEFT, PLAIN, "float32", (9, 5)), Code.BAD_SHAPE, "cannot multiply"),
        (
            Call(Op.GROUPED, UP, "float32", ROWS, view=GROUPED["view"]),
            Code.BAD_SHAPE,
            "one group of rows or more, not 0",
        ),
        (Call(Op.GROUPED, UP, "float32", ROWS, view=GROUPED["view"], groups=2), Code.BAD_SHAPE, "2 groups of rows"),
        (
            Call(Op.GROUPED, UP, "float32", ROWS, view=View((3, 8, 14), (112, 14, 1), 0), groups=3),
            Code.BAD_VIEW,
            "multiples of 16 bytes",
        ),
        (Call(Op.FORWARD, LINEAR, "float32", (5,), also=(CONV,)), Code.UNKNOWN_OP, "group of layers takes rows"),
        (Call(Op.FORWARD, LINEAR, "float32", ROWS, also=(UP,)), Code.UNKNOWN_LAYER, "it cannot be in a group"),
        (Call(Op.DGRAD, LINEAR, "float32", ROWS, also=(CONV,)), Code.BAD_SHAPE, "are not gradients of layers"),
        (Call(Op.READ, PLAIN, "float32", view=View((16, 8, 8), (8, 1, 0), 0)), Code.BAD_VIEW, "more than once"),
        (Call(Op.READ, PLAIN, "float32", view=View((2, 16, 8), (0, 8, 1), 0)), Code.BAD_VIEW, "more than once"),
        (Call(Op.READ, NUMBER["norm.weight"], "float32", view=View((9,), (0,), 0)), Code.BAD_VIEW, "more than once"),
        (Call(Op.READ, PLAIN, "float32", view=View((16, 8), (8, 1), 1)), Code.BAD_VIEW, "beyond"),
        (Call(Op.GROUPED, UP, "float32", (5, 9), **GROUPED), Code.BAD_SHAPE, "takes rows of 8"),
        (Call(Op.FORWARD, LINEAR, "float32", (65, 8)), Code.TOO_LARGE, "--max-rows"),
        (Call(Op.FORWARD, LINEAR, "float32", (2**40, 2**40)), Code.TOO_LARGE, "--max-call-bytes"),
        (Call(Op.LEFT, PLAIN, "float32", (8, 200), view=View((16, 8), (8, 1), 0)), Code.TOO_LARGE, "reply"),
        (Call(Op.PRODUCT, PLAIN, "float32", (5, 8), view=View((8, 16), (1, 8), 1)), Code.BAD_VIEW, "beyond"),
        (Call(Op.PRODUCT, PLAIN, "float32", (5, 0), view=View((0, 16), (1, 8), 0)), Code.BAD_VIEW, "beyond"),
        (Call(Op.PRODUCT, PLAIN, "float32", (5, 1), view=View((), (), 0)), Code.BAD_VIEW, "dimensions"),
        (Call(Op.PRODUCT, PLAIN, "float32", (1, 8), view=View((8, 2**60), (0, 0), 0)), Code.BAD_VIEW, "exceeds"),
        (Call(Op.READ, PLAIN, "float32", view=View((2**62,) * 3, (0,) * 3, 0)), Code.BAD_VIEW, "exceeds"),
    ],
)
def test_wrong_calls_are_refused(call: Call, code: Code, message: str) -> None:
    with pytest.raises(CallError, match=message) as error:
        check(call, ())
    assert error.value.code is code


def rows_with(value: float, shape: tuple[int, ...] = ROWS) -> Tensor:
    rows = torch.randn(shape)
    rows.view(-1)[3] = value
    return rows


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "call",
    [
        Call(Op.FORWARD, LINEAR, "float32", ROWS),
        Call(Op.PRODUCT, PLAIN, "float32", (5, 16)),
        Call(Op.LEFT, PLAIN, "float32", (8, 5)),
    ],
)
def test_rows_that_are_not_finite_are_refused(call: Call, value: float) -> None:
    payload = (rows_with(value, call.shape),)
    with pytest.raises(CallError, match="NaN or infinity.*--non-finite pass") as error:
        check(call, payload)
    assert error.value.code is Code.NON_FINITE
    check(call, payload, Options(non_finite="pass"))


def test_gradients_may_be_infinite() -> None:
    """Loss scaling overflows now and then, and looks for infinities itself."""
    payload = (rows_with(float("inf")),)
    check(Call(Op.PRODUCT, PLAIN, "float32", ROWS, gradient=True, view=View((8, 16), (1, 8), 0)), payload)
    check(Call(Op.DGRAD, PLAIN, "float32", (5, 16)), (rows_with(float("nan"), (5, 16)),))


def test_a_sum_that_overflows_is_no_infinity() -> None:
    largest = torch.full(ROWS, torch.finfo(torch.float32).max)
    check(Call(Op.FORWARD, LINEAR, "float32", ROWS), (largest,))


@pytest.mark.parametrize("ids", [[0, 10], [-1, 3], [2**40, 0]])
def test_ids_beyond_the_embedding_are_refused(ids: list[int]) -> None:
    call = Call(Op.LOOKUP, TABLE, "float32", (2,))
    check(call, (torch.tensor([0, 9]),))
    with pytest.raises(CallError, match="between 0 and 9") as error:
        check(call, (torch.tensor(ids),))
    assert error.value.code is Code.BAD_SHAPE


@pytest.mark.parametrize("ends", [[3, 2, 5], [-1, 2, 5], [2, 3, 6]])
def test_group_ends_that_do_not_rise_within_the_rows_are_refused(ends: list[int]) -> None:
    call = Call(Op.GROUPED, UP, "float32", ROWS, **GROUPED)
    check(call, (torch.zeros(ROWS), torch.tensor([0, 2, 5], dtype=torch.int32)))
    with pytest.raises(CallError, match="group ends") as error:
        check(call, (torch.zeros(ROWS), torch.tensor(ends, dtype=torch.int32)))
    assert error.value.code is Code.BAD_SHAPE


def test_rows_of_no_group_may_hold_anything() -> None:
    call = Call(Op.GROUPED, UP, "float32", ROWS, **GROUPED)
    padded = torch.zeros(ROWS)
    padded[3:] = float("nan")
    check(call, (padded, torch.tensor([0, 2, 3], dtype=torch.int32)))


@pytest.mark.parametrize("call", [Call(Op.READ, LINEAR, "float32"), Call(Op.READ, TABLE, "float32")])
def test_reads_of_served_weights_need_permission(call: Call) -> None:
    with pytest.raises(CallError, match=r"not started with --allow-read") as error:
        check(call, (), Options())
    assert error.value.code is Code.READ_DENIED
    assert check(Call(Op.READ, NUMBER["norm.weight"], "float32"), (), Options()) == (8,)


def test_a_seed_counts_as_the_rows_that_it_stands_for() -> None:
    """For what a tenant may have under way; else 32 bytes could make the executor hold any number of rows."""
    store = Store(nn.Sequential(nn.Linear(64, 32)), integers=(8,))
    rows = Call(Op.FORWARD, 0, "int32", (1000, 64))
    plans = [
        make_plan(call, store, Options(integers=(8,))) for call in (rows, msgspec.structs.replace(rows, seeded=True))
    ]
    assert plans[0].held == plans[1].held == 1000 * (64 + 32) * 4
    assert plans[1].nbytes == 32


@pytest.mark.parametrize("number", [LINEAR, CONV])
def test_some_outputs_of_a_layer_come_with_their_bias(number: int) -> None:
    layer, x = STORE.manifest[number], torch.randn(5, 8)
    whole = Call(Op.FORWARD, number, "float32", (5, 8), bias=True)
    _, expected = computed(whole, (x,), check(whole))
    for begin, end in ((0, 16), (3, 9), (15, 16)):
        call = Call(Op.PRODUCT, number, "float32", (5, 8), bias=True, view=view_of_outputs(layer, begin, end))
        _, columns = computed(call, (x,), check(call))
        assert torch.allclose(columns, expected[:, begin:end], atol=1e-6) and columns.abs().min() > 0
