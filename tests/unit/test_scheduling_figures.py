"""The figures of the executor's scheduling, one by one: what is counted, learned, ranked, cut and waited for."""

from math import inf, isclose

import pytest

from symbiosis.executor.scheduling.arrival_model import KEYS_KEPT, ArrivalModel, Due, Habits, note, observe
from symbiosis.executor.scheduling.batcher import Batcher
from symbiosis.executor.scheduling.callers import ALONE_S, CREDIT_S
from symbiosis.executor.scheduling.costs import READING, UNSEEN_ROW_S, UNSEEN_S, USUAL_S, Costs
from symbiosis.executor.scheduling.cutting import TOGETHER, TURN_S
from symbiosis.executor.scheduling.queue import Batch, Item, Queues, Slice
from symbiosis.executor.scheduling.ranking import AGING_S, SLACK_S
from symbiosis.executor.scheduling.rules import BATCH_BELOW, IMMEDIATE, LOCKSTEP, OPPORTUNISTIC, Policy, Rules
from symbiosis.executor.scheduling.tenant_use import ACTIVE_S, TenantUse
from symbiosis.executor.scheduling.waiting import Awaited, _worth_waiting


def item(
    session: int = 1, rows: int = 1, arrived: float = 0.0, key: str = "a", priority: int = 1, **more: object
) -> Item:
    return Item(session, key, rows, priority, arrived, **more)  # type: ignore[arg-type]


def joined(policy: Policy, *tenants: str | None, **options: object) -> Batcher:
    """A batcher with sessions 1, 2, ... of these tenants."""
    batcher = Batcher(policy, **options)  # type: ignore[arg-type]
    for session, tenant in enumerate(tenants, 1):
        batcher.join(session, tenant)
    return batcher


def run(batcher: Batcher, now: float, seconds: float = 0.0, ends: float | None = None) -> list[tuple[int, int, int]]:
    """Run the next batch. Return the session and the rows of each of its slices, in their order."""
    if (batch := batcher.next_batch(now)) is None:
        return []
    if batch.ends:
        batch.ran()
    batcher.done(batch, seconds, now if ends is None else ends)
    return [(piece.item.session, piece.start, piece.stop) for piece in batch.slices]


# ---------------------------------------------------------------- queues and batches


def test_a_queue_counts_its_rows_and_what_stands_apart() -> None:
    queues, first, large, last = Queues(), item(rows=5), item(rows=300, whole=False), item(rows=7)
    for each in (first, large, last):
        queues.put(each)
    queue = queues["a"]
    assert (queue.rows, queue.apart) == (312, 1)
    queue.cut(large, 100)
    assert (queue.rows, queue.apart, large.start, large.left) == (212, 1, 100, 200)
    queue.cut(last, 2)
    assert (queue.rows, queue.apart, last.whole) == (210, 2, False), "one that was cut stands apart"
    queue.cut(first, 5)
    assert (queue.rows, queue.apart, first.whole, first.left) == (205, 2, True, 0), "one that is taken whole does not"
    queue.drop(large)
    assert (queue.rows, queue.apart, list(queue)) == (5, 1, [first, last])
    queue.drop(first)
    assert (queue.rows, queue.apart, list(queue)) == (5, 1, [last])
    queues.put(item(rows=9, start=2))
    assert queue.rows == 12, "what was taken before does not count"


def test_no_queue_is_empty() -> None:
    queues, a, b, other = Queues(), item(), item(), item(key="b")
    for each in (a, b, other):
        queues.put(each)
    assert queues.count() == 3 and [len(queue) for queue in queues.values()] == [2, 1]
    queues.remove(a)
    queues.remove(a)
    queues.remove(other)
    assert list(queues) == ["a"] and queues.count() == 1
    queues.remove(b)
    assert not queues and queues.count() == 0


def test_a_batch_says_what_of_it_runs() -> None:
    batch = Batch("a", [Slice(item(rows=10, price=500), 2, 6), Slice(item(rows=4, price=8), 0, 4)], 0.0, 10, 2, 5)
    assert (batch.rows, batch.price, batch.share, batch.ends) == (8, 208.0, 0.3, False)
    batch.first, batch.last = 5, 10
    assert (batch.share, batch.ends) == (0.5, True)
    assert [piece.last for piece in batch.slices] == [False, True]
    batch.ran()
    assert [(piece.item.ran, piece.item.finished) for piece in batch.slices] == [(4, False), (4, True)]
    whole = Batch("a", [Slice(item(), 0, 1)], 0.0)
    assert (whole.cells, whole.share, whole.ends, whole.seconds, whole.prepared_s) == (1, 1.0, True, 0, 0)
    assert whole.grain == whole.first == 0


def test_a_call_of_which_nothing_else_is_said() -> None:
    call = Item(1, "a", 2, 3, 4.0)
    assert (call.divisible, call.batchable, call.whole, call.work, call.kind) == (True, True, True, None, None)
    assert (call.calls, call.turns, call.start, call.ran, call.price, call.grains) == (1, 1, 0, 0, 0, ((64, 1),))
    assert (call.left, call.finished) == (2, False)


# ---------------------------------------------------------------- what is counted


def test_a_batcher_begins_with_these_rules() -> None:
    assert Batcher(OPPORTUNISTIC).rules == Rules(OPPORTUNISTIC, 0.0, 4096, inf, False, 1.0, 1.5, 256, 1.0)
    assert Batcher(LOCKSTEP, 1.0, 2, 3.0, True, 4.0, 5.0).rules == Rules(IMMEDIATE, 1.0, 2, 3.0, True, 4.0, 5.0)


def test_what_waits_and_what_has_begun_is_counted() -> None:
    batcher = joined(IMMEDIATE, None, None)
    assert (len(batcher), batcher.idle, batcher.wake_at(), batcher.next_batch(0.0)) == (0, True, inf, None)
    for session in (1, 2):
        batcher.add(item(session, key="read", divisible=False, batchable=False, grains=((1, 10),), turns=5))
    assert (len(batcher), batcher.idle) == (2, False)
    batch = batcher.next_batch(0.0)
    assert batch is not None and (batch.first, batch.last) == (0, 2) and (len(batcher), batcher.idle) == (1, False)
    batcher.done(batch, 1.0, 1.0)
    assert (len(batcher), batch.seconds) == (2, 1.0)
    assert [each.session for each in batcher.leave(2)] == [2] and (len(batcher), batcher.idle) == (1, False)
    turns = [(batch.first, batch.last)]
    while (turn := batcher.next_batch(1.0)) is not None:
        turns.append((turn.first, turn.last))
        if turn.ends:
            turn.ran()
        batcher.done(turn, 0.5, 1.0)
    assert turns == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)] and batch.seconds == 3.0 and batcher.idle


def test_a_session_is_alone_only_once_it_was_for_a_while() -> None:
    batcher = joined(OPPORTUNISTIC, None, None)
    assert not batcher.alone(1, 0.0) and batcher.alone(1, ALONE_S)
    batcher.went("a", [(1, 1000.0, 2), (2, 1000.0, 6)], 1000.0, 0.8, 1001.0)
    assert not batcher.alone(1, 1002.0), "others were there"
    used = {number: batcher.callers.sessions[number] for number in (1, 2)}
    assert [used[number].used for number in (1, 2)] == pytest.approx([0.2, 0.6]) and batcher.costs.product.get(
        "a", 0.0
    ) == 0.8
    assert all((each.last_key, each.replied, each.served) == ("a", 1001.0, 1000.0) for each in used.values())
    batcher.add(item(2, arrived=1003.0))
    assert not batcher.alone(1, 1009.0), "a call waits"
    assert joined(IMMEDIATE, None).alone(1, 0.0) and not joined(OPPORTUNISTIC, None).alone(1, 1000.0), (
        "nobody knows of others"
    )
    batcher = joined(IMMEDIATE, None, None)
    batcher.add(item(2, key="read", divisible=False, batchable=False, grains=((1, 10),), turns=5))
    run(batcher, 0.0)
    assert not batcher.alone(1, 0.0), "a product has begun"


def test_who_is_away_is_not_waited_for() -> None:
    batcher = joined(LOCKSTEP, None, None)
    for session in (1, 2):
        batcher.add(item(session))
    assert run(batcher, 0.0) == [(1, 0, 1), (2, 0, 1)] and batcher.callers.live.keys() == {1, 2}
    batcher.unseen(2)
    assert batcher.callers.sessions[2].last_key is None and batcher.callers.live.keys() == {1, 2}
    batcher.waiting.awaited = Awaited("a", 2, inf)
    batcher.away(2)
    assert batcher.callers.live.keys() == {1} and batcher.waiting.awaited is None
    batcher.waiting.awaited = Awaited("a", 2, inf)
    batcher.away(2)
    assert batcher.waiting.awaited is not None, "who was away before changes nothing"
    batcher.add(item(1, arrived=1.0))
    assert run(batcher, 1.0) == [(1, 0, 1)]


def test_seconds_are_shared_by_rows() -> None:
    batcher = joined(OPPORTUNISTIC, "x", "x", "y")
    for session, rows in ((1, 1), (2, 3), (3, 6)):
        batcher.add(item(session, rows))
    assert run(batcher, 0.0, 2.0) == [(3, 0, 6), (1, 0, 1), (2, 0, 3)], "who has the fewest calls is answered first"
    sessions = batcher.callers.sessions
    assert [sessions[n].used for n in (1, 2, 3)] == pytest.approx([0.2, 0.6, 1.2])
    assert [sessions[n].tenant.used for n in (1, 2, 3)] == pytest.approx([0.8, 0.8, 1.2])
    batcher = joined(IMMEDIATE, None)
    batcher.add(item(1, 1))
    run(batcher, 0.0, 2.0)
    assert batcher.callers.sessions[1].used == 2.0


@pytest.mark.parametrize(
    ("call", "whole"),
    [
        (item(rows=BATCH_BELOW - 1), True),
        (item(rows=BATCH_BELOW), False),
        (item(batchable=False), False),
        (item(kind="slow"), False),
        (item(kind="quick"), True),
    ],
)
def test_small_calls_of_quick_kinds_are_joined_as_they_are(call: Item, whole: bool) -> None:
    batcher = joined(OPPORTUNISTIC, None)
    batcher.costs.measured({"slow": 6e-10, "quick": 5e-10}, 64)
    batcher.add(call)
    assert call.whole is whole and batcher.costs.rounds == {}
    assert batcher.callers.live.keys() == ({1} if call.batchable else set())


def test_what_is_not_known_yet_takes_no_time() -> None:
    batcher = joined(IMMEDIATE, None)
    for key in ("a", "b"):
        batcher.add(item(key=key))
    session = batcher.callers.sessions[1]
    assert (session.at, session.answer_s) == ("a", 0.0)
    run(batcher, 0.0, 3.0)
    assert (session.at, session.answer_s) == ("b", 0.0)


def test_an_item_of_several_calls_is_a_round() -> None:
    batcher = joined(OPPORTUNISTIC, None, None, max_wait=0.01)
    batcher.add(item(calls=2, key="round"))
    assert batcher.costs.rounds == {"round": 2} and batcher.waiting.budget("round") == 0.02
    assert batcher.waiting.budget("other") == 0.01
    batcher.took("round", 4.0)
    batcher.took("round", 8.0)
    assert batcher.costs.product.get("round", 0.0) == 5.0 and batcher.costs.saved("round", 9.0) == 2.5
    assert batcher.costs.learn_product("round", 100, 7.0) == 5.0 == batcher.costs.product.get("round", 0.0)


def test_the_shortest_call_of_late_is_remembered() -> None:
    batcher = joined(OPPORTUNISTIC, "x")
    rhythm = batcher.callers.sessions[1]
    use = rhythm.tenant
    for seconds, now, brief, at in (
        (5.0, 0.0, 5.0, 0.0),
        (6.0, 1.0, 5.0, 0.0),
        (5.0, 1.0, 5.0, 1.0),
        (4.0, 1.5, 4.0, 1.5),
    ):
        batcher.callers.calls(rhythm, now, seconds)
        assert (use.brief, use.brief_at) == (brief, at)
    batcher.callers.calls(rhythm, 1.5 + ACTIVE_S, 9.0)
    assert use.brief == 4.0
    batcher.callers.calls(rhythm, 1.6 + ACTIVE_S, 9.0)
    assert (use.brief, use.brief_at) == (9.0, 1.6 + ACTIVE_S)


def test_idleness_earns_little_credit() -> None:
    batcher = joined(IMMEDIATE, "x", "y")
    for _ in range(3):
        batcher.add(item(1))
        run(batcher, 0.0, 1.0)
    batcher.add(item(1))
    run(batcher, 0.0)
    batcher.add(item(2))
    assert batcher.callers.sessions[2].tenant.used == pytest.approx(3.0 - CREDIT_S)
    assert batcher.callers.sessions[2].used == 3.0
    batcher.join(3, "z")
    assert batcher.callers.sessions[3].tenant.used == 3.0 == batcher.callers.sessions[3].used


# ---------------------------------------------------------------- what is learned


def test_a_rhythm_is_learned_from_calls() -> None:
    rhythm = ArrivalModel(TenantUse(), Habits(), Rules(OPPORTUNISTIC, max_wait=0.3, overdue=1.5), set())
    rhythm.learn("a", 1.0, 0.5)
    assert (rhythm.at, rhythm.next, rhythm.pause, rhythm.answer_s, rhythm.age) == ("a", None, inf, 0.5, 0)
    rhythm.answered("a", "a", 2.0, 0.5)
    rhythm.learn("b", 2.4, 0.5)
    assert rhythm.follows == {"a": "b"} and rhythm.gap == {"a": pytest.approx(0.4)} and rhythm.age == 1
    rhythm.answered("b", "b", 3.0, 0.5)
    rhythm.learn("a", 2.9, 0.7)
    assert rhythm.gap["b"] == 0.0, "it came before the answer"
    assert (rhythm.at, rhythm.next) == ("a", "b") and rhythm.pause == pytest.approx(0.4) and rhythm.comes
    rhythm.answered("a", "a", 4.0, 0.5)
    assert rhythm.due(9.0) == pytest.approx(Due(4.4, 4.6)), "half a pause late at most"
    rhythm.learn("b", 5.2, 0.5)
    assert rhythm.gap["a"] == pytest.approx(0.4 + (1.2 - 0.4) / 4)
    rhythm.answered("b", "a", 6.0, 0.5)
    rhythm.pending.append(item())
    assert rhythm.comes, "it waits for another call than that"
    assert rhythm.due(9.0) == pytest.approx(Due(9.0 + 0.5 + 0.6, 9.0 + 0.5 + 0.6 + 0.3)), (
        "while it waits: its next but one"
    )
    assert rhythm.ring() == {"a": 0, "b": 1} and observe({}, "a", 3.0) == 3.0 and observe({"a": 4.0}, "a", 8.0) == 5.0


def test_a_table_begins_anew_when_a_client_makes_ever_new_keys() -> None:
    table = dict.fromkeys(range(KEYS_KEPT - 1), 0)
    note(table, "last", 1)
    note(table, "last", 2)
    assert len(table) == KEYS_KEPT and table["last"] == 2
    note(table, "one more", 3)
    assert table == {"one more": 3}


def test_costs_are_learned_from_products() -> None:
    costs, call = Costs(), item(rows=100, price=200, kind="k", grains=((64, 9), (8, 90)))
    assert costs.product.get("a", 0.0) == 0.0 and costs.of_call(call) == pytest.approx(2 * USUAL_S * (100 + READING))
    assert costs.at_most(call, 100) == pytest.approx(200 * UNSEEN_S) and costs.at_most(call, 10) == pytest.approx(
        20 * UNSEEN_S
    )
    assert costs.at_most(item(rows=100, price=200), 100) == pytest.approx(200 * UNSEEN_ROW_S)
    assert READING == 8, "reading the matrix is as eight rows"
    read = item(rows=100, price=200, divisible=False)
    assert costs.of_call(read) == pytest.approx(200 * USUAL_S) and costs.at_most(read, 1) == pytest.approx(
        200 * UNSEEN_S
    )
    assert costs.learn_product("a", 63, 3.0) == 3.0 and costs.of_call(call) == pytest.approx(2 * USUAL_S * 108), (
        "of few rows"
    )
    assert costs.learn_product("a", 64, 7.0) == 4.0 and costs.of_call(call) == pytest.approx(7.0 / 64 * 108)
    assert costs.of_call(item(rows=63, price=126)) == 4.0 and costs.of_call(item(rows=64)) == pytest.approx(
        7.0 / 64 * 72
    )
    assert costs.saved("a", 2.0) == 8.0


def test_multiplications_cost_what_those_of_their_kind_did() -> None:
    call = item(rows=100, price=100, kind="k", grains=((64, 9), (8, 90)))
    costs = Costs()
    costs.measured({"k": 3e-9}, 8)
    assert [costs.at_most(call, rows) / rows for rows in (8, 15, 999)] == pytest.approx([3e-9] * 3)
    assert costs.at_most(call, 7) == pytest.approx(3e-9 * 15), "with fewer, a multiplication costs more"
    assert costs.at_most(call, 1) == pytest.approx(3e-9 * 9)
    assert "k" in costs.slow
    costs.measured({"k": 1e-10}, 64)
    assert costs.at_most(call, 64) == pytest.approx(64e-10) and costs.at_most(call, 63) == pytest.approx(63 * 3e-9)
    assert "k" not in costs.slow
    costs.measured({"k": 9e-9}, 7)
    assert "k" not in costs.slow, "of fewer rows than reading the matrix takes"


@pytest.mark.parametrize(
    ("rows", "price", "last", "seconds", "learned"),
    [
        (64, 1 << 20, 10, 1.0, 1.0 / (1 << 20)),
        (64, (1 << 20) - 1, 10, 1.0, None),
        (63, 1 << 30, 10, 1.0, None),  # of few rows at once
        (63, 1 << 21, 5, 1.0, 1.0 / (1 << 20)),
        (64, 1 << 20, 5, 2e-4, None),  # too few multiplications, and no long time
        (64, 1 << 20, 5, 3e-4, 3e-4 / (1 << 19)),
    ],
)
def test_long_turns_say_what_a_multiplication_costs(
    rows: int, price: int, last: int, seconds: float, learned: float | None
) -> None:
    costs, call = Costs(), item(rows=rows, price=price, kind="k", grains=((64, 10), (8, 90)))
    batch = Batch("a", [Slice(call, 0, rows)], 0.0, 10, 0, last)
    costs.learn_turn(batch, seconds)
    assert costs.at_most(call, rows) == pytest.approx((learned or UNSEEN_S) * price)
    assert costs.of_turn(batch) == pytest.approx((learned or 0.0) * price * last / 10)


def test_a_price_that_was_too_high_is_corrected_by_short_turns() -> None:
    """One slow turn on a busy machine must not cut all products of its kind finely for ever: turns so short teach nothing by themselves."""
    costs, call = Costs(), item(rows=24, price=1 << 24, kind="k", grains=((64, 896), (8, 9000)))
    costs.learn_turn(Batch("a", [Slice(call, 0, 24)], 0.0, 896, 0, 448), 0.02)
    dear = costs.at_most(call, 24)
    ended = Batch("a", [Slice(call, 0, 24)], 0.0, 896, 895, 896, seconds=0.01)
    costs.learn_turn(ended, 1e-5)
    assert costs.at_most(call, 24) == dear
    costs.learn(ended)
    assert costs.at_most(call, 24) == pytest.approx(dear + (0.01 - dear) / 4)
    ended.seconds = 1.0
    costs.learn(ended)
    assert costs.at_most(call, 24) < dear, "what turns cost by themselves makes nothing dearer"


def test_preparing_is_counted_apart() -> None:
    costs, call = Costs(), item(rows=64, price=1 << 20, kind="k", grains=((64, 10), (8, 90)))
    batch = Batch("a", [Slice(call, 0, 64)], 0.0, 10, 0, 10, prepared_s=0.32)
    costs.learn_turn(batch, 1.32)
    assert costs.of_preparing(call) == 0.32 / 64 and costs.of_turn(batch) == pytest.approx(1.0)
    batch.first = 5
    costs.learn_turn(batch, 0.5)
    assert costs.of_preparing(call) == 0.32 / 64 and costs.of_turn(batch) == pytest.approx(0.5), "in the first turn"
    batch.first, batch.seconds = 0, 4.0
    costs.learn(batch)
    assert (
        costs.product.get("a", 0.0) == 4.0 and costs.of_call(item(rows=1, price=1, key="b")) > (1 + READING) * USUAL_S
    )
    small = Costs()
    small.learn(Batch("a", [Slice(item(rows=64, price=(1 << 20) - 1), 0, 64)], 0.0, seconds=9.0))
    small.learn(Batch("a", [Slice(item(rows=63, price=1 << 20), 0, 63)], 0.0, seconds=9.0))
    assert small.of_call(item(rows=1, price=1, key="b")) == (1 + READING) * USUAL_S, (
        "small products say nothing about others"
    )
    small.learn(Batch("c", [Slice(item(rows=2, price=1 << 20, divisible=False), 0, 2)], 0.0, seconds=9.0))
    assert isclose(small.of_call(item(rows=1, price=1, key="b")), 9 * (USUAL_S + (9.0 / (1 << 20) - USUAL_S) / 4))
    assert small.of_call(item(rows=64, price=64, key="c")) > (64 + READING) * USUAL_S, "nor has it rows"


# ---------------------------------------------------------------- what runs, and how much


def test_urgent_calls_go_first_and_waiting_makes_urgent() -> None:
    batcher = joined(IMMEDIATE, *[None] * 4)
    for session, priority, arrived in ((1, 2, 0.0), (2, 1, 0.001), (3, 0, 0.002), (4, 2, -2 * AGING_S)):
        batcher.add(item(session, priority=priority, arrived=arrived, key=str(session)))
    assert [run(batcher, 0.002)[0][0] for _ in range(4)] == [4, 3, 2, 1], "urgent by now, and it came first"
    for session, priority, arrived in ((1, 1, 9.0), (2, 0, 9.0 + 0.99 * AGING_S)):
        batcher.add(item(session, priority=priority, arrived=arrived, key=str(session)))
    assert run(batcher, 9.0 + 0.99 * AGING_S)[0][0] == 2
    batcher.add(item(2, priority=0, arrived=9.0 + 1.01 * AGING_S, key="2"))
    assert run(batcher, 9.0 + 1.01 * AGING_S)[0][0] == 1


@pytest.mark.parametrize(("used", "first"), [(0.99 * SLACK_S, 1), (1.01 * SLACK_S, 2)])
def test_who_has_used_more_lets_others_go_first(used: float, first: int) -> None:
    batcher = joined(IMMEDIATE, None, None)
    batcher.add(item(1))
    run(batcher, 0.0, used)
    for session in (1, 2):
        batcher.add(item(session, arrived=1.0 + session / 1e3, priority=session - 1, key=str(session)))
        batcher.callers.sessions[2].used = 0.0
    batcher.callers.sessions[1].pending[0].priority = 1
    assert run(batcher, 1.003)[0][0] == (2 if used else first), "what was used counts within a step, too"


@pytest.mark.parametrize(
    ("rows", "max_rows", "stops"),
    [
        (100, 50, [50, 100]),
        (99, 50, [50, 99]),
        (57, 50, [49, 57]),  # eight are left for the next slice
        (58, 50, [50, 58]),
        (51, 50, [43, 51]),
        (16, 10, [8, 16]),
        (10, 9, [2, 10]),
        (9, 9, [9]),
        (17, 16, [9, 17]),
        (9, 8, [1, 9]),
        (9, 5, [5, 9]),
    ],
)
def test_slices_leave_no_few_rows(rows: int, max_rows: int, stops: list[int]) -> None:
    batcher = joined(IMMEDIATE, None, max_rows=max_rows)
    batcher.add(item(rows=rows))
    found = []
    while pieces := run(batcher, 0.0):
        found += [stop for _, _, stop in pieces]
    assert found == stops


@pytest.mark.parametrize(("rows", "stop"), [(12, 12), (16, 16), (17, 9), (18, 10)])
def test_what_is_little_more_than_a_slice_runs_whole(rows: int, stop: int) -> None:
    assert joined(IMMEDIATE, None, max_rows=20)._cutting._stop(item(rows=rows), 10) == stop


def test_so_many_calls_of_a_tenant_run_while_another_calls() -> None:
    def together(*tenants: str | None) -> int:
        batcher = joined(OPPORTUNISTIC, *tenants)
        for session in range(1, len(tenants) + 1):
            batcher.add(item(session, key="a" if session > 1 else "b"))
        run(batcher, 0.0)
        return len(run(batcher, 0.0))

    assert together("y", *["x"] * 20) == TOGETHER and together("x", *["x"] * 20) == 20 == together(*[None] * 21)


def test_calls_beside_each_other_fill_a_product() -> None:
    batcher = joined(OPPORTUNISTIC, *[None] * 5, max_rows=20)
    for session, rows in ((1, 10), (2, 11), (3, 7), (4, 3), (5, 1)):
        batcher.add(item(session, rows))
    batcher.add(item(2, 1))
    assert run(batcher, 0.0) == [(1, 0, 10), (3, 0, 7), (4, 0, 3)], "twenty rows; what does not fit is passed by"
    assert run(batcher, 0.0) == [(2, 0, 11), (5, 0, 1), (2, 0, 1)]


def test_calls_run_beside_the_end_of_a_long_one() -> None:
    batcher = joined(OPPORTUNISTIC, None, None, max_rows=20)
    batcher.add(item(1, 25))
    assert run(batcher, 0.0) == [(1, 0, 17)]
    batcher.add(item(2, 12, 1.0))
    assert run(batcher, 1.0) == [(1, 17, 25), (2, 0, 12)]


@pytest.mark.parametrize(("rows", "pieces"), [(BATCH_BELOW - 1, 2), (BATCH_BELOW, 1)])
def test_large_calls_run_by_themselves(rows: int, pieces: int) -> None:
    batcher = joined(OPPORTUNISTIC, None, None)
    batcher.add(item(1, rows))
    batcher.add(item(2, 1, 1.0))
    assert len(run(batcher, 1.0)) == pieces


@pytest.mark.parametrize("other_s", [2e-3, 4e-3, 1e-6])
def test_a_turn_takes_as_long_as_the_shortest_call_of_others(other_s: float) -> None:
    """One of 1000 cells that takes a tenth of a second, while another tenant calls."""
    batcher = joined(OPPORTUNISTIC, "x", "y")
    batcher.costs.measured({"k": 1e-9}, 64)
    batcher.add(item(2, arrived=0.0, price=int(other_s / USUAL_S), divisible=False))
    run(batcher, 0.0)
    batcher.add(item(1, 64, 0.5, key="large", kind="k", price=10**8, grains=((64, 1000), (8, 9000), (1, 99000))))
    batch = batcher.next_batch(0.5)
    turn_s = max(TURN_S, other_s)
    assert batch is not None and batch.grain == 0 and batch.last == pytest.approx(1000 * turn_s / 0.1, abs=1)
    batcher.done(batch, turn_s / 2, 0.5)
    batcher.add(item(2, arrived=0.5, price=1, divisible=False))
    run(batcher, 0.5)
    again = batcher.next_batch(0.6)
    assert again is batch and batch.first == pytest.approx(1000 * turn_s / 0.1, abs=1)
    assert batch.last - batch.first <= 4 * batch.first, "four times as many cells as before, at most"


# ---------------------------------------------------------------- what is waited for


@pytest.mark.parametrize(
    ("coming", "saved", "deadline", "waits"),
    [
        ([], 1.0, 9.0, (0, inf)),
        ([Due(0.5, 0.7)], 1.0, 9.0, (1, 0.7)),
        ([Due(0.5, 0.7)], 0.5, 9.0, (0, inf)),  # it would save no more than it takes
        ([Due(0.5, 0.7)], 1.0, 0.5, (1, 0.5)),
        ([Due(0.5, 0.7)], 1.0, 0.4, (0, inf)),
        ([Due(0.5, 0.7), Due(1.0, 1.2)], 1.0, 9.0, (2, 1.2)),
        ([Due(0.5, 0.7), Due(1.6, 1.8)], 1.0, 9.0, (1, 0.7)),  # a gain of 0.4 instead of 0.5
        ([Due(0.5, 1.5), Due(1.0, 1.2)], 1.0, 9.0, (2, 1.5)),
        ([Due(-1.0, 0.7)], 0.1, 9.0, (1, 0.7)),  # late already
    ],
)
def test_waiting_must_pay(coming: list[Due], saved: float, deadline: float, waits: tuple[int, float]) -> None:
    assert _worth_waiting(coming, saved, 0.0, deadline) == waits
    later = [Due(expected + 8.0, latest + 8.0) for expected, latest in coming]
    assert _worth_waiting(later, saved, 8.0, deadline + 8.0) == pytest.approx((waits[0], waits[1] + 8.0))


def test_who_is_due_for_a_call_that_waits() -> None:
    batcher = joined(OPPORTUNISTIC, None, None, max_wait=1.0)
    for session in (1, 2):
        batcher.add(item(session))
    run(batcher, 0.0)
    rhythm = batcher.callers.sessions[2]
    rhythm.next, rhythm.pause = "b", 0.5
    assert batcher.waiting._due(0.1) == {}, "no such call waits"
    batcher.add(item(1, arrived=0.1, key="b"))
    assert batcher.waiting._due(0.1) == {"b": [Due(0.5, 0.75)]}
    assert batcher.waiting._due(0.75) == {}, "it is late"


def test_how_far_behind_sessions_are_in_the_ring_that_they_go_round() -> None:
    batcher = joined(OPPORTUNISTIC, None, None, max_wait=0.25)
    for key in "abcda":
        for session in (1, 2):
            batcher.add(item(session, key=key))
        run(batcher, 0.0)
    for session, key in ((1, "b"), (2, "d")):
        batcher.callers.sessions[session].at = key
    behind = batcher.waiting._behind(item(1, key="b"))
    assert behind == {"b": 2, "d": 2}
    batcher.callers.sessions[2].at = "c"
    assert batcher.waiting._behind(item(1, key="b")) == {"b": 3, "c": 1}
    assert batcher.waiting.budget("b") == 0.25


@pytest.mark.parametrize(("apart", "product_s"), [(0.25, 0.5), (0.5, 0.25), (0.25, 0.25)])
def test_who_come_together_are_awaited(apart: float, product_s: float) -> None:
    """Two sessions, of which the second comes so much later after each answer."""
    batcher = joined(OPPORTUNISTIC, None, None, max_wait=1.0)
    for session in (1, 2):
        batcher.add(item(session))
    run(batcher, 0.0, product_s, 3.0)
    for session in (1, 2):
        rhythm = batcher.callers.sessions[session]
        rhythm.next, rhythm.pause = "a", 0.5 + apart * (session - 1)
    batcher.waiting.foresee(3.0)
    last = 3.5 + apart
    late = (0.5 + apart) / 2
    assert batcher.awaited == (Awaited("a", 2, last + late, last - product_s) if apart < product_s else None)
    batcher.add(item(1, arrived=3.5))
    assert batcher.awaited is None, "a call is there"
    lockstep = joined(LOCKSTEP, None)
    lockstep.waiting.awaited = Awaited("a", 2, inf)
    assert lockstep.awaited is None
