"""Many small things over `tcp://` without keys: no message and nobody who joins keeps the executor's loop, or fills its log."""

import json
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from prometheus_client import CollectorRegistry
from torch import nn

from symbiosis.base.allowance import Allowance
from symbiosis.client.session import Session
from symbiosis.errors import CallError, ProtocolError
from symbiosis.executor.observe import join_log
from symbiosis.executor.observe.prometheus import PrometheusCollector
from symbiosis.protocol import (
    LONGEST_BEAT_S,
    MAX_WELCOME,
    Beat,
    Bye,
    Call,
    FromClient,
    Hello,
    Limits,
    Op,
    encode_call,
    encode_control,
)
from symbiosis.transport.tcp import connection_monitor, discard
from symbiosis.transport.tcp import listener as tcp_listener
from symbiosis.transport.tcp.sockets import Wire
from tests.conftest import tiny_llama
from tests.fault.test_hostile_executor import welcome_of
from tests.processes import WAIT_S, Bystander, until
from tests.realm import Raw, echoes
from tests.zmtp import Stream, answering

FRAMES = 1_000_000  # two megabytes


@pytest.fixture
def house(serve: Callable, tmp_path: Path) -> Any:
    return serve(tiny_llama(), listen="tcp://127.0.0.1:0", policy="immediate", audit_log=str(tmp_path / "audit"))


# ---------------------------------------------------------------- messages of very many frames


@pytest.fixture(params=["in C", "in Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How frames are thrown away."""
    if request.param == "in C":
        discard._compile()
        if not discard._libraries:
            pytest.skip("no C compiler here")
    else:
        monkeypatch.setattr(discard, "_compile_meanwhile", lambda: None)
        monkeypatch.setattr(discard, "_libraries", [])
    return str(request.param)


@pytest.mark.parametrize("joined", [True, False])
def test_a_message_of_very_many_frames_leaves_the_loop_to_others(
    joined: bool, way: str, house: Any, llama: nn.Module
) -> None:
    """The loop turns at least once in some thousands of frames, and each turn does what else there is to do."""
    (listener,), reactor = house.server.listeners, house.server.reactor
    with Bystander(house.endpoint, llama) as innocent:
        stream = Stream(house.endpoint)
        if joined:
            stream.join()
        seen, some = list[int](), discard.Discard.some

        def counted(self: Any) -> None:
            seen.append(reactor.passes)
            some(self)

        with pytest.MonkeyPatch.context() as patch:
            # else its look may end it before ZeroMQ has taken all of it in
            patch.setattr(connection_monitor, "FIRST_BYTES", 4 * FRAMES)
            patch.setattr(discard.Discard, "some", counted)
            stream.send_empty_frames(FRAMES)
            until(lambda: seen and not listener._queues.blocked, "the end of the message")
        assert len(set(seen)) == len(seen) >= FRAMES / 100_000
        assert stream.was_hung_up_on
        innocent.goes_on()
        stream.close()


def test_who_listens_can_throw_frames_away_in_c_before_they_come(
    serve: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first such message would be over before the compiler is."""
    discard._compile()
    if not discard._libraries:
        pytest.skip("no C compiler here")
    monkeypatch.setattr(discard, "_libraries", [])
    discard._compile_meanwhile.cache_clear()
    serve(tiny_llama(), listen="tcp://127.0.0.1:0")
    until(lambda: discard._libraries, "the library")


def test_a_message_of_a_few_frames_too_many_ends_its_connection(house: Any) -> None:
    """... and what others send is found behind it."""
    raw = Raw(house.endpoint)
    raw.socket.send_multipart([b"x"] * (discard.BY_PYTHON + 100))
    until(lambda: raw.was_hung_up_on, "the end of the connection")
    session = Session(house.endpoint)
    assert echoes(session)
    session.close()
    raw.close()


def test_goodbyes_of_nobody_are_not_answered(house: Any) -> None:
    stream = Stream(house.endpoint).say(*[Bye()] * (Limits().max_in_flight // 2), Hello(client="late"))
    until(lambda: len(house.server.sessions) == 1, "a join behind them")
    assert not stream.was_hung_up_on
    stream.close()


def test_who_says_more_than_can_wait_before_it_joins_is_hung_up_on(house: Any) -> None:
    """What is said first is read first: a goodbye that waits must not end a join that came behind it."""
    with suppress(ConnectionError):
        stream = Stream(house.endpoint).say(*[Bye()] * 100_000, Hello(client="late"))
        until(lambda: stream.was_hung_up_on, "the end of the connection")
        stream.close()
    assert not house.server.sessions


@pytest.mark.parametrize(
    "end", [pytest.param(b"\x00\x00", id="whole"), pytest.param(b"", id="never ends", marks=pytest.mark.full)]
)
def test_a_client_reads_few_frames_of_an_executors_message(end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    read, receive = list[int](), zmq.Socket.recv

    def counted(self: Any, *words: Any, **options: Any) -> Any:
        frame = receive(self, *words, **options)
        if self.type == zmq.DEALER:  # neither what monitors tell nor what an executor reads
            read.append(1)
        return frame

    monkeypatch.setattr(zmq.Socket, "recv", counted)
    with answering(b"\x01\x00" * FRAMES + end) as url, pytest.raises((ProtocolError, ConnectionError)):
        _ = Session(url, timeout=2.0, patience=2.0).welcome
    assert len(read) < 100


@pytest.mark.parametrize("when", ["before the welcome", "while the client is idle", "instead of a reply"])
def test_a_client_holds_little_of_a_message_that_never_ends(when: str) -> None:
    """Whatever sign of life the executor asks for: each of its frames takes two bytes on the way, and 64 in memory."""
    welcome = encode_control(welcome_of(tiny_llama(), heartbeat_s=LONGEST_BEAT_S))
    first, sent = struct.pack(">BQ", 2, len(welcome)) + welcome, list[int]()
    with answering(b"" if "welcome" in when else first, b"\x01\x00" * (32 << 10), sent) as url:
        session = Session(url, timeout=WAIT_S, patience=0.0)
        if "idle" in when:
            assert session.welcome
            until(lambda: session._connection._socket.closed, "the end of the connection")
        else:
            with pytest.raises((ProtocolError, ConnectionError)):
                session.call(Op.ECHO, 0, torch.ones(2, 8))
    in_kernel = 16 << 20  # what both sides' buffers take
    assert sum(sent) < in_kernel + 2 * MAX_WELCOME


@pytest.mark.parametrize("said", [[Hello(client="gone"), Bye()], [Beat()] * 6], ids=["leaves", "says much"])
def test_who_is_gone_ends_nobody_elses_connection(serve: Callable, said: list[FromClient]) -> None:
    """What it said is read when its descriptor in the executor is another connection's."""
    house = serve(tiny_llama(), listen="tcp://127.0.0.1:0", policy="immediate", max_in_flight=2)
    begun, go_on = threading.Event(), threading.Event()
    house.server.reactor.call_soon(lambda: begun.set() or go_on.wait(WAIT_S))
    assert begun.wait(WAIT_S)
    later, stream = socket.socket(), Stream(house.endpoint)
    host, port = stream.socket.getpeername()
    wires = map(Wire.of, range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    wire = next(wire for wire in wires if wire and wire.other_end == stream.socket.getsockname())
    with ExitStack() as held:
        while held.enter_context(open(os.devnull)).fileno() < wire.fd:  # noqa: PTH123
            pass
        stream.say(*said).socket.shutdown(socket.SHUT_RDWR)
        until(lambda: Wire.of(wire.fd) is None, "the end of its connection")
        later.connect((host, port))
        until(lambda: Wire.of(wire.fd) == (wire.fd, later.getsockname()), "the other connection")
    go_on.set()
    session = Session(house.endpoint)
    assert echoes(session)  # so what was said before is read
    later.setblocking(False)
    with pytest.raises(BlockingIOError):  # and not the end of the connection
        while later.recv(1024):
            pass
    session.close()
    later.close()
    stream.close()


# ---------------------------------------------------------------- bytes that come in vain

LARGE = Call(Op.ECHO, 0, "float32", (1 << 20, 1))  # 4 MiB
OF_NO_LAYER = Call(Op.FORWARD, 9_999, "float32", (1 << 20, 1))


def in_vain(raw: Raw, frames: list[bytes], most: int) -> int:
    """Send a message again and again, at most so many bytes. Return how many were sent before the connection was ended."""
    sent, raw.socket.sndtimeo = 0, 1000
    while sent < most and not raw.was_hung_up_on:
        with suppress(zmq.Again):
            raw.socket.send_multipart(frames, copy=False)
            sent += sum(map(len, frames))
        while raw.socket.poll(5):
            raw.socket.recv_multipart()
    return sent


@pytest.mark.parametrize(
    "frames",
    [
        [encode_call(OF_NO_LAYER, 1), bytes(4 << 20)],
        [encode_call(LARGE, 1), bytes(4 << 20), bytes(1)],
        [bytes(4 << 20)],
    ],
    ids=["a refused call", "wrong frames", "no message"],
)
def test_who_sends_much_that_is_refused_is_hung_up_on(house: Any, frames: list[bytes], llama: nn.Module) -> None:
    """Long before there are very many refusals."""
    raw, ledger = Raw.joined(house.endpoint), house.server.ledger
    with Bystander(house.endpoint, llama) as innocent:
        most = 2 * tcp_listener.IN_VAIN_PER_S
        assert in_vain(raw, frames, 3 * most) < most * 1.2
        assert raw.was_hung_up_on
        innocent.goes_on()
    assert tcp_listener.IN_VAIN_PER_S < ledger.in_vain["", "tcp"] < most * 1.2
    told = CollectorRegistry()
    told.register(PrometheusCollector(house.server.snapshot))
    labels = {"tenant": "", "transport": "tcp"}
    assert told.get_sample_value("symbiosis_in_vain_bytes_total", labels) == ledger.in_vain["", "tcp"]
    raw.close()


def test_a_tenant_may_send_as_much_in_vain_as_its_rate_of_bytes(serve: Callable) -> None:
    house = serve(tiny_llama(), listen="tcp://127.0.0.1:0", policy="immediate", max_tenant_bytes_per_s=1 << 20)
    raw = Raw.joined(house.endpoint)
    assert in_vain(raw, [encode_call(LARGE, 1), bytes(1 << 20)], 16 << 20) < 8 << 20
    assert raw.was_hung_up_on
    raw.close()


def test_one_large_call_that_is_refused_ends_nothing(house: Any) -> None:
    """It may be larger than all that may come in vain in a second."""
    session = Session(house.endpoint)
    many = torch.ones(1, tcp_listener.IN_VAIN_PER_S // 4 + 1)  # of no width that a layer has
    with pytest.raises(CallError):
        session.call(Op.FORWARD, 1, many)
    assert echoes(session) and session.stats.reconnects == 0
    assert house.server.ledger.in_vain["", "tcp"] > many.nbytes
    session.close()


# ---------------------------------------------------------------- joins without keys


def test_programs_that_join_at_once_all_get_in(house: Any) -> None:
    streams = [Stream(house.endpoint).say(Hello(client="one of many")) for _ in range(200)]
    until(lambda: len(house.server.sessions) == 200, "the last of them")
    for stream in streams:
        stream.close()


def test_who_joins_and_leaves_again_and_again_leaves_the_loop_to_others(house: Any, llama: nn.Module) -> None:
    with Bystander(house.endpoint, llama) as innocent:
        streams = [Stream(house.endpoint).say(Hello(client="eve"), Bye()) for _ in range(100)]
        until(lambda: all(stream.was_hung_up_on for stream in streams), "the end of them all")
        innocent.goes_on()
        new = Session(house.endpoint)
        assert echoes(new)
        new.close()
    for stream in streams:
        stream.close()


def test_who_joins_and_leaves_again_and_again_fills_no_log(house: Any, tmp_path: Path) -> None:
    written = house.server.register
    written._sessions = Allowance(20, 1.0)
    begun = time.monotonic()
    for _ in range(60):
        stream = Stream(house.endpoint).join()
        stream.say(Bye())
        until(lambda stream=stream: stream.was_hung_up_on, "the end of a session")
        stream.close()
    most = 20 + (time.monotonic() - begun) + 1
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    joined, left = ([line["session"] for line in lines if line["event"] == event] for event in ("joined", "left"))
    assert joined == left and 20 <= len(joined) <= most
    written._sessions = Allowance(20, 1.0)
    Stream(house.endpoint).join().close()
    last = json.loads((tmp_path / "audit").read_text().splitlines()[-1])
    assert last.get("untold", 0) + sum(line.get("untold", 0) for line in lines) == 60 - len(joined)
    assert join_log.SESSIONS_AT_ONCE >= 256  # as many as may be there
