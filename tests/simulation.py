"""The batcher on simulated time: random clients that call, wait, think and leave, and the server's loop without a server."""

import heapq
import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter

from hypothesis import strategies as st

from symbiosis.executor.scheduling.batcher import Batcher
from symbiosis.executor.scheduling.queue import Batch, Item
from symbiosis.executor.scheduling.rules import Policy

MAX_WAIT = 0.002
MAX_ROWS = 512
ROW_S = 1e-6  # what a row costs in simulated seconds
BATCH_S = 1e-4  # ... and a product
EPS = 1e-9
name = attrgetter("name")


def cost(rows: int) -> float:
    return BATCH_S + rows * ROW_S


@dataclass
class Step:
    """One call of a client: how long it thinks before, and what it asks."""

    think: float
    key: Hashable
    rows: int
    priority: int = 1
    divisible: bool = True
    batchable: bool = True


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
        item = Item(session, step.key, step.rows, step.priority, now, None, step.divisible, step.batchable)
        sent = self.waiting[item] = Sent(session, client.sent, item)
        self.calls.append(sent)
        client.sent += 1
        self.batcher.add(item)

    def _answer(self, sent: Sent, now: float) -> None:
        sent.answered = now
        if sent.item.batchable:
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
    batchable=st.sampled_from((True, True, False)),
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
