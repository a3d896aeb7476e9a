"""`tcp://` for clients on a GPU of another host, the executor's end: rows come and go by NCCL, from GPU to GPU.

Headers come over a TCP connection beside ZeroMQ's, which is looked at like a doorbell, so that no thread must wake up for them. Each
session has a communicator and a stream of its own, so that waiting for one client holds up no other. A session's rows always come and go at
the same places in our memory, one call at a time. So a call that comes again runs as the calls of a GPU of this host do: as a graph, or
joined.
"""

import hmac
import itertools
import logging
import os
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from time import monotonic, sleep

import torch
from msgspec.structs import replace
from torch import Tensor

from symbiosis.errors import CallError, Code
from symbiosis.protocol import (
    CALL_SIZE,
    Call,
    Hello,
    Reply,
    Welcome,
    encode_reply,
    parse_call_body,
    split_call,
)
from symbiosis.transport.base import NO_MEMORY, Prepared, ServerPort, refuse
from symbiosis.transport.cuda.driver import device_name, new_stream
from symbiosis.transport.cuda.remote_gpu import lay_out
from symbiosis.transport.nccl import driver as nccl_driver
from symbiosis.transport.nccl.driver import UNIQUE_BYTES, Communicator, NcclError
from symbiosis.transport.reactor import CAN_SPIN
from symbiosis.transport.tcp.peer import TcpHome, TcpPeer
from symbiosis.transport.tcp.sockets import Wire
from symbiosis.transport.tensors import bytes_of, tensor_at

TOKEN_BYTES = 32
FIRST_BYTES = TOKEN_BYTES + UNIQUE_BYTES  # who this is, and where its NCCL waits
LOOK_S = 0.5  # between two looks whether the client is there
STALL_S = 30.0  # that rows may be on their way
LAST_S = 1.0  # that the last reply may be, of a session that is over
MOST_IN_VAIN = 64 << 20  # bytes of rows that are received though their call is refused
PLACES_KEPT = 1 << 12  # a client may make ever new calls
BY_NCCL = -1  # the number by which the server knows such a call: no frame can have it
_free_streams: list[torch.cuda.ExternalStream] = []  # of sessions that are over: torch may still know them

logger = logging.getLogger("symbiosis")


@dataclass(slots=True)
class Transfer:
    """Rows on their way, in either direction."""

    nbytes: int
    there: torch.cuda.Event
    since: float

    @property
    def done(self) -> bool:
        return self.there.query()

    @property
    def stalls(self) -> bool:
        return monotonic() - self.since > STALL_S and not self.done


@dataclass(slots=True)
class CallBuffers:
    """The place of a call's rows whenever the call comes, and the place of the result if it is a prepared call."""

    call: Call
    payload: tuple[Tensor, ...]
    out: Tensor | None = None
    prepared: Prepared | None = None


@dataclass(slots=True)
class Arriving:
    """A call whose rows are on their way."""

    place: CallBuffers
    transfer: Transfer
    admitted: bool


class NcclPeer(TcpPeer):
    """The executor's end of one connection. Calls that come as frames are answered in frames, too."""

    transport = "nccl"

    def __init__(
        self, home: TcpHome, identity: bytes, tenant: str | None, wire: Wire | None, hello: Hello, key: str
    ) -> None:
        """`key` is the key that the connection has proved, if there are keys."""
        super().__init__(home, identity, tenant, wire)
        self.key = key
        self._inbox, self._reactor, self._device = home.inbox, home.reactor, home.inbox.device
        self._door: socket.socket | None = None
        self._socket: socket.socket | None = None
        self._raw = b""  # what has come of a header
        self._known = False  # the client has shown the token
        self._memory = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._places: dict[bytes, CallBuffers] = {}
        self._numbers = itertools.count(1)
        self._seq: int | None = None  # of the call whose rows came by NCCL and that is not answered
        self._place: CallBuffers | None = None  # ... where they lie
        self._arriving: Arriving | None = None
        self._sending: Transfer | None = None
        self._taking = False  # a call whose rows came by NCCL
        self._comm: Communicator | None = None  # while the other side is there
        self._in_use = threading.Lock()  # held by whoever uses or ends it
        self._left = threading.Event()
        if reason := why_not_by_nccl(home.inbox, wire, hello):
            raise CallError(Code.UNKNOWN_OP, f"this executor takes no rows by NCCL: {reason}")
        self._came, self._launched, self._went = (torch.cuda.Event() for _ in range(3))
        self.welcome = self._let_in(wire, hello)
        self._reactor.watch_bell(self)

    def _let_in(self, wire: Wire | None, hello: Hello) -> Welcome:
        """Open the door for the connection by which headers come, and let the client join."""
        stream = None
        try:
            self._door = socket.create_server((wire.near_end() if wire else "", 0))
            self._door.setblocking(False)
            self._stream = stream = _free_streams.pop() if _free_streams else new_stream(self._device)
            self._reactor.watch(self._door.fileno(), self._accept, self)
            self._token = os.urandom(TOKEN_BYTES)
            port, welcome = self._door.getsockname()[1], self._inbox.joined(self, hello)
        except Exception as error:
            self._close_door()
            if stream is not None:
                _free_streams.append(stream)
            if isinstance(error, OSError | RuntimeError):
                raise CallError(Code.UNKNOWN_OP, f"this executor takes no rows by NCCL now: {error}") from None
            raise
        return replace(welcome, port=port, token=self._token)

    nap = inf  # headers wake up a descriptor, too

    def sleeping(self, flag: bool) -> None:
        """Do nothing: the connection wakes a descriptor anyway."""

    @property
    def unread(self) -> list[int]:
        return [*super().unread, *(transfer.nbytes for transfer in self._on_their_way() if not transfer.done)]

    def _on_their_way(self) -> Iterable[Transfer]:
        arriving, sending = self._arriving, self._sending
        return [transfer for transfer in (sending, arriving and arriving.transfer) if transfer]

    # ------------------------------------------------------------------ who comes

    def _accept(self) -> None:
        """Accept a connection from the client's address: the newest one, until one has shown the token."""
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
            self._reactor.watch(sock.fileno(), self.look, self)

    def _meet(self, raw: bytes) -> None:
        if not hmac.compare_digest(raw[:TOKEN_BYTES], nccl_driver.shown(self._token)):
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
        except (CallError, RuntimeError) as error:  # the latter of NCCL and CUDA
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
        """Receive the rows of a call. Those of a call that is not admitted are received, too, because the client's GPU has sent them."""
        seq, body = split_call(raw)
        if self._seq is not None:
            raise CallError(Code.LIMIT, "a client makes one call at a time by NCCL")
        self._seq = seq
        known = self._places.get(body)
        call = known.call if known else parse_call_body(body)
        if not call.parts or call.nbytes > self._inbox.limits.max_call_bytes:
            raise CallError(Code.TOO_LARGE, "a call by NCCL has rows, and no more than any call may have")
        admitted = self._inbox.admits(self, BY_NCCL, call)
        if not admitted and call.nbytes > MOST_IN_VAIN:
            raise CallError(Code.BUSY, "there is no room for a call of this size: send it again later")
        if not admitted:
            self._inbox.came_in_vain(self, call.nbytes)
        try:
            place = self._place = known or self._new_place(call, body, admitted)
        except torch.OutOfMemoryError:
            if admitted:
                refuse(self, BY_NCCL, CallError(Code.RESOURCE, NO_MEMORY))
            raise  # the rows are on their way, and there is no place for them
        with self._in_use:
            for rows in place.payload:
                self._communicator.receive(rows, self._stream.cuda_stream)
            self._came.record(self._stream)
        self._arriving = Arriving(place, Transfer(call.nbytes, self._came, monotonic()), admitted)

    def _new_place(self, call: Call, body: bytes, admitted: bool) -> CallBuffers:
        """Return a place for a call's rows. If the call is admitted, the place is kept, with one for the result."""
        lies, nbytes = lay_out([*call.payload_kinds, (call.dtype, self._inbox.shape(call) if admitted else ())])
        if nbytes > self._memory.numel():
            self._grow(nbytes)
        *payload, out = (tensor_at(self._memory, *lie) for lie in lies)
        place = CallBuffers(call, tuple(payload))
        if admitted:
            if len(self._places) >= PLACES_KEPT:
                self._places.clear()
            place.out = out
            if not call.op.traits.indices and not call.seeded:  # indices a CPU checks each time
                number = next(self._numbers)
                place.prepared = self._inbox.prepare(self, number, call, place.payload, (out,), BY_NCCL)
            self._places[body] = place
        return place

    def _grow(self, nbytes: int) -> None:
        """Take other memory, in which nothing lies yet. A result may still be on its way from the old one."""
        self._memory.record_stream(self._stream)
        self._places.clear()
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # which may have used it before

    @property
    def _communicator(self) -> Communicator:
        if self._comm is None:
            raise NcclError("the client is gone")
        return self._comm

    def _take(self, arrived: Arriving) -> bool:
        self._arriving, place = None, arrived.place
        if not arrived.admitted or self._seq is None:
            return False
        if place.prepared is not None:
            return self._inbox.on_doorbell(place.prepared)
        rows, *ends = place.payload
        with torch.cuda.stream(self._stream):  # on which nothing else is waited for
            ends = [tensor.cpu() for tensor in ends]
        self._taking = True
        try:
            self._inbox.arrived(self, BY_NCCL, place.call, (rows, *ends))
        finally:
            self._taking = False
        return True

    def out(self, call: Call, shape: tuple[int, ...]) -> Tensor | None:
        return self._place.out if self._taking and self._place else None

    here = True

    def answer(self, number: int) -> tuple[int, int]:
        """Return no word, because none tells the client."""
        return 0, 0

    def enqueue_reply(self) -> None:
        """Do nothing: `count` sends the reply, because no graph can."""

    def count(self, batch: int, calls: int = 1) -> None:
        """Send the reply to a prepared call that was launched, in a batch of so many."""
        place = self._place
        assert place is not None and place.out is not None
        self._answer(Reply(BY_NCCL, Code.OK, place.call.dtype, batch=batch), place.out)

    def reply(self, reply: Reply, result: Tensor) -> None:
        if reply.seq != BY_NCCL:
            super().reply(reply, result)
        elif reply.code is Code.OK or not self._too_many(reply):
            self._answer(reply, result)

    def _answer(self, reply: Reply, result: Tensor) -> None:
        """Answer the call whose rows came by NCCL."""
        seq, self._seq = self._seq, None
        if seq is None:
            return
        header = encode_reply(replace(reply, seq=seq, shape=tuple(result.shape)))
        try:
            if reply.code is not Code.OK:
                header += bytes_of(result.cpu())
            elif reply.nbytes:
                self._send(result)
            if self._socket is not None and self._socket.send(header) != len(header):
                raise OSError("the client does not read")
        except (RuntimeError, OSError):
            self._reactor.call_soon(self.close, self)  # not now: who asks us to count still has to count us

    def _send(self, rows: Tensor) -> None:
        """Send the result, behind the product on its stream."""
        self._launched.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._launched)
        before = self._sending
        since = before.since if before and not before.done else monotonic()
        self._sending = Transfer(rows.nbytes, self._went, since)
        with self._in_use:
            self._communicator.send(rows, self._stream.cuda_stream)
            self._went.record(self._stream)

    @property
    def busy(self) -> bool:
        """Whether rows are on their way here."""
        return self._arriving is not None

    # ------------------------------------------------------------------ from the meeting to the end

    def _guard(self, meeting: bytes) -> None:
        """Abort transfers that do not come, in a thread of its own: the loop might be waiting for them itself."""
        try:
            comm = Communicator(meeting, 1, self._device, self._stream)
        except RuntimeError as error:
            if not self._left.is_set():
                logger.warning("a client's GPU was not met by NCCL: %s", error)
            _free_streams.append(self._stream)
            self._reactor.call_soon(self.close, self)
            return
        self._comm = comm
        while not self._left.wait(LOOK_S) and self.wire and self.wire.received():
            if any(transfer.stalls for transfer in self._on_their_way()):
                logger.warning("a client did not send or take its rows for %g s", STALL_S)
                break
        end = monotonic() + LAST_S
        while self._left.is_set() and self._sending and not self._sending.done and monotonic() < end:
            sleep(1e-3)
        with self._in_use:
            self._comm = None
        comm.abort()
        _free_streams.append(self._stream)
        self._reactor.call_soon(self.close, self)

    def release(self) -> None:
        """End the session."""
        self._left.set()
        self._reactor.forget_bell(self)
        if self._inbox.stream:  # what was launched waits for nobody: let it end
            self._inbox.drain_gpu(self)
        self._places.clear()
        self._arriving = self._place = None
        if not self._known:  # else the guard is done with it later
            _free_streams.append(self._stream)
        self._close_door()
        self._close_socket()


def why_not_by_nccl(inbox: ServerPort, wire: Wire | None, hello: Hello) -> str | None:
    """Return why the rows of the client that says this cannot come and go by NCCL, or None if they can."""
    if inbox.device.type != "cuda":
        return "it computes on the CPU"
    if not inbox.nccl:
        return "they would be neither encrypted nor known to be their tenant's; its operator may allow that with --nccl"
    if hello.observer or wire is None:
        return "an observer makes no calls" if hello.observer else "the connection has ended"
    if hello.device == device_name(inbox.device):
        return "it computes on the same GPU as its client: use local://"
    if (mine := nccl_driver.version()) != hello.nccl:
        return f"it has NCCL {mine or 'not installed'}, the client {hello.nccl}"
    return None if CAN_SPIN else "nothing wakes up its processor when they are there"
