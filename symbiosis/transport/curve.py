"""`tcp://` among strangers: every connection is encrypted, and comes from a tenant whose key the executor knows.

ZeroMQ's CURVE encrypts, and proves that the client holds the secret half of its key. Whether that key may come in is asked
of us (ZAP, RFC 27); the answer goes with every message as its `User-Id`, so nobody can speak for another tenant.
"""

import ipaddress
import logging
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import zmq
from zmq.utils import z85

from symbiosis.errors import ConfigError
from symbiosis.keys import Keyring, Pair, read_pair, read_public
from symbiosis.transport.reactor import Reactor

ZAP = "inproc://zeromq.zap.01"
AT_ONCE = 64
logger = logging.getLogger("symbiosis")


class Door:
    """The executor's side: its own key, the tenants, and the ZeroMQ context in which they are asked for."""

    def __init__(self, keyring: Keyring, reactor: Reactor) -> None:
        self.context: Any = zmq.Context()
        self._own, self.tenants = keyring
        self._reactor = reactor
        self._asked: Any = self.context.socket(zmq.REP)
        self._asked.linger = 0
        self._asked.bind(ZAP)
        self._fd = int(self._asked.getsockopt(zmq.FD))
        reactor.watch(self._fd, self._answer)

    def guard(self, socket: Any) -> None:
        """From now on `socket` is entered through this door only."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = (half.encode() for half in self._own)
        socket.zap_domain = b"symbiosis"

    def tenant_of(self, frame: zmq.Frame) -> str | None:
        """Whose message this is; None if that tenant was struck off the list."""
        return self.tenants.name_of(str(frame.get("User-Id")))

    def look(self) -> None:
        """Read the list of tenants again, if it changed."""
        if self.tenants.look():
            logger.info("%d tenants may come in", len(self.tenants))
            for problem in self.tenants.problems:
                logger.warning("%s", problem)

    def _answer(self) -> None:
        """All that was asked so far: the descriptor tells of changes only."""
        with suppress(zmq.Again):
            for _ in range(AT_ONCE):
                version, number, *_, mechanism, key = self._asked.recv_multipart(zmq.NOBLOCK)[:7]
                self.look()
                public = z85.encode(key).decode() if mechanism == b"CURVE" and len(key) == 32 else ""
                known = self.tenants.name_of(public) is not None
                verdict = (b"200", b"OK", public.encode()) if known else (b"400", b"unknown key", b"")
                self._asked.send_multipart([version, number, *verdict, b""])
            self._reactor.call_soon(self._answer)

    def close(self) -> None:
        self._reactor.forget(self._fd)
        self._asked.close()
        Thread(target=self.context.term, daemon=True).start()  # which waits for the last replies to go out


def is_loopback(address: str) -> bool:
    """Whether only this machine can connect to HOST:PORT."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Address(NamedTuple):
    """What a client's endpoint says: where, and with which keys."""

    where: str
    server: str | None = None
    own: Pair | None = None

    @classmethod
    def parse(cls, address: str) -> "Address":
        """`HOST:PORT`, or `HOST:PORT?server=EXECUTOR.pub&key=MINE.key`."""
        where, _, query = address.partition("?")
        if not query:
            return cls(where)
        given = parse_qs(query)
        if sorted(given) != ["key", "server"]:
            raise ConfigError(
                f"tcp://{address}: with keys an endpoint reads tcp://HOST:PORT?server=EXECUTOR.pub&key=MINE.key"
            )
        files = {name: Path(values[-1]).expanduser() for name, values in given.items()}
        return cls(where, read_public(files["server"]), read_pair(files["key"]))

    def unlock(self, socket: Any) -> None:
        """Let `socket` prove who we are, and accept nobody but that executor."""
        if self.own and self.server:
            socket.curve_serverkey = self.server.encode()
            socket.curve_publickey, socket.curve_secretkey = (half.encode() for half in self.own)
