"""Which calls wait for others, and how long: what each policy awaits, on simulated time."""

from math import inf

import pytest

from symbiosis.executor.scheduling.batcher import Batcher
from symbiosis.executor.scheduling.callers import ALONE_S
from symbiosis.executor.scheduling.queue import Item
from symbiosis.executor.scheduling.rules import BATCH_BELOW, IMMEDIATE, LOCKSTEP, OPPORTUNISTIC, Policy
from tests.simulation import MAX_ROWS, MAX_WAIT, Client, Simulation, Step, answered, one_call


def test_lockstep_waits_for_who_is_active_until_it_leaves() -> None:
    batcher = Batcher(LOCKSTEP, MAX_WAIT, MAX_ROWS)
    for session in (1, 2, 3):
        batcher.join(session)
    batcher.add(one_call(1))
    assert answered(batcher, 0.0) == [1]  # 2 and 3 have never called: nobody waits for them
    batcher.add(one_call(2))
    assert answered(batcher, 1.0) == []  # 1 is active
    batcher.add(one_call(1))
    assert answered(batcher, 1.0) == [1, 2]  # together
    batcher.add(one_call(1))
    assert answered(batcher, 100.0) == []
    assert batcher.wake_at() == inf
    batcher.leave(2)
    assert answered(batcher, 100.0) == [1]


def test_lockstep_waits_for_nobody_who_is_idle() -> None:
    batcher = Batcher(LOCKSTEP, MAX_WAIT, MAX_ROWS, idle_s=2.0)
    for session in (1, 2):
        batcher.join(session)
        batcher.add(one_call(session))
    assert answered(batcher, 0.0) == [1, 2]
    batcher.add(one_call(1))
    assert answered(batcher, 1.0) == []
    assert batcher.wake_at() == 2.0
    assert answered(batcher, 2.0) == [1]


def test_lockstep_waits_for_nobody_who_only_read_something() -> None:
    batcher = Batcher(LOCKSTEP, MAX_WAIT, MAX_ROWS)
    for session in (1, 2):
        batcher.join(session)
    batcher.add(Item(1, "read", 1, 1, 0.0, None, divisible=False, batchable=False))
    assert answered(batcher, 0.0) == [1]
    batcher.add(one_call(2))
    assert answered(batcher, 0.0) == [2]


def two_in_rhythm(now: float, period: float = 0.001, product_s: float = 10 * MAX_WAIT) -> Batcher:
    """Sessions 1 and 2 had their answers to "a" at `now`; 2 usually calls "b" a period later, 1 has just done so."""
    batcher = Batcher(OPPORTUNISTIC, MAX_WAIT, MAX_ROWS)
    for session in (1, 2):
        batcher.join(session)
    for begun, key in ((now - 2 * period, "a"), (now - period, "b"), (now, "a")):
        for session in (1, 2):
            batcher.add(one_call(session, key, arrived=begun))
        batch = batcher.next_batch(begun)
        assert batch is not None and len(batch.slices) == 2
        batch.ran()
        batcher.done(batch, product_s, begun)
    batcher.add(one_call(1, "b", arrived=now))
    return batcher


def test_a_session_whose_next_call_is_due_is_waited_for() -> None:
    batcher = two_in_rhythm(now=1.0)
    assert batcher.next_batch(1.0) is None  # 2 is due within the budget, and the product costs more than the wait
    assert 1.0 < batcher.wake_at() <= 1.0 + MAX_WAIT
    batcher.add(one_call(2, "b", arrived=1.001))
    assert answered(batcher, 1.001) == [1, 2]


def test_a_session_that_does_not_come_in_time_is_not_waited_for() -> None:
    batcher = two_in_rhythm(now=1.0)
    assert answered(batcher, 1.0) == []
    assert answered(batcher, batcher.wake_at()) == [1]


def test_a_session_that_is_due_beyond_the_budget_is_not_waited_for() -> None:
    assert answered(two_in_rhythm(now=1.0, period=2 * MAX_WAIT), 1.0) == [1]


def test_nobody_is_waited_for_longer_than_the_product_costs() -> None:
    assert answered(two_in_rhythm(now=1.0, product_s=0.0005), 1.0) == [1]


def going_on_together(sessions: int, product_s: float = 1e-4, rounds: int = 6) -> tuple[Batcher, float]:
    """Sessions that had their answers to "a" together, as all the time; and when they had them."""
    batcher, now = Batcher(OPPORTUNISTIC, MAX_WAIT, MAX_ROWS), 1.0
    for session in range(sessions):
        batcher.join(session)
    for key in ("a", "b") * rounds + ("a",):
        now += 5e-5
        for session in range(sessions):
            batcher.add(one_call(session, key, arrived=now))
        batch = batcher.next_batch(now)
        while batch is not None:
            now += product_s
            batch.ran()
            batcher.done(batch, product_s, now)
            batch = batcher.next_batch(now)
    return batcher, now


def test_who_go_on_together_are_waited_for_without_a_new_decision() -> None:
    batcher, now = going_on_together(3)
    for session in range(3):
        now += 2e-5
        assert batcher.next_batch(now) is None
        batcher.add(one_call(session, "b", arrived=now))
    assert answered(batcher, now) == [0, 1, 2]


def test_what_was_foreseen_does_not_hold_if_one_of_them_does_not_come() -> None:
    batcher, now = going_on_together(3)
    for session in range(2):
        batcher.add(one_call(session, "b", arrived=now + 5e-5))
    assert batcher.next_batch(now + 5e-5) is None
    assert now + 5e-5 < batcher.wake_at() <= now + 5e-5 + MAX_WAIT
    assert answered(batcher, batcher.wake_at()) == [0, 1]


@pytest.mark.parametrize("event", ["another call", "a large call", "leaving"])
def test_what_was_foreseen_is_decided_anew_when_things_change(event: str) -> None:
    batcher, now = going_on_together(3)
    now += 5e-5
    for session in range(2):
        batcher.add(one_call(session, "b", arrived=now))
    assert batcher.next_batch(now) is None
    if event == "another call":
        batcher.add(one_call(2, "c", arrived=now))
        assert answered(batcher, now) in ([0, 1], [2])
    elif event == "a large call":
        batcher.add(Item(2, "b", BATCH_BELOW, 1, now))
        assert set(answered(batcher, now)) & {0, 1, 2}
    else:
        batcher.leave(2)
        assert answered(batcher, now) == [0, 1]


ROUND_S = 10 * MAX_WAIT


def rounds_out_of_step(calls: int) -> tuple[Batcher, float]:
    """Two sessions that make one and the same item again and again, each of so many calls, the second a third of a period later; what
    each took was seen. It is time for the first one."""
    batcher, now = Batcher(OPPORTUNISTIC, MAX_WAIT, MAX_ROWS), 1.0
    for session in range(2):
        batcher.join(session)
    for turn in range(9):
        now = 1.0 + (turn // 2 + turn % 2 / 3) * ROUND_S
        if turn < 8:
            batcher.add(Item(turn % 2, "round", 1, 1, now, calls=calls))
            batch = batcher.next_batch(now)
            while batch is None:
                assert now < batcher.wake_at() < inf
                now = batcher.wake_at()
                batch = batcher.next_batch(now)
            batch.ran()
            batcher.done(batch, ROUND_S / 10, now + ROUND_S / 10)
            batcher.took("round", 0.9 * ROUND_S)
    return batcher, now


def test_a_round_waits_for_another_as_long_as_its_calls_may() -> None:
    batcher, now = rounds_out_of_step(calls=100)
    batcher.add(Item(0, "round", 1, 1, now, calls=100))
    assert batcher.next_batch(now) is None
    assert now + MAX_WAIT < batcher.wake_at() <= now + 100 * MAX_WAIT
    batcher.add(Item(1, "round", 1, 1, now + ROUND_S / 3, calls=100))
    assert answered(batcher, now + ROUND_S / 3) == [0, 1]


def test_a_single_call_does_not() -> None:
    batcher, now = rounds_out_of_step(calls=1)
    batcher.add(Item(0, "round", 1, 1, now))
    assert answered(batcher, now) == [0]


@pytest.mark.parametrize("thinks", [0.0, 0.5, 1.5, 3.5])
def test_rounds_of_one_thread_do_not_wait_for_each_other(thinks: float) -> None:
    """Two sessions in turn, the second of which thinks: who waits for the other waits in vain."""
    batcher, now, waited = Batcher(OPPORTUNISTIC, MAX_WAIT, MAX_ROWS, spread=4.0), 1.0, 0.0
    for session in range(2):
        batcher.join(session)
    for turn in range(60):
        arrived = now
        batcher.add(Item(turn % 2, "round", 1, 1, now, calls=128))
        while (batch := batcher.next_batch(now)) is None:
            now = batcher.wake_at()
        waited += now - arrived
        batch.ran()
        batcher.done(batch, ROUND_S / 10, now + ROUND_S / 10)
        now += ROUND_S * (1 + thinks * (turn % 2))
        batcher.took("round", ROUND_S)
    assert waited < 0.05 * (now - 1.0)


def test_who_has_been_silent_for_long_is_not_missed() -> None:
    batcher, now = going_on_together(3)
    for _ in range(4):
        now += 0.2
        for key in ("b", "a"):
            for session in range(2):
                batcher.add(one_call(session, key, arrived=now))
            batch = batcher.next_batch(now) or batcher.next_batch(batcher.wake_at())
            assert batch is not None
            batch.ran()
            batcher.done(batch, 1e-4, now + 1e-4)
            now += 1e-4
    for session in range(2):
        batcher.add(one_call(session, "b", arrived=now + 5e-5))
    assert answered(batcher, now + 5e-5) == [0, 1]
    batcher.add(one_call(2, "b", arrived=now + 1.0))
    assert answered(batcher, now + 1.0) == [2]


def test_a_session_that_calls_something_else_first_is_not_waited_for() -> None:
    batcher = two_in_rhythm(now=1.0)
    batcher.add(one_call(2, "c", arrived=1.0))
    assert answered(batcher, 1.0) in ([1], [2])
    assert answered(batcher, 1.0) in ([1], [2])


def test_a_session_that_leaves_is_not_waited_for() -> None:
    batcher = two_in_rhythm(now=1.0)
    batcher.leave(2)
    assert answered(batcher, 1.0) == [1]


def test_who_waits_alone_is_served_at_once() -> None:
    """A budget is no delay: with nobody due, a call does not wait at all."""
    crowd = [Client([Step(3e-4, layer, 8) for layer in range(8)] * 4), Client([Step(0.0, "other", 8)])]
    assert all(sent.idled == 0 for sent in Simulation(OPPORTUNISTIC, crowd, max_wait=1.0).run().calls)


@pytest.mark.parametrize(("policy", "until"), [(IMMEDIATE, 0.0), (OPPORTUNISTIC, ALONE_S), (LOCKSTEP, 3.0)])
def test_a_session_is_alone_when_nobody_else_has_called_for_a_while(policy: Policy, until: float) -> None:
    batcher = Batcher(policy, MAX_WAIT, MAX_ROWS, idle_s=3.0)
    batcher.join(1)
    batcher.join(2)
    batcher.alone(2, 10.0)
    for begun, session in ((20.0, 1), (30.0, 2), (40.0, 1)):  # whoever calls takes the turn, and begins anew
        assert batcher.alone(session, begun) is (until == 0.0)
        if until:
            assert not batcher.alone(session, begun + until - 0.01)
        assert batcher.alone(session, begun + until + 0.01)
    batcher.add(Item(2, "a", 1, 1, 50.0))
    assert not batcher.alone(1, 60.0)  # somebody's call waits, which it could meet
