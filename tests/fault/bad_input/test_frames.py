"""Raw frames and bytes over tcp://: what is no message of ours harms nobody."""

import contextlib
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

import symbiosis
from symbiosis.client.session import Session
from symbiosis.errors import Code
from symbiosis.executor.loop import ExecutorLoop
from symbiosis.executor.model.store import Store
from symbiosis.executor.options import Options
from symbiosis.protocol import (
    CALL_SIZE,
    VERSION,
    Beat,
    Call,
    Grown,
    Hello,
    Op,
    Refusal,
    decode_from_executor,
    decode_reply,
    encode_call,
    encode_control,
)
from symbiosis.transport.tcp.listener import AT_ONCE
from tests import tally
from tests.conftest import tiny_llama
from tests.fault.bad_input.raw import (
    ECHO,
    LIMITS,
    MODEL,
    WAIT_S,
    RawLocal,
    by_the_thousand,
    header,
    joined,
    refusal,
    rows,
)
from tests.processes import Bystander, Client, Say, killed_at_the_end, until


@pytest.fixture
def dealer(executor: symbiosis.Executor) -> Iterator[zmq.Socket]:
    """A bare ZeroMQ socket at the executor of the test, not joined."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        dealer.connect(executor.endpoint)
        yield dealer


only_tcp = pytest.mark.parametrize("scheme", ["tcp"])


NO_FRAMES_OF_OURS: dict[str, tuple[list[bytes], Code, str]] = {
    "an empty frame": ([b""], Code.BAD_FRAME, "not a control message"),
    "text": ([b"GET / HTTP/1.1\r\n\r\n"], Code.BAD_FRAME, "not a control message"),
    "a pickle": ([b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x01x\x94."], Code.BAD_FRAME, "not a control"),
    "half a header": ([header()[: CALL_SIZE // 2]], Code.BAD_FRAME, f"has {CALL_SIZE} bytes, not {CALL_SIZE // 2}"),
    "another version": (
        [header(at=4, put=struct.pack("<H", VERSION + 1)), bytes(64)], Code.BAD_VERSION, f"version {VERSION + 1}, this side {VERSION}",
    ),
    "no payload": ([header()], Code.BAD_FRAME, "promises frames of (64,) bytes"),
    "a short payload": ([header(), bytes(63)], Code.BAD_FRAME, "promises frames of (64,) bytes, (63,) came"),
    "a long payload": ([header(), bytes(65)], Code.BAD_FRAME, "promises frames of (64,) bytes, (65,) came"),
    "a frame too many": ([header(), bytes(64), b"x"], Code.BAD_FRAME, "promises frames of (64,) bytes"),
    "many frames": ([header()] + [b"x"] * 50, Code.BAD_FRAME, "promises frames of (64,) bytes"),
    "a promise of 2^40 elements": (
        [header(Call(Op.ECHO, 0, "float32", (2**40,))), bytes(64)], Code.BAD_FRAME, f"frames of ({2**42},) bytes",
    ),
    "a promise of 2^32 calls": (
        [b"\x83\xa4type\xa7compose\xa6number\x01\xa5calls\xdd\xff\xff\xff\xff"], Code.BAD_FRAME, "of length <= 16384",
    ),
    "a second join": ([encode_control(Hello())], Code.NOT_JOINED, "unexpected Hello"),
    "a message of the other side": ([encode_control(Grown(1))], Code.BAD_FRAME, "Invalid value 'grown'"),
}  # fmt: skip


@only_tcp
@pytest.mark.parametrize("what", NO_FRAMES_OF_OURS)
def test_frames_that_are_not_ours_are_refused(executor: symbiosis.Executor, dealer: zmq.Socket, what: str) -> None:
    frames, code, text = NO_FRAMES_OF_OURS[what]
    joined(dealer)
    got, message = refusal(dealer, *frames)
    assert got is code
    assert text in message
    dealer.send_multipart([header(), bytes(64)])
    head, result = dealer.recv_multipart()
    assert (decode_reply(head).code, result) == (Code.OK, bytes(64))


@only_tcp
def test_who_has_not_joined_is_told_to(executor: symbiosis.Executor, dealer: zmq.Socket) -> None:
    assert refusal(dealer, header(), bytes(64)) == (
        Code.NOT_JOINED, "this executor does not know the session: join again",
    )  # fmt: skip
    dealer.send_multipart([encode_control(Hello()), b"more"])
    message = decode_from_executor(dealer.recv())
    assert isinstance(message, Refusal) and message.code == Code.BAD_FRAME


@only_tcp
def test_calls_beyond_those_in_flight_are_refused(executor: symbiosis.Executor, dealer: zmq.Socket) -> None:
    joined(dealer)
    begun, go_on = threading.Event(), threading.Event()
    executor.server.reactor.call_soon(lambda: begun.set() or go_on.wait(WAIT_S))  # else it may answer as fast as we ask
    assert begun.wait(WAIT_S)
    for number in range(40):
        dealer.send_multipart([encode_call(ECHO, number), bytes(64)])
    *_, peer = executor.server.listeners[0]._peers.values()
    until(lambda: peer.wire.received() > 40 * (CALL_SIZE + 64), "the last of them")
    go_on.set()
    replies = [decode_reply(dealer.recv_multipart()[0]) for _ in range(40)]
    assert {reply.seq for reply in replies} == set(range(40))
    codes = [reply.code for reply in replies]
    assert Code.OK in codes and set(codes) <= {Code.OK, Code.LIMIT, Code.BUSY}
    assert LIMITS["max_in_flight"] <= codes.count(Code.OK) < 40


@pytest.mark.fault
@only_tcp
@by_the_thousand
def test_random_frames_harm_nobody(
    executor: symbiosis.Executor, dealer: zmq.Socket, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Mutants of good frames; every one is answered (else we would be hung up on), and the executor lives on."""
    monkeypatch.setattr("symbiosis.transport.tcp.listener.REFUSALS", 10**6)
    chance = random.Random(times)
    good = [
        [header(), bytes(64)],
        [encode_control(Hello())],
        [header(Call(Op.FORWARD, 1, "float32", (1, 16))), bytes(64)],
    ]
    joined(dealer)
    for sent in range(times):
        frames = [bytearray(frame) for frame in chance.choice(good)]
        victim = chance.choice(frames)
        for _ in range(chance.randrange(1, 4)):
            victim[chance.randrange(len(victim))] = chance.randrange(256)
        dealer.send_multipart(frames)
        if sent >= 32:  # fewer than the executor would queue
            dealer.recv_multipart()
    for _ in range(32):
        dealer.recv_multipart()
    tally.done[tally.SENT] += times


@only_tcp
def test_who_is_gone_takes_nobody_along(executor: symbiosis.Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """What he sent is read when his descriptor is another's: the first refusal fails, the second is one too many, and the other
    one must not be hung up on."""
    monkeypatch.setattr("symbiosis.transport.tcp.listener.REFUSALS", 1)
    busy, go_on = threading.Event(), threading.Event()
    executor.server.reactor.call_soon(lambda: (busy.set(), go_on.wait(WAIT_S)))  # type: ignore[arg-type, return-value]
    assert busy.wait(WAIT_S)
    with zmq.Context() as context:
        others = [context.socket(zmq.DEALER) for _ in range(25)]
        monitors = [other.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) for other in others]
        before = descriptors()
        with zmq.Context() as ended:
            for _ in range(20):
                gone = ended.socket(zmq.DEALER)
                gone.connect(executor.endpoint)
                for _ in range(2):
                    gone.send(encode_control(Beat()))  # without having joined
            ended.destroy(linger=int(1000 * WAIT_S))
        until(lambda: descriptors() <= before, "closing of their connections")
        for other, monitor in zip(others, monitors, strict=True):
            other.linger, other.rcvtimeo = 0, int(1000 * WAIT_S)
            other.connect(executor.endpoint)
            other.send_multipart([header(), bytes(64)])
            assert monitor.poll(1000 * WAIT_S), "it did not come in"
        go_on.set()
        for other in others:
            answer = decode_from_executor(other.recv())  # lost with the connection, if that was ended
            assert isinstance(answer, Refusal) and answer.code == Code.NOT_JOINED
            other.disable_monitor()
            other.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


FLOOD = """
import os, sys, time, zmq
dealer = zmq.Context().socket(zmq.DEALER)
dealer.setsockopt(zmq.SNDHWM, 10000)
dealer.connect(sys.argv[1])
for number in range(int(sys.argv[2])):
    dealer.send(b"garbage" * 100)
    if number == 2000:
        print("flooding", flush=True)
time.sleep(0.3)  # it dies with its last frames in the executor's queue
os._exit(0)
"""


@only_tcp
def test_a_flood_of_garbage_does_not_stop_the_products(executor: symbiosis.Executor) -> None:
    """Connections that only send: the innocent client's calls still run in between."""
    floods = [flood(executor.endpoint, 10**12) for _ in range(2)]
    try:
        with Bystander(executor.endpoint, MODEL) as innocent:
            for _ in range(20):
                innocent.goes_on()
    finally:
        for process in floods:
            process.kill()
            process.communicate()


def flood(endpoint: str, frames: int) -> subprocess.Popen:
    """A process that sends garbage; it has begun when this returns, and dies without closing anything."""
    process = subprocess.Popen([sys.executable, "-c", FLOOD, endpoint, str(frames)], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"flooding\n"
    return process


def test_messages_that_never_end_are_taken_by_turns() -> None:
    """Between two turns the executor computes, however fast the next message is there."""
    server = ExecutorLoop(Store(tiny_llama()), Options())
    server.listen(("tcp://127.0.0.1:0",))
    listener: Any = server.listeners[0]
    handle, handled = listener._handle, []

    def handle_until_there_is_more(frames: list[zmq.Frame], room: bool = True) -> None:
        assert len(handled) < 10 * AT_ONCE, "this turn does not end"
        handle(frames, room)
        handled.append(len(frames))
        assert listener._socket.poll(WAIT_S * 1000), "the flood ran dry"

    listener._handle = handle_until_there_is_more
    process = flood(listener.url, 10**12)
    try:
        assert listener._socket.poll(WAIT_S * 1000), "the flood did not begin"
        listener._drain()
        assert len(handled) == AT_ONCE
    finally:
        process.kill()
        process.communicate()
        listener.close()


def test_a_call_that_arrives_in_a_tick_does_not_wait_for_the_next() -> None:
    server = ExecutorLoop(Store(tiny_llama()), Options(policy="immediate"))
    server.listen(("tcp://127.0.0.1:0",))
    listener: Any = server.listeners[0]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(listener.url)
        for message in ([encode_control(Hello(client="raw"))], [header(), bytes(64)]):
            dealer.send_multipart(message)
            assert listener._socket.poll(WAIT_S * 1000)
            server._next_tick = 0.0
            server._step()
            assert dealer.poll(WAIT_S * 1000), "it was taken, and forgotten"
            answer = dealer.recv_multipart()
        assert decode_reply(answer[0]).code is Code.OK
    listener.close()


def test_who_was_frozen_takes_nobody_for_hung(tmp_path: Path) -> None:
    """What clients have said meanwhile is not read yet when it looks for those who hang; afterwards it finds those who do."""
    server = ExecutorLoop(Store(tiny_llama()), Options(policy="immediate", heartbeat_s=1.0))
    server.listen((f"local://{tmp_path}/x.sock",))
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(lambda: RawLocal(server.listeners[0].url).join())
        while not joining.done():
            server.reactor.poll(0.01)
            server._step()
    raw = joining.result()
    raw.ring(encode_call(ECHO, 1), bytes(64))
    time.sleep(1.6)  # how long the executor is frozen
    server._step()
    server.reactor.poll(0.0)
    server._step()
    assert raw.answer()[0].code is Code.OK
    for _ in range(3):
        time.sleep(0.5)  # how long the client says nothing, between two looks
        server._step()
    server.reactor.poll(0.0)
    assert not server.sessions
    raw.close()
    for listener in server.listeners:
        listener.close()


def busy_executor(say: Say) -> str:
    """An executor whose thread is kept busy while its sockets are not."""
    with symbiosis.Executor(tiny_llama(), listen=["tcp://127.0.0.1:0"]) as executor:
        executor.server.reactor.call_soon(lambda: time.sleep(3.0))
        say(executor.endpoint)
        session = Session(executor.endpoint)
        session.call(Op.ECHO, 0, rows(1))
        session.close()
    return "alive"


def test_a_client_that_fills_the_queue_and_dies_harms_nobody() -> None:
    """... while the executor computes. (ZeroMQ's own heartbeats on the executor's side would abort it here.)"""
    with killed_at_the_end() as processes:
        client = Client(busy_executor)
        processes.append(client)
        flood(client.heard(), 5000).communicate()
        assert client.result() == "alive"


@only_tcp
def test_a_frame_beyond_the_limit_ends_that_connection_only(executor: symbiosis.Executor, dealer: zmq.Socket) -> None:
    joined(dealer)
    dealer.send_multipart([header(), bytes(LIMITS["max_call_bytes"] + 5000)])
    until(lambda: not any(s.client == "raw" for s in executor.server.sessions.values()) or answers_nothing(dealer))


def answers_nothing(dealer: zmq.Socket) -> bool:
    return not dealer.poll(50)


ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 1 + 31)


@only_tcp
@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(200),
        ZMTP_GREETING[:11],
        ZMTP_GREETING + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER" + b"\x02" + struct.pack(">Q", 2**40),
        ZMTP_GREETING + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER" + b"\x02" + struct.pack(">Q", 2**63),
        ZMTP_GREETING + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER" + b"\x02" + struct.pack(">Q", 2**34),
        ZMTP_GREETING + b"\x06" + struct.pack(">Q", 2**62),
    ],
)
def test_bytes_that_are_not_even_zeromq_harm_nobody(executor: symbiosis.Executor, raw: bytes) -> None:
    host, _, port = executor.endpoint.removeprefix("tcp://").rpartition(":")
    for _ in range(5):
        sock = socket.create_connection((host, int(port)), timeout=WAIT_S)
        with sock, contextlib.suppress(OSError):  # it may hang up before we have said all
            sock.sendall(raw)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass


@pytest.mark.fault
@only_tcp
@pytest.mark.parametrize("times", [300, pytest.param(10_000, marks=(pytest.mark.soak, pytest.mark.timeout(1800)))])
def test_random_greetings_harm_nobody(executor: symbiosis.Executor, times: int) -> None:
    """Mutants of what ZeroMQ says first, each on a connection of its own; the executor's descriptors come back."""
    host, _, port = executor.endpoint.removeprefix("tcp://").rpartition(":")
    chance, greeting = random.Random(times), ZMTP_GREETING + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    before = descriptors()
    for _ in range(times):
        raw = bytearray(greeting)
        for _ in range(chance.randrange(1, 4)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as sock, contextlib.suppress(OSError):
            sock.sendall(raw[: chance.randrange(1, len(raw) + 1)])
    tally.done[tally.SENT] += times
    until(lambda: descriptors() <= before, "closing of the connections")
