"""`local://PATH`, the executor's end: a Unix socket to join, one shared memory segment per session, eventfds as doorbells.

The socket's hang-up tells either side that the other is gone. The segment is created by the executor, sealed against
resizing, and passed as a descriptor; it belongs to one session. The header of a call is copied before it is parsed, so that
a client that scribbles over it meanwhile changes nothing.
"""

import logging
import os
import socket
from contextlib import suppress
from math import inf, prod
from pathlib import Path
from time import monotonic

from torch import Tensor

from symbiosis.errors import CallError, Code, ConfigError, ProtocolError
from symbiosis.ownership import check_socket, is_trusted, make_folder, peer_pid, peer_uid, user_name
from symbiosis.protocol import (
    CALL_SIZE,
    ITEMSIZE,
    LONGEST_TEXT,
    REPLY_SIZE,
    Call,
    Control,
    Grow,
    Grown,
    Hello,
    Op,
    Reply,
    Share,
    Shared,
    encode_control,
    encode_reply,
    parse_call_body,
    split_call,
)
from symbiosis.transport import control
from symbiosis.transport.base import JOIN_S, Inbox, refuse
from symbiosis.transport.control import answer, received
from symbiosis.transport.cuda import DevicePeer
from symbiosis.transport.reactor import CAN_SPIN, Reactor, fence
from symbiosis.transport.slab import (
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
from symbiosis.transport.tensors import split_payload

FIRST_SLAB = 4 << 20
NOT_OURS = (
    "local:// serves processes of the executor's own user only, which is {}, and you are {}: start an executor of your own, or have "
    "its operator let you in by tcp:// with keys"
)
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

    @property
    def address(self) -> str:
        return f"pid {peer_pid(self._socket)}"

    def control(self) -> None:
        """The socket is readable: a control message, or the client is gone."""
        try:
            with received(self._socket) as (message, fds):
                self._control(message, fds)
        except BlockingIOError:
            pass
        except (CallError, OSError) as error:
            control.refuse(self._socket, error)
            self._listener.drop(self)

    def _control(self, message: Control, fds: list[int]) -> None:
        if isinstance(message, Hello) and message.device is not None and not self._slab:
            self._listener.hand_over(self, self._socket, message, fds)
        elif fds:
            raise ProtocolError(Code.BAD_FRAME, f"a descriptor came with {type(message).__name__}, which takes none")
        elif isinstance(message, Hello) and not self._slab:
            self._join(message)
        elif isinstance(message, Grow) and self._slab:
            self._grow(message.nbytes)
        elif isinstance(message, Share) and self._slab:
            answer(self._socket, Shared(), [self._listener.inbox.shared().fileno()])
        else:
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
            answer(self._socket, Grown(self._slab.nbytes), [letter, self._slab.fd, *self._bells])
        finally:
            os.close(letter)
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
        reactor.forget_bell(self)
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
        self._socket = bind(self._path)
        self._inode = self._path.stat().st_ino
        reactor.watch(self._socket.fileno(), self._accept)
        if inbox.device.type == "cuda":
            logger.info("%s", OF_ONE_OWNER)

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError:
            return
        sock.setblocking(False)
        if not is_trusted(uid := peer_uid(sock)):
            control.refuse(sock, CallError(Code.NOT_ALLOWED, NOT_OURS.format(user_name(os.getuid()), user_name(uid))))
            sock.close()
            self.inbox.kept_out("OTHER_USER", user_name(uid))
            return
        peer = Peer(self, sock)
        self._peers.add(peer)
        self.reactor.watch(sock.fileno(), peer.control, peer)

    def hand_over(self, stranger: Peer, sock: socket.socket, hello: Hello, fds: list[int]) -> None:
        """The client's calls will come from a GPU: that is for a peer of another kind."""
        peer = DevicePeer(self, sock, hello, fds)
        self._peers.discard(stranger)
        self._peers.add(peer)
        self.reactor.forget(sock.fileno())
        self.reactor.watch(sock.fileno(), peer.control, peer)

    def drop(self, peer: Peer | DevicePeer) -> None:
        if peer in self._peers:
            self._peers.discard(peer)
            try:
                self.inbox.left(peer)
            finally:
                peer.release()

    def tick(self) -> None:
        for peer in list(self._peers):
            self.reactor.attempt(peer, self._look_after, peer)

    def _look_after(self, peer: Peer | DevicePeer) -> None:
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
    """A listening socket at `path`, in place of one that a dead executor left behind, in a folder where nobody else can put one."""
    make_folder(path.parent.resolve())
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    old = os.umask(0o177)
    try:
        check_socket(path)
        path.unlink(missing_ok=True)
        sock.bind(str(path))
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen at local://{path}: {error}") from None
    except ConfigError:
        sock.close()
        raise
    finally:
        os.umask(old)
    sock.setblocking(False)
    return sock
