"""Calls of GPU clients who go on together, without a GPU: the batcher is the real one, what launches is counted."""

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.executor.accounts import Account
from symbiosis.executor.gpu.foreseen_batch import ForeseenBatch
from symbiosis.executor.scheduling.batcher import Batcher
from symbiosis.executor.scheduling.queue import Item
from symbiosis.executor.scheduling.rules import IMMEDIATE, OPPORTUNISTIC, Policy
from symbiosis.protocol import Limits

MAX_WAIT, PRODUCT_S, MAX_ROWS = 2e-3, 1e-4, 4096
KEYS = ("a", "b", "c")


class Executor:
    """A batcher and a cohort as the server drives them; calls have sessions, keys and numbers."""

    def __init__(self, sessions: int, policy: Policy = OPPORTUNISTIC, spread: float = 1.0) -> None:
        self.now, self.answered, self.products = 1.0, Counter[int](), list[list[int]]()
        self.failing = False
        self.batcher = Batcher(policy, MAX_WAIT, MAX_ROWS, spread=spread)
        self.cohort = ForeseenBatch(self.batcher, self.launch, lambda works, waited, seconds: None, self.enqueue)
        self.peers = {number: self.join(number) for number in range(1, sessions + 1)}
        self._numbers = 0

    def join(self, number: int) -> Any:
        self.batcher.join(number)
        session = SimpleNamespace(number=number, count=lambda plan: None, account=Account(Limits()))
        return SimpleNamespace(session=session, count=lambda together, calls: None)

    def call(self, session: int, key: str, rows: int = 1, placed: bool = True) -> int:
        """A bell rings."""
        self._numbers += 1
        plan = SimpleNamespace(key=key, rows=rows, nbytes=0)
        work: Any = SimpleNamespace(
            number=self._numbers, plan=plan, can_be_batched=placed, peer=self.peers[session], calls=(None,)
        )
        if not self.cohort.takes(work, self.now):
            self.cohort.disband()
            self.enqueue(work, self.now)
        return self._numbers

    def enqueue(self, work: Any, arrived: float) -> None:
        self.batcher.add(Item(work.peer.session.number, work.plan.key, work.plan.rows, 1, arrived, work))

    def launch(self, works: Sequence[Any]) -> float:
        if self.failing:
            raise RuntimeError("the kernel does not start")
        self.answered.update(work.number for work in works)
        self.products.append(sorted(work.peer.session.number for work in works))
        return PRODUCT_S

    def step(self) -> None:
        """What is ready now."""
        while True:
            if self.cohort and self.cohort.step(self.now):
                return
            batch = self.batcher.next_batch(self.now)
            if batch is None:
                return
            batch.ran()
            self.answered.update(piece.item.work.number for piece in batch.slices)
            self.products.append(sorted(piece.item.session for piece in batch.slices))
            self.batcher.done(batch, PRODUCT_S, self.now + PRODUCT_S)

    def wait(self) -> None:
        """Until all that can run has run."""
        for _ in range(50):
            self.step()
            at = min(self.batcher.wake_at(), self.cohort.wake_at())
            if at == float("inf"):
                return
            self.now = max(self.now, at)

    def round(self, sessions: Sequence[int], key: str) -> None:
        self.now += PRODUCT_S + 5e-5
        for session in sessions:
            self.call(session, key)
        self.step()


@pytest.fixture
def together() -> Executor:
    """Three sessions that have gone round together until everybody knows."""
    return in_step(3)


def in_step(sessions: int, spread: float = 1.0) -> Executor:
    executor = Executor(sessions, spread=spread)
    for turn in range(4 * len(KEYS)):
        executor.round(range(1, sessions + 1), KEYS[turn % len(KEYS)])
    assert executor.products[-1] == list(range(1, sessions + 1))
    executor.products.clear()
    executor.now += PRODUCT_S + 5e-5
    return executor


def test_the_last_one_starts_the_product_and_nobody_is_queued(together: Executor) -> None:
    for session in (2, 1):
        together.call(session, "a")
        together.step()
    assert not together.products and len(together.cohort) == 2 and together.batcher.idle
    together.call(3, "a")
    together.step()
    assert together.products == [[1, 2, 3]] and not together.cohort


@pytest.mark.parametrize(("spread", "meet"), [(1.0, False), (4.0, True)])
def test_the_last_is_waited_for_as_many_products_as_told(spread: float, meet: bool) -> None:
    """Two who think for ten products, one of them two and a half products behind."""
    executor = Executor(2, spread=spread)
    calls, turns, seen = {1: 1.0, 2: 1.0 + 2.5 * PRODUCT_S}, Counter[int](), 0
    for _ in range(200):
        session = min(calls, key=lambda number: calls[number], default=0)
        wake = min(executor.batcher.wake_at(), executor.cohort.wake_at())
        executor.now = max(executor.now, min(wake, calls.get(session, wake)))
        if session and executor.now >= calls[session]:
            del calls[session]
            executor.call(session, KEYS[turns[session] % len(KEYS)])
            turns[session] += 1
        executor.step()
        for product in executor.products[seen:]:
            calls.update(dict.fromkeys(product, executor.now + 11 * PRODUCT_S))
            seen += 1
    assert ([1, 2] in executor.products) is meet


def test_who_does_not_come_is_not_waited_for_long(together: Executor) -> None:
    begun = together.now
    for session in (2, 1):
        together.call(session, "a")
    together.wait()
    assert together.products == [[1, 2]]
    assert together.now - begun <= MAX_WAIT


@pytest.mark.parametrize(
    "event",
    [
        "another key",
        "a large call",
        "more than a product takes",
        "elsewhere",
        "somebody leaves",
        "no kernel",
        "draining",
    ],
)
def test_what_was_not_foreseen_goes_through_the_queue(event: str, together: Executor) -> None:
    numbers = [together.call(session, "a") for session in (1, 2)]
    if event == "another key":
        numbers.append(together.call(3, "z"))
    elif event == "a large call":
        numbers.append(together.call(3, "a", rows=together.batcher.rules.batch_below))
    elif event == "more than a product takes":
        together.batcher.rules.batch_below = MAX_ROWS
        numbers.append(together.call(3, "a", rows=MAX_ROWS - 1))
        together.step()
        assert [1, 2, 3] not in together.products
    elif event == "elsewhere":
        numbers.append(together.call(3, "a", placed=False))
    elif event == "somebody leaves":
        together.cohort.disband()
        together.batcher.leave(2)
        numbers.pop()
    elif event == "draining":
        together.batcher.rules.policy = IMMEDIATE
    else:
        together.failing = True
        numbers.append(together.call(3, "a"))
    together.wait()
    assert all(together.answered[number] == 1 for number in numbers)
    assert not together.cohort and together.batcher.idle


def test_who_was_not_foreseen_takes_nobodys_place(together: Executor) -> None:
    together.peers[4] = together.join(4)
    numbers = [together.call(session, "a") for session in (4, 1, 1, 2, 3)]
    together.wait()
    assert all(together.answered[number] == 1 for number in numbers)


def test_calls_that_are_not_foreseen_are_not_taken() -> None:
    executor = Executor(2)
    executor.call(1, "a")
    assert not executor.cohort and not executor.batcher.idle


ACTIONS = st.lists(
    st.tuples(
        st.integers(1, 4), st.sampled_from((*KEYS, "next", "next", "next")), st.sampled_from((0.0, 2e-5, 1e-4, 5e-3))
    ),
    max_size=60,
)


@given(ACTIONS, st.integers(2, 4))
def test_every_call_is_answered_once_whatever_comes(actions: list[tuple[int, str, float]], sessions: int) -> None:
    """`next`: what the session calls in its usual round."""
    executor = in_step(sessions)
    at, waiting, made = dict.fromkeys(range(1, sessions + 1), 0), dict[int, int](), list[int]()
    for session, key, pause in actions:
        if session > sessions:
            continue
        if executor.answered[waiting.get(session, 0)] == 0 and session in waiting:
            executor.wait()  # a session has one call under way
        if key == "next":
            key, at[session] = KEYS[at[session] % len(KEYS)], at[session] + 1
        number = waiting[session] = executor.call(session, key)
        made.append(number)
        executor.step()
        executor.now += pause
    executor.wait()
    assert all(executor.answered[number] == 1 for number in made)
    assert not executor.cohort and executor.batcher.idle
