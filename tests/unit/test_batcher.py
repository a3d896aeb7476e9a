"""The scheduler on simulated time: random clients that call, wait, think and leave; and what must hold for all of them."""

import heapq
import itertools
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from random import Random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.config import PolicyName
from symbiosis.executor.scheduling.batcher import Batcher
from symbiosis.executor.scheduling.callers import ALONE_S
from symbiosis.executor.scheduling.forecast import KEYS_KEPT
from symbiosis.executor.scheduling.queue import Batch, Item
from symbiosis.executor.scheduling.ranking import AGING_S
from symbiosis.executor.scheduling.rules import IMMEDIATE, JOIN_BELOW, LOCKSTEP, OPPORTUNISTIC, POLICIES, Policy

MAX_WAIT = 0.002
MAX_ROWS = 512
ROW_S = 1e-6  # what a row costs in simulated seconds
BATCH_S = 1e-4  # ... and a product
EPS = 1e-9
name = attrgetter("name")


def cost(rows: int) -> float:
    return BATCH_S + rows * ROW_S


SLICE_S = cost(MAX_ROWS)


@dataclass
class Step:
    """One call of a client: how long it thinks before, and what it asks."""

    think: float
    key: Hashable
    rows: int
    priority: int = 1
    divisible: bool = True
    joinable: bool = True


@dataclass
class Client:
    """Makes its calls with at most `window` unanswered, then leaves; or leaves rudely after `patience` calls."""

    steps: list[Step]
    joins: float = 0.0
    window: int = 1
    patience: int | None = None
    due: int = 0  # calls that were sent or will be when the client has thought
    unanswered: int = 0  # of those
    sent: int = 0
    left: bool = False


@dataclass(eq=False)
class Sent:
    """A call on its way: when it came and how long the executor idled while it waited, and what was run of it."""

    session: int
    number: int
    item: Item
    idled: float = 0.0
    slices: list[tuple[int, int]] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    answered: float = inf

    @property
    def dropped(self) -> bool:
        return self.answered == inf


class Simulation:
    """The server's loop without a server: arrivals, `next_batch`, time passes, `done`."""

    def __init__(self, policy: Policy, clients: list[Client], max_wait: float = MAX_WAIT) -> None:
        self.batcher = Batcher(policy, max_wait, MAX_ROWS)
        self.clients = clients
        self.calls: list[Sent] = []
        self.waiting: dict[Item, Sent] = {}
        self.batches: list[tuple[float, Batch]] = []
        self.active: set[int] = set()  # sessions that had an answer and have not left
        self.blockers: list[set[int]] = []  # for every batch: active sessions that had nothing pending
        self._events: list[tuple[float, int, str, int]] = []
        self._ties = itertools.count()
        for session, client in enumerate(clients):
            self._at(client.joins, "join", session)

    def _at(self, time: float, what: str, session: int) -> None:
        heapq.heappush(self._events, (time, next(self._ties), what, session))

    def run(self) -> "Simulation":
        now = 0.0
        while self._events or len(self.batcher):
            while self._events and self._events[0][0] <= now:
                _, _, what, session = heapq.heappop(self._events)
                getattr(self, f"_{what}")(session, now)
            batch = self.batcher.next_batch(now)
            assert self.batcher.idle == (len(self.batcher) == 0)
            if batch is None:
                now = self._sleep(now)
            else:
                now = self._compute(batch, now)
        return self

    def _sleep(self, now: float) -> float:
        until = min(self._events[0][0] if self._events else inf, self.batcher.wake_at())
        assert now < until, "asks to be woken in the past"
        assert until < inf or not len(self.batcher), "calls wait, and nothing will ever wake the executor"
        for sent in self.waiting.values():
            sent.idled += until - now
        return until if until < inf else now

    def _compute(self, batch: Batch, now: float) -> float:
        self.blockers.append(self.active - {item.session for item in self.waiting})
        seconds = cost(batch.rows)
        for item, start, stop in batch.slices:
            sent = self.waiting[item]
            sent.slices.append((start, stop))
            sent.batches.append(len(self.batches))
        self.batches.append((now, batch))
        now += seconds
        batch.ran()
        self.batcher.done(batch, seconds, now)
        for item, _, stop in batch.slices:
            if stop == item.rows:
                self._answer(self.waiting.pop(item), now)
        return now

    def _join(self, session: int, now: float) -> None:
        self.batcher.join(session)
        self._go_on(session, now)

    def _go_on(self, session: int, now: float) -> None:
        client = self.clients[session]
        while client.due < len(client.steps) and client.unanswered < client.window:
            self._at(now + client.steps[client.due].think, "send", session)
            client.due += 1
            client.unanswered += 1
        if not client.unanswered:
            self._leave(session)

    def _send(self, session: int, now: float) -> None:
        client = self.clients[session]
        if client.sent == client.patience:
            self._leave(session)
        if client.left:
            return
        step = client.steps[client.sent]
        item = Item(session, step.key, step.rows, step.priority, now, None, step.divisible, step.joinable)
        sent = self.waiting[item] = Sent(session, client.sent, item)
        self.calls.append(sent)
        client.sent += 1
        self.batcher.add(item)

    def _answer(self, sent: Sent, now: float) -> None:
        sent.answered = now
        if sent.item.joinable:
            self.active.add(sent.session)
        self.clients[sent.session].unanswered -= 1
        self._go_on(sent.session, now)

    def _leave(self, session: int) -> None:
        if self.clients[session].left:
            return
        self.clients[session].left = True
        self.active.discard(session)
        expected = [item for item in self.waiting if item.session == session]
        assert self.batcher.leave(session) == expected
        for item in expected:
            del self.waiting[item]

    def of(self, session: int) -> list[Sent]:
        return [sent for sent in self.calls if sent.session == session]


rows = st.one_of(st.integers(1, 40), st.integers(1, 3 * MAX_ROWS))
steps = st.builds(
    Step,
    think=st.sampled_from((0.0, 1e-5, 3e-4, 2e-3)) | st.floats(0, 0.01),
    key=st.sampled_from("abc"),
    rows=rows,
    priority=st.integers(0, 2),
    divisible=st.sampled_from((True, True, False)),
    joinable=st.sampled_from((True, True, False)),
)
clients = st.builds(
    Client,
    steps=st.lists(steps, min_size=1, max_size=12),
    joins=st.floats(0, 0.02),
    window=st.integers(1, 4),
    patience=st.none() | st.integers(0, 12),
)
# Loops over layers, as models are: with a rhythm, so that they are waited for, and pauses, so that they do not come.
loops = st.builds(
    lambda think, pause, rounds: Client(
        [Step(think + pause * (n % 7 == 6), "abc"[n % 3], 4) for n in range(3 * rounds)], joins=pause
    ),
    think=st.sampled_from((1e-5, 4e-5, 1e-4)),
    pause=st.sampled_from((0.0, 5e-5, 5e-3)),
    rounds=st.integers(3, 10),
)
crowds = st.lists(clients, min_size=1, max_size=5) | st.lists(loops, min_size=2, max_size=6)
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
        assert all(piece.item.joinable and not piece.start for piece in others)
        assert not others or (first.item.joinable and policy.joins)


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


def one_call(session: int, key: Hashable = "a", rows: int = 1, priority: int = 1, arrived: float = 0.0) -> Item:
    return Item(session, key, rows, priority, arrived)


def answered(batcher: Batcher, now: float) -> list[int]:
    """The sessions whose calls ran in the next batch, which takes no time."""
    batch = batcher.next_batch(now)
    if batch is None:
        return []
    batch.ran()
    batcher.done(batch, BATCH_S, now)
    return sorted(piece.item.session for piece in batch.slices)


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
    batcher.add(Item(1, "read", 1, 1, 0.0, None, divisible=False, joinable=False))
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
        batcher.add(Item(2, "b", JOIN_BELOW, 1, now))
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


def test_large_products_are_not_joined() -> None:
    batcher = Batcher(OPPORTUNISTIC, MAX_WAIT, MAX_ROWS)
    for session, rows_ in ((1, JOIN_BELOW), (2, 1), (3, JOIN_BELOW - 1)):
        batcher.join(session)
        batcher.add(one_call(session, rows=rows_))
    assert answered(batcher, 0.0) == [1]
    assert answered(batcher, 0.0) == [2, 3]
    batcher.add(one_call(2, arrived=1.0))
    batcher.add(one_call(1, rows=JOIN_BELOW, arrived=1.0))
    assert answered(batcher, 1.0) in ([1], [2])
    assert answered(batcher, 1.0) in ([1], [2])


def test_a_call_that_may_join_waits_for_an_earlier_one_of_its_session_that_may_not() -> None:
    batcher = Batcher(OPPORTUNISTIC, MAX_WAIT, MAX_ROWS)
    batcher.join(1)
    batcher.join(2)
    for number, item in enumerate((one_call(1), one_call(2, rows=JOIN_BELOW), one_call(2))):
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
    assert (
        max(sizes) <= 10 + 1
    )  # what a product of each key costs; of the sessions that left only their tenant's habits
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


# ---------------------------------------------------------------- tenants


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
    sizes = []
    for turn in range(12):
        if turn == 6:
            batcher.add(Item(2, "other", 1, 0, now))
        batch = batcher.next_batch(now)
        assert batch is not None
        seconds = batch.rows * 10e-6
        now += seconds
        batch.ran()
        batcher.done(batch, seconds, now)
        if batch.key == "k":
            sizes.append(batch.rows)
    assert sizes[:6] == [4096] * 6, "nobody else is there"
    assert set(sizes[6:]) == {200}, "2 ms at 10 us a row"


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
