"""What these tests send: calls that no session would make, frames and shared memory without a client of ours behind them."""

import contextlib
import mmap
import os
import select
import socket
import struct

import pytest
import torch
import zmq
from torch import Tensor

from symbiosis import transport
from symbiosis.errors import Code
from symbiosis.protocol import (
    REPLY_SIZE,
    Call,
    Grown,
    Hello,
    Op,
    Refusal,
    Reply,
    Welcome,
    decode_from_executor,
    decode_reply,
    encode_call,
    encode_control,
)
from symbiosis.transport.local.segment import (
    CALL_AT,
    CALL_BELL_AT,
    CLIENT_SLEEPS_AT,
    PAYLOAD_AT,
    REPLY_AT,
)
from tests.conftest import tiny_llama

WAIT_S = 60.0
WIDTH = 64
MODEL = tiny_llama()
LIMITS = {"max_rows": 40_000, "max_call_bytes": 16 << 20, "max_in_flight": 2, "max_sessions": 6, "heartbeat_s": 60.0}
ECHO = Call(Op.ECHO, 0, "float32", (2, 8))
FORWARD = Call(Op.FORWARD, 1, "float32", (1, WIDTH))
only_local = pytest.mark.parametrize("scheme", ["local"])
by_the_thousand = pytest.mark.parametrize(
    "times", [3_000, pytest.param(100_000, marks=(pytest.mark.soak, pytest.mark.timeout(1800)))]
)


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


def joined(dealer: zmq.Socket) -> zmq.Socket:
    dealer.send(encode_control(Hello(client="raw")))
    assert isinstance(decode_from_executor(dealer.recv()), Welcome)
    return dealer


def refusal(dealer: zmq.Socket, *frames: bytes) -> tuple[Code, str]:
    """How the executor refuses `frames`: as a reply if they have a number, else as a control message."""
    dealer.send_multipart(frames)
    head, *rest = dealer.recv_multipart()
    if rest:
        return decode_reply(head).code, rest[0].decode()
    message = decode_from_executor(head)
    assert isinstance(message, Refusal)
    return Code(message.code), message.message


def header(call: Call = ECHO, *, at: int = 0, put: bytes = b"") -> bytes:
    """The call's header, with some bytes of it replaced."""
    raw = encode_call(call, 1)
    return raw[:at] + put + raw[at + len(put) :]


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
        grown = decode_from_executor(raw)
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
        with select.epoll.fromfd(os.dup(self.bells[1])) as ear:
            assert ear.poll(0)
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
