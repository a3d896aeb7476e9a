"""`tcp://HOST:PORT`, the client's end.

The socket is replaced, not reused, when the connection breaks: ZeroMQ would reconnect by itself but never resend what
was lost, so the session reconnects and resends instead.
"""

from contextlib import suppress
from itertools import chain
from time import monotonic
from typing import Any

import torch
import zmq
from torch import Tensor
from zmq.utils.monitor import recv_monitor_message

from symbiosis.errors import CallError, Code, ConnectionLost, HandshakeFailed, ProtocolError
from symbiosis.kernels.packed import PackedWeight
from symbiosis.protocol import (
    MAGIC_REPLY,
    MAX_WELCOME,
    Beat,
    Bye,
    Call,
    Hello,
    Refusal,
    Reply,
    decode_from_executor,
    decode_reply,
    encode_call,
    encode_control,
)
from symbiosis.transport.patience import CONNECT_S, SAYS_NOTHING
from symbiosis.transport.reply_checks import Answers, MoreRoom, accepted
from symbiosis.transport.tcp.address import Address, ClientKeys
from symbiosis.transport.tcp.sockets import COPY_BELOW, Wire, harden, hold, most_frames
from symbiosis.transport.tcp.sockets import cut as cut_frames
from symbiosis.transport.tensors import CPU, TORCH_DTYPE, Shapes, bytes_of, copied, cut

REFUSED_KEYS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
BROKEN_HANDSHAKE = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL  # wrong keys, or an executor that is just ending
BEAT_S, LOOK_S = 1.0, 0.1  # during a call: between two beats, and between two looks at how much has come
IDLE_LOOK_S = 0.25  # between two looks when there is no call
MAX_REFUSAL = 8 << 10  # bytes
# Most bytes that ZeroMQ's own messages and keys take, and that it adds to each frame.
SPARE, OF_A_FRAME = 64 << 10, 64


class TcpConnection:
    """A DEALER socket, with a monitor that tells when the executor is gone."""

    device, page, is_lost, look_s = CPU, None, False, IDLE_LOOK_S
    _has_joined = False

    def __init__(self, address: str, hello: Hello, timeout: float, for_gpu: bool = False, room: int = -1) -> None:
        """Results `for_gpu` lie in pinned memory. A `room` of 0 or more limits the bytes of a message."""
        self._for_gpu, self._room = for_gpu, room
        self._beat_at = 0.0
        self._broken = False  # whether the connection broke between calls
        self._wire: Wire | None = None
        self._received = 0  # bytes of the messages taken, or somewhat more
        place = Address.parse(address)
        self._url, self._has_keys = f"tcp://{place.where}", bool(place.key)
        self._join(place.keys(), hello, monotonic() + timeout)
        self._has_joined = True
        self._answers = Answers(self.welcome)
        self.host = str(self._wire.other_end[0]) if self._wire else ""  # the executor's address

    def _join(self, keys: ClientKeys, hello: Hello, deadline: float) -> None:
        """Join by the first of the executor's keys that it accepts. There are several while it exchanges them."""
        for server in keys.servers[:-1]:
            with suppress(HandshakeFailed):
                self._join_by(keys, server, hello, deadline)
                return
        self._join_by(keys, keys.servers[-1] if keys.servers else "", hello, deadline)

    def _join_by(self, keys: ClientKeys, server: str, hello: Hello, deadline: float) -> None:
        self._wire, self._received = None, 0
        self._socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        keys.unlock(self._socket, server)
        harden(self._socket)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, round(1e3 * CONNECT_S))
        self._socket.setsockopt(zmq.MAXMSGSIZE, self._room + SPARE if self._room >= 0 else -1)
        self._monitor: Any = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | REFUSED_KEYS | BROKEN_HANDSHAKE
        )
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._socket.connect(self._url)
            with suppress(zmq.Again):  # refused before we could say anything: the monitor tells
                self._socket.send(encode_control(hello), zmq.NOBLOCK)
            head, *rest = self._receive(deadline, MAX_WELCOME)
            if rest or len(head) > MAX_WELCOME:
                raise ProtocolError(Code.BAD_FRAME, f"{self._url} answers a join with more than a welcome")
            self.welcome = accepted(decode_from_executor(head.buffer), self._url, hello)
            self._wire = Wire.below(head)
        except zmq.ZMQError as error:
            self.close()
            raise ConnectionLost(str(error)) from None
        except BaseException:  # ctrl-C, too: if nobody reads the monitor, ZeroMQ's thread waits for ever
            self.close()
            raise

    def call(
        self, seq: int, call: Call, payload: tuple[Tensor, ...], timeout: float, shapes: Shapes = ()
    ) -> tuple[Reply, list[Tensor]]:
        expected = self._answers.nbytes(call)
        if 0 <= self._room < expected:
            raise MoreRoom(expected)
        parts = [
            cut_frames(bytes_of(part), self._has_keys) for part in reversed(payload)
        ]  # the rows last: see `sockets`
        frames = [encode_call(call, seq), *chain.from_iterable(parts)]
        deadline = monotonic() + timeout
        if self._broken:
            raise ConnectionLost("the connection broke")
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=call.nbytes < COPY_BELOW)
        except zmq.Again:  # the queue is full of beats that the executor did not read
            raise ConnectionLost("it takes no more messages: it hangs") from None
        while True:
            head, *rest = self._receive(deadline, expected)
            if head.buffer[:4] != MAGIC_REPLY:
                refusal = decode_from_executor(head.buffer) if len(head) <= MAX_REFUSAL else None
                if not isinstance(refusal, Refusal):
                    raise ProtocolError(Code.BAD_FRAME, f"{self._url} answers a call with a {type(refusal).__name__}")
                if refusal.code == Code.NOT_JOINED:
                    raise ConnectionLost("it was restarted")
                raise refusal.error()
            reply = decode_reply(head.bytes)
            if reply.seq == seq:
                self._answers.check(call, reply)
                found = [len(frame) for frame in rest]
                if not hold(found, [reply.nbytes] if reply.nbytes else [], self._has_keys):
                    raise ProtocolError(
                        Code.BAD_FRAME, f"a reply of {reply.nbytes} bytes came in frames of {found[:3]}"
                    )
                if not rest:
                    return reply, [torch.empty(reply.shape, dtype=TORCH_DTYPE[reply.dtype])]
                result = copied([frame.buffer for frame in rest], reply.dtype, reply.shape, self._for_gpu)
                return reply, cut(result, shapes if reply.code is Code.OK else ())

    def _receive(self, deadline: float, most: int) -> list[zmq.Frame]:
        """Receive the next message, of not much more than `most` bytes."""
        beat_at = monotonic() + BEAT_S
        while monotonic() < deadline:
            ready = dict(self._poller.poll(int(1e3 * max(0.0, min(LOOK_S, deadline - monotonic())))))
            if self._socket in ready:
                return self._message(1 + most_frames(most, self._has_keys))
            if self._monitor in ready:
                self._attend(recv_monitor_message(self._monitor))
            if self._wire and self._wire.received() > self._received + most + SPARE:
                raise ProtocolError(Code.BAD_FRAME, f"{self._url} sends more than the {most} bytes that were asked for")
            if monotonic() > beat_at:
                self._say_that_we_live()
                beat_at += BEAT_S
        if self._wire is not None and not self._has_joined:
            raise HandshakeFailed(SAYS_NOTHING)
        raise self._lost("no answer in time")

    def _message(self, most: int) -> list[zmq.Frame]:
        """Read the message that has come, or raise `ProtocolError` if it has more frames than a reply."""
        frames = [self._socket.recv(copy=False)]
        while frames[-1].more:
            if len(frames) == most:
                raise ProtocolError(Code.BAD_FRAME, f"{self._url} sends a message of more than {most} frames")
            frames.append(self._socket.recv(copy=False))
        self._received += sum(len(frame) + OF_A_FRAME for frame in frames)
        return frames

    def _attend(self, told: dict[str, Any]) -> None:
        """Handle what the monitor tells about the connection: that it is there, or why it is not."""
        event = told["event"]
        if event == zmq.EVENT_CONNECTED:
            self._wire = Wire.of(told["value"])
            return
        keys = f"{self._url}?server=EXECUTOR.pub&key=MINE.key"
        if self._has_keys and told["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            raise CallError(
                Code.NOT_ALLOWED,
                f"the executor at {self._url} has no keys, and this endpoint names some: leave out ?server=...&key=... if rows may go there "
                "unencrypted, else its operator must start it with --key and --tenants",
            )
        if event & REFUSED_KEYS:
            raise CallError(
                Code.NOT_ALLOWED,
                f"the executor at {self._url} did not let this client in: its operator must have your .pub file among the tenants, and "
                f"the endpoint must read {keys} with the right files",
            )
        if event & BROKEN_HANDSHAKE:
            asked = "server= names another executor's .pub file" if self._has_keys else f"the endpoint must read {keys}"
            raise HandshakeFailed(f"it broke off the handshake: it is ending, or {asked}")
        raise self._lost("the connection broke")

    def _lost(self, why: str) -> ConnectionLost:
        """Return the error of a connection that is gone, or never was there."""
        return ConnectionLost(why if self._wire else "it accepts no connection")

    def commons(self) -> dict[int, Tensor]:
        return {}

    def served_weights(self) -> dict[int, Tensor | PackedWeight]:
        return {}

    def beat(self) -> None:
        """Tell the executor that this client is alive, and read the monitor. Nothing else reads it between calls, and if its queue
        filled up while the executor is away, ZeroMQ's thread would wait for ever."""
        with suppress(zmq.ZMQError):  # ZeroMQ closes its sockets when the process ends
            while self._monitor.poll(0):
                self._broken |= recv_monitor_message(self._monitor)["event"] != zmq.EVENT_CONNECTED
        came = self._wire.received() if self._wire else 0
        if came > self._received + SPARE:  # unasked for
            self._broken = True
            self.close()
        self._received = came
        if (now := monotonic()) >= self._beat_at:
            self._beat_at = now + self.welcome.heartbeat_s / 5  # `beat` is called at least four times in that time
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
