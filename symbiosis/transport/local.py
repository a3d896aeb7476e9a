"""`local://PATH`, the executor's end: a Unix socket to join, one shared memory segment per session, eventfds as doorbells.

The socket's hang-up tells either side that the other is gone. The segment is created by the executor, sealed against
resizing, and passed as a descriptor; it belongs to one session. The header of a call is copied before it is parsed, so that
a client that scribbles over it meanwhile changes nothing.
"""

import logging
import os
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from math import inf, prod
from pathlib import Path
from time import monotonic

from torch import Tensor

from symbiosis.errors import CallError, Code, ConfigError
from symbiosis.protocol import (
    CALL_SIZE,
    ITEMSIZE,
    LONGEST_TEXT,
    REPLY_SIZE,
    Bye,
    Call,
    Grow,
    Grown,
    Hello,
    Op,
    Refusal,
    Reply,
    Share,
    Shared,
    decode_control,
    encode_control,
    encode_reply,
    parse_call_body,
    split_call,
)
from symbiosis.transport.base import JOIN_S, Inbox, refuse
from symbiosis.transport.cuda import DevicePeer
from symbiosis.transport.reactor import CAN_SPIN, Reactor, fence
from symbiosis.transport.slab import (
    CALL_AT,
    CALL_BELL_AT,
    CLIENT_SLEEPS_AT,
    EXECUTOR_SLEEPS_AT,
    MAX_CONTROL,
    PAYLOAD_AT,
    REPLY_AT,
    REPLY_BELL_AT,
    VIEWS_KEPT,
    WORD,
    Slab,
    reply_at,
    ring,
)
from symbiosis.transport.tensors import split_payload

FIRST_SLAB = 4 << 20
OF_ONE_OWNER = (
    "local:// shares device memory with its clients: for tenants of one owner only; let others come by tcp:// with keys"
)
logger = logging.getLogger("symbiosis")


class Peer:
    """The executor's end of one connection."""

    transport, tenant = "local", None
    unread = ()  # replies lie in the session's own memory
    busy, nap = False, inf  # it rings a descriptor when we sleep

    def __init__(self, listener: "Listener", sock: socket.socket) -> None:
        self.session = None
        self._listener, self._socket = listener, sock
        self._slab: Slab | None = None
        self._bells: list[int] = []  # for calls, for replies
        self.opened = monotonic()
        self._beats, self._max_slab = 0, 0
        self._number = bytes(WORD.size)  # of the newest call that was seen
        self._call: Call | None = None  # what is not yet answered
        self._payloads: dict[bytes, tuple[Call, tuple[Tensor, ...]]] = {}

    def control(self) -> None:
        """The socket is readable: a control message, or the client is gone."""
        try:
            raw, fds, _, _ = socket.recv_fds(self._socket, MAX_CONTROL, 1)
            message = decode_control(raw) if raw else Bye()
            if isinstance(message, Hello) and message.device is not None and not self._slab:
                self._listener.hand_over(self, self._socket, message, fds)
            elif isinstance(message, Hello) and not self._slab:
                self._join(message)
            elif isinstance(message, Grow) and self._slab:
                self._grow(message.nbytes)
            elif isinstance(message, Share) and self._slab:
                socket.send_fds(self._socket, [encode_control(Shared())], [self._listener.inbox.shared().fileno()])
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
        self._slab = self._new_slab(min(FIRST_SLAB, self._max_slab))
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
        old, self._slab = self._slab, self._new_slab(min(1 << (nbytes - 1).bit_length(), self._max_slab))
        old.close()
        self._payloads.clear()
        self._number = bytes(WORD.size)
        self.sleeping(not CAN_SPIN)
        socket.send_fds(self._socket, [encode_control(Grown(self._slab.nbytes))], [self._slab.fd])

    def _new_slab(self, nbytes: int) -> Slab:
        slab = Slab.create(nbytes)
        if self._listener.inbox.device.type == "cuda":
            slab.pin()
        return slab

    def look(self) -> bool:
        """Whether a new call lies in the segment, which is then taken."""
        slab = self._slab
        if slab is None:
            return False
        number = slab.memory[CALL_BELL_AT : CALL_BELL_AT + WORD.size]
        if number == self._number:
            return False
        self._number = number
        self._take(slab)
        return True

    def sleeping(self, flag: bool) -> None:
        if self._slab is not None:
            WORD.pack_into(self._slab.memory, EXECUTOR_SLEEPS_AT, flag)

    def _take(self, slab: Slab) -> None:
        if self._call is not None:  # the reply to it would be written over this one
            self._listener.drop(self)
            return
        seq = 0
        try:
            seq, body = split_call(slab.memory[CALL_AT : CALL_AT + CALL_SIZE])
            call, payload = self._payloads.get(body) or self._parse(slab, body)
        except CallError as error:
            self._call = Call(Op.STATS, 0, "uint8")  # of no payload: the text goes to the front
            refuse(self, seq, error)
            return
        self._call = call
        if not self._listener.inbox.admits(self, seq, call):
            return
        if call.groups or call.op is Op.LOOKUP:  # used as indices after the check: the client must not change them
            payload = (*payload[:-1], payload[-1].clone())
        self._listener.inbox.arrived(self, seq, call, payload)

    def _parse(self, slab: Slab, body: bytes) -> tuple[Call, tuple[Tensor, ...]]:
        """The call, and where in the segment its payload lies: looked up when the same call comes again."""
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
        fence()
        if slab.memory[CLIENT_SLEEPS_AT]:
            with suppress(BlockingIOError):  # the client has filled its own bell
                os.eventfd_write(self._bells[1], 1)

    def beat_seen(self) -> bool:
        """Whether the client's counter moved since we last looked."""
        if self._slab is None:
            return False
        beats = WORD.unpack_from(self._slab.memory)[0]
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
        self._peers: set[Peer | DevicePeer] = set()
        self.leaving = False
        self._looks: tuple[Callable[[], bool], ...] = ()
        self._socket = bind(self._path)
        self._inode = self._path.stat().st_ino
        reactor.watch(self._socket.fileno(), self._accept)
        reactor.watch_bells(self)
        if inbox.device.type == "cuda":
            logger.info("%s", OF_ONE_OWNER)

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
        self._peers_changed()
        self.reactor.watch(sock.fileno(), peer.control)

    def hand_over(self, stranger: Peer, sock: socket.socket, hello: Hello, fds: list[int]) -> None:
        """The client's calls will come from a GPU: that is for a peer of another kind."""
        peer = DevicePeer(self, sock, hello, fds)
        self._peers.discard(stranger)
        self._peers.add(peer)
        self._peers_changed()
        self.reactor.forget(sock.fileno())
        self.reactor.watch(sock.fileno(), peer.control)

    def scan(self) -> bool:
        found = False
        for look in self._looks:
            found |= look()
        return found

    def _peers_changed(self) -> None:
        self._looks = tuple(peer.look for peer in self._peers)

    def busy(self) -> bool:
        return any(peer.busy for peer in self._peers)

    def nap(self) -> float:
        return min((peer.nap for peer in self._peers), default=inf)

    def sleeping(self, flag: bool) -> None:
        for peer in self._peers:
            peer.sleeping(flag)

    def drop(self, peer: Peer | DevicePeer) -> None:
        if peer in self._peers:
            self._peers.discard(peer)
            self._peers_changed()
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
            self.leaving = True
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
