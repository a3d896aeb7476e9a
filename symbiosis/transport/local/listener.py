"""`local://PATH`, the executor's end: the Unix socket by which programs of this host join.

The socket's hang-up tells either side that the other is gone.
"""

import errno
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from time import monotonic

from symbiosis.base.ownership import check_socket, is_trusted, make_folder, peer_uid, resolved, user_name
from symbiosis.errors import CallError, Code, ConfigError
from symbiosis.protocol import Hello
from symbiosis.transport import control_messages
from symbiosis.transport.base import UNJOINED_S, ServerPort
from symbiosis.transport.cuda.peer import DevicePeer
from symbiosis.transport.local.peer import LocalPeer
from symbiosis.transport.reactor import Reactor

NOT_OURS = (
    "local:// serves processes of the executor's own user only, which is {}, and you are {}: start an executor of your own, or have "
    "its operator let you in by tcp:// with keys"
)
OF_ONE_OWNER = (
    "local:// shares device memory with its clients: for tenants of one owner only; let others come by tcp:// with keys"
)
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # for another connection
logger = logging.getLogger("symbiosis")


class LocalListener:
    """The executor's socket. Only processes of the same user (or root) may join."""

    def __init__(self, address: str, reactor: Reactor, inbox: ServerPort) -> None:
        self.url = f"local://{address}"
        self.reactor, self.inbox = reactor, inbox
        self._path = Path(address)
        self._peers: set[LocalPeer | DevicePeer] = set()
        self.leaving = False
        self._is_full = False  # while nobody can be let in
        self._socket = bind(self._path)
        self._inode = self._path.stat().st_ino
        reactor.watch(self._socket.fileno(), self._accept)
        if inbox.device.type == "cuda":
            logger.info("%s", OF_ONE_OWNER)

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError as error:
            if error.errno in NO_ROOM:  # who waits keeps the socket readable, so look again at the next tick
                self.reactor.forget(self._socket.fileno())
                self._is_full = True
            return
        sock.setblocking(False)
        if not is_trusted(uid := peer_uid(sock)):
            control_messages.tell_refusal(
                sock, CallError(Code.NOT_ALLOWED, NOT_OURS.format(user_name(os.getuid()), user_name(uid)))
            )
            sock.close()
            self.inbox.kept_out("OTHER_USER", user_name(uid))
            return
        peer = LocalPeer(self, sock)
        self._peers.add(peer)
        self.reactor.watch(sock.fileno(), peer.control, peer)

    def hand_over(self, stranger: LocalPeer, sock: socket.socket, hello: Hello, fds: list[int]) -> None:
        """Give a client whose calls will come from a GPU a `DevicePeer`."""
        peer = DevicePeer(self, sock, hello, fds)
        self._peers.discard(stranger)
        self._peers.add(peer)
        self.reactor.forget(sock.fileno())
        self.reactor.watch(sock.fileno(), peer.control, peer)

    def drop(self, peer: LocalPeer | DevicePeer) -> None:
        if peer in self._peers:
            self._peers.discard(peer)
            try:
                peer.offer.counsel()  # what it did last counts, too
                self.inbox.left(peer)
            finally:
                peer.release()

    def tick(self) -> None:
        if self._is_full and not self.leaving:
            self._is_full = False
            self.reactor.watch(self._socket.fileno(), self._accept)
        for peer in list(self._peers):
            self.reactor.attempt(peer, self._look_after, peer)

    def _look_after(self, peer: LocalPeer | DevicePeer) -> None:
        if peer.beat_seen():
            self.inbox.heard(peer)
        peer.offer.counsel()
        if peer.session is None and monotonic() - peer.opened > UNJOINED_S:
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
    """Listen at `path`, in place of a socket that a dead executor left behind, and only in a folder where no other user can put one."""
    make_folder(resolved(path.parent), shared=True)
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
