"""What a call costs is known before it is computed; the work of any is done in turns, and what tenants hold is bounded."""

from collections.abc import Iterator
from functools import cache
from itertools import islice
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from symbiosis.base.keystream import keystream
from symbiosis.errors import CallError, Code
from symbiosis.executor.call_kinds import HostCall
from symbiosis.executor.calls import cell_ops, price
from symbiosis.executor.calls.call_plan import WHOLE, CallPlan, make_plan
from symbiosis.executor.calls.cells import GRAINS, SMALL, boxes, leading
from symbiosis.executor.calls.price import grid_of
from symbiosis.executor.calls.validation import must_be_finite
from symbiosis.executor.compute import slices
from symbiosis.executor.compute.batch_runner import BatchRunner
from symbiosis.executor.compute.slices import Slices
from symbiosis.executor.options import Options
from symbiosis.executor.scheduling.batcher import Batcher
from symbiosis.executor.scheduling.costs import UNSEEN_S
from symbiosis.executor.scheduling.cutting import ALONE_S, FEWEST, LONG, TURN_S
from symbiosis.executor.scheduling.queue import Batch, Item, Slice
from symbiosis.executor.scheduling.rules import IMMEDIATE, OPPORTUNISTIC
from symbiosis.protocol import Call, Layer, Op, View
from symbiosis.transport.inproc import InprocPeer
from symbiosis.transport.tensors import TORCH_DTYPE, check_ids
from tests.frames import EXPERT, STACK, WEIGHT, G, K, N, payload_of, wide_calls, wide_store

STORE = wide_store()
NUMBER = {layer.name: number for number, layer in enumerate(STORE.manifest)}
LINEAR, PLAIN, CONV, EXPERTS = NUMBER["linear"], NUMBER["plain"], NUMBER["conv"], NUMBER["experts.up"]
OPTIONS = Options(allow_read=True, integers=(8, 16))


@cache
def engine_of_the_store() -> BatchRunner:
    """One for all: an engine measures formulas when it is made."""
    return BatchRunner(STORE, lambda *_: None, lambda *_: None)


def computed(call: Call, cuts: list[float], grain: int = 0) -> Tensor:
    """What the engine makes of it in turns, which end at these parts of all cells of this grain."""
    plan, payload = make_plan(call, STORE, OPTIONS), payload_of(call)
    out = torch.full(plan.shape, 99, dtype=TORCH_DTYPE[call.dtype])
    peer = InprocPeer()
    work = HostCall(peer, 1, call, payload, out, plan, must_be_finite(call, OPTIONS))
    item = Item(1, plan.key, plan.rows, 0, 0.0, work)
    engine, (_, cells) = engine_of_the_store(), plan.grains[min(grain, len(plan.grains) - 1)]
    ends = sorted({max(1, int(cut * cells)) for cut in cuts} | {cells})
    batch = Batch(plan.key, [Slice(item, 0, plan.rows)], 0.0, cells, grain=min(grain, len(plan.grains) - 1))
    with torch.no_grad():
        for batch.first, batch.last in zip([0, *ends], ends, strict=False):
            assert not engine.step(batch) < 0
            assert peer.replies.empty() == (batch.last < cells)
    answer = peer.replies.get_nowait()
    assert isinstance(answer, tuple) and answer[0].code is Code.OK, answer
    return out


@settings(max_examples=60, deadline=None)
@given(wide_calls(), st.lists(st.floats(0, 1), max_size=6), st.integers(0, len(GRAINS) - 1))
def test_what_is_computed_in_turns_is_what_is_computed_at_once(call: Call, cuts: list[float], grain: int) -> None:
    whole, in_turns = computed(call, []), computed(call, cuts, grain)
    # of these alone, parts may round differently
    if call.op in (Op.GROUPED, Op.NORMS) or (call.op is Op.LEFT and call.shape[-1] == 1):
        tolerance = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 2e-2, "float16": 2e-3}[call.dtype]
        torch.testing.assert_close(in_turns, whole, rtol=tolerance, atol=tolerance * 30)
    else:
        assert torch.equal(in_turns, whole)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int32", "int64"])
@pytest.mark.parametrize("op", [Op.FORWARD, Op.DGRAD])
def test_joined_calls_have_the_same_bits_in_turns(op: Op, dtype: str) -> None:
    """Of a group of two layers, in turns that begin in one of them and end in the other. A wrong call does the others no harm."""
    works, pieces = [], []
    for session, rows in enumerate((3, 1, 7, 5)):
        shape = (rows, K) if op is Op.FORWARD else (rows, 2 * N)
        call = Call(op, LINEAR, dtype, shape, bias=op is Op.FORWARD and dtype[:3] != "int", also=(CONV,))
        plan, (payload,) = make_plan(call, STORE, OPTIONS), payload_of(call)
        payload[0, 0] += session
        out = torch.full(plan.shape, 99, dtype=payload.dtype)
        works.append(HostCall(InprocPeer(), 1, call, (payload,), out, plan, finite=True))
        pieces.append(Slice(Item(session, plan.key, rows, 0, 0.0, works[-1]), 0, rows))
    engine, cells = engine_of_the_store(), plan.grains[0][1]
    with torch.no_grad():
        engine.step(Batch(plan.key, pieces, 0.0))
        whole = [work.out.clone() for work in works]
        if dtype[:3] != "int":
            works[1].payload[0][0, 0] = torch.inf
        ends = [cells // 3, cells // 3 + 1, cells]
        batch = Batch(plan.key, pieces, 0.0, cells)
        for work in works:
            work.out.fill_(99)
        for batch.first, batch.last in zip([0, *ends], ends, strict=False):
            for piece in pieces:
                piece.item.ran = 0
            engine.step(batch)
    wrong = [] if dtype[:3] == "int" else [1]
    for number, (work, expected) in enumerate(zip(works, whole, strict=True)):
        replies = [work.peer.replies.get_nowait() for _ in range(2)]
        assert work.peer.replies.empty(), "one reply, with the last turn"
        assert (replies[1][0].code is Code.OK) == (number not in wrong)
        assert number in wrong or torch.equal(work.out, expected)


def test_a_call_that_makes_joined_turns_fail_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls = engine_of_the_store(), [Call(Op.FORWARD, PLAIN, "float32", (rows, K)) for rows in (2, 3)]
    plans = [make_plan(call, STORE, OPTIONS) for call in calls]
    works = [
        HostCall(InprocPeer(), 1, call, payload_of(call), torch.empty(plan.shape), plan)
        for call, plan in zip(calls, plans, strict=True)
    ]
    pieces = [Slice(Item(number, plans[0].key, plan.rows, 0, 0.0, work), 0, plan.rows) for number, (plan, work) in enumerate(zip(plans, works, strict=True))]  # fmt: skip
    gather = Slices._inputs

    def broken(self: Slices, piece: Slice) -> list[Tensor]:
        if piece is pieces[0]:
            raise RuntimeError("it cannot be read")
        return gather(self, piece)

    monkeypatch.setattr(Slices, "_inputs", broken)
    cells = plans[0].grains[0][1]
    batch = Batch(plans[0].key, pieces, 0.0, cells)
    with torch.no_grad():
        for batch.first, batch.last in ((0, 5), (5, cells)):
            engine.step(batch)
    answers = [work.peer.replies.get_nowait() for work in works]
    assert [answer[0].code is Code.OK if isinstance(answer, tuple) else False for answer in answers] == [False, True]
    layer = STORE.weights[PLAIN]
    torch.testing.assert_close(works[1].out, works[1].payload[0] @ layer.t())


@pytest.mark.parametrize("seeded", [False, True])
def test_calls_that_cost_otherwise_have_a_cost_of_their_own(seeded: bool) -> None:
    calls = [Call(Op.FORWARD, PLAIN, "int32", (300, K), seeded=which) for which in (False, seeded)]
    plain, other = (make_plan(call, STORE, OPTIONS).key for call in calls)
    assert (plain == other) == (not seeded)


@pytest.mark.parametrize("call", [
    Call(Op.FORWARD, LINEAR, "int64", (1000, K), also=(CONV,), seeded=True),
    Call(Op.DGRAD, LINEAR, "int64", (1000, 2 * N), also=(CONV,), seeded=True),
])  # fmt: skip
def test_a_slice_grows_no_more_of_a_seed_than_its_rows(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    grown: list[int] = []

    def counted(key: bytes, shape: tuple[int, ...], dtype: torch.dtype, start: int = 0) -> Tensor:
        grown.append(prod(shape))
        return keystream(key, shape, dtype, start=start)

    monkeypatch.setattr(slices, "keystream", counted)
    plan, payload = make_plan(call, STORE, OPTIONS), payload_of(call)
    out = torch.empty(plan.shape, dtype=TORCH_DTYPE[call.dtype])
    item = Item(1, plan.key, plan.rows, 0, 0.0, HostCall(InprocPeer(), 1, call, payload, out, plan))
    inputs = engine_of_the_store().slices._inputs(Slice(item, 500, 564))
    assert sum(map(Tensor.numel, inputs)) == 64 * call.shape[1]
    assert sum(grown) <= (64 + 2 * len(grown)) * call.shape[1], "besides, one row at either end"
    whole = keystream(payload[0].numpy().tobytes(), call.shape, TORCH_DTYPE[call.dtype])
    parts = [whole] if call.op is Op.FORWARD else whole.view(2, 1000, N)
    assert all(torch.equal(mine, part[500:564]) for mine, part in zip(inputs, parts, strict=True))


def test_a_turn_looks_at_its_own_ids_and_a_wrong_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def counted(ids: Tensor, layer: Layer) -> None:
        looked.append(len(ids))
        check_ids(ids, layer)

    monkeypatch.setattr(cell_ops, "check_ids", counted)
    call = Call(Op.LOOKUP, NUMBER["embedding"], "float32", (3000,))
    computed(call, [0.25, 0.5])
    assert looked == [750, 750, 1500]
    plan, peer = make_plan(call, STORE, OPTIONS), InprocPeer()
    for wrong in (-1, 700, 2**40):
        ids = torch.zeros(3000, dtype=torch.int64)
        ids[1400] = wrong
        work = HostCall(peer, 1, call, (ids,), torch.empty(plan.shape), plan)
        for first, last in ((0, 1000), (1000, 2000), (2000, 3000)):
            piece = Slice(Item(1, plan.key, plan.rows, 0, 0.0, work), 0, plan.rows)
            engine_of_the_store().step(Batch(plan.key, [piece], 0.0, plan.grains[0][1], first, last))
        answer = peer.replies.get_nowait()
        assert isinstance(answer, tuple) and answer[0].code is Code.BAD_SHAPE


@pytest.mark.parametrize(
    ("shape", "sides"), [((7,), 1), ((7, SMALL), 1), ((7, SMALL + 1), 2), ((30, 20, 50, 40), 2), ((30, 20, 50, 41), 3)]
)
def test_what_is_copied_together_is_small(shape: tuple[int, ...], sides: int) -> None:
    assert leading(shape, GRAINS[0]) == shape[:sides]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_boxes_are_the_cells_between_two(grid: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, prod(grid)))
    last = data.draw(st.integers(first, prod(grid)))
    cells = torch.arange(prod(grid)).view(*grid)
    found = [cell for box in boxes(tuple(grid), first, last) for cell in cells[box].flatten().tolist()]
    assert found == list(range(first, last))


# ---------------------------------------------------------------- turns


def smallest_cell_s(plan: CallPlan, call: Call, pace: float) -> float:
    rows, cells = plan.grains[-1]
    return plan.multiplications * pace / cells * (min(1.0, rows / plan.rows) if call.by_rows else 1)


def turns_beside_small_calls(
    batcher: Batcher, neighbour: int, work: float, pace: float, small_s: float = 1e-4
) -> Iterator[tuple[Batch, float]]:
    """Run until so much is done, while a session makes one small call after another. Yield each turn of what is large, and how long it takes."""
    now = done = 0.0
    while done < 0.999 * work:
        batch = batcher.next_batch(now)
        assert batch is not None
        seconds = small_s
        if batch.key != "small":
            seconds = batch.price * pace * batch.share
            yield batch, seconds
            done += batch.price * batch.share
        now += seconds
        if batch.ends:
            batch.ran()
        batcher.done(batch, seconds, now)
        if batch.key == "small":
            batcher.add(Item(neighbour, "small", 1, 0, now, price=1))


@settings(max_examples=15, deadline=None)
@given(wide_calls(st.integers(1, 500)), st.floats(1e-10, 1e-8))
def test_a_turn_is_short_while_another_tenant_calls(call: Call, pace: float) -> None:
    """Whatever the call is: each turn takes about as long as it may, but for what a single cell takes."""
    plan = make_plan(call, STORE, OPTIONS)
    batcher, now = Batcher(OPPORTUNISTIC, max_rows=4096), 0.0
    batcher.costs._usual = pace
    for session, tenant in ((1, "large"), (2, "small")):
        batcher.join(session, tenant)
    batcher.add(Item(2, "small", 1, 0, now, price=1))
    small = batcher.next_batch(now)
    assert small is not None
    small.ran()
    batcher.done(small, 1e-4, now)
    batcher.add(
        Item(
            1, plan.key, plan.rows, 0, now, None, call.by_rows, plan.batchable, price=plan.multiplications, grains=plan.grains, kind=plan.kind,
            turns=plan.turns,
        )
    )  # fmt: skip
    cell_s = smallest_cell_s(plan, call, pace)
    done, used, waits = 0.0, {"small": 1e-4, "large": 0.0}, False
    while batch := batcher.next_batch(now):
        if batch.key == "small":
            batch.ran()
            batcher.done(batch, 1e-4, now)
            used["small"] += 1e-4
            waits = False
            continue
        assert not waits or used["large"] <= used["small"], (
            "its turn comes after the other's, unless that has used less"
        )
        seconds = batch.price * pace * batch.share
        assert seconds <= 2 * LONG * TURN_S + 2 * cell_s
        now += seconds
        used["large"] += seconds
        done += batch.price * batch.share
        if batch.ends:
            batch.ran()
        batcher.done(batch, seconds, now)
        if not waits:
            batcher.add(Item(2, "small", 1, 0, now, price=1))
            waits = True
    assert done == pytest.approx(plan.multiplications) and batcher.idle


@settings(max_examples=20, deadline=None)
@given(wide_calls(st.integers(1, 500)), st.floats(1e-11, UNSEEN_S), st.floats(1e-11, 1e-9))
def test_the_first_turn_is_short_though_nothing_of_its_kind_has_run(call: Call, pace: float, usual: float) -> None:
    """Whatever other calls have cost. What is learned of this one then makes the next ones longer, by and by."""
    plan = make_plan(call, STORE, OPTIONS)
    batcher, now = Batcher(OPPORTUNISTIC, max_rows=4096), 0.0
    batcher.costs._usual = usual
    for session, tenant in ((1, "large"), (2, "small")):
        batcher.join(session, tenant)
    small = Item(2, "small", 1, 0, now, price=1)
    large = Item(
        1, plan.key, plan.rows, 0, now, None, call.by_rows, plan.batchable, price=plan.multiplications, grains=plan.grains, kind=plan.kind, turns=plan.turns,
    )  # fmt: skip
    batcher.add(small)
    batcher.add(large)
    cell_s = smallest_cell_s(plan, call, pace)
    # the tenants get the same time, so beside a call of minutes small ones would be millions if they were not a little longer
    small_s = min(max(1e-4, plan.multiplications * pace / 2_000), TURN_S / 2)
    for _, seconds in turns_beside_small_calls(batcher, 2, plan.multiplications, pace, small_s):
        assert seconds <= 2 * LONG * TURN_S + 2 * cell_s


WIDE = Call(Op.DGRAD, 0, "bfloat16", (48, 14_336))
WIDE_OUT = 4_096


@pytest.mark.parametrize("known", [False, True], ids=["unseen", "measured"])
@pytest.mark.parametrize("pace", [2e-11, 4e-10, 7.7e-9], ids=["fast", "slow", "slowest"])
def test_a_turn_through_a_wide_matrix_is_short_whatever_its_dtype_costs(pace: float, known: bool) -> None:
    """A cell of 64 rows by 256 columns has 2.3e8 multiplications, which some dtypes take two seconds for."""
    grids = [grid_of(WIDE, (48, WIDE_OUT), [WIDE_OUT], grain) for grain in GRAINS]
    grains = tuple((grain.rows, prod(grid)) for grain, grid in zip(GRAINS, grids, strict=True))
    batcher, now = Batcher(OPPORTUNISTIC, max_rows=4096), 0.0
    batcher.costs.measured({"wide": pace} if known else {}, FEWEST)
    for session, tenant in ((1, "large"), (2, "small")):
        batcher.join(session, tenant)
    work = prod(WIDE.shape) * WIDE_OUT
    batcher.add(Item(2, "small", 1, 0, now, price=1))
    batcher.add(Item(1, "wide", 48, 0, now, price=work, grains=grains, kind="wide"))
    turns = []
    for batch, seconds in islice(turns_beside_small_calls(batcher, 2, work, pace), 500):
        assert batch.rows >= FEWEST or pace > 1e-9 or not known, "fewer rows round differently in what CPUs are fast at"
        turns.append(seconds)
    assert max(turns) <= LONG * TURN_S, "for so long a neighbour waits"
    assert len(turns) < 3 * sum(turns) / TURN_S + 20, "nor are they much shorter than they may be"


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("pace", [2e-11, 1e-10], ids=["fast", "slow"])
def test_a_joined_product_is_cut_as_one_call_is(pace: float, rows: int) -> None:
    """While somebody calls who has no part in it. Four callers of 16 rows kept a neighbour waiting for a tenth of a second."""
    grids = [grid_of(WIDE, (rows, WIDE_OUT), [WIDE_OUT], grain) for grain in GRAINS]
    grains = tuple((grain.rows, prod(grid)) for grain, grid in zip(GRAINS, grids, strict=True))
    batcher, now, callers = Batcher(OPPORTUNISTIC, max_rows=4096), 0.0, range(1, 5)
    batcher.costs.measured({"wide": pace}, FEWEST)
    for session in (0, *callers):
        batcher.join(session, f"tenant-{session}")
    work = 14_336 * WIDE_OUT * rows
    items = [Item(session, "wide", rows, 0, now, price=work, grains=grains, kind="wide") for session in callers]
    for item in items:
        batcher.add(item)
    batcher.add(Item(0, "small", 1, 0, now, price=1))
    turns = [(seconds, len(batch.slices)) for batch, seconds in turns_beside_small_calls(batcher, 0, 4 * work, pace)]
    longest, joined = map(max, zip(*turns, strict=True))
    assert longest <= 2 * LONG * TURN_S, "for so long a neighbour waits"
    assert all(item.finished for item in items) and joined == (1 if rows == 16 and pace == 1e-10 else 4)


def test_joined_turns_go_on_without_those_who_leave() -> None:
    batcher, now = Batcher(OPPORTUNISTIC), 0.0
    for session in (1, 2, 3):
        batcher.join(session)
    batcher.costs.measured({"wide": 1e-10}, FEWEST)
    batcher.add(Item(3, "small", 1, 0, now, price=1))
    for session in (1, 2):
        batcher.add(Item(session, "wide", 1, 0, now, price=10**8, grains=((64, 100),), kind="wide"))
    turns = []
    for _ in range(200):
        if (batch := batcher.next_batch(now)) is None:
            break
        now += 1e-4
        turns.append((batch.key, len(batch.slices), batch.ends))
        if batch.ends:
            batch.ran()
        batcher.done(batch, 1e-4, now)
        if turns[-1] == ("wide", 2, False):
            batcher.leave(1)
    assert turns[-1] == ("wide", 2, True) and batcher.idle and not batcher.callers.sessions[2].pending


def test_what_every_cpu_is_fast_at_is_not_cut_into_values() -> None:
    """A product of float64 that was measured while the machine was busy was, and had other bits."""
    finest = {
        dtype: make_plan(Call(Op.FORWARD, PLAIN, dtype, (4, K)), STORE, OPTIONS).grains[-1][0] for dtype in TORCH_DTYPE if dtype != "uint8"
    }  # fmt: skip
    assert finest == {"float32": 8, "float64": 8, "bfloat16": 1, "float16": 1, "int32": 1, "int64": 1}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_who_is_alone_are_cut_so_that_nobody_waits_for_minutes(dtype: str) -> None:
    """Whole rows are taken as long as 64 of them take no long time: an unsplit layer's bits are theirs."""
    pace = {"float32": 2e-11, "bfloat16": 7.7e-9}[dtype]
    grains = tuple((grain.rows, prod(grid_of(WIDE, (512, WIDE_OUT), [WIDE_OUT], grain))) for grain in GRAINS)
    batcher, now = Batcher(OPPORTUNISTIC, max_rows=4096), 0.0
    batcher.costs.measured({dtype: pace}, FEWEST)
    batcher.join(1, "one")
    batcher.add(Item(1, "wide", 512, 0, now, price=512 * 14_336 * WIDE_OUT, grains=grains, kind=dtype))
    for _ in range(100):
        if (batch := batcher.next_batch(now)) is None:
            break
        seconds = batch.price * pace * batch.share
        assert seconds <= LONG * ALONE_S and (batch.share == 1.0 or dtype == "bfloat16")
        now += seconds
        if batch.ends:
            batch.ran()
        batcher.done(batch, seconds, now)


def test_no_slice_leaves_few_rows_by_themselves() -> None:
    """CPUs multiply few rows by another formula, which rounds differently."""
    for rows in (513, 519, 130, 4097, 71):
        for slice_s in (6e-5, 4e-5, 1e-5):  # of a row; eight of them fit into a turn
            batcher, now, sizes = Batcher(IMMEDIATE, max_rows=4096), 0.0, []
            batcher.costs.measured({"kind": slice_s / (1 << 20)}, FEWEST)
            batcher.join(1, "trainer")
            batcher.join(2, "other")
            batcher.add(Item(2, "other", 1, 0, now))
            batcher.add(Item(1, "k", rows, 2, now, grains=((64, 1), (8, 1), (1, 1)), kind="kind", price=rows << 20))
            while (batch := batcher.next_batch(now)) is not None:
                seconds = batch.rows * slice_s
                now += seconds
                batch.ran()
                batcher.done(batch, seconds, now)
                if batch.key == "k":
                    sizes.append(batch.rows)
            assert sum(sizes) == rows and min(sizes) >= FEWEST, (rows, sizes)


def test_what_a_session_that_left_had_begun_is_not_computed_further() -> None:
    batcher = Batcher(IMMEDIATE)
    batcher.join(1)
    batcher.add(Item(1, "read", 1, 0, 0.0, None, False, False, price=100, grains=((1, 10),), turns=5))
    batch = batcher.next_batch(0.0)
    assert batch is not None and (batch.first, batch.last, batch.ends) == (0, 2, False)
    batcher.done(batch, 1.0, 1.0)
    assert len(batcher) == 1
    batcher.leave(1)
    assert batcher.idle and batcher.next_batch(2.0) is None
    batcher.done(batch, 1.0, 3.0)
    assert batcher.idle, "nor if it was computed just then"


def test_sessions_without_keys_do_not_wait_for_large_calls_of_others_either() -> None:
    batcher, now = Batcher(OPPORTUNISTIC, max_rows=4096), 0.0
    for session in (1, 2):
        batcher.join(session)
    sizes = []
    for _ in range(4):
        batcher.add(Item(2, "small", 1, 0, now, price=1000))
        batcher.add(Item(1, "large", 100_000, 0, now, price=100_000 << 14))
        for _ in range(4):
            batch = batcher.next_batch(now)
            assert batch is not None
            seconds = 1e-4 if batch.key == "small" else batch.rows * 10e-6
            now += seconds
            batch.ran()
            batcher.done(batch, seconds, now)
            sizes += [batch.rows] if batch.key == "large" else []
    assert set(sizes[1:]) <= {200, 64} | set(range(64, 401)), "2 ms at 10 us a row"


def test_a_tenant_that_says_its_calls_are_urgent_has_no_more_turns_than_others() -> None:
    batcher, now = Batcher(IMMEDIATE), 0.0
    batcher.join(1, "urgent")
    batcher.join(2, "modest")
    turns = []
    for _ in range(200):
        waiting = {item.session for queue in batcher._queues.values() for item in queue}
        for session, priority in ((1, 0), (2, 2)):
            if session not in waiting:
                batcher.add(Item(session, session, 1, priority, now))
        batch = batcher.next_batch(now)
        assert batch is not None
        turns.append(batch.key)
        now += 5e-3
        batch.ran()
        batcher.done(batch, 5e-3, now)
    assert turns.count(2) >= 80


# ---------------------------------------------------------------- the price


def test_views_of_which_elements_come_more_than_once_are_no_larger_than_the_tensor() -> None:
    """A call of some bytes would be multiplied by a matrix of any size."""
    for call in (
        Call(Op.PRODUCT, LINEAR, "float32", (1, 10_000), view=View((10_000, 10_000), (0, 1), 0)),
        Call(Op.PRODUCT, LINEAR, "float32", (1, 10_000), view=View((10_000, 100), (1, 1), 0)),
        Call(Op.LEFT, LINEAR, "float32", (1, 1), view=View((200_000, 1), (0, 1), 0)),
        Call(Op.GROUPED, EXPERTS, "float32", (8, 160), groups=60, view=View((60, 160, 160), (1, 0, 1), 0)),
    ):
        with pytest.raises(CallError, match="more than once") as refused:
            make_plan(call, STORE, OPTIONS)
        assert refused.value.code is Code.BAD_VIEW
    assert make_plan(Call(Op.PRODUCT, EXPERTS, "float32", (G, 2, K), view=STACK), STORE, OPTIONS).shape == (G, 2, N)
    expanded = Call(Op.PRODUCT, LINEAR, "float32", (1, 8), view=View((8, N), (1, 0), 0))
    # the product, and a copy of what it is with
    assert make_plan(expanded, STORE, OPTIONS).multiplications >= 2 * 8 * N


def test_a_call_has_as_many_multiplications_as_it_may() -> None:
    call = Call(Op.FORWARD, LINEAR, "float32", (100, K))
    price = make_plan(call, STORE, OPTIONS).multiplications
    assert price == 100 * (K * N + K + N)
    make_plan(call, STORE, Options(max_call_multiplications=price))
    with pytest.raises(CallError, match="--max-call-multiplications") as refused:
        make_plan(call, STORE, Options(max_call_multiplications=price - 1))
    assert refused.value.code is Code.TOO_LARGE


T, M, V = 100, N + 200, 700  # rows, the width of `plain`, and the ids of the embedding
GROUPS = 3 * N + 200  # the widths of `linear`, `plain` and `conv`
HALF = View((G, K, N), (K * N, N, 1), 0)
# multiplications, bytes held and bytes of scratch: a product, moving the rows and the reply, converting matrices; rows beside their
# aligned copy and the look for infinities, and the reply, twice for a group
PRICED = {
    "a layer": (
        Call(Op.FORWARD, LINEAR, "float32", (T, K)),
        T * K * N + T * K + T * N, 4 * T * (K + N), 9 * T * K + 4 * T * N,
    ),
    "a group in half precision": (
        Call(Op.FORWARD, LINEAR, "bfloat16", (T, K), also=(PLAIN, CONV)),
        T * K * GROUPS + T * (K + GROUPS) + K * GROUPS, 2 * T * (K + GROUPS), 2 * K * GROUPS + 5 * T * K + 4 * T * GROUPS,
    ),
    "its gradient": (
        Call(Op.DGRAD, LINEAR, "float32", (T, 2 * N), also=(CONV,)),
        2 * T * K * N + T * (2 * N + K), 4 * T * (2 * N + K), 9 * T * 2 * N + 8 * T * K,
    ),
    "integers of 32 bits: four products of bytes": (
        Call(Op.FORWARD, PLAIN, "int32", (T, K)),
        4 * T * K * M + T * (K + M) + K * M, 4 * T * (K + M), 48 * T * K + 60 * T * M + 8 * K * M,
    ),
    "grown integers of 64 bits: eight and seven": (
        Call(Op.FORWARD, LINEAR, "int64", (T, K), also=(CONV,), seeded=True),
        15 * T * K * 2 * N + T * K * (1 + 8) + T * 2 * N + K * 2 * N, 8 * T * (K + 2 * N),
        32 * T + 16 * T * K + 96 * T * K + 120 * T * 2 * N + 8 * K * 2 * N,
    ),
    "a view that lies row by row": (
        Call(Op.PRODUCT, EXPERTS, "float32", (T, K), view=EXPERT),
        T * K * N + T * K + T * N, 4 * T * (K + N), 9 * T * K + 4 * T * N,
    ),
    "matrices in half precision": (
        Call(Op.PRODUCT, EXPERTS, "float16", (G, T, K), view=HALF),
        G * T * K * N + G * T * (K + N) + G * K * N, 2 * G * T * (K + N), 2 * G * K * N + 5 * G * T * K + 2 * G * T * N,
    ),
    "one expert, expanded": (
        Call(Op.PRODUCT, EXPERTS, "float16", (G, T, K), view=STACK),
        G * T * K * N + G * T * (K + N) + K * N, 2 * G * T * (K + N), 2 * K * N + 5 * G * T * K + 2 * G * T * N,
    ),
    "columns": (
        Call(Op.LEFT, LINEAR, "float32", (K, T), view=WEIGHT),
        N * T * K + K * T + N * T, 4 * T * (K + N), 9 * K * T + 4 * N * T,
    ),
    "rows by group": (
        Call(Op.GROUPED, EXPERTS, "float32", (T, K), groups=G),
        T * K * N + T * (K + N) + 4096 * G, 4 * T * (K + N) + 4 * G, 9 * T * K + 4 * T * N,
    ),
    "ids": (Call(Op.LOOKUP, NUMBER["embedding"], "bfloat16", (T,)), 8 * T * K, 8 * T + 2 * T * K, 4 * T * K),
    "norms": (Call(Op.NORMS, LINEAR, "float64"), K * N, 8 * N, 2 * 8 * K * N),
    "reading": (Call(Op.READ, LINEAR, "float16"), 8 * K * N, 2 * K * N, 0),
    "an echo": (Call(Op.ECHO, 0, "float64", (T, 7)), 8 * 7 * T, 2 * 8 * 7 * T, 0),
    "an empty echo": (Call(Op.ECHO, 0, "float64", (0, 7)), 1, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize(("call", "multiplications", "held", "scratch"), PRICED.values(), ids=PRICED)
def test_what_a_call_costs(call: Call, multiplications: int, held: int, scratch: int) -> None:
    plan = make_plan(call, STORE, OPTIONS)
    assert (plan.multiplications, plan.held, plan.scratch, plan.turns) == (multiplications, held, scratch, 1)


# rows, whether it may be batched, bytes sent, and the cells of each grain
PLANNED = {
    "a layer": (Call(Op.FORWARD, LINEAR, "float32", (T, K)), T, True, 4 * T * (K + N), ((N // 16,),) * 2),
    "a short one, which is cut if it is joined": (
        Call(Op.FORWARD, LINEAR, "float32", (1, K)), 1, True, 4 * (K + N), ((N // 16,),) * 2,
    ),
    "its gradient": (Call(Op.DGRAD, LINEAR, "float32", (T, N)), T, True, 4 * T * (K + N), ((K // 16,),) * 2),
    "columns": (
        Call(Op.LEFT, LINEAR, "float32", (K, T), view=WEIGHT), K, False, 4 * T * (K + N), ((N // 64, T // 16), (N // 8, T // 16)),
    ),
    "no columns": (Call(Op.LEFT, LINEAR, "float32", (K, 0), view=WEIGHT), K, False, 0, WHOLE),
    "ids": (Call(Op.LOOKUP, NUMBER["embedding"], "bfloat16", (T,)), T, True, 8 * T + 2 * T * K, WHOLE),
    "norms": (Call(Op.NORMS, LINEAR, "float64"), 1, False, 8 * N, ((N,),) * 2),
    "a short echo": (Call(Op.ECHO, 0, "float64", (T, 7)), T, False, 2 * 8 * 7 * T, WHOLE),
    "a long echo": (Call(Op.ECHO, 0, "float64", (T, 700)), T, False, 2 * 8 * 700 * T, ((700 * T,),) * 2),
    "an empty echo": (Call(Op.ECHO, 0, "float64", (0, 7)), 1, False, 0, WHOLE),
}  # fmt: skip


@pytest.mark.parametrize(("call", "rows", "batchable", "moved", "grids"), PLANNED.values(), ids=PLANNED)
def test_what_may_join_a_call_and_how_it_is_cut(
    call: Call, rows: int, batchable: bool, moved: int, grids: tuple[tuple[int, ...], ...]
) -> None:
    plan = make_plan(call, STORE, OPTIONS)
    assert (plan.rows, plan.batchable, plan.moved, plan.grids) == (rows, batchable, moved, grids)
    assert [cells for _, cells in plan.grains] == [prod(grid) for grid in grids]


@pytest.mark.parametrize("view", [
    View((3, 5), (5, 1), 0), View((3, 5), (9, 1), 0), View((5, 3), (1, 5), 0), View((5, 3), (1, 9), 0),
])  # fmt: skip
@pytest.mark.parametrize("copied", [False, True])
def test_a_matrix_is_copied_if_neither_its_rows_nor_its_columns_lie_together(view: View, copied: bool) -> None:
    """Rows and columns of two values apart are copied. So are rows that overlap, which a view of a weight may not have."""
    size, stride = view.size, tuple(2 * each if copied else each for each in view.stride)
    call = Call(Op.PRODUCT, EXPERTS, "float32", (4, size[0]), view=View(size, stride, 0))
    moved = 4 * sum(size)
    assert make_plan(call, STORE, OPTIONS).multiplications == 4 * prod(size) + moved + copied * prod(size)
    matrix = torch.empty(100).as_strided((3, 5), (4, 1))
    assert not price._lies_well(matrix) and not price._lies_well(matrix.T)


def test_few_rows_of_a_product_run_together_and_need_little() -> None:
    """Of 100 rows 25 run together: a quarter of what is needed, but for the matrices."""
    options = Options(integers=(8, 16), max_batch_tokens=25)
    rows = make_plan(Call(Op.FORWARD, LINEAR, "float32", (T, K)), STORE, options)
    assert (rows.scratch, rows.turns) == (9 * 25 * K + 4 * 25 * N, 1)
    one_at_a_time = Options(max_batch_tokens=1)
    assert make_plan(Call(Op.FORWARD, LINEAR, "float32", (1, K)), STORE, one_at_a_time).scratch == 9 * K + 4 * N
    seeded = Call(Op.FORWARD, LINEAR, "int64", (T, K), seeded=True)
    grown = 32 * 25 + 16 * 25 * K
    assert make_plan(seeded, STORE, options).scratch == grown + 96 * 25 * K + 120 * 25 * N + 8 * K * N
    columns = make_plan(Call(Op.LEFT, LINEAR, "float32", (K, T), view=WEIGHT), STORE, options)
    assert columns.scratch * columns.turns >= 9 * K * T + 4 * N * T, "which is not cut by rows"


def test_a_call_is_cut_into_as_many_turns_as_its_work_and_its_scratch_need(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = K * M  # the matrix of most values: a turn has as many multiplications as `max_batch_tokens` rows by it
    call = Call(Op.LEFT, LINEAR, "float32", (K, T), view=WEIGHT)
    work, scratch = N * T * K + K * T + N * T, 9 * K * T + 4 * N * T

    def price_with(tokens: int, cells: int = 1000) -> tuple[int, int]:
        found = price.price_of(call, (N, T), cells, STORE, Options(max_batch_tokens=tokens))
        return found.turns, found.scratch

    for tokens in (10, 33, 64):
        turns = -(-work // (tokens * largest))
        assert turns > 1 and price_with(tokens) == (turns, -(-scratch // turns))
    assert price_with(10, cells=3)[0] == 3 and price_with(4096) == (1, scratch)
    for most, turns in ((scratch, 1), (scratch - 1, 2), (scratch // 4, 4)):
        monkeypatch.setattr(price, "MOST_SCRATCH", most)
        assert price_with(4096) == (turns, -(-scratch // turns))
    assert price.price_of(call, (N, T), 0, STORE, Options()).turns == 1
    by_rows = Call(Op.FORWARD, LINEAR, "float32", (T, K))
    monkeypatch.undo()
    assert (
        price.MOST_SCRATCH == 2**30
        and price.price_of(by_rows, (T, N), 99, STORE, Options(max_batch_tokens=1)).turns == 1
    )
