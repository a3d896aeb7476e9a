"""`local://PATH`: client and executor on one host. A Unix socket to join, one shared memory segment per session, eventfds.

The socket's hang-up tells either side that the other is gone. The segment is created by the executor, sealed against
resizing, and passed as a descriptor; it belongs to one session. A call is written once into it and never serialised:

    0      the client's beat, a counter
    8      1 while the executor sleeps and must be woken by an eventfd; 16 likewise the client
    24     the number of the newest call; 32 of the newest reply: written last, they are the doorbells
    64     call header
    256    reply header
    4096   payload of the call, and behind it (64-byte aligned) that of the reply

The header is copied before it is parsed, so that a client that scribbles over it meanwhile changes nothing.
"""

import fcntl
import mmap
import os
import select
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from math import prod
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from symbiosis.errors import CallError, Code, ConfigError, ConnectionLost
from symbiosis.protocol import (
    CALL_SIZE,
    ITEMSIZE,
    LONGEST_TEXT,
    REPLY_SIZE,
    Bye,
    Call,
    Control,
    Grow,
    Grown,
    Hello,
    Op,
    Refusal,
    Reply,
    Welcome,
    decode_control,
    decode_reply,
    encode_call,
    encode_control,
    encode_reply,
    parse_call_body,
    split_call,
)
from symbiosis.transport.base import Inbox
from symbiosis.transport.reactor import CAN_SPIN, Reactor, fence, spin
from symbiosis.transport.tensors import split_payload, tensor_at

EXECUTOR_SLEEPS_AT, CLIENT_SLEEPS_AT, CALL_BELL_AT, REPLY_BELL_AT = 8, 16, 24, 32
CALL_AT, REPLY_AT, PAYLOAD_AT = 64, 256, 4096
FIRST_SLAB = 4 << 20
JOIN_S = 10.0  # a connection that has not joined by then is closed
MAX_CONTROL = 4096
NAP_S = 0.5  # a sleeping client looks again after this time, whatever happened to the bell
_WORD = struct.Struct("<Q")
_VIEWS_KEPT = 512


class Slab:
    """A shared memory segment, seen from either side. Tensors over it are cached by place, dtype and shape."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes
        self.memory = mmap.mmap(fd, nbytes)
        self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._views: dict[tuple[int, str, tuple[int, ...]], Tensor] = {}

    @classmethod
    def create(cls, nbytes: int) -> "Slab":
        fd = os.memfd_create("symbiosis", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(fd, nbytes)

    def tensor(self, start: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
        key = (start, dtype, shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _VIEWS_KEPT:
                self._views.clear()
            view = self._views[key] = tensor_at(self._bytes, start, dtype, shape)
        return view

    def close(self) -> None:
        """Drop our handle; the mapping goes when the last tensor over it does."""
        self._views.clear()
        os.close(self.fd)


def _ring(memory: mmap.mmap, at: int, number: int) -> None:
    """In one store: the other side looks all the time, and `pack_into` writes zeros first, then byte by byte."""
    memory[at : at + _WORD.size] = _WORD.pack(number)


@lru_cache(maxsize=1 << 14)
def reply_at(call: Call) -> int:
    """Where the payload of the reply begins: behind that of the call, on a cache line."""
    return PAYLOAD_AT + -(-call.nbytes // 64) * 64


class Peer:
    """The executor's end of one connection."""

    transport = "local"

    def __init__(self, listener: "Listener", sock: socket.socket) -> None:
        self.session = None
        self._listener, self._socket = listener, sock
        self._slab: Slab | None = None
        self._bells: list[int] = []  # for calls, for replies
        self.opened = monotonic()
        self._beats, self._max_slab = 0, 0
        self._number = bytes(_WORD.size)  # of the newest call that was seen
        self._call: Call | None = None  # what is not yet answered
        self._payloads: dict[bytes, tuple[Call, tuple[Tensor, ...]]] = {}

    def control(self) -> None:
        """The socket is readable: a control message, or the client is gone."""
        try:
            raw = self._socket.recv(MAX_CONTROL)
            message = decode_control(raw) if raw else Bye()
            if isinstance(message, Hello) and not self._slab:
                self._join(message)
            elif isinstance(message, Grow) and self._slab:
                self._grow(message.nbytes)
            else:
                self._listener.drop(self)
        except BlockingIOError:
            pass
        except (CallError, OSError) as error:
            code = error.code if isinstance(error, CallError) else Code.RESOURCE
            with suppress(OSError):
                self._socket.send(encode_control(Refusal(code, getattr(error, "message", str(error)))))
            self._listener.drop(self)

    def _join(self, hello: Hello) -> None:
        welcome = self._listener.inbox.joined(self, hello)
        self._max_slab = 2 * (PAYLOAD_AT + self._listener.inbox.limits.max_call_bytes) + 128 + LONGEST_TEXT
        for _ in range(2):
            self._bells.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self._slab = Slab.create(min(FIRST_SLAB, self._max_slab))
        raw = encode_control(welcome)
        letter = os.memfd_create("symbiosis-welcome", os.MFD_CLOEXEC)  # a manifest may be larger than a socket's buffer
        try:
            with os.fdopen(os.dup(letter), "wb") as file:
                file.write(raw)
            message = encode_control(Grown(self._slab.nbytes))
            fds = [letter, self._slab.fd, *self._bells]
            socket.send_fds(self._socket, [message], fds)
        finally:
            os.close(letter)
        self._listener.reactor.watch(self._bells[0], self.look, on_change=True)
        self.sleeping(not CAN_SPIN)

    def _grow(self, nbytes: int) -> None:
        assert self._slab
        if not self._slab.nbytes < nbytes <= self._max_slab:
            raise CallError(Code.TOO_LARGE, f"a session's shared memory grows to at most {self._max_slab} bytes")
        old, self._slab = self._slab, Slab.create(min(1 << (nbytes - 1).bit_length(), self._max_slab))
        old.close()
        self._payloads.clear()
        self._number = bytes(_WORD.size)
        self.sleeping(not CAN_SPIN)
        socket.send_fds(self._socket, [encode_control(Grown(self._slab.nbytes))], [self._slab.fd])

    def look(self) -> bool:
        """Whether a new call lies in the segment, which is then taken."""
        slab = self._slab
        if slab is None:
            return False
        number = slab.memory[CALL_BELL_AT : CALL_BELL_AT + _WORD.size]
        if number == self._number:
            return False
        self._number = number
        self._take(slab)
        return True

    def sleeping(self, flag: bool) -> None:
        if self._slab is not None:
            _WORD.pack_into(self._slab.memory, EXECUTOR_SLEEPS_AT, flag)

    def _take(self, slab: Slab) -> None:
        if self._call is not None:  # the reply to it would be written over this one
            self._listener.drop(self)
            return
        seq = 0
        try:
            seq, body = split_call(slab.memory[CALL_AT : CALL_AT + CALL_SIZE])
            call, payload = self._payloads.get(body) or self._parse(slab, body)
        except CallError as error:
            text = torch.frombuffer(bytearray(error.message, "utf-8")[:LONGEST_TEXT], dtype=torch.uint8)
            self._call = Call(Op.STATS, 0, "uint8")  # of no payload: the text goes to the front
            self.reply(Reply(seq, error.code, shape=(text.numel(),)), text)
            return
        if call.groups or call.op is Op.LOOKUP:  # used as indices after the check: the client must not change them
            payload = (*payload[:-1], payload[-1].clone())
        self._call = call
        self._listener.inbox.arrived(self, seq, call, payload)

    def _parse(self, slab: Slab, body: bytes) -> tuple[Call, tuple[Tensor, ...]]:
        """The call, and where in the segment its payload lies: looked up when the same call comes again."""
        call = parse_call_body(body)
        if reply_at(call) + LONGEST_TEXT > slab.nbytes:
            raise CallError(Code.TOO_LARGE, f"{call.nbytes} bytes of payload do not fit the session's segment")
        if len(self._payloads) >= _VIEWS_KEPT:
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
        _ring(slab.memory, REPLY_BELL_AT, reply.seq)
        fence()
        if slab.memory[CLIENT_SLEEPS_AT]:
            with suppress(BlockingIOError):  # the client has filled its own bell
                os.eventfd_write(self._bells[1], 1)

    def beat_seen(self) -> bool:
        """Whether the client's counter moved since we last looked."""
        if self._slab is None:
            return False
        beats = _WORD.unpack_from(self._slab.memory)[0]
        moved, self._beats = beats != self._beats, beats
        return bool(moved)

    def close(self) -> None:
        self._listener.drop(self)

    def release(self) -> None:
        reactor = self._listener.reactor
        reactor.forget(self._socket.fileno())
        self._socket.close()
        for bell in self._bells:
            reactor.forget(bell)
            os.close(bell)
        if self._slab:
            self._slab.close()
            self._slab = None


class Listener:
    """The executor's socket. Only processes of the same user (or root) are let in."""

    def __init__(self, address: str, reactor: Reactor, inbox: Inbox) -> None:
        self.url = f"local://{address}"
        self.reactor, self.inbox = reactor, inbox
        self._path = Path(address)
        self._peers: set[Peer] = set()
        self._socket = bind(self._path)
        self._inode = self._path.stat().st_ino
        reactor.watch(self._socket.fileno(), self._accept)
        reactor.watch_bells(self)

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError:
            return
        sock.setblocking(False)
        uid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if uid not in (os.getuid(), 0):
            sock.send(encode_control(Refusal(Code.LIMIT, "local:// serves processes of the executor's own user only")))
            sock.close()
            return
        peer = Peer(self, sock)
        self._peers.add(peer)
        self.reactor.watch(sock.fileno(), peer.control)

    def scan(self) -> bool:
        found = False
        for peer in self._peers.copy():
            found |= peer.look()
        return found

    def sleeping(self, flag: bool) -> None:
        for peer in self._peers:
            peer.sleeping(flag)

    def drop(self, peer: Peer) -> None:
        if peer in self._peers:
            self._peers.discard(peer)
            self.inbox.left(peer)
            peer.release()

    def tick(self) -> None:
        for peer in list(self._peers):
            if peer.beat_seen():
                self.inbox.heard(peer)
            if peer.session is None and monotonic() - peer.opened > JOIN_S:
                self.drop(peer)

    def stop_accepting(self) -> None:
        if self._socket.fileno() >= 0:
            self.reactor.forget(self._socket.fileno())
            self._socket.close()
            with suppress(OSError):
                if self._path.stat().st_ino == self._inode:  # else a successor already listens here
                    self._path.unlink()

    def close(self) -> None:
        self.stop_accepting()
        for peer in list(self._peers):
            self.drop(peer)


def bind(path: Path) -> socket.socket:
    """A listening socket at `path`, in place of one that a dead executor left behind."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make a directory for local://{path}: {error}") from None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise ConfigError(f"{path} exists and is no socket: choose another path for local://")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise ConfigError(f"another executor already serves local://{path}: stop it, or choose another path")
        path.unlink()
    old = os.umask(0o177)
    try:
        sock.bind(str(path))
    except OSError as error:
        raise ConfigError(f"cannot listen at local://{path}: {error}") from None
    finally:
        os.umask(old)
    sock.listen(128)
    sock.setblocking(False)
    return sock


class LocalConnection:
    """The client's end."""

    def __init__(self, address: str, hello: Hello, timeout: float) -> None:
        self._url = f"local://{address}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(timeout)
        self._beats = 0
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
            raise CallError(Code(message.code), message.message)
        return message, received

    def call(self, seq: int, call: Call, payload: tuple[Tensor, ...], timeout: float) -> tuple[Reply, Tensor]:
        slab, start = self._slab, reply_at(call)
        if start + LONGEST_TEXT > slab.nbytes:
            slab = self._grow(2 * start)
        if payload:
            slab.tensor(PAYLOAD_AT, call.payload_dtype, call.shape).copy_(payload[0])
            if call.groups:
                slab.tensor(PAYLOAD_AT + call.nbytes - 4 * call.groups, "int32", (call.groups,)).copy_(payload[1])
        slab.memory[CALL_AT : CALL_AT + CALL_SIZE] = encode_call(call, seq)
        _ring(slab.memory, CALL_BELL_AT, seq)
        fence()
        if slab.memory[EXECUTOR_SLEEPS_AT]:
            os.eventfd_write(self._call_bell, 1)
        reply = self._await(seq, timeout)
        if reply.code is Code.GROW:
            self._grow(int(bytes(slab.memory[start : start + reply.nbytes])))
            return self.call(seq, call, payload, timeout)
        return reply, slab.tensor(start, reply.dtype, reply.shape).clone()

    def _await(self, seq: int, timeout: float) -> Reply:
        memory, number = self._slab.memory, _WORD.pack(seq)

        def answered() -> bool:
            return memory[REPLY_BELL_AT : REPLY_BELL_AT + _WORD.size] == number

        if not (CAN_SPIN and spin(answered)):
            self._sleep(answered, timeout)
        return decode_reply(memory[REPLY_AT : REPLY_AT + REPLY_SIZE])

    def _sleep(self, answered: Callable[[], bool], timeout: float) -> None:
        memory, deadline = self._slab.memory, monotonic() + timeout
        _WORD.pack_into(memory, CLIENT_SLEEPS_AT, 1)
        fence()
        while not answered():
            left = deadline - monotonic()
            if left <= 0:
                raise ConnectionLost(f"no answer from {self._url} within {timeout:g} s")
            events = self._epoll.poll(min(left, NAP_S))
            if any(fd != self._reply_bell for fd, _ in events) and not answered():
                raise ConnectionLost(f"the executor at {self._url} hung up")
        _WORD.pack_into(memory, CLIENT_SLEEPS_AT, 0)

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

    def beat(self) -> None:
        self._beats += 1
        _WORD.pack_into(self._slab.memory, 0, self._beats)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._epoll.close()
            self._socket.close()
            self._slab.close()
            os.close(self._call_bell)
            os.close(self._reply_bell)


def connect(address: str, hello: Hello, timeout: float) -> LocalConnection:
    return LocalConnection(address, hello, timeout)
