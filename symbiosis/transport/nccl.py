"""`tcp://` for clients on a GPU of another host, the executor's end: rows come and go by NCCL, from GPU to GPU.

Headers come over a TCP connection beside ZeroMQ's, which is looked at like a doorbell: no thread must wake up for them. Each
session has a communicator and a stream of its own, so who is waited for there holds up nobody else.
"""

import hmac
import logging
import os
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace
from torch import Tensor

from symbiosis.errors import CallError, Code
from symbiosis.protocol import CALL_SIZE, Call, Hello, Reply, decode_call, encode_reply
from symbiosis.transport import nccl_driver
from symbiosis.transport.cuda import device_name
from symbiosis.transport.cuda_driver import new_stream
from symbiosis.transport.nccl_driver import UNIQUE_BYTES, Communicator, NcclError
from symbiosis.transport.reactor import CAN_SPIN
from symbiosis.transport.tensors import TORCH_DTYPE, bytes_of
from symbiosis.transport.zeromq import Peer

if TYPE_CHECKING:
    from symbiosis.transport.wire import Wire
    from symbiosis.transport.zeromq import Listener

TOKEN_BYTES = 16
FIRST_BYTES = TOKEN_BYTES + UNIQUE_BYTES  # who this is, and where its NCCL waits
LOOK_S = 0.5  # between two looks whether the client is there
STALL_S = 30.0  # that rows may be on their way
LAST_S = 1.0  # that the last reply may be, of a session that is over
MOST_IN_VAIN = 64 << 20  # bytes of rows that are received though their call is refused
_free_streams: list[torch.cuda.ExternalStream] = []  # of sessions that are over: torch may still know them

logger = logging.getLogger("symbiosis")


@dataclass(slots=True)
class Transfer:
    """Rows on their way, in either direction."""

    nbytes: int
    there: torch.cuda.Event
    since: float = field(default_factory=monotonic)

    @property
    def done(self) -> bool:
        return self.there.query()

    @property
    def stalls(self) -> bool:
        return monotonic() - self.since > STALL_S and not self.done


@dataclass(slots=True)
class Arriving:
    """A call whose rows are on their way."""

    seq: int
    call: Call
    payload: tuple[Tensor, ...]
    transfer: Transfer
    admitted: bool


class NcclPeer(Peer):
    """The executor's end of one connection. What is sent as frames is answered in frames, too."""

    transport = "nccl"

    def __init__(
        self, listener: "Listener", identity: bytes, tenant: str | None, wire: "Wire | None", hello: Hello, key: str
    ) -> None:
        """`key`: that the connection proved, if there are keys."""
        super().__init__(listener, identity, tenant)
        self.wire, self.key = wire, key
        self._inbox, self._reactor, self._device = listener.inbox, listener.reactor, listener.inbox.device
        self._door: socket.socket | None = None
        self._socket: socket.socket | None = None
        self._raw = b""  # what has come of a header
        self._known = False  # the client has shown the token
        self._arriving: Arriving | None = None
        self._sending: list[Transfer] = []
        self._unanswered: set[int] = set()  # calls whose rows came by NCCL
        self._taking = False  # one of them
        self._comm: Communicator | None = None  # while the other side is there
        self._turn = threading.Lock()  # of whoever uses or ends it
        self._left = threading.Event()
        if reason := self._why_not(hello):
            raise CallError(Code.UNKNOWN_OP, f"this executor takes no rows by NCCL: {reason}")
        try:
            self._door = socket.create_server((wire.near_end() if wire else "", 0))
            self._door.setblocking(False)
            self._stream = _free_streams.pop() if _free_streams else new_stream(self._device)
            self._reactor.watch(self._door.fileno(), self._accept)
            self._token = os.urandom(TOKEN_BYTES)
            port, welcome = self._door.getsockname()[1], self._inbox.joined(self, hello)
        except Exception as error:
            self._close_door()
            if isinstance(error, OSError | RuntimeError):
                raise CallError(Code.UNKNOWN_OP, f"this executor takes no rows by NCCL now: {error}") from None
            raise
        self.welcome = replace(welcome, port=port, token=self._token)

    def _why_not(self, hello: Hello) -> str | None:
        if self._device.type != "cuda":
            return "it computes on the CPU"
        if not self._inbox.nccl:
            return "they would be neither encrypted nor known to be their tenant's; its operator may allow that with --nccl"
        if hello.observer or self.wire is None:
            return "an observer makes no calls" if hello.observer else "the connection has ended"
        if hello.device == device_name(self._device):
            return "it computes on the same GPU as its client: use local://"
        if (mine := nccl_driver.version()) != hello.nccl:
            return f"it has NCCL {mine or 'not installed'}, the client {hello.nccl}"
        return None if CAN_SPIN else "nothing wakes up its processor when they are there"

    @property
    def unread(self) -> list[int]:
        self._sending = [transfer for transfer in self._sending if not transfer.done]
        return [*super().unread, *(transfer.nbytes for transfer in self._on_their_way())]

    def _on_their_way(self) -> Iterable[Transfer]:
        arriving = self._arriving
        return [*self._sending, arriving.transfer] if arriving else list(self._sending)

    # ------------------------------------------------------------------ who comes

    def _accept(self) -> None:
        """A connection from where the client is; the newest, until one has shown the token."""
        if self._door is None:
            return
        with suppress(OSError):
            sock, (host, *_) = self._door.accept()
            if self.wire is None or host != self.wire.other_end[0]:
                sock.close()
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._close_socket()
            self._socket, self._raw = sock, b""
            self._reactor.watch(sock.fileno(), self.look)

    def _meet(self, raw: bytes) -> None:
        if not hmac.compare_digest(raw[:TOKEN_BYTES], self._token):
            self._close_socket()
            return
        self._known = True
        self._close_door()
        threading.Thread(target=self._guard, args=(raw[TOKEN_BYTES:],), name="symbiosis-nccl", daemon=True).start()

    def _close_door(self) -> None:
        if self._door is not None:
            self._reactor.forget(self._door.fileno())
            self._door.close()
            self._door = None

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._reactor.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None

    # ------------------------------------------------------------------ calls

    def look(self) -> bool:
        """Whether a call has come, with all its rows."""
        try:
            return self._look()
        except Exception as error:  # whatever it is: the executor has other clients
            logger.warning("a session whose rows come by NCCL is ended: %s", error)
            self.close()
            return False

    def _look(self) -> bool:
        arriving = self._arriving
        if arriving is not None:
            return arriving.transfer.done and self._comm is not None and self._take(arriving)
        if self._socket is None or (self._known and self._comm is None):
            return False
        expected = CALL_SIZE if self._known else FIRST_BYTES
        try:
            came = self._socket.recv(expected - len(self._raw))
        except BlockingIOError:
            return False
        except OSError:
            came = b""
        self._raw += came
        if len(self._raw) == expected:
            raw, self._raw = self._raw, b""
            (self._receive if self._known else self._meet)(raw)
        elif not came:
            self.close() if self._known else self._close_socket()
        return False

    def _receive(self, raw: bytes) -> None:
        """The rows of a call. Those of a call that is not admitted come, too: the client's GPU has sent them."""
        seq, call = decode_call(raw)
        if not call.parts or call.nbytes > self._inbox.limits.max_call_bytes:
            raise CallError(Code.TOO_LARGE, "a client checks what it sends by NCCL")
        self._unanswered.add(seq)
        admitted = self._inbox.admits(self, seq, call)
        if not admitted and call.nbytes > MOST_IN_VAIN:
            raise CallError(Code.BUSY, "too much to be received in vain")
        kinds = ((call.payload_dtype, call.payload_shape), ("int32", (call.groups,)))
        with self._turn, torch.cuda.stream(self._stream):
            payload = tuple(
                torch.empty(shape, dtype=TORCH_DTYPE[dtype], device=self._device)
                for (dtype, shape), _ in zip(kinds, call.parts, strict=False)
            )
            for rows in payload:
                self._communicator.receive(rows, self._stream.cuda_stream)
            self._arriving = Arriving(seq, call, payload, self._transfer(call.nbytes), admitted)

    @property
    def _communicator(self) -> Communicator:
        if self._comm is None:
            raise NcclError("the client is gone")
        return self._comm

    def _transfer(self, nbytes: int) -> Transfer:
        there = torch.cuda.Event()
        there.record(self._stream)
        return Transfer(nbytes, there)

    def _take(self, arrived: Arriving) -> bool:
        self._arriving = None
        if not arrived.admitted:
            return False
        rows, *ends = arrived.payload
        rows.record_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            payload = (rows, *(tensor.cpu() for tensor in ends))
        self._taking = True
        try:
            self._inbox.arrived(self, arrived.seq, arrived.call, payload)
        finally:
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
        if reply.code is not Code.OK and self._too_many(reply):
            return
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
            self._communicator.send(rows, self._stream.cuda_stream)
            self._sending.append(self._transfer(rows.nbytes))

    @property
    def busy(self) -> bool:
        """Whether rows are on their way here."""
        return self._arriving is not None

    # ------------------------------------------------------------------ from the meeting to the end

    def _guard(self, meeting: bytes) -> None:
        """In a thread of its own: that a client's rows never come must not depend on a loop that may be waiting for them."""
        try:
            comm = Communicator(meeting, 1, self._device, self._stream)
        except RuntimeError as error:
            if not self._left.is_set():
                logger.warning("a client's GPU was not met by NCCL: %s", error)
            self._reactor.call_soon(self.close)
            return
        self._comm = comm
        while not self._left.wait(LOOK_S) and self.wire and self.wire.received():
            if any(transfer.stalls for transfer in self._on_their_way()):
                logger.warning("a client did not send or take its rows for %g s", STALL_S)
                break
        end = monotonic() + LAST_S
        while self._left.is_set() and self._sending and not self._sending[-1].done and monotonic() < end:
            sleep(1e-3)
        with self._turn:
            self._comm = None
        comm.abort()
        _free_streams.append(self._stream)
        self._reactor.call_soon(self.close)

    def release(self) -> None:
        """The session is over."""
        self._left.set()
        self._arriving = None
        self._close_door()
        self._close_socket()
