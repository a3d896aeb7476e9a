"""Rows by NCCL without a GPU: connections, headers and refusals are real, only what CUDA and NCCL do is done by queues."""

import os
import queue
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import symbiosis
from symbiosis import transport
from symbiosis.client.session import Session
from symbiosis.errors import CallError, Code, ConnectionLost
from symbiosis.executor.gpu.launcher import Launcher
from symbiosis.kernels.gpu.graphs import GraphPool
from symbiosis.protocol import REPLY_SIZE, Call, Hello, Op, decode_reply, encode_call
from symbiosis.transport.nccl import client as nccl_client
from symbiosis.transport.nccl import driver as nccl_driver
from symbiosis.transport.nccl import peer as nccl
from symbiosis.transport.nccl.client import NcclConnection
from symbiosis.transport.tcp import client as zeromq_client
from symbiosis.transport.tcp.client import TcpConnection
from symbiosis.transport.tensors import CPU
from tests.conftest import tiny_llama
from tests.processes import until

WAIT_S = 20.0
LAYER = "model.layers.0.mlp.down_proj"


class Queues:
    """Stands for a communicator: what one side sends waits until the other has asked for it."""

    ways: dict[tuple[bytes, int], "queue.Queue[Tensor]"] = {}

    def __init__(self, unique: bytes, rank: int, device: torch.device, stream: Any) -> None:
        self._out = self.ways.setdefault((unique, rank), queue.Queue())
        self._into = self.ways.setdefault((unique, 1 - rank), queue.Queue())
        self.wanted: list[Tensor] = []
        self.of_client, self.stream = rank == 0, stream
        Stream.used.append(self)

    def send(self, rows: Tensor, stream: int) -> None:
        self._out.put(rows.clone())

    def receive(self, rows: Tensor, stream: int) -> None:
        self.wanted.append(rows)

    def go_on(self) -> None:
        while self.wanted and not self._into.empty():
            self.wanted.pop(0).view(-1).copy_(self._into.get().view(-1))

    def abort(self) -> None:
        self.wanted.clear()


class Stream:
    """Stands for all streams and events."""

    used: list[Queues] = []
    cuda_stream = 0

    def record(self, stream: object) -> None:
        self._awaited = [rows for comm in self.used if comm.stream is stream for rows in comm.wanted]

    def wait_stream(self, other: object) -> None:
        pass

    wait_event = wait_stream

    def query(self) -> bool:
        for comm in self.used:
            comm.go_on()
        wanted = [rows for comm in self.used for rows in comm.wanted]
        awaited = getattr(self, "_awaited", None)
        if awaited is None:
            return not any(comm.wanted for comm in self.used if comm.of_client)
        return not any(one is other for one in awaited for other in wanted)


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Queues.ways, Stream.used = {}, []
    monkeypatch.setattr(torch.cuda, "Event", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-client"))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda rows, stream: None)
    monkeypatch.setattr(Launcher, "_pool", GraphPool(), raising=False)
    monkeypatch.setattr(GraphPool, "captured", lambda pool, run: None)  # a GPU would not know these streams
    monkeypatch.setattr(nccl, "new_stream", lambda device: Stream())
    monkeypatch.setattr(nccl, "_free_streams", [])
    monkeypatch.setattr(nccl, "Communicator", Queues)
    monkeypatch.setattr(nccl, "why_not_by_nccl", lambda inbox, wire, hello: None)
    monkeypatch.setattr(nccl_driver, "version", lambda: 22809)
    monkeypatch.setattr(nccl_driver, "new_unique", lambda: os.urandom(nccl_driver.UNIQUE_BYTES))
    monkeypatch.setattr(
        nccl_client, "communicator_within", lambda s, unique, rank, device, _: Queues(unique, rank, device, None)
    )
    yield


@pytest.fixture
def executor() -> Iterator[symbiosis.Executor]:
    with symbiosis.Executor(tiny_llama(), listen="tcp://127.0.0.1:0", heartbeat_s=60.0) as executor:
        yield executor


def joined(executor: symbiosis.Executor) -> NcclConnection:
    return NcclConnection(executor.endpoint.removeprefix("tcp://"), Hello(client="a GPU"), WAIT_S, CPU)


def forward(executor: symbiosis.Executor, rows: Tensor) -> Call:
    layer = next(n for n, layer in enumerate(executor.server.store.manifest) if layer.name == LAYER)
    return Call(Op.FORWARD, layer, "float32", tuple(rows.shape))


def answer(connection: NcclConnection, executor: symbiosis.Executor, rows: Tensor) -> Tensor:
    reply, (result,) = connection.call(1, forward(executor, rows), (rows,), WAIT_S)
    assert reply.code is Code.OK, bytes(result.numpy())
    return result


@pytest.fixture
def weight() -> Tensor:
    return tiny_llama().get_submodule(LAYER).weight.detach()


def test_calls(executor: symbiosis.Executor, weight: Tensor) -> None:
    connection = joined(executor)
    for count in (1, 3, 100, 3, 3, 3, 5000, 3):  # the same ones from the same place, until there must be a larger one
        rows = torch.randn(count, weight.shape[1])
        assert torch.equal(answer(connection, executor, rows), linear(rows, weight))
    assert [s.peer.transport for s in executor.server.sessions.values()] == ["nccl"]
    assert executor.server.sessions[1].calls == 8
    connection.close()
    until(lambda: not executor.server.sessions, "the session's end")


def test_a_refused_call_leaves_the_connection_as_it_was(executor: symbiosis.Executor, weight: Tensor) -> None:
    connection = joined(executor)
    rows = torch.randn(5, weight.shape[1])
    for turn in range(3):
        reply, (text,) = connection.call(turn, forward(executor, rows[:, :-1]), (rows[:, :-1],), WAIT_S)
        assert reply.code is Code.BAD_SHAPE and b"down_proj" in bytes(text.numpy())
        assert torch.equal(answer(connection, executor, rows), linear(rows, weight))
    connection.close()


def test_frames_and_rows_by_nccl_are_told_apart(executor: symbiosis.Executor, weight: Tensor) -> None:
    """Whatever numbers a client gives its calls."""
    connection, rows = joined(executor), torch.randn(5, weight.shape[1])
    call, wrong = forward(executor, rows), forward(executor, rows[:, :-1])
    for seq in (0, 1, 1):
        reply, (result,) = TcpConnection.call(connection, seq, call, (rows,), WAIT_S)
        assert reply.code is Code.OK and torch.equal(result, linear(rows, weight))
        assert torch.equal(answer(connection, executor, rows), linear(rows, weight))
    assert connection._side is not None and connection._comm is not None
    connection._side.sendall(encode_call(call, 7))
    until(lambda: executor.server.sessions[1].peer.busy, "the header")
    assert TcpConnection.call(connection, 7, wrong, (rows[:, :-1],), WAIT_S)[0].code is Code.BAD_SHAPE
    assert TcpConnection.call(connection, 0, call, (rows,), WAIT_S)[0].code is Code.OK
    connection._comm.send(rows, 0)
    reply = decode_reply(connection._read(REPLY_SIZE, time.monotonic() + WAIT_S))
    assert reply.seq == 7 and reply.code is Code.OK and reply.shape == (5, weight.shape[0])
    connection.close()


def test_who_is_refused_leaves_no_stream_behind(executor: symbiosis.Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(nccl, "new_stream", lambda device: made.append(1) or Stream())
    hello = Hello(client="a GPU", fingerprint="of another model")
    for _ in range(5):
        with pytest.raises(CallError):
            NcclConnection(executor.endpoint.removeprefix("tcp://"), hello, WAIT_S, CPU)
    assert len(made) == 1


def test_who_goes_on_with_what_is_refused_is_hung_up_on(executor: symbiosis.Executor, weight: Tensor) -> None:
    connection = joined(executor)
    rows = torch.randn(5, weight.shape[1] - 1)
    with pytest.raises(ConnectionLost):
        for turn in range(300):
            connection.call(turn, forward(executor, rows), (rows,), WAIT_S)
    connection.close()


@pytest.mark.parametrize("header", [
    encode_call(Call(Op.STATS, 0, "float32"), 1), encode_call(Call(Op.READ, 3, "float32"), 1), b"x" * len(encode_call(Call(Op.STATS, 0, "float32"), 1)),
    encode_call(Call(Op.FORWARD, 3, "float32", (1 << 40, 64)), 1),
], ids=["figures", "weights", "nonsense", "a bomb"])  # fmt: skip
def test_headers_that_nobody_sends_so_end_their_session_only(
    header: bytes, executor: symbiosis.Executor, weight: Tensor
) -> None:
    good, bad = joined(executor), joined(executor)
    assert bad._side is not None
    bad._side.sendall(header)
    until(lambda: len(executor.server.sessions) == 1, "the end of the session")
    rows = torch.randn(2, weight.shape[1])
    assert torch.equal(answer(good, executor, rows), linear(rows, weight))
    good.close()
    bad.close()


def test_half_a_header_and_rows_that_never_come(executor: symbiosis.Executor, weight: Tensor, monkeypatch: Any) -> None:
    good, half, none = (joined(executor) for _ in range(3))
    rows = torch.randn(2, weight.shape[1])
    header = encode_call(forward(executor, rows), 1)
    half._side.sendall(header[:20])  # type: ignore[union-attr]
    none._side.sendall(header)  # type: ignore[union-attr]
    for _ in range(3):
        assert torch.equal(answer(good, executor, rows), linear(rows, weight))
    monkeypatch.setattr(nccl, "STALL_S", 0.1)
    until(lambda: len(executor.server.sessions) == 2, "the end of who does not send")
    half.close()
    none.close()
    until(lambda: len(executor.server.sessions) == 1, "the end of the others")
    assert torch.equal(answer(good, executor, rows), linear(rows, weight))
    good.close()


def test_the_port_for_headers_takes_only_who_has_the_token(
    executor: symbiosis.Executor, weight: Tensor, monkeypatch: Any
) -> None:
    connect = socket.create_connection
    strangers = []

    def late(place: tuple[str, int], timeout: float) -> socket.socket:
        strangers.extend(connect(place, timeout) for _ in range(2))
        strangers[0].sendall(b"x" * nccl.FIRST_BYTES)
        return connect(place, timeout)

    monkeypatch.setattr(socket, "create_connection", late)
    connection = joined(executor)
    rows = torch.randn(2, weight.shape[1])
    assert torch.equal(answer(connection, executor, rows), linear(rows, weight))
    for stranger in strangers:
        stranger.settimeout(WAIT_S)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
        with pytest.raises((ConnectionResetError, AssertionError)):
            assert stranger.recv(1)
        stranger.close()
    connection.close()


def test_what_a_client_says_at_that_port_is_not_for_the_executor_to_choose(
    executor: symbiosis.Executor, monkeypatch: Any
) -> None:
    """Else it could have its clients give commands to whatever listens on its host."""
    command, said = b"\r\nSHUTDOWN NOW\r\n".ljust(nccl.TOKEN_BYTES), []
    connect = socket.create_connection

    class Heard(socket.socket):
        def sendall(self, data: Any, *flags: int) -> None:
            said.append(bytes(data))
            super().sendall(data, *flags)

    def heard(place: tuple[str, int], timeout: float) -> Heard:
        return Heard(fileno=connect(place, timeout).detach())

    random = os.urandom
    monkeypatch.setattr(nccl.os, "urandom", lambda size: command if size == nccl.TOKEN_BYTES else random(size))
    monkeypatch.setattr(socket, "create_connection", heard)
    connection = joined(executor)
    assert connection.welcome.token == command
    assert said and b"SHUTDOWN" not in b"".join(said)
    connection.close()


def test_where_the_port_cannot_be_reached_rows_go_through_the_host(
    executor: symbiosis.Executor, weight: Tensor, monkeypatch: Any, caplog: Any
) -> None:
    def refused(*_: object) -> socket.socket:
        raise ConnectionRefusedError("nobody there")

    monkeypatch.setattr(nccl_client.socket, "create_connection", refused)
    monkeypatch.setattr(zeromq_client.TcpConnection, "device", CPU)
    connection = transport.connect(executor.endpoint, Hello(), WAIT_S, torch.device("cuda:0"))
    assert not isinstance(connection, NcclConnection) and "cannot be reached" in caplog.text
    connection.close()


def test_looking_does_not_wait(executor: symbiosis.Executor) -> None:
    connection = joined(executor)
    assert not connection._something_came()
    executor.close()
    until(connection._something_came, "the end")
    connection.close()


def test_a_session_makes_calls_again_on_a_new_connection(
    executor: symbiosis.Executor, weight: Tensor, monkeypatch: Any
) -> None:
    session = Session(executor.endpoint)
    monkeypatch.setattr(transport, "connect", lambda url, hello, timeout, device, room: joined(executor))
    layer = forward(executor, weight).layer
    rows = torch.randn(4, weight.shape[1])
    for turn in range(3):
        assert torch.equal(session.call(Op.FORWARD, layer, rows), linear(rows, weight))
        if turn < 2:
            peer = next(iter(executor.server.sessions.values())).peer
            executor.server.reactor.call_soon(peer.close)
            until(lambda: not executor.server.sessions, "the session's end")
    assert session.stats.retries == 2
    with pytest.raises(CallError):
        session.call(Op.FORWARD, layer, rows[:, :-1])
    session.close()
