"""`tcp://` for clients on a GPU of another host, the executor's end: rows come and go by NCCL, from GPU to GPU.

Headers come over a TCP connection beside ZeroMQ's, which is looked at like a doorbell: no thread must wake up for them. Each
session has a communicator and a stream of its own, so who is waited for there holds up nobody else.
"""

import hmac
import logging
import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace
from torch import Tensor

from symbiosis.errors import CallError, Code
from symbiosis.protocol import CALL_SIZE, Call, Hello, Reply, decode_call, encode_reply
from symbiosis.transport import nccl_driver
from symbiosis.transport.cuda import device_name
from symbiosis.transport.nccl_driver import UNIQUE_BYTES, Communicator, NcclError
from symbiosis.transport.tensors import TORCH_DTYPE, bytes_of
from symbiosis.transport.zeromq import Peer

if TYPE_CHECKING:
    from symbiosis.transport.wire import Wire
    from symbiosis.transport.zeromq import Listener

TOKEN_BYTES = 16
LOOK_S = 0.5  # between two looks whether the client's connection lasts
logger = logging.getLogger("symbiosis")


@dataclass(slots=True)
class Arriving:
    """A call whose rows are on their way."""

    seq: int
    call: Call
    payload: tuple[Tensor, ...]
    there: torch.cuda.Event
    admitted: bool


class NcclPeer(Peer):
    """The executor's end of one connection. What is sent as frames is answered in frames, too."""

    transport = "nccl"

    def __init__(
        self, listener: "Listener", identity: bytes, tenant: str | None, wire: "Wire | None", hello: Hello
    ) -> None:
        super().__init__(listener, identity, tenant)
        self.wire = wire
        self._inbox, self._reactor, self._device = listener.inbox, listener.reactor, listener.inbox.device
        if reason := self._why_not(hello):
            raise CallError(Code.UNKNOWN_OP, f"this executor takes no rows by NCCL: {reason}")
        try:
            self._door: socket.socket | None = socket.create_server(("", 0))
        except OSError as error:
            raise CallError(Code.RESOURCE, f"the executor cannot listen for headers: {error}") from None
        self._token = os.urandom(TOKEN_BYTES)
        try:
            welcome = self._inbox.joined(self, hello)
        except CallError:
            self._door.close()
            raise
        self.welcome = replace(welcome, port=self._door.getsockname()[1], token=self._token)
        self._stream = torch.cuda.Stream(self._device)
        self._socket: socket.socket | None = None
        self._raw, self._expected = b"", TOKEN_BYTES + UNIQUE_BYTES  # what came of a header, and how much it has
        self._arriving: Arriving | None = None
        self._unanswered: set[int] = set()  # calls whose rows came by NCCL
        self._taking = False  # one of them
        self._comm: Communicator | None = None  # while the other side is there
        self._turn = threading.Lock()  # of whoever uses or ends it
        self._left = threading.Event()
        self._reactor.watch(self._door.fileno(), self._accept)

    def _why_not(self, hello: Hello) -> str | None:
        mine = nccl_driver.version() if self._device.type == "cuda" else 0
        if self._device.type != "cuda":
            return "it computes on the CPU"
        if not self._inbox.nccl:
            return "they would be neither encrypted nor known to be their tenant's; its operator may allow that with --nccl"
        if hello.observer or self.wire is None:
            return "an observer makes no calls" if hello.observer else "the connection has ended"
        if hello.device == device_name(self._device):
            return "it computes on the same GPU as its client: use local://"
        if mine != hello.nccl:
            return f"it has NCCL {mine or 'not installed'}, the client {hello.nccl}"
        return None

    # ------------------------------------------------------------------ calls

    def _accept(self) -> None:
        """One connection, from where the client is."""
        assert self._door is not None
        with suppress(OSError):
            sock, (host, *_) = self._door.accept()
            if self.wire is None or host != self.wire.other_end[0]:
                sock.close()
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._close_door()
            self._socket = sock
            self._reactor.watch(sock.fileno(), self.look)

    def _close_door(self) -> None:
        if self._door is not None:
            self._reactor.forget(self._door.fileno())
            self._door.close()
            self._door = None

    def look(self) -> bool:
        """Whether a call has come, with all its rows."""
        if self._arriving is not None:
            return self._arriving.there.query() and self._take(self._arriving)
        if self._socket is None or (self._comm is None and self._expected == CALL_SIZE):
            return False
        try:
            came = self._socket.recv(self._expected - len(self._raw))
        except BlockingIOError:
            return False
        except OSError:
            came = b""
        self._raw += came
        if not came:
            self.close()
        elif len(self._raw) == self._expected:
            raw, self._raw, self.heard = self._raw, b"", True
            if self._expected == CALL_SIZE:
                self._receive(raw)
            else:
                self._expected = CALL_SIZE
                self._meet(raw)
        return False

    def _meet(self, raw: bytes) -> None:
        """The first that comes: who this is, and where its NCCL waits."""
        token, meeting = raw[:TOKEN_BYTES], raw[TOKEN_BYTES:]
        if hmac.compare_digest(token, self._token):
            threading.Thread(target=self._live, args=(meeting,), name="symbiosis-nccl", daemon=True).start()
        else:
            self.close()

    def _receive(self, raw: bytes) -> None:
        """The rows of this call. Those of a call that is not admitted come, too: the client's GPU has sent them."""
        try:
            seq, call = decode_call(raw)
            if call.nbytes > self._inbox.limits.max_call_bytes:
                raise CallError(Code.TOO_LARGE, "a client checks that")
        except CallError:
            self.close()
            return
        self._unanswered.add(seq)
        admitted = self._inbox.admits(self, seq, call)
        kinds = ((call.payload_dtype, call.payload_shape), ("int32", (call.groups,)))
        try:
            with self._turn, torch.cuda.stream(self._stream):
                payload = tuple(
                    torch.empty(shape, dtype=TORCH_DTYPE[dtype], device=self._device)
                    for (dtype, shape), _ in zip(kinds, call.parts, strict=False)
                )
                for rows in payload:
                    if self._comm is None:
                        return
                    self._comm.receive(rows, self._stream.cuda_stream)
                there = torch.cuda.Event()
                there.record(self._stream)
        except RuntimeError as error:  # of NCCL, or no memory: the client's GPU waits for us
            logger.warning("a client's rows could not be received: %s", error)
            self.close()
            return
        self._arriving = Arriving(seq, call, payload, there, admitted)

    def _take(self, arrived: Arriving) -> bool:
        self._arriving = None
        if not arrived.admitted:
            return False
        rows, *ends = arrived.payload
        if rows.numel():
            rows.record_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            payload = (rows, *(tensor.cpu() for tensor in ends))
        self._taking = True
        self._inbox.arrived(self, arrived.seq, arrived.call, payload)
        self._taking = False
        return True

    def out(self, call: Call, shape: tuple[int, ...]) -> Tensor | None:
        if not self._taking:
            return None
        return torch.empty(shape, dtype=TORCH_DTYPE[call.dtype], device=self._device)

    def reply(self, reply: Reply, result: Tensor) -> None:
        if reply.seq not in self._unanswered:
            super().reply(reply, result)
            return
        self._unanswered.discard(reply.seq)
        header = encode_reply(reply)
        try:
            if reply.code is not Code.OK:
                header += bytes_of(result.cpu())
            elif reply.nbytes:
                self._send(result)
            if self._socket is not None and self._socket.send(header) != len(header):
                raise OSError("the client does not read")
        except (RuntimeError, OSError):
            self.close()

    def _send(self, result: Tensor) -> None:
        """Behind the product."""
        rows = result.to(self._device).contiguous()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        rows.record_stream(self._stream)
        with self._turn:
            if self._comm is None:
                raise NcclError("the client is gone")
            self._comm.send(rows, self._stream.cuda_stream)

    @property
    def busy(self) -> bool:
        """Whether rows are on their way."""
        return self._arriving is not None

    # ------------------------------------------------------------------ from the meeting to the end

    def _live(self, meeting: bytes) -> None:
        """In a thread of its own: that a client's rows never come must not depend on a loop that may be waiting for them."""
        try:
            comm = Communicator(meeting, 1, self._device)
        except RuntimeError as error:
            if not self._left.is_set():
                logger.warning("a client's GPU was not met by NCCL: %s", error)
            return
        self._comm = comm
        while not self._left.wait(LOOK_S) and self.wire and self.wire.received():
            pass
        with self._turn:
            self._comm = None
        comm.abort()

    def release(self) -> None:
        """The session is over."""
        self._left.set()
        self._close_door()
        if self._socket is not None:
            self._reactor.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None
