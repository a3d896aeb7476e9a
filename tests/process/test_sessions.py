"""Sessions over each transport: how they join, leave, are lost, and join again."""

import contextlib
import gc
import itertools
import os
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import symbiosis
import symbiosis.client.session
from symbiosis import transport
from symbiosis.client.session import Session
from symbiosis.errors import ConnectionLost, ExecutorUnavailable
from symbiosis.protocol import Hello, Op, Priority
from symbiosis.transport.local.peer import FIRST_SLAB
from tests.conftest import tiny_llama
from tests.processes import until
from tests.transports import WAIT_S, anything, echoed

between_processes = pytest.mark.parametrize("url", ["local", "tcp"], indirect=True)


@between_processes
def test_a_pickled_session_joins_anew_and_only_once(session: Session) -> None:
    one, other = pickle.loads(pickle.dumps((session, session)))
    assert one is other is not session
    assert pickle.loads(pickle.dumps(session)) is one
    assert echoed(one, anything((3, 5))) and echoed(session, anything((3, 5)))
    one.close()


@between_processes
def test_a_forked_child_joins_anew(session: Session) -> None:
    """As data loaders fork; parent and child then call at the same time, each on a connection of its own."""
    assert echoed(session, anything((3, 5)))
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os.write(writer, b"yes" if all(echoed(session, anything((n + 1, 5))) for n in range(100)) else b"no")
        os._exit(0)
    os.close(writer)
    assert all(echoed(session, anything((n + 1, 7))) for n in range(100))
    assert os.read(reader, 3) == b"yes"
    os.waitpid(child, 0)
    os.close(reader)
    assert session.stats.reconnects == 0


def test_the_priority_is_that_of_the_session_if_it_has_one(executor: symbiosis.Executor) -> None:
    session = Session(executor.endpoint, Priority.TRAIN)
    number = session.welcome.session
    assert executor.server.sessions[number].priority == Priority.TRAIN
    session.close()


def test_who_leaves_is_forgotten(executor: symbiosis.Executor) -> None:
    for _ in range(3):
        session = Session(executor.endpoint)
        assert echoed(session, anything((3, 5)))
        assert len(executor.server.sessions) == 1
        session.close()
        until(lambda: not executor.server.sessions)


def test_a_closed_session_joins_again_when_it_is_used(session: Session) -> None:
    assert echoed(session, anything((3, 5)))
    session.close()
    assert echoed(session, anything((3, 5)))
    assert session.stats.reconnects == 1


def test_a_session_that_nobody_keeps_leaves(executor: symbiosis.Executor) -> None:
    session = Session(executor.endpoint)
    assert echoed(session, anything((3, 5)))
    del session
    until(lambda: not executor.server.sessions)


def test_joining_and_leaving_leaves_no_descriptors(executor: symbiosis.Executor) -> None:
    def join_and_leave() -> None:
        session = Session(executor.endpoint)
        assert echoed(session, anything((FIRST_SLAB // 4,)))  # with growing
        session.close()
        until(lambda: not executor.server.sessions)

    leaves_no_descriptors(join_and_leave, times=20)


def test_a_session_whose_socket_was_collected_first_leaves_no_descriptors(url: str) -> None:
    """The collector finalizes what it finds together in any order."""
    with symbiosis.Executor(tiny_llama(), listen=[url]) as executor:

        def join() -> None:
            session = Session(executor.endpoint)
            assert echoed(session, anything((3, 5)))
            if (sock := getattr(session._connection, "_socket", None)) is not None:
                sock.close()
            del session
            gc.collect()
            until(lambda: not executor.server.sessions)

        leaves_no_descriptors(join, times=5, seconds=5)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def leaves_no_descriptors(act: Callable[[], None], times: int, seconds: float = WAIT_S) -> None:
    """What is opened by the first time may stay."""
    act()
    before = descriptors()
    for _ in range(times):
        act()
    until(lambda: descriptors() <= before, seconds=seconds)


def test_closed_executors_leave_no_descriptors(url: str, tmp_path: Path) -> None:
    model = tiny_llama()

    rows = itertools.count(1)

    def run() -> None:
        with symbiosis.Executor(model, listen=[url]) as executor:
            session = Session(executor.endpoint)
            assert echoed(session, anything((next(rows), 5)))
            session.close()

    leaves_no_descriptors(run, times=10)


def test_a_session_goes_on_with_an_executor_that_was_restarted(url: str) -> None:
    model = tiny_llama()
    first = symbiosis.Executor(model, listen=[url])
    session = Session(first.endpoint)
    assert echoed(session, anything((3, 5)))
    first.close()
    results: list[bool] = []
    waiting = threading.Thread(target=lambda: results.append(echoed(session, anything((3, 5)))))
    waiting.start()
    with symbiosis.Executor(model, listen=[first.endpoint]):
        waiting.join(WAIT_S)
        assert results == [True]
        assert session.stats.reconnects == 1
        session.close()


def test_an_executor_that_stays_away_is_given_up_in_time(url: str) -> None:
    executor = symbiosis.Executor(tiny_llama(), listen=[url])
    session = Session(executor.endpoint, patience=0.3)
    assert echoed(session, anything((3, 5)))
    executor.close()
    begun = time.monotonic()
    with pytest.raises(ExecutorUnavailable, match=f"no executor at {re.escape(executor.endpoint)}.*Start one with"):
        session.call(Op.ECHO, 0, anything((3, 5)))
    assert 0.3 <= time.monotonic() - begun < WAIT_S
    session.close()


def test_a_client_that_is_idle_stays_joined(url: str, serve: Callable) -> None:
    executor = serve(tiny_llama(), listen=[url], heartbeat_s=1.5)
    session = Session(executor.endpoint)
    assert echoed(session, anything((3, 5)))
    (its,), begun = executor.server.sessions.values(), time.monotonic()
    until(lambda: its.heard > begun + 1.5, "signs of life for a whole heartbeat")
    assert executor.server.ledger.dropped == 0
    assert echoed(session, anything((3, 5)))
    assert session.stats.reconnects == 0
    session.close()


def test_an_idle_client_hears_all_that_zeromq_tells_while_its_executor_is_away() -> None:
    """ZeroMQ's thread waits, with the connections of all sessions, when too much of it is not read."""
    executor = symbiosis.Executor(tiny_llama(), listen=["tcp://127.0.0.1:0"], heartbeat_s=60)
    session = Session(executor.endpoint)
    assert echoed(session, anything((3, 5)))
    monitor = session._connection._monitor
    executor.close()
    until(lambda: monitor.poll(0), "the end of the connection")
    session.beat()
    assert not monitor.poll(0)
    until(lambda: monitor.poll(0), "another attempt of ZeroMQ's")
    session.beat()
    with symbiosis.Executor(tiny_llama(), listen=[executor.endpoint]):
        assert echoed(session, anything((3, 5)))
    assert session.stats.reconnects == 1
    session.close()


def test_a_heartbeat_survives_zeromq() -> None:
    """Which closes what is open when a process ends, while a thread may still beat."""
    with symbiosis.Executor(tiny_llama(), listen=["tcp://127.0.0.1:0"]) as executor:
        session = Session(executor.endpoint)
        assert echoed(session, anything((3, 5)))
        session._connection._socket.disable_monitor()  # else ZeroMQ's thread would wait for ever to tell of the end
        session._connection._monitor.close()
        session.beat()
        assert echoed(session, anything((3, 5)))
        session._connection._socket.close()
        session.beat()


@between_processes
def test_a_client_that_was_dropped_joins_again(url: str, serve: Callable) -> None:
    """Its heartbeat stopped, as it does in a frozen process; the next call finds out."""
    executor = serve(tiny_llama(), listen=[url], heartbeat_s=0.3)
    session = Session(executor.endpoint)
    with session._lock:
        session._connected()  # and the lock is held, so that nothing beats
        until(lambda: executor.server.ledger.dropped == 1 and not executor.server.sessions)
    assert echoed(session, anything((3, 5)))
    assert session.stats.reconnects == 1
    session.close()


def test_a_peer_gone_in_the_middle_of_a_handshake_is_a_lost_connection() -> None:
    """As an executor that restarts leaves it: the session must try again, not take it for a refusal."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            with server.accept()[0]:
                pass

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(ConnectionLost, match="it is ending"):
            transport.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}", Hello(), 5.0)
        thread.join()


def test_connecting_to_nobody_is_a_lost_connection(url: str) -> None:
    url = url.replace(":0", ":1")
    with pytest.raises(ConnectionLost, match="it accepts no connection|No such file|none of this process has the name"):
        transport.connect(url, Hello(), 1.0)
