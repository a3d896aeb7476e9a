"""`local://PATH`, the executor's end of one session: a segment of shared memory, and eventfds as doorbells.

The segment is created by the executor, sealed against resizing, and passed as a descriptor; it belongs to one session. The header
of a call is copied before it is parsed, so that a client that scribbles over it meanwhile changes nothing.

A process that holds an eventfd can fill it, so that the next write blocks. So the client never gets the eventfd that the executor
writes to, but an epoll instance that watches it, which is good for waiting only.
"""

import os
import select
import socket
from math import inf, prod
from time import monotonic
from typing import Protocol

from torch import Tensor

from symbiosis.base.ownership import peer_pid
from symbiosis.errors import CallError, Code, ProtocolError
from symbiosis.protocol import (
    CALL_SIZE,
    ITEMSIZE,
    LONGEST_TEXT,
    REPLY_SIZE,
    Bye,
    Call,
    FromClient,
    Grow,
    Grown,
    Hello,
    Op,
    Reply,
    Share,
    Shared,
    decode_from_client,
    encode_reply,
    parse_call_body,
    split_call,
)
from symbiosis.transport import control_messages
from symbiosis.transport.base import PeerHome, refuse
from symbiosis.transport.control_messages import answer, received
from symbiosis.transport.local.segment import (
    CALL_AT,
    CALL_BELL_AT,
    CLIENT_SLEEPS_AT,
    EXECUTOR_SLEEPS_AT,
    PAYLOAD_AT,
    REPLY_AT,
    REPLY_BELL_AT,
    VIEWS_KEPT,
    WORD,
    Slab,
    reply_at,
    ring,
)
from symbiosis.transport.local.shared_page import Offer
from symbiosis.transport.reactor import CAN_SPIN, FENCE
from symbiosis.transport.tensors import split_payload

FIRST_SLAB = 4 << 20


class LocalHome(PeerHome, Protocol):
    """What a peer needs of its listener, which takes over clients whose calls come from a GPU."""

    def hand_over(self, stranger: "LocalPeer", sock: socket.socket, hello: Hello, fds: list[int]) -> None: ...


class LocalPeer:
    """The executor's end of one connection."""

    transport, tenant = "local", None
    unread = ()  # replies wait in the session's own memory
    busy, nap = False, inf  # the client rings a descriptor when the loop sleeps

    def __init__(self, listener: LocalHome, sock: socket.socket) -> None:
        self.session = None
        self._listener, self._socket = listener, sock
        self._slab: Slab | None = None
        self.offer = Offer(listener.inbox, self, sock)
        self._bells: list[int] = []  # one for calls, one for replies
        self.opened = monotonic()
        self._beats, self._max_slab = 0, 0
        self._number = bytes(WORD.size)  # number of the newest call that was seen
        self._call: Call | None = None  # the call that is not answered yet
        self._payloads: dict[bytes, tuple[Call, tuple[Tensor, ...]]] = {}

    @property
    def address(self) -> str:
        return f"pid {peer_pid(self._socket)}"

    def control(self) -> None:
        """Handle the readable socket: a control message, or the client's hang-up."""
        try:
            with received(self._socket, decode_from_client) as (message, fds):
                self._control(message, fds)
        except BlockingIOError:
            pass
        except (CallError, OSError) as error:
            control_messages.tell_refusal(self._socket, error)
            self._listener.drop(self)

    def _control(self, message: FromClient | Bye, fds: list[int]) -> None:
        if isinstance(message, Hello) and message.device is not None and not self._slab:
            self._listener.hand_over(self, self._socket, message, fds)
        elif fds:
            raise ProtocolError(Code.BAD_FRAME, f"a descriptor came with {type(message).__name__}, which takes none")
        elif isinstance(message, Hello) and not self._slab:
            self._join(message)
        elif isinstance(message, Grow) and self._slab:
            self._grow(message.nbytes)
        elif isinstance(message, Share) and self._slab:
            commons = () if message.weights else self._listener.inbox.commons()
            fds = [file.fileno() for file in commons] or self.offer.descriptors(on_gpu=False)
            answer(self._socket, Shared(), fds)
        else:
            self._listener.drop(self)

    def _join(self, hello: Hello) -> None:
        welcome = self._listener.inbox.joined(self, hello)
        self._max_slab = 2 * (PAYLOAD_AT + self._listener.inbox.limits.max_call_bytes) + 128 + LONGEST_TEXT
        for _ in range(2):
            self._bells.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self._slab = self._new_slab(min(FIRST_SLAB, self._max_slab))
        with select.epoll() as ear:
            ear.register(self._bells[1], select.EPOLLIN | select.EPOLLET)
            fds = [self._slab.fd, self._bells[0], ear.fileno()]
            control_messages.let_in(self._socket, Grown(self._slab.nbytes), welcome, fds)
        self._listener.reactor.watch(self._bells[0], self.look, self, on_change=True)
        self._listener.reactor.watch_bell(self)
        self.sleeping(not CAN_SPIN)

    def _grow(self, nbytes: int) -> None:
        assert self._slab
        if self._call is not None:
            raise ProtocolError(Code.BAD_FRAME, "a segment grows between two calls, not during one")
        if not self._slab.nbytes < nbytes <= self._max_slab:
            raise CallError(Code.TOO_LARGE, f"a session's shared memory grows to at most {self._max_slab} bytes")
        old, self._slab = self._slab, self._new_slab(min(1 << (nbytes - 1).bit_length(), self._max_slab))
        old.close()
        self._payloads.clear()
        self._number = bytes(WORD.size)
        self.sleeping(not CAN_SPIN)
        answer(self._socket, Grown(self._slab.nbytes), [self._slab.fd])

    def _new_slab(self, nbytes: int) -> Slab:
        slab = Slab.create(nbytes)
        if self._listener.inbox.device.type == "cuda":
            slab.pin()
        return slab

    def look(self) -> bool:
        """Take a new call from the segment, if there is one. Return whether there was."""
        slab = self._slab
        if slab is None or (number := slab.memory[CALL_BELL_AT : CALL_BELL_AT + WORD.size]) == self._number:
            return False
        self._number = number
        self._take(slab)
        return True

    def sleeping(self, flag: bool) -> None:
        if self._slab is not None:
            WORD.pack_into(self._slab.memory, EXECUTOR_SLEEPS_AT, flag)

    def _take(self, slab: Slab) -> None:
        if self._call is not None:  # its reply would be written over this call's
            self._listener.drop(self)
            return
        seq = 0
        try:
            seq, body = split_call(slab.memory[CALL_AT : CALL_AT + CALL_SIZE])
            call, payload = self._payloads.get(body) or self._parse(slab, body)
        except CallError as error:
            self._call = Call(Op.STATS, 0, "uint8")  # has no payload, so that the text goes to the front
            refuse(self, seq, error)
            return
        self._call, inbox = call, self._listener.inbox
        if not inbox.admits(self, seq, call):
            inbox.came_in_vain(self, call.nbytes)
            return
        if call.groups:  # copy their ends, so that the client cannot change them after the check
            payload = (*payload[:-1], payload[-1].clone())
        inbox.arrived(self, seq, call, payload)

    def _parse(self, slab: Slab, body: bytes) -> tuple[Call, tuple[Tensor, ...]]:
        """Return the call, and its payload in the segment. Both are looked up when the same call comes again."""
        call = parse_call_body(body)
        if reply_at(call) + LONGEST_TEXT > slab.nbytes:
            raise CallError(Code.TOO_LARGE, f"{call.nbytes} bytes of payload do not fit the session's segment")
        if len(self._payloads) >= VIEWS_KEPT:
            self._payloads.clear()
        payload = split_payload(call, slab.tensor(PAYLOAD_AT, "uint8", (call.nbytes,)))
        self._payloads[body] = call, payload
        return call, payload

    def out(self, call: Call, shape: tuple[int, ...]) -> Tensor:
        slab = self._slab
        start = reply_at(call)
        end = start + prod(shape) * ITEMSIZE[call.dtype]
        if slab is None or end > slab.nbytes:
            raise CallError(Code.GROW, str(end))
        return slab.tensor(start, call.dtype, shape)

    def reply(self, reply: Reply, result: Tensor) -> None:
        slab, call = self._slab, self._call
        if slab is None or call is None:
            return
        target = slab.tensor(reply_at(call), reply.dtype, reply.shape)
        if target is not result:
            target.copy_(result.view(reply.shape))
        slab.memory[REPLY_AT : REPLY_AT + REPLY_SIZE] = encode_reply(reply)
        self._call = None
        ring(slab.memory, REPLY_BELL_AT, reply.seq)
        with FENCE:
            pass
        if slab.memory[CLIENT_SLEEPS_AT]:
            os.eventfd_write(self._bells[1], 1)

    def beat_seen(self) -> bool:
        """Whether the client's counter has moved since the last look."""
        if self._slab is None:
            return False
        beats = WORD.unpack_from(self._slab.memory)[0]
        moved, self._beats = beats != self._beats, beats
        return bool(moved)

    def close(self) -> None:
        self._listener.drop(self)

    def release(self) -> None:
        reactor = self._listener.reactor
        reactor.forget_bell(self)
        reactor.forget(self._socket.fileno())
        self._socket.close()
        for bell in self._bells:
            reactor.forget(bell)
            os.close(bell)
        self._payloads.clear()
        if self._slab:
            self._slab.close()
            self._slab = None
        self.offer.close()
