"""Threads that share one wrapped model: those that would wait for each other have connections of their own, for as long as they call."""

import errno
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import symbiosis
from symbiosis import transport
from symbiosis.client.connection import lanes
from symbiosis.client.session import Session
from symbiosis.client.weights.remote_weight import remote_weights
from symbiosis.errors import CallError, Code, ConnectionLost
from symbiosis.protocol import Hello, Op
from symbiosis.transport.local import client
from tests.conftest import tiny_llama
from tests.processes import until

pytestmark = pytest.mark.long

X = torch.arange(6.0).reshape(2, 3)
HEARTBEAT_S = 0.8


def echo(session: Session) -> Tensor:
    return session.call(Op.ECHO, 0, X)


class Caller:
    """A thread that makes a call whenever it is told to, and keeps what came of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self._go, self.made, self._ends = call, threading.Semaphore(0), [], False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._go.acquire() and not self._ends:
            try:
                self.made.append(self._call())
            except BaseException as error:
                self.made.append(error)

    def go(self) -> None:
        self._go.release()

    def must_answer(self, calls: int = 1) -> None:
        until(lambda: len(self.made) == calls, "the answer")
        assert torch.equal(self.made[-1], X), self.made[-1]

    def end(self) -> None:
        self._ends = True
        self._go.release()
        self._thread.join(10.0)


@contextmanager
def callers(number: int, call: Callable[[], Any]) -> Iterator[list[Caller]]:
    found = [Caller(call) for _ in range(number)]
    yield found
    for caller in found:
        caller.end()


@pytest.fixture
def executor(serve: Callable, url: str) -> symbiosis.Executor:
    return serve(tiny_llama(), listen=[url], heartbeat_s=HEARTBEAT_S, policy="immediate")


def test_a_thread_that_others_keep_waiting_has_a_connection_of_its_own(executor: symbiosis.Executor) -> None:
    session = Session(executor.endpoint)
    echo(session)
    with callers(2, lambda: echo(session)) as (one, two):
        with session._lock:  # as a long call of another thread holds it
            one.go()
            one.must_answer()
        one.go()
        one.must_answer(2)  # over its own
        two.go()
        two.must_answer()  # nobody kept it waiting
        assert len(executor.server.sessions) == 2 and session.stats.calls == 4
        sessions, begun = list(executor.server.sessions.values()), time.monotonic()
        until(lambda: all(one.heard > begun + HEARTBEAT_S for one in sessions), "beats of both, which keep them in")
        assert len(executor.server.sessions) == 2 and executor.server.ledger.dropped == 0
    until(lambda: len(executor.server.sessions) == 1, "the end of the connection of a thread that ended")
    assert torch.equal(echo(session), X)
    session.close()
    until(lambda: not executor.server.sessions, "the end of all")


def test_a_thread_for_whom_no_descriptor_is_left_calls_by_the_one_there_is(
    serve: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, tried = Session(serve(tiny_llama(), listen=[f"local://{tmp_path}/a.sock"]).endpoint), threading.Event()
    echo(session)

    def epoll() -> None:
        tried.set()
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as without, callers(1, lambda: echo(session)) as (one,):
        without.setattr(client, "select", SimpleNamespace(**vars(select) | {"epoll": epoll}))  # and not the executor's
        with session._lock:
            one.go()
            assert tried.wait(60)
        one.must_answer()
    assert not len(session._lanes)
    session.close()


def test_a_program_with_one_thread_has_one_connection(executor: symbiosis.Executor, ids: Tensor) -> None:
    model = symbiosis.wrap(tiny_llama(), executor.endpoint)
    model.train()
    model(ids, labels=ids).loss.backward()
    assert len(executor.server.sessions) == 1


def test_a_connection_that_its_thread_does_not_use_is_closed(
    executor: symbiosis.Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "IDLE_S", 0.1)
    session = Session(executor.endpoint)
    echo(session)
    with callers(1, lambda: echo(session)) as (one,):
        with session._lock:
            one.go()
            one.must_answer()
        until(lambda: len(executor.server.sessions) == 1, "the end of an idle connection")
        one.go()
        one.must_answer(2)
        assert len(executor.server.sessions) == 1
        with session._lock:
            one.go()
            one.must_answer(3)
    session.close()


def test_a_slow_heartbeat_costs_no_connection(executor: symbiosis.Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it may hold the session for long, and nobody else calls."""
    session = Session(executor.endpoint)
    echo(session)
    beats, go_on, beat = threading.Event(), threading.Event(), session._connection.beat
    monkeypatch.setattr(session._connection, "beat", lambda: (beats.set(), go_on.wait(), beat()))
    with callers(1, lambda: echo(session)) as (one,):
        assert beats.wait(60 * HEARTBEAT_S)
        one.go()
        time.sleep(0.1)  # LANE_AFTER_S many times over
        go_on.set()
        one.must_answer()
    assert not len(session._lanes) and len(executor.server.sessions) == 1
    session.close()


def test_connections_of_threads_that_ended_are_taken_over(serve: Callable) -> None:
    session = Session(serve(tiny_llama(), heartbeat_s=60).endpoint)
    echo(session)
    for _ in range(5):
        with callers(1, lambda: echo(session)) as (one,), session._lock:
            one.go()
            one.must_answer()
    assert len(session._lanes) == 1
    session.close()


@pytest.mark.parametrize("limits", [{"max_sessions": 1}, {"max_tenant_sessions": 3}], ids=["refused", "not asked for"])
def test_where_no_more_are_let_in_threads_take_turns(limits: dict[str, int], serve: Callable) -> None:
    session = Session(serve(tiny_llama(), **limits).endpoint)
    echo(session)
    with callers(2, lambda: echo(session)) as (one, two):
        with session._lock:
            one.go()
            two.go()
            time.sleep(0.3)
            assert not one.made and not two.made
        one.must_answer()
        two.must_answer()
    assert session.stats.retries == session.stats.reconnects == 0
    session.close()


def test_all_sessions_of_a_process_have_no_more_than_a_part_of_what_a_tenant_may_have(serve: Callable) -> None:
    executor = serve(tiny_llama(), max_tenant_sessions=8)
    for session in (sessions := [Session(executor.endpoint) for _ in range(2)]):
        echo(session)
    with callers(2, lambda: echo(sessions[0])) as first, callers(2, lambda: echo(sessions[1])) as second:
        for caller, others in zip((*first, *second), (0, 0, 1, 1), strict=True):
            with sessions[others]._lock:
                caller.go()
                time.sleep(0.3)
            caller.must_answer()
        assert [len(session._lanes) for session in sessions] == [2, 0]
    for session in sessions:
        session.close()


def test_a_session_that_proves_its_answers_keeps_to_one_connection(serve: Callable, ids: Tensor) -> None:
    executor = serve(tiny_llama())
    model = symbiosis.wrap(tiny_llama(), executor.endpoint, verify=True)
    session = model.model.layers[0].mlp.up_proj.weight.handle.session
    with torch.no_grad(), callers(1, lambda: model(ids).logits) as (one,):
        with session._lock:
            one.go()
            time.sleep(0.3)
            assert not one.made and len(executor.server.sessions) == 1
        until(lambda: one.made, "the answer")


def test_a_refused_call_is_refused_and_the_connection_stays(executor: symbiosis.Executor) -> None:
    session = Session(executor.endpoint)
    echo(session)
    served = next(number for number, layer in enumerate(session.manifest) if layer.kind == "linear")
    with callers(1, lambda: session.call(Op.READ, served, dtype=torch.float32)) as (one,), session._lock:
        for calls in (1, 2):
            one.go()
            until(lambda calls=calls: len(one.made) == calls, "the refusal")
            assert isinstance(one.made[-1], CallError) and one.made[-1].code is Code.READ_DENIED
        assert len(session._lanes) == 1
    session.close()


def test_what_a_lane_loses_is_sent_again(serve: Callable, tmp_path: Path) -> None:
    endpoint = f"local://{tmp_path}/x.sock"
    first = serve(tiny_llama(), listen=[endpoint])
    session = Session(endpoint)
    echo(session)
    with callers(1, lambda: echo(session)) as (one,):
        with session._lock:
            one.go()
            one.must_answer()
        first.close()
        one.go()
        time.sleep(0.2)
        second = serve(tiny_llama(), listen=[endpoint])
        one.must_answer(2)
        with session._lock:
            one.go()
            one.must_answer(3)
        assert len(second.server.sessions) == 2
    assert session.stats.reconnects == 1 and session.stats.calls == 4
    session.close()


def test_ten_threads_compute_what_one_does(executor: symbiosis.Executor, ids: Tensor) -> None:
    """Bit for bit, forward and backward, where the executor joins no calls."""
    model = symbiosis.wrap(tiny_llama(), executor.endpoint)
    inputs = [model.get_input_embeddings()((ids + n) % 100).detach() for n in range(10)]

    def step(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        model(inputs_embeds=x).logits.square().sum().backward()
        return x.grad  # type: ignore[return-value]

    expected = [step(x) for x in inputs]
    got: list[list[Tensor]] = [[] for _ in inputs]
    ready = threading.Barrier(len(inputs))
    lanes, counts = model.model.layers[0].mlp.up_proj.weight.handle.session._lanes, list[int]()

    def run(number: int) -> None:
        ready.wait()
        for _ in range(5):
            got[number].append(step(inputs[number]))
        counts.append(len(lanes))
        ready.wait(60.0)  # the lane of a thread that has ended is closed

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert all(torch.equal(one, expected[number]) for number in range(len(inputs)) for one in got[number])
    assert [len(steps) for steps in got] == [5] * len(inputs)
    assert 0 < max(counts) < len(inputs)
    until(lambda: len(executor.server.sessions) == 1, "the end of the others")


def test_every_call_of_every_thread_is_counted(executor: symbiosis.Executor) -> None:
    session = Session(executor.endpoint)
    echo(session)

    def run() -> None:
        for _ in range(200):
            echo(session)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert session.stats.calls == 1601 == session.stats.by_op["ECHO"] == session.stats.batched_calls
    session.close()


def test_a_join_that_takes_too_long_leaves_no_session(serve: Callable) -> None:
    executor = serve(tiny_llama())
    session = Session(executor.endpoint)
    echo(session)
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go_on.wait(60)

    executor.server.reactor.call_soon(hold)
    assert begun.wait(60)
    for _ in range(3):
        with pytest.raises(ConnectionLost, match="no answer"):
            transport.connect(executor.endpoint, Hello(), 0.05)
    go_on.set()
    echo(session)
    echo(session)
    assert len(executor.server.sessions) == 1


def test_the_calls_of_all_gpus_of_a_session_and_of_its_host_are_counted(
    executor: symbiosis.Executor, ids: Tensor
) -> None:
    split = symbiosis.wrap(tiny_llama(), executor.endpoint)
    session = next(remote_weights(split)).handle.session
    with torch.no_grad():
        split(ids)
    before = symbiosis.stats(split)
    line = SimpleNamespace(close=lambda: None)
    session._lines = {n: SimpleNamespace(**vars(line), batched=5 + n, reconnects=n) for n in range(2)}
    for _ in range(2):
        after = symbiosis.stats(split)
        assert (after.batched_calls, after.reconnects) == (before.batched_calls + 11, before.reconnects + 1)
    session.close()
    assert symbiosis.stats(split).batched_calls == before.batched_calls + 11
