"""The three transports carry the same: every dtype, shape and size, for threads, forks, copies, and after a break."""

import contextlib
import copy
import logging
import math
import mmap
import os
import pickle
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zmq

import symbiosis
import symbiosis.client.session
from symbiosis import transport
from symbiosis.client import requests
from symbiosis.client.session import Session
from symbiosis.errors import ConfigError, ConnectionLost, ExecutorUnavailable
from symbiosis.protocol import DTYPES, Call, Hello, Limits, Op, Priority, Welcome, encode_control
from symbiosis.security.fingerprint import model_fingerprint
from symbiosis.transport import reactor
from symbiosis.transport.cuda.driver import CudaError
from symbiosis.transport.cuda.peer import DevicePeer
from symbiosis.transport.cuda.words import ANSWERED, BATCHED, ENQUEUED
from symbiosis.transport.local import client as local_client
from symbiosis.transport.local import listener as local
from symbiosis.transport.local import segment
from symbiosis.transport.local.peer import FIRST_SLAB
from symbiosis.transport.reactor import Reactor, spin
from symbiosis.transport.tcp.client import TcpConnection
from symbiosis.transport.tcp.sockets import COPY_BELOW
from symbiosis.transport.tensors import TORCH_DTYPE
from tests.conftest import tiny_llama
from tests.processes import until

WAIT_S = 60.0
between_processes = pytest.mark.parametrize("url", ["local", "tcp"], indirect=True)


@pytest.fixture
def executor(url: str, serve: Callable) -> symbiosis.Executor:
    return serve(tiny_llama(), listen=[url], policy="immediate")


@pytest.fixture
def session(executor: symbiosis.Executor) -> Iterator[Session]:
    session = Session(executor.endpoint)
    yield session
    session.close()


def anything(shape: tuple[int, ...], dtype: str = "float32") -> torch.Tensor:
    """Random bytes as this dtype: NaNs of all kinds among them."""
    kind = TORCH_DTYPE[dtype]
    count = torch.Size(shape).numel() * kind.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    return raw.view(kind).view(shape)


def echoed(session: Session, x: torch.Tensor) -> bool:
    """Whether the very same bytes come back."""
    y = session.call(Op.ECHO, 0, x)
    same = torch.equal(y.reshape(-1).view(torch.uint8), x.reshape(-1).view(torch.uint8))
    return y.dtype == x.dtype and y.shape == x.shape and same


# ---------------------------------------------------------------- what is carried


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape_arrives_bit_for_bit(session: Session, dtype: str) -> None:
    for shape in ((1,), (7,), (3, 5), (2, 3, 5), (1, 1, 1), (0,), (0, 5), (4, 0)):
        assert echoed(session, anything(shape, dtype)), shape


@pytest.mark.parametrize(
    "nbytes", [COPY_BELOW - 1, COPY_BELOW, COPY_BELOW + 1, FIRST_SLAB // 2, FIRST_SLAB, 3 * FIRST_SLAB + 1]
)
def test_every_size_arrives_bit_for_bit(session: Session, nbytes: int) -> None:
    for _ in range(2):  # once with growing, once without
        assert echoed(session, anything((1, nbytes), "uint8"))
        assert echoed(session, anything((3,), "uint8"))


def test_a_reply_much_larger_than_its_call_arrives(url: str, serve: Callable) -> None:
    model = tiny_llama()
    executor = serve(model, listen=[url], serve=["*"])
    session = Session(executor.endpoint)
    number = next(n for n, layer in enumerate(session.manifest) if layer.name == "model.embed_tokens")
    ids = torch.arange(50_000) % 100
    assert torch.equal(session.call(Op.LOOKUP, number, ids, dtype=torch.float32), model.model.embed_tokens.weight[ids])
    session.close()


@pytest.mark.parametrize("rows", [3, 9_000], ids=["few", "many"])
def test_a_product_is_that_of_the_layer(url: str, serve: Callable, rows: int) -> None:
    """Wherever its rows lie in the executor's memory."""
    layer = torch.nn.Linear(48, 32)
    session = Session(serve(torch.nn.Sequential(layer), listen=[url]).endpoint)
    x = torch.randn(rows, 48)
    number = next(number for number, layer in enumerate(session.manifest) if layer.kind == "linear")
    y = session.call(Op.FORWARD, number, x, bias=True)
    with torch.no_grad():
        assert torch.equal(y, torch.cat([layer(part) for part in x.split(4096)]))
    session.close()


def test_rows_need_not_be_contiguous(session: Session) -> None:
    x = anything((6, 4), "int32").t()
    assert torch.equal(session.call(Op.ECHO, 0, x), x)
    wide = anything((6, 8), "int32")[:, ::2]
    assert torch.equal(session.call(Op.ECHO, 0, wide), wide)


def test_ids_may_be_of_any_integer_type(url: str, serve: Callable) -> None:
    model = tiny_llama()
    split = symbiosis.wrap(tiny_llama(), serve(model, listen=[url], serve=["*"]).endpoint)
    for dtype in (torch.int64, torch.int32):
        ids = torch.tensor([[5, 7, 9]], dtype=dtype)
        with torch.no_grad():
            assert torch.equal(split(ids).logits, model(ids).logits)


def test_weights_of_more_dimensions_are_read_whole(url: str, serve: Callable) -> None:
    """A vision tower has convolutions: they are the client's own, and come from the executor like all that is."""
    model = tiny_llama()
    model.patches = torch.nn.Conv3d(3, 4, 2)
    executor = serve(model, listen=[url])
    session = Session(executor.endpoint)
    number = next(n for n, layer in enumerate(session.manifest) if layer.name == "patches.weight")
    assert torch.equal(session.call(Op.READ, number), model.patches.weight)
    session.close()


def test_the_figures_arrive(session: Session) -> None:
    assert echoed(session, anything((3, 5)))
    assert session.call(Op.STATS, 0).numel() > 100
    assert (session.stats.calls, session.stats.rows, session.stats.bytes_sent) == (2, 4, 60)


# ---------------------------------------------------------------- who shares a session


def test_threads_share_a_session(session: Session) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda n: echoed(session, anything((n % 60 + 1, 64))), range(400)))
    assert session.stats.reconnects == 0


def test_sessions_do_not_mix(executor: symbiosis.Executor) -> None:
    """Each with rows and sizes of its own, all at once."""

    def run(number: int) -> bool:
        session = Session(executor.endpoint)
        try:
            return all(echoed(session, torch.full((number + n % 7, 64), float(number))) for n in range(100))
        finally:
            session.close()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(1, 9)))


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


# ---------------------------------------------------------------- joining, leaving, coming back


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

    join_and_leave()
    before = descriptors()
    for _ in range(20):
        join_and_leave()
    until(lambda: descriptors() <= before)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_closed_executors_leave_no_descriptors(url: str, tmp_path: Path) -> None:
    model = tiny_llama()

    def run(number: int) -> None:
        with symbiosis.Executor(model, listen=[url]) as executor:
            session = Session(executor.endpoint)
            assert echoed(session, anything((number + 1, 5)))
            session.close()

    run(0)
    before = descriptors()
    for number in range(10):
        run(number)
    until(lambda: descriptors() <= before)


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


# ---------------------------------------------------------------- addresses


def test_an_address_in_use_is_refused(executor: symbiosis.Executor) -> None:
    with pytest.raises(ConfigError, match="already|cannot listen"):
        symbiosis.Executor(tiny_llama(), listen=[executor.endpoint])


def test_a_stale_socket_is_replaced_and_another_file_is_not(tmp_path: Path, serve: Callable) -> None:
    path = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    assert stat.S_ISSOCK(path.stat().st_mode)
    executor = serve(tiny_llama(), listen=[f"local://{path}"])
    session = Session(executor.endpoint)
    assert echoed(session, anything((3, 5)))
    session.close()
    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(ConfigError, match="is not a socket"):
        symbiosis.Executor(tiny_llama(), listen=[f"local://{file}"])
    assert file.read_text() == "kept"


def test_an_executor_that_closes_leaves_a_successors_socket_alone(tmp_path: Path, serve: Callable) -> None:
    path = tmp_path / "x.sock"
    first = serve(tiny_llama(), listen=[f"local://{path}"])
    path.unlink()
    second = serve(tiny_llama(), listen=[f"local://{path}"])
    first.close()
    session = Session(second.endpoint)
    assert echoed(session, anything((3, 5)))
    session.close()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_executor_on_a_gpu_says_whom_local_is_for(
    device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Reactor()
    with caplog.at_level(logging.INFO, "symbiosis"):
        local.LocalListener(f"{tmp_path}/socket", loop, SimpleNamespace(device=torch.device(device))).close()  # type: ignore[arg-type]
    assert ("tenants of one owner only" in caplog.text) == (device == "cuda")
    loop.close()


def test_an_executor_answers_at_several_addresses(tmp_path: Path, serve: Callable) -> None:
    urls = ["inproc://one", f"local://{tmp_path}/x.sock", "tcp://127.0.0.1:0"]
    executor = serve(tiny_llama(), listen=urls)
    assert executor.endpoints[:2] == urls[:2]
    for endpoint in executor.endpoints:
        session = Session(endpoint)
        assert echoed(session, anything((3, 5)))
        session.close()


def test_connecting_to_nobody_is_a_lost_connection(url: str) -> None:
    url = url.replace(":0", ":1")
    with pytest.raises(ConnectionLost, match="no executor"):
        transport.connect(url, Hello(), 1.0)


# ---------------------------------------------------------------- the reactor


def test_what_is_added_meanwhile_waits_for_the_next_pass() -> None:
    """A callback that calls itself again must not keep the loop from anything else."""
    reactor, turns = Reactor(), []

    def again() -> None:
        turns.append(len(turns))
        reactor.call_soon(again)

    reactor.call_soon(again)
    for turn in range(1, 4):
        reactor.poll(1.0)
        assert len(turns) == turn
    reactor.close()
    reactor.wake()  # after the end: nobody sleeps any more, and nothing happens


def test_a_call_that_takes_too_long_is_a_lost_connection(executor: symbiosis.Executor) -> None:
    """The executor's thread is kept busy for longer than the caller waits."""
    connection = transport.connect(executor.endpoint, Hello(), WAIT_S)
    busy, go_on = threading.Event(), threading.Event()

    def compute() -> None:
        busy.set()
        go_on.wait(WAIT_S)

    executor.server.reactor.call_soon(compute)
    busy.wait(WAIT_S)
    with pytest.raises(ConnectionLost, match=r"no answer from .* within 0\.2 s"):
        connection.call(1, Call(Op.ECHO, 0, "float32", (3, 5)), (anything((3, 5)),), 0.2)
    go_on.set()
    connection.close()


@pytest.mark.skipif(not reactor.CAN_SPIN, reason="nobody looks at bells here")
def test_looking_at_bells_does_not_keep_descriptors_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls by tcp come by a descriptor, also while the executor looks out for local ones."""

    class Silent:
        busy, nap = False, 10.0

        def look(self) -> bool:
            return False

        def sleeping(self, flag: bool) -> None:
            pass

        def close(self) -> None:
            raise AssertionError("nothing went wrong with it")

    monkeypatch.setattr(reactor, "SPIN_S", 2 * WAIT_S)
    monkeypatch.setattr(reactor, "CONTENDED_S", 2 * WAIT_S)
    loop, bell, rang = Reactor(), os.eventfd(0, os.EFD_NONBLOCK), []
    loop.watch(bell, lambda: rang.append(os.eventfd_read(bell)))
    loop.watch_bell(Silent())
    threading.Timer(0.1, os.eventfd_write, (bell, 1)).start()
    begun = time.monotonic()
    loop.poll(2 * WAIT_S)
    assert rang == [1]
    assert time.monotonic() - begun < WAIT_S
    loop.close()
    os.close(bell)


def test_a_client_looks_for_what_is_answered_soon_and_sleeps_until_the_rest(
    serve: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    monkeypatch.setattr(local_client, "CAN_SPIN", True)
    monkeypatch.setattr(local_client, "spin", lambda answered: looked.append(1) or spin(answered))
    session = Session(serve(tiny_llama(), listen=[f"local://{tmp_path}/e.sock"]).endpoint)

    def looks(call: int, long_s: float) -> bool:
        """Whether a call of so many rows was looked for, when those are long that take `long_s`."""
        monkeypatch.setattr(local_client, "LONG_S", long_s)
        looked.clear()
        x = torch.randn(call, 8)
        assert torch.equal(session.call(Op.ECHO, 0, x), x)
        return bool(looked)

    assert looks(1, math.inf) and looks(1, math.inf)
    assert looks(1, 0.0) and not looks(1, 0.0)  # the first time nobody knew
    assert looks(2, math.inf)
    assert not looks(1, math.inf) and looks(1, math.inf)
    monkeypatch.setattr(local_client, "MOST_LONG", 1)
    assert looks(1, 0.0) and looks(2, 0.0)
    assert not looks(1, 0.0) and looks(2, 0.0)
    session.close()


def test_very_many_rows_go_in_several_calls(serve: Callable, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """... with the same results, gradients too, also for layers that are asked together."""
    model = tiny_llama()
    split = symbiosis.wrap(copy.deepcopy(model), serve(model, listen=[url]).endpoint)
    ids = torch.randint(3, 100, (3, 120), generator=torch.Generator().manual_seed(1))
    found = []
    for largest in (requests.LARGEST, 64 * 64 * 4):
        monkeypatch.setattr(requests, "LARGEST", largest)
        before = symbiosis.stats(split).calls
        x = split.get_input_embeddings()(ids).detach().requires_grad_()
        logits = split(inputs_embeds=x).logits
        logits.sum().backward()
        assert x.grad is not None
        found.append((logits, x.grad, symbiosis.stats(split).calls - before))
    (logits, grad, few), (in_parts, grad_in_parts, more_calls) = found
    assert more_calls > 3 * few
    torch.testing.assert_close(in_parts, logits, rtol=1e-5, atol=1e-5)  # fewer rows may round in another way
    torch.testing.assert_close(grad_in_parts, grad, rtol=1e-5, atol=1e-5)


class FakePin:
    """Stands for what only a GPU's driver does."""

    open: "set[FakePin]" = set()
    refuses = False

    def __init__(self, memory: mmap.mmap) -> None:
        if self.refuses:
            raise CudaError("cuMemHostRegister: no more")
        self.nbytes = len(memory)
        self.open.add(self)

    def close(self) -> None:
        self.open.remove(self)


@pytest.mark.parametrize("refuses", [False, True])
def test_segments_for_a_gpu_are_pinned_as_long_as_they_are_used(
    refuses: bool, serve: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "PinnedMemory", FakePin)
    monkeypatch.setattr(FakePin, "open", set())
    monkeypatch.setattr(FakePin, "refuses", refuses)
    monkeypatch.setattr(segment, "PINNED_AT_MOST", 4 * FIRST_SLAB)
    executor = serve(tiny_llama(), listen=[f"local://{tmp_path}/executor.sock"])
    executor.server.dispatch.device = torch.device("cuda")
    sessions = [Session(executor.endpoint) for _ in range(2)]
    pinned = []
    for times in (0.1, 2, 10):  # the last is too large
        assert all(echoed(session, torch.randn(int(times * FIRST_SLAB) // 512, 64)) for session in sessions)
        pinned.append(sorted(pin.nbytes // FIRST_SLAB for pin in FakePin.open))
    assert pinned == [[], [], []] if refuses else [[1, 1], [4, 4], []]
    sessions += [Session(executor.endpoint)]
    assert echoed(sessions[-1], torch.ones(2, 2))
    assert len(FakePin.open) == (not refuses)
    for session in sessions:
        session.close()
    until(lambda: not FakePin.open and not executor.server.sessions)


def test_calls_that_a_gpu_makes_unannounced_leave_nothing_behind() -> None:
    """A graph that is replayed without us: the executor is not told, and later it must know again who is about to call."""
    peer, words = DevicePeer.__new__(DevicePeer), [0] * 1024
    peer.words = words  # type: ignore[assignment]
    words[ENQUEUED] = words[ANSWERED] = 0xFFFFFFFE
    for _ in range(5):
        words[ENQUEUED] = (words[ENQUEUED] + 1) & 0xFFFFFFFF
        assert peer.busy
        peer.count(1)
        assert not peer.busy
        for _ in range(3):
            peer.count(2)
            assert not peer.busy
    assert words[ANSWERED] == words[ENQUEUED] == 3 and words[BATCHED] == 5 * 7


def test_the_rows_of_a_message_go_last() -> None:
    """Nothing is left to be sent behind it, whenever the socket is closed (see `wire`)."""
    call = Call(Op.GROUPED, 0, "float32", (1 << 10, 64), groups=4)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as executor, ThreadPoolExecutor(1) as pool:
        executor.linger = 0
        port = executor.bind_to_random_port("tcp://127.0.0.1")
        joining = pool.submit(TcpConnection, f"127.0.0.1:{port}", Hello("somebody"), 10.0)
        identity, _ = executor.recv_multipart()
        nothing = Welcome(1, model_fingerprint("{}", []), [], "{}", "", Limits(), False, 1.0, "")
        executor.send_multipart([identity, encode_control(nothing)])
        connection = joining.result()
        with pytest.raises(ConnectionLost, match="no answer"):
            connection.call(1, call, (torch.ones(call.shape), torch.arange(4, dtype=torch.int32)), 0.01)
        assert [len(frame) for frame in executor.recv_multipart()[2:]] == sorted(call.parts)
        connection.close()
