"""`local://PATH`, the client's end."""

import os
import select
import socket
from collections.abc import Callable
from time import monotonic

from torch import Tensor

from symbiosis.errors import CallError, Code, ConnectionLost
from symbiosis.protocol import (
    CALL_SIZE,
    LONGEST_TEXT,
    REPLY_SIZE,
    Call,
    Control,
    Grow,
    Grown,
    Hello,
    Refusal,
    Reply,
    Share,
    Shared,
    Welcome,
    decode_control,
    decode_reply,
    encode_call,
    encode_control,
)
from symbiosis.transport import commons
from symbiosis.transport.reactor import CAN_SPIN, fence, spin
from symbiosis.transport.slab import (
    CALL_AT,
    CALL_BELL_AT,
    CLIENT_SLEEPS_AT,
    EXECUTOR_SLEEPS_AT,
    MAX_CONTROL,
    PAYLOAD_AT,
    REPLY_AT,
    REPLY_BELL_AT,
    WORD,
    Slab,
    reply_at,
    ring,
)
from symbiosis.transport.tensors import CPU, Shapes

LONG_S = 0.5e-3  # to wait for a reply: ten times what waking up takes
MOST_LONG = 1 << 14  # calls that are known
NAP_S = 0.5  # a sleeping client looks again after this time, whatever happened to the bell


class LocalConnection:
    """Joined by the socket, calls through the segment; asleep on an eventfd when looking found no answer."""

    device = CPU

    def __init__(self, address: str, hello: Hello, timeout: float) -> None:
        self._url = f"local://{address}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(timeout)
        self._beats = 0
        self._long: set[Call] = set()  # those that were last answered after so long that looking is a waste
        try:
            self._socket.connect(address)
            self._socket.send(encode_control(hello))
            first, fds = self._receive(4)
        except CallError:
            self._socket.close()
            raise
        except OSError as error:
            self._socket.close()
            raise ConnectionLost(f"no executor answers at {self._url}: {error}") from None
        letter, slab, self._call_bell, self._reply_bell = fds
        with os.fdopen(letter, "rb") as file:
            file.seek(0)
            welcome = decode_control(file.read())
        assert isinstance(welcome, Welcome) and isinstance(first, Grown)
        self.welcome = welcome
        self._slab = Slab(slab, first.nbytes)
        self._epoll = select.epoll()
        self._epoll.register(self._reply_bell, select.EPOLLIN | select.EPOLLET)
        self._epoll.register(self._socket.fileno(), select.EPOLLIN)
        self.beat()

    def _receive(self, fds: int) -> tuple[Control, list[int]]:
        raw, received, _, _ = socket.recv_fds(self._socket, MAX_CONTROL, fds)
        if not raw:
            raise ConnectionLost(f"the executor at {self._url} closed the connection")
        message = decode_control(raw)
        if isinstance(message, Refusal):
            raise message.error()
        return message, received

    def call(
        self, seq: int, call: Call, payload: tuple[Tensor, ...], timeout: float, shapes: Shapes = ()
    ) -> tuple[Reply, list[Tensor]]:
        slab, start = self._slab, reply_at(call)
        if start + LONGEST_TEXT > slab.nbytes:
            slab = self._grow(2 * start)
        if payload:
            slab.tensor(PAYLOAD_AT, call.payload_dtype, payload[0].shape).copy_(payload[0])
            if call.groups:
                slab.tensor(PAYLOAD_AT + call.nbytes - 4 * call.groups, "int32", (call.groups,)).copy_(payload[1])
        slab.memory[CALL_AT : CALL_AT + CALL_SIZE] = encode_call(call, seq)
        ring(slab.memory, CALL_BELL_AT, seq)
        fence()
        if slab.memory[EXECUTOR_SLEEPS_AT]:
            os.eventfd_write(self._call_bell, 1)
        reply = self._await(seq, call, timeout)
        if reply.code is Code.GROW:
            self._grow(int(bytes(slab.memory[start : start + reply.nbytes])))
            return self.call(seq, call, payload, timeout, shapes)
        results = []
        for shape in shapes if shapes and reply.code is Code.OK else (reply.shape,):
            part = slab.tensor(start, reply.dtype, shape)
            results.append(part.clone())
            start += part.nbytes
        return reply, results

    def _await(self, seq: int, call: Call, timeout: float) -> Reply:
        """Looking is for calls that are answered soon: for others it takes a core from those who could use it."""
        memory, number = self._slab.memory, WORD.pack(seq)

        def answered() -> bool:
            return memory[REPLY_BELL_AT : REPLY_BELL_AT + WORD.size] == number

        begun = monotonic()
        if call in self._long or not CAN_SPIN or not spin(answered):
            self._sleep(answered, timeout)
        self._note(call, monotonic() - begun)
        return decode_reply(memory[REPLY_AT : REPLY_AT + REPLY_SIZE])

    def _note(self, call: Call, seconds: float) -> None:
        if seconds < LONG_S:
            self._long.discard(call)
        elif len(self._long) < MOST_LONG:
            self._long.add(call)

    def _sleep(self, answered: Callable[[], bool], timeout: float) -> None:
        memory, deadline = self._slab.memory, monotonic() + timeout
        WORD.pack_into(memory, CLIENT_SLEEPS_AT, 1)
        fence()
        while not answered():
            left = deadline - monotonic()
            if left <= 0:
                raise ConnectionLost(f"no answer from {self._url} within {timeout:g} s")
            events = self._epoll.poll(min(left, NAP_S))
            if any(fd != self._reply_bell for fd, _ in events) and not answered():
                raise ConnectionLost(f"the executor at {self._url} hung up")
        WORD.pack_into(memory, CLIENT_SLEEPS_AT, 0)

    def _grow(self, nbytes: int) -> Slab:
        try:
            self._socket.send(encode_control(Grow(nbytes)))
            grown, fds = self._receive(1)
        except OSError as error:
            raise ConnectionLost(f"the executor at {self._url} hung up: {error}") from None
        assert isinstance(grown, Grown)
        self._slab.close()
        self._slab = Slab(fds[0], grown.nbytes)
        return self._slab

    def shared(self) -> dict[int, Tensor]:
        try:
            self._socket.send(encode_control(Share()))
            answer, fds = self._receive(1)
        except OSError as error:
            raise ConnectionLost(f"the executor at {self._url} hung up: {error}") from None
        assert isinstance(answer, Shared)
        with os.fdopen(fds[0], "rb") as file:
            return commons.taken(self.welcome.manifest, file.fileno())

    def beat(self) -> None:
        self._beats += 1
        WORD.pack_into(self._slab.memory, 0, self._beats)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._epoll.close()
            self._socket.close()
            self._slab.close()
            os.close(self._call_bell)
            os.close(self._reply_bell)


def connect(address: str, hello: Hello, timeout: float) -> LocalConnection:
    return LocalConnection(address, hello, timeout)
