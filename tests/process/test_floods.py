"""Many small things over `tcp://` without keys: no message and nobody who joins keeps the executor's loop, or fills its log."""

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
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
from symbiosis.transport.tcp import discard, gate, lookout, waiting_room
from symbiosis.transport.tcp import listener as tcp_listener
from symbiosis.transport.tcp.sockets import Wire
from symbiosis.transport.tcp.waiting_room import Knock, WaitingRoom
from tests.conftest import tiny_llama
from tests.fault.test_hostile_executor import welcome_of
from tests.processes import WAIT_S, Bystander, until
from tests.realm import Raw, echoes
from tests.zmtp import Stream, answering

FRAMES = 1_000_000  # two megabytes


@pytest.fixture
def house(serve: Callable, tmp_path: Path) -> Any:
    return serve(tiny_llama(), listen="tcp://127.0.0.1:0", policy="immediate", audit_log=str(tmp_path / "audit"))


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


# ---------------------------------------------------------------- messages of very many frames


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
            patch.setattr(lookout, "FIRST_BYTES", 4 * FRAMES)
            patch.setattr(discard.Discard, "some", counted)
            stream.send_empty_frames(FRAMES)
            until(lambda: seen and not listener._intake.blocked, "the end of the message")
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


@pytest.mark.parametrize("end", [b"\x00\x00", b""], ids=["whole", "never ends"])
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
    wire = next(wire for wire in Wire.all_at(port) if wire.other_end == stream.socket.getsockname())
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


# ---------------------------------------------------------------- very many connections


def begins_to_connect(port: int) -> socket.socket:
    """Returns at once: a connection that the kernel drops is tried again after a second, when the gate may be open again."""
    opened = socket.socket()
    opened.setblocking(False)
    with suppress(BlockingIOError):
        opened.connect(("127.0.0.1", port))
    return opened


def test_too_many_connections_from_one_address_are_not_opened(
    house: Any, llama: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... for a while, whatever they want. The kernel drops them, so they cost the executor nothing."""
    (listener,), kept_out = house.server.listeners, house.server.ledger.kept_out
    port = int(house.endpoint.rpartition(":")[2])
    monkeypatch.setattr(gate, "SHUT_S", 2.0)
    with Bystander(house.endpoint, llama) as innocent:
        listener._gate._allowance = Allowance(20, 100.0)
        opened = [begins_to_connect(port) for _ in range(30)]
        until(lambda: kept_out["TOO_MANY_CONNECTIONS"], "the closing of the gate")
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", port), timeout=gate.SHUT_S / 10)
        innocent.goes_on()
        until(lambda: not listener._gate._shut, "the opening of the gate")
        new = Session(house.endpoint)
        assert echoes(new)
        new.close()
    for one in opened:
        one.close()
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [line["address"] for line in lines if line.get("code") == "TOO_MANY_CONNECTIONS"][0] == "127.0.0.0/8"


@pytest.mark.parametrize("whole", [True, False])
def test_who_sends_very_many_frames_again_and_again_is_shut_out(whole: bool, house: Any) -> None:
    """... long before as many connections as anybody may open: each keeps others waiting, or takes memory."""
    (listener,), kept_out = house.server.listeners, house.server.ledger.kept_out
    listener._gate._allowance = Allowance(gate.AT_ONCE, 1e-3)
    for _ in range(3 * gate.AT_ONCE // gate.FINE):
        with suppress(TimeoutError, ConnectionError):
            stream = Stream(house.endpoint)
            stream.socket.sendall(b"\x01\x00" * lookout.FIRST_BYTES + b"\x00\x00" * whole)
            until(lambda stream=stream: stream.was_hung_up_on, "the end of a connection")
            stream.close()
        if kept_out["TOO_MANY_CONNECTIONS"]:
            return
    raise AssertionError("the gate stays open")


@pytest.mark.parametrize(
    ("shut", "host", "comes_from", "passes"),
    [
        (["127.0.0.2/32"], "127.0.0.1", "127.0.0.2", False),
        (["127.0.0.2/32"], "127.0.0.1", "127.0.0.3", True),
        (["10.0.0.0/8", "2001:db8::/64", "127.0.0.0/8"], "127.0.0.1", "127.0.0.3", False),
        (["10.0.0.1/32", "2001:db8::/64", "::/64"], "127.0.0.1", "127.0.0.3", True),
        (["10.0.0.1/32", "::/64"], "::1", "::1", False),
        (["10.0.0.1/32", "0:0:0:1::/64", "0:0:1::/64", "127.0.0.0/8"], "::1", "::1", True),
        ([gate.ANYBODY], "127.0.0.1", "127.0.0.3", False),
    ],
)
def test_the_kernel_drops_those_who_are_shut_out(shut: list[str], host: str, comes_from: str, passes: bool) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("no IPv6 here")
    with listening, socket.socket(family) as early, socket.socket(family) as late:
        keeper = gate.Gate(listening.getsockname()[1], lambda why, address: None)
        for one in (early, late):
            one.settimeout(0.3)
            one.bind((comes_from, 0))
        early.connect(listening.getsockname()[:2])
        keeper._shut = dict.fromkeys(shut, time.monotonic() + 60.0)
        keeper._filter()
        with nullcontext() if passes else pytest.raises(TimeoutError):
            late.connect(listening.getsockname()[:2])
        early.sendall(b"more")  # who is in stays in
        accepted, _ = listening.accept()
        assert accepted.recv(4) == b"more"
        accepted.close()


# ---------------------------------------------------------------- joins without keys


def test_who_joins_and_leaves_again_and_again_takes_turns(house: Any, llama: nn.Module) -> None:
    """Whom the executor lets in is bounded; who waits and goes is forgotten, and who waits and stays gets in."""
    server, (listener,) = house.server, house.server.listeners
    joins, joined = list[float](), server.dispatch.joined
    server.dispatch.joined = lambda *told: joins.append(time.monotonic()) or joined(*told)
    with Bystander(house.endpoint, llama) as innocent:
        listener._waiting._allowance = Allowance(10, 5.0)
        begun, before = time.monotonic(), len(joins)
        streams = [Stream(house.endpoint).say(Hello(client="eve"), Bye()) for _ in range(100)]
        until(lambda: all(stream.was_hung_up_on for stream in streams), "the end of them all")
        assert len(joins) - before <= 10 + 5.0 * (time.monotonic() - begun) + 1
        assert not len(listener._waiting)
        innocent.goes_on()
        new = Session(house.endpoint)
        assert echoes(new)
        new.close()
    for stream in streams:
        stream.close()


def test_joins_leave_the_loop_to_others(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many may join at once, the executor lets them in by and by."""
    monkeypatch.setattr(tcp_listener, "LET_IN_S", 0.0)
    server, passes, joined = house.server, list[int](), house.server.dispatch.joined
    server.dispatch.joined = lambda *told: passes.append(server.reactor.passes) or joined(*told)
    streams = [Stream(house.endpoint) for _ in range(20)]
    for stream in streams:
        stream.say(Hello(client="one of many"))
    until(lambda: len(server.sessions) == 20, "the last of them")
    assert len(set(passes)) == 20
    for stream in streams:
        stream.close()


def test_programs_that_join_at_once_all_get_in(house: Any) -> None:
    """More of them than may join at once."""
    (listener,) = house.server.listeners
    listener._waiting._allowance = Allowance(16, 40.0)
    streams = [Stream(house.endpoint).say(Hello(client="one of many")) for _ in range(48)]
    until(lambda: len(house.server.sessions) == 48, "the last of them")
    for stream in streams:
        stream.close()


def test_who_waits_in_vain_costs_the_others_nothing(house: Any) -> None:
    room, now = WaitingRoom(), time.monotonic()
    room._allowance = Allowance(1, 1.0)
    streams = [Stream(house.endpoint) for _ in range(3)]
    (listener,) = house.server.listeners
    wires = list(Wire.all_at(listener._lookout._port))
    assert len(wires) == 3
    for number, wire in enumerate(wires):
        assert room.put(Knock(b"%d" % number, None, zmq.Frame(), Hello(), wire))
    assert not room.put(Knock(b"gone", None, zmq.Frame(), Hello(), None))
    gone = next(stream for stream in streams if stream.socket.getsockname() == wires[0].other_end)
    gone.close()
    until(lambda: not wires[0].received(), "the end of a connection")
    assert [knock.identity for _ in range(2) if (knock := room.next(now))] == [b"1"]
    assert b"2" in room and room.next(now + 1.0)
    assert room.next(now + 9.0) is None and not len(room)


def test_the_waiting_room_is_bounded(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_room, "MOST_WAITING", 5)
    (listener,) = house.server.listeners
    listener._waiting._allowance = Allowance(1, 1e-3)
    streams = [Stream(house.endpoint).say(Hello()) for _ in range(20)]

    def there() -> tuple[int, int, int]:
        """How many have joined, wait, and were hung up on."""
        return len(house.server.sessions), len(listener._waiting), sum(one.was_hung_up_on for one in streams)

    # the first is let in before or after the others come
    until(lambda: there() in ((1, 5, 14), (1, 4, 15)), "the end of those for whom there is no room")
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
