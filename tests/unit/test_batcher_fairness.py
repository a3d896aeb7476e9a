"""Nobody takes more than a share: idleness, floods, priorities, tenants, and sessions that go the same round."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.executor.scheduling.batcher import Batcher
from symbiosis.executor.scheduling.queue import Item
from symbiosis.executor.scheduling.ranking import AGING_S
from symbiosis.executor.scheduling.rules import IMMEDIATE, LOCKSTEP, OPPORTUNISTIC, Policy
from tests.simulation import EPS, MAX_ROWS, Client, Simulation, Step, cost, name

SLICE_S = cost(MAX_ROWS)


def test_idleness_earns_no_credit() -> None:
    """Who has long been idle does not go before others for as long, when it comes with a flood."""
    late = Client([Step(0.2, "flood", 20 * MAX_ROWS)] * 8, window=8)
    busy = Client([Step(0.0, "work", MAX_ROWS)] * 600)
    done = Simulation(OPPORTUNISTIC, [late, busy]).run()
    assert sum(sent.item.arrived > 0.2 for sent in done.of(1)) > 100
    for sent in done.of(1):
        first = next(n for n, (begun, _) in enumerate(done.batches) if sent.item.arrived <= begun)
        assert sent.batches[0] - first <= 2  # what the other had not used yet, and the turn of who came first


floods = st.lists(st.integers(1, 20 * MAX_ROWS), min_size=8, max_size=30)


@pytest.mark.parametrize("policy", [IMMEDIATE, OPPORTUNISTIC], ids=name)  # under lockstep all wait for the victim
@given(sizes=st.lists(floods, min_size=1, max_size=3), victims=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_a_flood_delays_others_by_a_slice_per_session(
    policy: Policy, sizes: list[list[int]], victims: list[int]
) -> None:
    """However much a session sends: who has used less goes first, and nothing that runs is longer than a slice."""
    crowd = [Client([Step(0.0, f"flood {n}", size) for size in flood], window=8) for n, flood in enumerate(sizes)]
    crowd.append(Client([Step(1e-3, "victim", size) for size in victims]))
    done = Simulation(policy, crowd).run()
    for sent in done.of(len(sizes)):
        meanwhile = [n for n, (begun, _) in enumerate(done.batches) if sent.item.arrived <= begun]
        assert sent.batches[0] - meanwhile[0] <= len(sizes)


@pytest.mark.parametrize("flooders", [1, 3])
@pytest.mark.parametrize("priority", [0, 1, 2])
def test_waiting_raises_a_priority_until_it_is_the_highest(flooders: int, priority: int) -> None:
    """A stream of urgent calls delays others by the aging of their priority and a slice per session, not for ever."""
    endless = [
        Client([Step(0.0, f"flood {n}", MAX_ROWS, priority=0)] * int(0.5 / SLICE_S), window=4) for n in range(flooders)
    ]
    done = Simulation(OPPORTUNISTIC, [*endless, Client([Step(0.05, "late", 1, priority=priority)] * 3)]).run()
    for sent in done.of(flooders):
        assert sent.answered - sent.item.arrived <= priority * AGING_S + (flooders + 1) * SLICE_S + cost(1) + EPS
        assert priority == 0 or sent.answered - sent.item.arrived > AGING_S  # else the flood was none


@given(first=st.integers(64, 8 * MAX_ROWS), second=st.integers(64, 8 * MAX_ROWS))
def test_two_sessions_that_always_want_more_get_the_same_share(first: int, second: int) -> None:
    """... of the executor's time, whatever the size of their calls."""
    total = 20 * MAX_ROWS
    pair = [Client([Step(0.0, key, size)] * -(-total // size), window=3) for key, size in (("a", first), ("b", second))]
    done = Simulation(OPPORTUNISTIC, pair).run()
    end = min(max(sent.answered for sent in done.of(session)) for session in (0, 1))
    used = {"a": 0.0, "b": 0.0}
    for begun, batch in done.batches:
        if begun >= end:
            break
        used[batch.key] += cost(batch.rows)  # type: ignore[index]
        assert abs(used["a"] - used["b"]) <= 2 * SLICE_S


@pytest.mark.parametrize("policy", [OPPORTUNISTIC, LOCKSTEP], ids=name)
def test_sessions_that_go_the_same_round_come_together(policy: Policy) -> None:
    """They begin anywhere in it, and nobody is due when another calls: who is behind is served first until it is not."""
    layers = 16
    crowd = [
        Client([Step(2e-5, (first + n) % layers, 1) for n in range(40 * layers)], joins=first * 1e-4)
        for first in (0, 3, 7, 12)
    ]
    done = Simulation(policy, crowd).run()
    half = done.batches[len(done.batches) // 2 :]
    assert sum(len(batch.slices) for _, batch in half) / len(half) > 2
    alone = Simulation(IMMEDIATE, crowd_of(done)).run()
    assert done.batches[-1][0] < 0.6 * alone.batches[-1][0]


def crowd_of(done: Simulation) -> list[Client]:
    """The same clients, before they did anything."""
    return [Client(client.steps, client.joins) for client in done.clients]


def crowd(batcher: Batcher, sessions: int, key: str = "crowd") -> list[Item]:
    """Calls of one tenant's many sessions, which all wait."""
    for number in range(sessions):
        batcher.join(number, "crowd")
    items = [Item(number, (key, number), 1, 0, 0.0) for number in range(sessions)]
    for item in items:
        batcher.add(item)
    return items


def test_a_tenant_with_many_sessions_has_no_more_turns_than_one_with_one() -> None:
    batcher, now = Batcher(IMMEDIATE), 0.0
    crowd(batcher, 50)
    batcher.join(99, "single")
    turns = []
    for _ in range(40):
        if not any(call == 99 for call in waiting(batcher)):
            batcher.add(Item(99, "single", 1, 0, now))
        batch = batcher.next_batch(now)
        assert batch is not None
        item = batch.slices[0].item
        turns.append(item.session)
        now += 0.02
        batch.ran()
        batcher.done(batch, 0.02, now)
        if item.session != 99:
            batcher.add(Item(item.session, item.key, 1, 0, now))
    assert turns.count(99) >= 18
    assert len(set(turns)) > 15, "the sessions of the crowd take turns, too"


def waiting(batcher: Batcher) -> list[int]:
    return [item.session for queue in batcher._queues.values() for item in queue]


def test_who_calls_now_and_then_goes_before_a_crowd() -> None:
    batcher, now = Batcher(OPPORTUNISTIC, max_wait=0.0), 0.0
    crowd(batcher, 50, "same")
    batcher.join(99, "single")
    for _ in range(30):  # the crowd has used a lot
        batch = batcher.next_batch(now)
        assert batch is not None
        now += 0.02
        batch.ran()
        batcher.done(batch, 0.02, now)
        for piece in batch.slices:
            batcher.add(Item(piece.item.session, piece.item.key, 1, 0, now))
    batcher.add(Item(99, "single", 1, 2, now))
    batch = batcher.next_batch(now + 1.0)
    assert batch is not None and batch.slices[0].item.session == 99


@pytest.mark.parametrize("most", [3, 50], ids=["all", "some"])
def test_who_has_the_fewest_calls_in_a_product_is_answered_first(most: int) -> None:
    """Whether the whole queue runs at once, or as much of it as one tenant may have."""
    batcher = Batcher(LOCKSTEP)
    for number in range(most):
        batcher.join(number, "crowd")
        batcher.add(Item(number, "key", 1, 0, 0.0))
    batcher.join(99, "single")
    batcher.add(Item(99, "key", 1, 0, 0.0))
    batch = batcher.next_batch(0.0)
    assert batch is not None
    sessions = [piece.item.session for piece in batch.slices]
    assert sessions[0] == 99 and len(sessions) > 3
    assert sessions[1:] == sorted(sessions[1:])


def test_slices_are_short_while_another_tenant_calls() -> None:
    batcher, now = Batcher(IMMEDIATE, max_rows=4096), 0.0
    batcher.join(1, "trainer")
    batcher.join(2, "other")
    batcher.add(Item(1, "k", 100_000, 2, now))
    sizes, spent = [], {"k": 0.0, "other": 0.0}
    for turn in range(12):
        if turn == 6:
            batcher.add(Item(2, "other", 1, 0, now))
        batch = batcher.next_batch(now)
        assert batch is not None
        seconds = batch.rows * 10e-6
        now += seconds
        spent[batch.key] += seconds  # type: ignore[index]
        batch.ran()
        batcher.done(batch, seconds, now)
        if batch.key == "k":
            sizes.append(batch.rows)
    assert sizes[:6] == [4096] * 6, "nobody else is there"
    assert set(sizes[6:]) == {200}, "2 ms at 10 us a row"
    assert batcher.callers.sessions[1].used == pytest.approx(spent["k"]), "of each slice what it took"


def test_calls_that_do_not_go_by_rows_are_joined_as_far_as_others_can_wait() -> None:
    """What is batched is not cut: so a tenant's many grouped products, none of them long, must not become one that is."""
    batcher = Batcher(OPPORTUNISTIC, max_rows=4096)
    for session in range(8):
        batcher.join(session, "trainer")
    batcher.join(99, "other")
    for session in range(8):
        batcher.add(
            Item(session, "grouped", 200, 2, 0.0, divisible=False, price=200 << 14, grains=((1, 64),))
        )  # 1.3 ms each as guessed
    batcher.add(Item(99, "other", 1, 0, 0.0))
    longest, now = 0.0, 0.0
    while (batch := batcher.next_batch(now)) is not None:
        seconds = 4e-10 * batch.price * (batch.last - batch.first) / batch.cells if batch.key == "grouped" else 1e-4
        longest, now = max(longest, seconds), now + seconds
        if batch.ends:
            batch.ran()
        batcher.done(batch, seconds, now)
    assert 0.0 < longest <= 2.1e-3
