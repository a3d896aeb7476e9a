"""`tcp://HOST:PORT`, the client's end.

The socket is replaced, not reused, when the connection breaks: ZeroMQ would reconnect by itself but never resend what
was lost, so the session reconnects and resends instead.
"""

from contextlib import suppress
from time import monotonic
from typing import Any

import torch
import zmq
from torch import Tensor
from zmq.utils.monitor import recv_monitor_message

from symbiosis.errors import CallError, Code, ConnectionLost, ProtocolError
from symbiosis.protocol import (
    MAGIC_REPLY,
    Beat,
    Bye,
    Call,
    Hello,
    Refusal,
    Reply,
    Welcome,
    decode_control,
    decode_reply,
    encode_call,
    encode_control,
)
from symbiosis.transport.curve import Address
from symbiosis.transport.tensors import CPU, TORCH_DTYPE, Shapes, bytes_of, copied, cut
from symbiosis.transport.wire import COPY_BELOW, Wire, harden

REFUSED_KEYS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
BROKEN_HANDSHAKE = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL  # by other keys, or by an executor that just ends
BEAT_S = 1.0  # between two signs of life during a call


class TcpConnection:
    """The client's DEALER socket, with a monitor that tells when the other side is gone."""

    device = CPU

    def __init__(self, address: str, hello: Hello, timeout: float, for_gpu: bool = False) -> None:
        """`for_gpu`: results go there."""
        self._for_gpu = for_gpu
        self._broken = False  # while nobody waited for an answer
        place = Address.parse(address)
        self._url, self._has_keys = f"tcp://{place.where}", place.own is not None
        self._socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        place.unlock(self._socket)
        harden(self._socket)
        self._socket.setsockopt(zmq.MAXMSGSIZE, -1)
        self._monitor: Any = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | REFUSED_KEYS | BROKEN_HANDSHAKE
        )
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._socket.connect(self._url)
            with suppress(zmq.Again):  # refused before we could say anything: the monitor tells
                self._socket.send(encode_control(hello), zmq.NOBLOCK)
            head = self._receive(monotonic() + timeout, timeout)[0]
            answer = decode_control(head.buffer)
            wire = Wire.below(head)
        except zmq.ZMQError as error:
            self.close()
            raise ConnectionLost(f"cannot connect to {self._url}: {error}") from None
        except BaseException:  # also ctrl-C: without a reader of the monitor, ZeroMQ's thread would wait for ever
            self.close()
            raise
        if isinstance(answer, Refusal):
            self.close()
            raise answer.error()
        assert isinstance(answer, Welcome)
        self.welcome = answer
        self.host = str(wire.other_end[0]) if wire else ""  # the address of whoever answered

    def call(
        self, seq: int, call: Call, payload: tuple[Tensor, ...], timeout: float, shapes: Shapes = ()
    ) -> tuple[Reply, list[Tensor]]:
        frames = [encode_call(call, seq), *map(bytes_of, reversed(payload))]  # the rows last: see `wire`
        deadline = monotonic() + timeout
        if self._broken:
            raise ConnectionLost(f"the connection to {self._url} broke")
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=call.nbytes < COPY_BELOW)
        except zmq.Again:  # the signs of life that nobody took fill the queue
            raise ConnectionLost(f"{self._url} takes no more messages: its executor hangs") from None
        while True:
            head, *rest = self._receive(deadline, timeout)
            if head.buffer[:4] != MAGIC_REPLY:
                refusal = decode_control(head.buffer)
                assert isinstance(refusal, Refusal)
                if refusal.code == Code.NOT_JOINED:
                    raise ConnectionLost(f"the executor at {self._url} was restarted")
                raise refusal.error()
            reply = decode_reply(head.bytes)
            if reply.seq == seq:
                sizes = [len(frame) for frame in rest]
                if sizes != ([reply.nbytes] if reply.nbytes else []):
                    raise ProtocolError(Code.BAD_FRAME, f"a reply of {reply.nbytes} bytes came in frames of {sizes}")
                if not rest:
                    return reply, [torch.empty(reply.shape, dtype=TORCH_DTYPE[reply.dtype])]
                result = copied(rest[0].buffer, reply.dtype, reply.shape, self._for_gpu)
                return reply, cut(result, shapes if reply.code is Code.OK else ())

    def _receive(self, deadline: float, timeout: float) -> list[zmq.Frame]:
        while not (ready := self._ready(deadline)) and monotonic() < deadline:
            self._say_that_we_live()
        if self._socket in ready:
            return self._socket.recv_multipart(copy=False)
        if self._monitor in ready:
            event = recv_monitor_message(self._monitor)["event"]
            keys = f"{self._url}?server=EXECUTOR.pub&key=MINE.key"
            if event & REFUSED_KEYS:
                raise CallError(
                    Code.NOT_ALLOWED,
                    f"the executor at {self._url} did not let us in: its operator must have our .pub file among the tenants, and "
                    f"the endpoint must read {keys} with the right files",
                )
            why = "the connection broke"
            if event & BROKEN_HANDSHAKE:
                asked = (
                    "it keeps keys that it does not know waiting, or server= names another executor's .pub file"
                    if self._has_keys
                    else f"the endpoint must read {keys}"
                )
                why = f"it is ending, or {asked}"
            raise ConnectionLost(f"no executor at {self._url}: {why}")
        raise ConnectionLost(f"no answer from {self._url} within {timeout:g} s")

    def _ready(self, deadline: float) -> dict[Any, int]:
        """What there is to receive from; nothing if nothing came for a while."""
        return dict(self._poller.poll(int(1000 * max(0.0, min(BEAT_S, deadline - monotonic())))))

    def shared(self) -> dict[int, Tensor]:
        return {}

    def beat(self) -> None:
        """Between calls nobody else reads what the monitor tells, again and again while the executor is away; and when no more has
        room, ZeroMQ's thread waits for ever."""
        with suppress(zmq.ZMQError):  # when a process ends, ZeroMQ closes what is open
            while self._monitor.poll(0):
                recv_monitor_message(self._monitor)
                self._broken = True
        self._say_that_we_live()

    def _say_that_we_live(self) -> None:
        with suppress(zmq.ZMQError):
            self._socket.send(encode_control(Beat()), zmq.NOBLOCK)

    def close(self) -> None:
        if not self._socket.closed:
            with suppress(zmq.ZMQError):
                self._socket.send(encode_control(Bye()), zmq.NOBLOCK)
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close(linger=200)
