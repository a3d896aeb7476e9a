"""Wrong calls, wrong frames and wrong peers, over real sockets: each is told what is wrong, and nobody else notices.

In every test an innocent client computes all the while; its results must stay right, bit for bit.
"""

import contextlib
import mmap
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from torch import Tensor

import symbiosis
from symbiosis import transport
from symbiosis.client.session import Session
from symbiosis.config import Options
from symbiosis.errors import CallError, Code, ConfigError, ConnectionLost, ExecutorUnavailable, WrapError
from symbiosis.executor.load import load_model
from symbiosis.executor.server import Server
from symbiosis.executor.store import Store
from symbiosis.protocol import (
    CALL_SIZE,
    LONGEST_TEXT,
    REPLY_SIZE,
    VERSION,
    Beat,
    Call,
    Grow,
    Grown,
    Hello,
    Op,
    Refusal,
    Reply,
    View,
    Welcome,
    decode_control,
    decode_reply,
    encode_call,
    encode_control,
)
from symbiosis.transport.local import FIRST_SLAB
from symbiosis.transport.slab import (
    CALL_AT,
    CALL_BELL_AT,
    CLIENT_SLEEPS_AT,
    PAYLOAD_AT,
    REPLY_AT,
    reply_at,
)
from symbiosis.transport.zeromq import AT_ONCE
from tests import tally
from tests.conftest import tiny_llama
from tests.processes import Bystander, Client, Say, both_transports, killed_at_the_end, until

WAIT_S = 10.0
WIDTH = 64
MODEL = tiny_llama()
LIMITS = {"max_rows": 40_000, "max_call_bytes": 16 << 20, "max_in_flight": 2, "max_sessions": 6, "heartbeat_s": 60.0}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., symbiosis.Executor]]:
    running: list[symbiosis.Executor] = []

    def run(scheme: str, **options: object) -> symbiosis.Executor:
        url = f"local://{tmp_path}/executor.sock" if scheme == "local" else "tcp://127.0.0.1:0"
        chosen = {"policy": "immediate", **LIMITS, **options}
        running.append(symbiosis.Executor(tiny_llama(), **{"listen": [url], **chosen}))
        return running[-1]

    yield run
    for executor in running:
        executor.close()


@pytest.fixture
def scheme() -> str:
    """The transport; tests say which."""
    raise NotImplementedError


@pytest.fixture
def executor(scheme: str, start: Callable) -> Iterator[symbiosis.Executor]:
    """An executor at an endpoint of the test's `scheme`, with an innocent client that must be unharmed at the end."""
    executor = start(scheme)
    with Bystander(executor.endpoint, MODEL) as innocent:
        yield executor
        innocent.goes_on()


def ask(endpoint: str, call: Call, *payload: Tensor) -> tuple[Reply, bytes]:
    """The executor's own answer: no session that checks first."""
    connection = transport.connect(endpoint, Hello(client="wrong"), WAIT_S)
    try:
        reply, (result,) = connection.call(1, call, payload, WAIT_S)
        return reply, bytes(result.reshape(-1).view(torch.uint8).numpy())
    finally:
        connection.close()


def rows(n: int, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(n, width, dtype=dtype)


def spoilt(value: float, count: int = 5) -> Tensor:
    x = rows(count)
    x[count // 2, 3] = value
    return x


WRONG_CALLS = {
    "unknown layer": (Call(Op.FORWARD, 10_000, "float32", (5, WIDTH)), rows(5), Code.UNKNOWN_LAYER, "no layer number"),
    "unserved layer": (Call(Op.FORWARD, 0, "float32", (5, WIDTH)), rows(5), Code.UNKNOWN_LAYER, "not served"),
    "wrong width": (Call(Op.FORWARD, 1, "float32", (5, 65)), rows(5, 65), Code.BAD_SHAPE, "rows of 64 values, not 65"),
    "wrong dtype": (
        Call(Op.FORWARD, 1, "uint8", (5, WIDTH)), rows(5, dtype=torch.uint8), Code.BAD_DTYPE, "not uint8",
    ),
    "integers that are not served": (
        Call(Op.FORWARD, 1, "int32", (5, WIDTH)), rows(5, dtype=torch.int32), Code.BAD_DTYPE, "--integers 8",
    ),
    "integers for another product": (
        Call(Op.PRODUCT, 1, "int64", (5, WIDTH)), rows(5, dtype=torch.int64), Code.BAD_DTYPE, "floating point",
    ),
    "a seed for floating point": (
        Call(Op.FORWARD, 1, "float32", (5, WIDTH), seeded=True), rows(1, 32, torch.uint8), Code.BAD_DTYPE, "a seed stands",
    ),
    "a seed of too many rows": (
        Call(Op.FORWARD, 1, "int32", (40_001, WIDTH), seeded=True), rows(1, 32, torch.uint8), Code.TOO_LARGE, "--max-rows",
    ),
    "NaN": (Call(Op.FORWARD, 1, "float32", (5, WIDTH)), spoilt(float("nan")), Code.NON_FINITE, "--non-finite pass"),
    "infinity": (Call(Op.FORWARD, 1, "float32", (5, WIDTH)), spoilt(float("inf")), Code.NON_FINITE, "set_detect_anom"),
    "NaN among many rows": (
        Call(Op.FORWARD, 1, "float32", (9_000, WIDTH)), spoilt(float("nan"), 9_000), Code.NON_FINITE, "--non-finite pass",
    ),
    "too many rows": (
        Call(Op.ECHO, 0, "uint8", (40_001, 1)), rows(40_001, 1, torch.uint8), Code.TOO_LARGE, "raise --max-rows",
    ),
    "a view out of bounds": (
        Call(Op.PRODUCT, 1, "float32", (5, WIDTH), view=View((64, 64), (64, 1), 1)), rows(5), Code.BAD_VIEW, "beyond",
    ),
    "a view of 2^124 elements": (
        Call(Op.PRODUCT, 1, "float32", (5, WIDTH), view=View((64, 2**62, 2**62), (0, 0, 0), 0)), rows(5),
        Code.BAD_VIEW, "exceeds",
    ),
    "a read": (Call(Op.READ, 1, "float32"), None, Code.READ_DENIED, "--allow-read"),
}  # fmt: skip


@both_transports
@pytest.mark.parametrize("what", WRONG_CALLS)
def test_a_wrong_call_is_refused_and_the_session_goes_on(executor: symbiosis.Executor, what: str) -> None:
    call, x, code, text = WRONG_CALLS[what]
    payload = () if x is None else (x,)
    reply, message = ask(executor.endpoint, call, *payload)
    assert reply.code is code
    assert text in message.decode()
    connection = transport.connect(executor.endpoint, Hello(client="wrong, then right"), WAIT_S)
    for number in range(1, 20):
        assert connection.call(number, call, payload, WAIT_S)[0].code is code
    right, (result,) = connection.call(99, Call(Op.ECHO, 0, "float32", (5, WIDTH)), (rows(5),), WAIT_S)
    connection.close()
    assert right.code is Code.OK and torch.equal(result, rows(5))


@both_transports
def test_a_session_checks_the_limits_before_it_sends(executor: symbiosis.Executor) -> None:
    """Over tcp a frame beyond the limit would end in silence."""
    session = Session(executor.endpoint, patience=1.0)
    for x in (rows(40_001), torch.zeros(1, (LIMITS["max_call_bytes"] >> 2) + 2000)):
        with pytest.raises(CallError, match="send smaller batches, or raise --max-rows / --max-call-bytes") as error:
            session.call(Op.ECHO, 0, x)
        assert error.value.code is Code.TOO_LARGE
    most = torch.arange(float(LIMITS["max_call_bytes"] >> 2)).view(-1, 512)
    assert torch.equal(session.call(Op.ECHO, 0, most), most)
    assert session.stats.reconnects == 0
    session.close()


@both_transports
def test_a_call_of_no_rows_has_an_answer_of_no_rows(executor: symbiosis.Executor) -> None:
    for call, shape in (
        (Call(Op.FORWARD, 1, "float32", (0, WIDTH)), (0, 64)),
        (Call(Op.DGRAD, 1, "float32", (0, 64)), (0, WIDTH)),
        (Call(Op.ECHO, 0, "float32", (0,)), (0,)),
    ):
        reply, result = ask(executor.endpoint, call, torch.zeros(call.shape))
        assert (reply.code, reply.shape, result) == (Code.OK, shape, b"")


@both_transports
def test_another_protocol_version_is_refused_with_both_named(executor: symbiosis.Executor) -> None:
    with pytest.raises(CallError, match=rf"version {VERSION}, the client 99.*same release") as error:
        transport.connect(executor.endpoint, Hello(version=99), WAIT_S)
    assert error.value.code is Code.BAD_VERSION


def test_rows_of_gpus_are_refused_by_an_executor_without_one() -> None:
    with symbiosis.Executor(tiny_llama(), listen="tcp://127.0.0.1:0") as executor:
        with pytest.raises(CallError, match="by NCCL: it computes on the CPU") as error:
            transport.connect(executor.endpoint, Hello(device="GPU-1", nccl=22809), WAIT_S)
        assert error.value.code is Code.UNKNOWN_OP
        transport.connect(executor.endpoint, Hello(), WAIT_S).close()


@both_transports
def test_a_client_of_another_model_is_refused(executor: symbiosis.Executor) -> None:
    with pytest.raises(CallError, match="another model.*same checkpoint") as error:
        _ = Session(executor.endpoint, fingerprint="0" * 64).welcome
    assert error.value.code is Code.WRONG_MODEL


@both_transports
def test_an_executor_that_comes_back_with_another_model_is_refused(scheme: str, start: Callable) -> None:
    first = start(scheme)
    session = Session(first.endpoint)
    assert torch.equal(session.call(Op.ECHO, 0, rows(1)), rows(1))
    first.close()
    other = symbiosis.Executor(load_model("demo"), listen=[first.endpoint])
    try:
        with pytest.raises(CallError, match="another model") as error:
            session.call(Op.ECHO, 0, rows(1))
        assert error.value.code is Code.WRONG_MODEL
    finally:
        session.close()
        other.close()


@both_transports
def test_more_sessions_than_allowed_are_refused_until_one_leaves(executor: symbiosis.Executor) -> None:
    sessions = [transport.connect(executor.endpoint, Hello(), WAIT_S) for _ in range(LIMITS["max_sessions"] - 1)]
    with pytest.raises(CallError, match="all 6 sessions are taken: raise --max-sessions") as error:
        transport.connect(executor.endpoint, Hello(), WAIT_S)
    assert error.value.code is Code.LIMIT
    sessions.pop().close()
    until(lambda: len(executor.server.sessions) < LIMITS["max_sessions"])
    sessions.append(transport.connect(executor.endpoint, Hello(), WAIT_S))
    for session in sessions:
        session.close()


@pytest.mark.parametrize("endpoint", ["inproc://nobody", "local://{}/nobody.sock", "tcp://127.0.0.1:{}"])
def test_nobody_there_is_said_at_once_with_endpoint_and_remedy(endpoint: str, tmp_path: Path) -> None:
    with socket.socket() as closed:  # bound and not listening: nobody can answer there
        closed.bind(("127.0.0.1", 0))
        endpoint = endpoint.format(tmp_path if "local" in endpoint else closed.getsockname()[1])
        model, before = tiny_llama(), set(map(type, MODEL.modules()))
        begun = time.monotonic()
        with pytest.raises(ExecutorUnavailable) as error:
            symbiosis.wrap(model, endpoint)
        assert time.monotonic() - begun < 5
        assert f"no executor at {endpoint}" in str(error.value)
        remedy = (
            "symbiosis-executor MODEL --listen {}"
            if "inproc" not in endpoint
            else "symbiosis.Executor(model, listen='{}')"
        )
        assert remedy.format(endpoint) in str(error.value)
        assert ("symbiosis-executor" in str(error.value)) == ("inproc" not in endpoint)
        assert set(map(type, model.modules())) == before


@pytest.mark.parametrize("url", ["", "executor", "http://127.0.0.1:1", "local://", "tcp:/127.0.0.1:1"])
def test_what_is_no_endpoint_is_refused_with_examples(url: str) -> None:
    with pytest.raises(ConfigError, match="is no endpoint: write inproc://NAME, local:///PATH/TO/SOCKET or tcp"):
        transport.connect(url, Hello(), WAIT_S)


@pytest.mark.parametrize(
    "url", ["tcp://127.0.0.1:99999", "tcp://127.0.0.1", "tcp://127.0.0.1:-1", "tcp://host:x?key=y"]
)
def test_what_is_no_port_is_refused_not_taken_for_another(url: str) -> None:
    for ask in (lambda: transport.connect(url, Hello(), WAIT_S), lambda: symbiosis.Executor(MODEL, listen=url)):
        with pytest.raises(ConfigError, match="with a port from 0 to 65535"):
            ask()


def test_a_wrong_timeout_and_what_is_no_model_are_refused(start: Callable) -> None:
    endpoint = start("tcp").endpoint
    with pytest.raises(ConfigError, match="timeout must be positive, not -1"):
        symbiosis.wrap(tiny_llama(), endpoint, timeout=-1)
    with pytest.raises(WrapError, match="wrap takes a model, not 'demo': load it with"):
        symbiosis.wrap("demo", endpoint)  # type: ignore[type-var]


@both_transports
def test_a_failure_in_the_product_is_its_own_calls_alone(
    executor: symbiosis.Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for one slice of a divided call: one refusal, and the session counts no call in flight."""
    server = executor.server
    operand, layer = server.store.operand, 2
    failures = []

    def fail_once(number: int, *rest: object) -> Tensor:
        if number == layer and not failures:
            failures.append(number)
            raise MemoryError
        return operand(number, *rest)

    monkeypatch.setattr(server.store, "operand", fail_once)
    monkeypatch.setattr(server.batcher, "max_rows", 16)
    connection = transport.connect(executor.endpoint, Hello(client="big"), WAIT_S)
    call = Call(Op.FORWARD, layer, "float32", (60, WIDTH))
    reply, (text,) = connection.call(1, call, (rows(60),), WAIT_S)
    assert reply.code is Code.RESOURCE and b"send fewer rows" in bytes(text.numpy())
    session = next(s for s in server.sessions.values() if s.client == "big")
    for number in range(2, 5):
        assert connection.call(number, call, (rows(60),), WAIT_S)[0].code is Code.OK
    until(lambda: session.in_flight == 0)
    connection.close()


# ---------------------------------------------------------------- raw frames over tcp


@pytest.fixture
def dealer(executor: symbiosis.Executor) -> Iterator[zmq.Socket]:
    """A bare ZeroMQ socket at the executor of the test, not joined."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        dealer.connect(executor.endpoint)
        yield dealer


only_tcp = pytest.mark.parametrize("scheme", ["tcp"])
only_local = pytest.mark.parametrize("scheme", ["local"])
ECHO = Call(Op.ECHO, 0, "float32", (2, 8))
FORWARD = Call(Op.FORWARD, 1, "float32", (1, WIDTH))


def joined(dealer: zmq.Socket) -> zmq.Socket:
    dealer.send(encode_control(Hello(client="raw")))
    assert isinstance(decode_control(dealer.recv()), Welcome)
    return dealer


def refusal(dealer: zmq.Socket, *frames: bytes) -> tuple[Code, str]:
    """How the executor refuses `frames`: as a reply if they have a number, else as a control message."""
    dealer.send_multipart(frames)
    head, *rest = dealer.recv_multipart()
    if rest:
        return decode_reply(head).code, rest[0].decode()
    message = decode_control(head)
    assert isinstance(message, Refusal)
    return Code(message.code), message.message


def header(call: Call = ECHO, *, at: int = 0, put: bytes = b"") -> bytes:
    """The call's header, with some bytes of it replaced."""
    raw = encode_call(call, 1)
    return raw[:at] + put + raw[at + len(put) :]


NO_FRAMES_OF_OURS: dict[str, tuple[list[bytes], Code, str]] = {
    "an empty frame": ([b""], Code.BAD_FRAME, "not a control message"),
    "text": ([b"GET / HTTP/1.1\r\n\r\n"], Code.BAD_FRAME, "not a control message"),
    "a pickle": ([b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x01x\x94."], Code.BAD_FRAME, "not a control"),
    "half a header": ([header()[: CALL_SIZE // 2]], Code.BAD_FRAME, f"has {CALL_SIZE} bytes, not {CALL_SIZE // 2}"),
    "another version": (
        [header(at=4, put=struct.pack("<H", 9)), bytes(64)], Code.BAD_VERSION, f"version 9, this side {VERSION}",
    ),
    "no payload": ([header()], Code.BAD_FRAME, "promises frames of (64,) bytes"),
    "a short payload": ([header(), bytes(63)], Code.BAD_FRAME, "promises frames of (64,) bytes, (63,) came"),
    "a long payload": ([header(), bytes(65)], Code.BAD_FRAME, "promises frames of (64,) bytes, (65,) came"),
    "a frame too many": ([header(), bytes(64), b"x"], Code.BAD_FRAME, "promises frames of (64,) bytes"),
    "many frames": ([header()] + [b"x"] * 50, Code.BAD_FRAME, "promises frames of (64,) bytes"),
    "a promise of 2^40 elements": (
        [header(Call(Op.ECHO, 0, "float32", (2**40,))), bytes(64)], Code.BAD_FRAME, f"frames of ({2**42},) bytes",
    ),
    "a promise of 2^40 layers": (
        [b"\x83\xa4type\xa7welcome\xa7session\x01\xa8manifest\xdd\xff\xff\xff\xff"], Code.BAD_FRAME, "of length <= 131072",
    ),
    "a second join": ([encode_control(Hello())], Code.NOT_JOINED, "unexpected Hello"),
    "a message of the other side": ([encode_control(Grown(1))], Code.NOT_JOINED, "unexpected Grown"),
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
    message = decode_control(dealer.recv())
    assert isinstance(message, Refusal) and message.code == Code.BAD_FRAME


@only_tcp
def test_calls_beyond_those_in_flight_are_refused(executor: symbiosis.Executor, dealer: zmq.Socket) -> None:
    joined(dealer)
    for number in range(40):
        dealer.send_multipart([encode_call(ECHO, number), bytes(64)])
    replies = [decode_reply(dealer.recv_multipart()[0]) for _ in range(40)]
    assert {reply.seq for reply in replies} == set(range(40))
    codes = [reply.code for reply in replies]
    assert Code.OK in codes and set(codes) <= {Code.OK, Code.LIMIT, Code.BUSY}
    assert LIMITS["max_in_flight"] <= codes.count(Code.OK) < 40


by_the_thousand = pytest.mark.parametrize(
    "times", [10_000, pytest.param(100_000, marks=(pytest.mark.soak, pytest.mark.timeout(1800)))]
)


@pytest.mark.fault
@only_tcp
@by_the_thousand
def test_random_frames_harm_nobody(
    executor: symbiosis.Executor, dealer: zmq.Socket, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Mutants of good frames; every one is answered (else we would be hung up on), and the executor lives on."""
    monkeypatch.setattr("symbiosis.transport.zeromq.REFUSALS", 10**6)
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
    monkeypatch.setattr("symbiosis.transport.zeromq.REFUSALS", 1)
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
            answer = decode_control(other.recv())  # lost with the connection, if that was ended
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
    server = Server(Store(tiny_llama()), Options())
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
    server = Server(Store(tiny_llama()), Options(policy="immediate"))
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
    server = Server(Store(tiny_llama()), Options(policy="immediate", heartbeat_s=1.0))
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


# ---------------------------------------------------------------- raw shared memory over local


class RawLocal:
    """The client's end of `local://` without any of its manners: socket, segment and bells."""

    def __init__(self, endpoint: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(endpoint.removeprefix("local://"))
        self.memory: mmap.mmap
        self.bells: list[int] = []
        self.rung = 0

    def join(self) -> "RawLocal":
        self.socket.send(encode_control(Hello(client="raw")))
        raw, (letter, slab, *self.bells), _, _ = socket.recv_fds(self.socket, 4096, 4)
        grown = decode_control(raw)
        assert isinstance(grown, Grown)
        self.memory = mmap.mmap(slab, grown.nbytes)
        os.close(letter)
        os.close(slab)
        return self

    def ring(self, head: bytes, payload: bytes = b"") -> None:
        self.memory[PAYLOAD_AT : PAYLOAD_AT + len(payload)] = payload
        self.memory[CALL_AT : CALL_AT + len(head)] = head
        self.rung += 1
        self.memory[CLIENT_SLEEPS_AT] = 1
        struct.pack_into("<Q", self.memory, CALL_BELL_AT, self.rung)
        os.eventfd_write(self.bells[0], 1)

    def answer(self, text_at: int = PAYLOAD_AT) -> tuple[Reply, bytes]:
        assert select.select([self.bells[1], self.socket], [], [], WAIT_S)[0] == [self.bells[1]], (
            "no answer, or hung up"
        )
        os.eventfd_read(self.bells[1])
        reply = decode_reply(self.memory[REPLY_AT : REPLY_AT + REPLY_SIZE])
        return reply, self.memory[text_at : text_at + reply.nbytes]

    def is_dropped(self) -> bool:
        """Whether the executor hangs up (after what it may have to say)."""
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(4096):
                pass
        return True

    def close(self) -> None:
        self.socket.close()
        for bell in self.bells:
            os.close(bell)


@pytest.fixture
def raw(executor: symbiosis.Executor) -> Iterator[RawLocal]:
    raw = RawLocal(executor.endpoint).join()
    raw.ring(encode_call(ECHO, 1), bytes(64))
    assert raw.answer()[0] == Reply(1, Code.OK, "float32", (2, 8), 1, *raw_times(raw))
    yield raw
    raw.close()


def raw_times(raw: RawLocal) -> tuple[int, int]:
    reply = decode_reply(raw.memory[REPLY_AT : REPLY_AT + REPLY_SIZE])
    return reply.wait_us, reply.compute_us


@only_local
@pytest.mark.parametrize(
    ("head", "code", "text"),
    [
        (bytes(CALL_SIZE), Code.BAD_FRAME, b"no message of Symbiosis"),
        (b"\xff" * CALL_SIZE, Code.BAD_FRAME, b"no message of Symbiosis"),
        (header(at=4, put=struct.pack("<H", 9)), Code.BAD_VERSION, b"version 9, this side %d" % VERSION),
        (header(Call(Op.ECHO, 0, "float32", (2**40,))), Code.TOO_LARGE, b"do not fit the session's segment"),
        (header(Call(Op.ECHO, 0, "uint8", (FIRST_SLAB - PAYLOAD_AT,))), Code.TOO_LARGE, b"do not fit"),
    ],
)
def test_a_wrong_header_in_shared_memory_is_refused(
    executor: symbiosis.Executor, raw: RawLocal, head: bytes, code: Code, text: bytes
) -> None:
    raw.ring(head)
    reply, message = raw.answer()
    assert reply.code is code
    assert text in message
    raw.ring(encode_call(ECHO, 2), bytes(range(64)))
    assert raw.answer(reply_at(ECHO))[1] == bytes(range(64))


@pytest.mark.fault
@only_local
@by_the_thousand
def test_random_headers_in_shared_memory_harm_nobody(executor: symbiosis.Executor, raw: RawLocal, times: int) -> None:
    chance = random.Random(times)
    for _ in range(times):
        head = bytearray(encode_call(chance.choice((ECHO, FORWARD)), 1))
        for _ in range(chance.randrange(1, 4)):
            head[chance.randrange(len(head))] = chance.randrange(256)
        raw.ring(bytes(head))
        raw.answer()
    tally.done[tally.RUNG] += times


@only_local
@pytest.mark.parametrize(
    "message",
    [
        b"\xc1",
        b"x" * 4096,
        encode_control(Hello()),
        encode_control(Grow(0)),
        encode_control(Grow(-1)),
        encode_control(Grow(100)),
        encode_control(Grow(1 << 40)),
        encode_control(Refusal(1, "no")),
    ],
)
def test_a_wrong_control_message_ends_that_connection_only(
    executor: symbiosis.Executor, raw: RawLocal, message: bytes
) -> None:
    raw.socket.send(message)
    assert raw.is_dropped()
    until(lambda: not any(s.client == "raw" for s in executor.server.sessions.values()))


@only_local
def test_a_segment_grows_to_the_limit_and_no_further(executor: symbiosis.Executor, raw: RawLocal) -> None:
    raw.socket.send(encode_control(Grow(FIRST_SLAB + 1)))
    message, (slab,), _, _ = socket.recv_fds(raw.socket, 4096, 1)
    grown = decode_control(message)
    assert isinstance(grown, Grown) and grown.nbytes == os.fstat(slab).st_size == 2 * FIRST_SLAB
    with pytest.raises(PermissionError):
        os.ftruncate(slab, 0)  # sealed: a client cannot pull memory from under the executor
    os.close(slab)
    raw.socket.send(encode_control(Grow(1 << 30)))
    refused = decode_control(raw.socket.recv(4096))
    assert isinstance(refused, Refusal) and refused.code == Code.TOO_LARGE


@only_local
def test_a_call_before_the_reply_to_the_last_ends_that_connection_only(scheme: str, start: Callable) -> None:
    executor = start(scheme, policy="lockstep")
    first = RawLocal(executor.endpoint).join()
    other = RawLocal(executor.endpoint).join()
    other.ring(encode_call(FORWARD, 1), bytes(4 * WIDTH))
    other.answer(reply_at(FORWARD))
    first.ring(encode_call(ECHO, 1), bytes(64))  # waits: the other is active and has not called
    until(lambda: len(executor.server.batcher) == 1)
    first.ring(encode_call(Call(Op.ECHO, 0, "uint8", (1 << 20,)), 2))
    assert first.is_dropped()
    other.ring(encode_call(ECHO, 2), bytes(64))
    assert other.answer()[0].seq == 2
    first.close()
    other.close()


@only_local
def test_indices_are_those_that_were_checked(scheme: str, start: Callable) -> None:
    """A client that changes its ids while the call waits: the executor uses what it has checked."""
    executor = start(scheme, policy="lockstep", serve=["*"])
    number = {layer.name: n for n, layer in enumerate(executor.server.store.manifest)}["model.embed_tokens"]
    first, other = RawLocal(executor.endpoint).join(), RawLocal(executor.endpoint).join()
    other.ring(encode_call(FORWARD, 1), bytes(4 * WIDTH))
    other.answer(reply_at(FORWARD))
    lookup = Call(Op.LOOKUP, number, "float32", (2,))
    first.ring(encode_call(lookup, 1), struct.pack("<2q", 5, 7))
    until(lambda: len(executor.server.batcher) == 1)
    first.memory[PAYLOAD_AT : PAYLOAD_AT + 16] = struct.pack("<2q", -(2**40), 2**40)
    other.ring(encode_call(ECHO, 2), bytes(64))
    reply, result = first.answer(reply_at(lookup))
    assert reply.code is Code.OK
    assert result == bytes(MODEL.model.embed_tokens.weight[[5, 7]].detach().numpy())
    first.close()
    other.close()


@only_local
def test_a_client_that_fills_its_own_bell_misses_its_reply_only(executor: symbiosis.Executor, raw: RawLocal) -> None:
    os.eventfd_write(raw.bells[1], 2**64 - 2)
    raw.ring(encode_call(ECHO, 2), bytes(64))
    until(lambda: decode_reply(raw.memory[REPLY_AT : REPLY_AT + REPLY_SIZE]).seq == 2)


@only_local
@pytest.mark.parametrize("before_the_end", [0, 1, 63, 64, 65, 200, LONGEST_TEXT, LONGEST_TEXT + 64])
def test_calls_that_just_fill_the_segment_are_answered(executor: symbiosis.Executor, before_the_end: int) -> None:
    """... with results, and with refusals, whose text needs room, too."""
    session = Session(executor.endpoint)
    data = torch.randint(0, 255, ((FIRST_SLAB - PAYLOAD_AT - before_the_end) // 256, 256), dtype=torch.uint8)
    tail = torch.zeros(FIRST_SLAB - PAYLOAD_AT - before_the_end - data.numel(), dtype=torch.uint8)
    whole = torch.cat([data.reshape(-1), tail])[None]
    with pytest.raises(CallError, match="floating point"):
        session.call(Op.FORWARD, 1, whole)
    assert torch.equal(session.call(Op.ECHO, 0, whole), whole)
    session.close()


@only_local
def test_connections_that_never_join_take_nobodys_place(executor: symbiosis.Executor) -> None:
    idle = [RawLocal(executor.endpoint) for _ in range(60)]
    session = Session(executor.endpoint)
    assert torch.equal(session.call(Op.ECHO, 0, rows(1)), rows(1))
    session.close()
    for connection in idle:
        connection.close()


# ---------------------------------------------------------------- interrupted calls


@pytest.mark.parametrize("scheme", ["local", "tcp", "inproc"])
def test_the_call_after_an_interrupted_one_gets_its_own_answer(scheme: str, start: Callable) -> None:
    """Ctrl-C in the middle of a call: its late reply must not be taken for the next one's."""
    listen = {"listen": ["inproc://interrupted"]} if scheme == "inproc" else {}
    executor = start(scheme, policy="lockstep", **listen)
    other, session = Session(executor.endpoint), Session(executor.endpoint)
    other.call(Op.FORWARD, 1, rows(1))
    assert session.welcome  # joined, so that the interrupt meets the call and not the join

    def interrupt() -> None:
        until(lambda: len(executor.server.batcher) == 1)
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        session.call(Op.FORWARD, 1, rows(3))  # waits for the other session
    helper.join(WAIT_S)
    other.close()
    big = torch.arange(1000.0 * WIDTH).view(1000, WIDTH)
    assert torch.equal(session.call(Op.ECHO, 0, big), big)
    session.close()


def test_an_unexpected_hang_up_is_a_lost_connection(tmp_path: Path) -> None:
    """Something that accepts and says nothing, or nonsense, is no executor."""
    path = tmp_path / "mute.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(ConnectionLost, match="no executor answers"):
            transport.connect(f"local://{path}", Hello(), 0.2)

        def nonsense() -> None:
            peer = server.accept()[0]
            peer.recv(4096)
            peer.send(b"\xc1nonsense")
            peer.close()

        server.accept()[0].close()
        thread = threading.Thread(target=nonsense)
        thread.start()
        with pytest.raises(CallError, match="not a control message"):
            transport.connect(f"local://{path}", Hello(), WAIT_S)
        thread.join(WAIT_S)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_users_process_is_turned_away_whatever_the_sockets_mode() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "executor.sock"
        with symbiosis.Executor(tiny_llama(), listen=f"local://{path}") as executor:
            assert path.stat().st_mode & 0o777 == 0o600
            assert answer_to_user(65534, path) == b"no way in"
            Path(folder).chmod(0o755)
            path.chmod(0o666)
            refused = decode_control(answer_to_user(65534, path))
            assert isinstance(refused, Refusal) and "own user only" in refused.message
            assert not executor.server.sessions


def answer_to_user(uid: int, path: Path) -> bytes:
    """What a process of that user hears when it connects and asks to join."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not (pid := os.fork()):
        try:
            os.setuid(uid)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(WAIT_S)
                sock.connect(str(path))
                theirs.send(sock.recv(4096))
        except OSError:
            theirs.send(b"no way in")
        finally:
            os._exit(0)
    with ours, theirs:
        ours.settimeout(WAIT_S)
        heard = ours.recv(4096)
    os.waitpid(pid, 0)
    return heard
