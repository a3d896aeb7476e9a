"""An executor with keys for tests, its folder of tenants, and what their clients need."""

import copy
from pathlib import Path

import torch
import zmq
from torch import nn

import symbiosis
from symbiosis.base.curve_keys import generate
from symbiosis.client.session import Session
from symbiosis.errors import Code
from symbiosis.protocol import (
    Call,
    Hello,
    Op,
    Refusal,
    Welcome,
    decode_from_executor,
    decode_reply,
    encode_call,
    encode_control,
)
from symbiosis.transport.tcp.address import Address
from symbiosis.transport.tcp.sockets import cut
from tests.conftest import tiny_llama

WAIT_S = 60.0
ECHO = Call(Op.ECHO, 0, "float32", (2, 8))
ROWS = torch.arange(640.0).view(10, 64)


class Realm:
    """Lets in alice; others when told to. Options are the executor's."""

    def __init__(self, folder: Path, model: nn.Module | None = None, **options: object) -> None:
        self.folder, self.tenants = folder, folder / "tenants"
        self.tenants.mkdir()
        self.key, _ = generate("executor", folder)
        self.let_in("alice")
        chosen = {"policy": "immediate", **options}
        self.executor = symbiosis.Executor(
            copy.deepcopy(model) if model else tiny_llama(),
            listen="tcp://127.0.0.1:0",
            key=str(self.key),
            tenants=str(self.tenants),
            **chosen,
        )

    def let_in(self, name: str) -> None:
        if not (self.folder / f"{name}.key").exists():
            generate(name, self.folder)
        (self.tenants / f"{name}.pub").write_bytes((self.folder / f"{name}.pub").read_bytes())

    @property
    def port(self) -> int:
        return int(self.executor.endpoint.rpartition(":")[2])

    def endpoint(self, key: str, server: str = "executor", address: str | None = None) -> str:
        return f"{address or self.executor.endpoint}?server={self.folder}/{server}.pub&key={self.folder}/{key}.key"

    def session(self, key: str = "alice", **options: float) -> Session:
        return Session(self.endpoint(key), **options)  # type: ignore[arg-type]


class Reader:
    """A peer, as far as an account knows it: the sizes of the replies that it has not read."""

    def __init__(self, *unread: int) -> None:
        self.unread = unread


def echoes(session: Session) -> bool:
    return torch.equal(session.call(Op.ECHO, 0, ROWS), ROWS)


class Raw:
    """A connection without manners."""

    def __init__(self, endpoint: str) -> None:
        place = Address.parse(endpoint.removeprefix("tcp://"))
        self._encrypted = bool(place.key)
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndtimeo = self.socket.rcvtimeo = int(WAIT_S * 1000)
        place.keys().unlock(self.socket)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(f"tcp://{place.where}")

    def join(self) -> Welcome | Refusal:
        self.socket.send(encode_control(Hello(client="raw")))
        answer = decode_from_executor(self.socket.recv())
        assert isinstance(answer, Welcome | Refusal)
        return answer

    @classmethod
    def joined(cls, endpoint: str) -> "Raw":
        raw = cls(endpoint)
        assert isinstance(raw.join(), Welcome)
        return raw

    def send(self, seq: int, call: Call = ECHO) -> None:
        self.socket.send_multipart([encode_call(call, seq), *cut(memoryview(bytes(call.nbytes)), self._encrypted)])

    def codes(self, count: int) -> list[Code]:
        """Of the next replies."""
        return [decode_reply(self.socket.recv_multipart()[0]).code for _ in range(count)]

    @property
    def was_hung_up_on(self) -> bool:
        return bool(self.monitor.poll(0))

    def close(self) -> None:
        """The monitor first: without a reader, ZeroMQ's thread would wait for ever to tell it of the end."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.monitor.close()
            self.socket.close()

    __del__ = close
