"""What must hold of every policy, for random clients on simulated time: nothing is lost, order is kept, memory is bounded."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from random import Random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.executor.options import PolicyName
from symbiosis.executor.scheduling import rules
from symbiosis.executor.scheduling.arrival_model import KEYS_KEPT
from symbiosis.executor.scheduling.batcher import Batcher
from symbiosis.executor.scheduling.queue import Batch, Item
from symbiosis.executor.scheduling.rules import BATCH_BELOW, IMMEDIATE, LOCKSTEP, OPPORTUNISTIC, POLICIES, Policy
from tests.simulation import (
    BATCH_S,
    EPS,
    MAX_ROWS,
    MAX_WAIT,
    Client,
    Sent,
    Simulation,
    answered,
    crowds,
    name,
    one_call,
)

every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=name)


@every_policy
@given(crowd=crowds)
def test_nothing_is_lost_and_nothing_runs_twice(policy: Policy, crowd: list[Client]) -> None:
    done = Simulation(policy, crowd).run()
    for sent in done.calls:
        ends = [0, *(stop for _, stop in sent.slices)]
        assert [start for start, _ in sent.slices] == ends[:-1], "the slices of a call follow one another"
        assert sent.dropped or ends[-1] == sent.item.rows
        assert sent.item.divisible or len(sent.slices) <= 1
    for session, client in enumerate(crowd):
        assert client.left
        assert client.patience is not None or len(done.of(session)) == len(client.steps)
    assert not len(done.batcher)


@every_policy
@given(crowd=crowds)
def test_what_runs_together_may_run_together(policy: Policy, crowd: list[Client]) -> None:
    for _, batch in Simulation(policy, crowd).run().batches:
        first, *others = batch.slices
        assert {piece.item.key for piece in batch.slices} == {batch.key}
        assert not others or batch.rows <= MAX_ROWS
        assert not first.item.divisible or first.stop - first.start <= MAX_ROWS
        assert all(piece.item.batchable and not piece.start for piece in others)
        assert not others or (first.item.batchable and policy.batches)


@every_policy
@given(crowd=crowds)
def test_calls_of_a_session_keep_their_order(policy: Policy, crowd: list[Client]) -> None:
    """Those of one key and priority: the first to come is the first to start, and the first to be answered."""
    done = Simulation(policy, crowd).run()
    lanes: dict[Hashable, list[Sent]] = {}
    for sent in sorted(done.calls, key=lambda sent: sent.number):
        if not sent.dropped:
            lanes.setdefault((sent.session, sent.item.key, sent.item.priority), []).append(sent)
    for lane in lanes.values():
        for earlier, later in itertools.pairwise(lane):
            assert earlier.batches[0] <= later.batches[0]
            assert earlier.answered <= later.answered


@given(crowd=crowds, max_wait=st.sampled_from((0.0, 1e-4, MAX_WAIT, 0.05)))
def test_opportunistic_never_keeps_a_free_executor_waiting_beyond_the_budget(
    crowd: list[Client], max_wait: float
) -> None:
    for sent in Simulation(OPPORTUNISTIC, crowd, max_wait).run().calls:
        assert sent.idled <= max_wait + EPS


@given(crowd=crowds)
def test_immediate_never_keeps_a_free_executor_waiting(crowd: list[Client]) -> None:
    assert all(sent.idled == 0 for sent in Simulation(IMMEDIATE, crowd).run().calls)


@given(crowd=crowds)
def test_lockstep_runs_only_when_every_active_session_waits(crowd: list[Client]) -> None:
    assert not any(Simulation(LOCKSTEP, crowd).run().blockers)


def test_large_products_are_not_joined() -> None:
    batcher = Batcher(OPPORTUNISTIC, MAX_WAIT, MAX_ROWS)
    for session, rows_ in ((1, BATCH_BELOW), (2, 1), (3, BATCH_BELOW - 1)):
        batcher.join(session)
        batcher.add(one_call(session, rows=rows_))
    assert answered(batcher, 0.0) == [1]
    assert answered(batcher, 0.0) == [2, 3]
    batcher.add(one_call(2, arrived=1.0))
    batcher.add(one_call(1, rows=BATCH_BELOW, arrived=1.0))
    assert answered(batcher, 1.0) in ([1], [2])
    assert answered(batcher, 1.0) in ([1], [2])


def test_a_call_that_may_join_waits_for_an_earlier_one_of_its_session_that_may_not() -> None:
    batcher = Batcher(OPPORTUNISTIC, MAX_WAIT, MAX_ROWS)
    batcher.join(1)
    batcher.join(2)
    for number, item in enumerate((one_call(1), one_call(2, rows=BATCH_BELOW), one_call(2))):
        item.arrived = number / 1000
        batcher.add(item)
    assert [answered(batcher, 1.0) for _ in range(3)] == [[1], [2], [2]]


def sizes_of_memory(batcher: Batcher) -> int:
    """Entries in all that a batcher remembers."""
    parts = (batcher, batcher.callers, batcher.costs, batcher.waiting, batcher._ranking, batcher._cutting)
    tables = [table for part in parts for table in vars(part).values() if isinstance(table, dict)]
    tables = list({id(table): table for table in tables}.values())
    rhythms = batcher.callers.sessions.values()
    return sum(map(len, tables)) + sum(len(r.follows) + len(r.gap) + len(r.pending) for r in rhythms)


@every_policy
def test_memory_is_bounded_by_sessions_and_keys(policy: Policy) -> None:
    batcher, sizes = Batcher(policy, MAX_WAIT, MAX_ROWS), []
    for turn in range(400):
        batcher.join(turn)
        for number in range(20):
            batcher.add(one_call(turn, key=(turn * number) % 10, arrived=turn + number / 100))
            if number % 3:
                answered(batcher, turn + number / 100 + MAX_WAIT)
        batcher.leave(turn)
        sizes.append(sizes_of_memory(batcher))
    # what a product of each key costs; of the sessions that left only their tenant's habits
    assert max(sizes) <= 10 + 1
    habits = batcher.callers._habits[None]
    assert len(habits.follows) <= 10 and len(habits.gap) <= 10


def test_memory_is_bounded_even_if_keys_never_repeat() -> None:
    batcher = Batcher(OPPORTUNISTIC, MAX_WAIT, MAX_ROWS)
    batcher.join(1)
    for number in range(3 * KEYS_KEPT):
        batcher.add(one_call(1, key=number, arrived=number))
        assert answered(batcher, number) == [1]
    assert sizes_of_memory(batcher) <= 3 * KEYS_KEPT + 2  # the session, and that it called lately


@pytest.mark.parametrize("rows_", [1, 2 * MAX_ROWS])
def test_a_session_that_leaves_while_its_batch_runs_is_forgotten(rows_: int) -> None:
    batcher = Batcher(IMMEDIATE, MAX_WAIT, MAX_ROWS)
    batcher.join(1)
    batcher.add(one_call(1, rows=rows_))
    batch = batcher.next_batch(0.0)
    assert batch is not None and [item.rows for item in batcher.leave(1)] == [rows_]
    batch.ran()
    batcher.done(batch, BATCH_S, 1.0)
    assert batcher.next_batch(1.0) is None
    assert not len(batcher)
    assert batcher.leave(1) == []


@given(
    st.sampled_from(list(POLICIES.values())),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.integers(1, 3 * MAX_ROWS)), max_size=20),
    st.randoms(use_true_random=False),
)
def test_products_that_are_under_way_at_the_same_time_may_end_in_any_order(
    policy: Policy, calls: list[tuple[int, Hashable, int]], random: Random
) -> None:
    batcher, now = Batcher(policy, MAX_WAIT, MAX_ROWS, idle_s=1.0), 0.0
    for session in range(4):
        batcher.join(session)
    left, items, running = list(calls), list[Item](), list[Batch]()
    finished = Counter[int]()
    while left or running or not batcher.idle:
        now += 1e-4
        if left and random.random() < 0.5:
            session, key, rows = left.pop()
            items.append(Item(session, key, rows, 1, now))
            batcher.add(items[-1])
        if len(running) < 3 and (batch := batcher.next_batch(now)):
            running.append(batch)
        elif running:
            batch = running.pop(random.randrange(len(running)))
            batch.ran()
            finished.update(id(piece.item) for piece in batch.slices if piece.item.finished)
            batcher.done(batch, 1e-4, now)
    assert all(item.finished and finished[id(item)] == 1 for item in items)
    assert not any(batcher.leave(session) for session in range(4)), "somebody still waits"


def test_every_policy_that_can_be_named_is_written() -> None:
    assert set(POLICIES) == set(get_args(PolicyName))


def test_every_property_of_a_policy_is_asked_for() -> None:
    """One that nothing reads would make a policy that is another one's twin."""
    code = "".join(file.read_text() for file in Path(rules.__file__).parents[1].rglob("*.py"))
    unread = {field.name for field in dataclasses.fields(Policy) if f"policy.{field.name}" not in code}
    assert not unread, f"nothing in symbiosis/executor reads {', '.join(unread)} of a policy"
