"""Threads for the work of many tenants: who waits for whom, and what becomes of work that nobody wants any more."""

import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from symbiosis.server.ipc.tenant_threads import TenantThreads

WAIT_S = 20.0


@pytest.fixture
def lanes() -> Iterator[TenantThreads]:
    lanes = TenantThreads(2, "test")
    yield lanes
    lanes.close()


def test_nobody_waits_behind_all_that_another_has_asked_for(lanes: TenantThreads) -> None:
    may_end = threading.Event()
    slow = [lanes.submit("eve", lambda: may_end.wait(WAIT_S)) for _ in range(20)]
    assert lanes.submit("bob", lambda: "bob's").result(WAIT_S) == "bob's" and not slow[0].done()
    may_end.set()
    assert all(each.result(WAIT_S) for each in slow)


def test_what_is_cancelled_before_it_begins_is_not_made(lanes: TenantThreads) -> None:
    may_end, made = threading.Event(), []
    first = lanes.submit("eve", lambda: may_end.wait(WAIT_S))
    second, third = lanes.submit("eve", lambda: made.append(2)), lanes.submit("eve", lambda: made.append(3))
    assert second.cancel()
    may_end.set()
    third.result(WAIT_S)
    assert first.result(WAIT_S) and made == [3]


def test_an_error_is_the_results_and_the_next_one_runs(lanes: TenantThreads) -> None:
    failing = lanes.submit("eve", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.result(WAIT_S)
    assert lanes.submit("eve", lambda: 1).result(WAIT_S) == 1


def test_closing_cancels_what_waits() -> None:
    lanes, may_end, runs = TenantThreads(2, "test"), threading.Event(), threading.Event()
    first = lanes.submit("eve", lambda: runs.set() or may_end.wait(WAIT_S))
    waiting = [lanes.submit("eve", lambda: 1) for _ in range(3)]
    assert runs.wait(WAIT_S)
    closer = threading.Thread(target=lanes.close)
    closer.start()
    while not all(each.cancelled() for each in waiting):
        assert closer.is_alive()
    may_end.set()
    closer.join(WAIT_S)
    assert first.result(WAIT_S) and not closer.is_alive()


def test_a_tenant_has_its_threads_whatever_has_ended() -> None:
    """Two threads may be sent for what one of them does."""
    lanes, gates = (
        TenantThreads(4, "test"),
        {name: threading.Event() for name in ("a1", "a2", "b1", "b2", "c1", "c2", "a3")},
    )
    ended = {name: lanes.submit(name[0], partial(gate.wait, WAIT_S)) for name, gate in gates.items()}
    for first in ("a1", "a2"):  # they leave the tenant's other work behind that of others
        gates[first].set()
        assert ended[first].result(WAIT_S)
    for gate in gates.values():
        gate.set()
    assert all(each.result(WAIT_S) for each in ended.values())
    both = threading.Barrier(2)
    for each in [lanes.submit("a", partial(both.wait, WAIT_S)) for _ in range(2)]:
        each.result(WAIT_S)
    lanes.close()
    assert not lanes._running and not lanes._waiting


def test_no_thread_of_many_tenants_is_lost() -> None:
    lanes = TenantThreads(4, "test")
    work = [lanes.submit(tenant, partial(time.sleep, n % 3 / 1000)) for n in range(60) for tenant in "abcd"]
    for each in work:
        each.result(WAIT_S)
    lanes.close()
    assert not lanes._running and not lanes._waiting
