"""`tcp://` with keys: every connection is encrypted, and comes from a tenant whose key the executor knows.

ZeroMQ's CURVE encrypts, and proves that the client holds the secret half of its key. ZeroMQ asks this module whether that key may come
in (ZAP, RFC 27). The answer goes with every message as its `User-Id`, so nobody can speak for another tenant.
"""

import logging
from collections import defaultdict, deque
from contextlib import suppress
from threading import Thread
from time import monotonic
from typing import Any

import zmq
from zmq.utils import z85

from symbiosis.base.allowance import Allowance
from symbiosis.base.curve_keys import Keyring
from symbiosis.base.folder_watch import FolderWatch
from symbiosis.errors import ConfigError
from symbiosis.protocol.endpoints import is_loopback, open_to_others
from symbiosis.transport.base import UNJOINED_S, ServerPort
from symbiosis.transport.reactor import Reactor

ZAP = "inproc://zeromq.zap.01"
IO_THREADS = 4  # of ZeroMQ; connections that share one wait while it encrypts a large message
AT_ONCE = 16  # most questions answered in one pass of the loop
FIRST_BAR_S, LONGEST_BAR_S = 1.0, 60.0  # a tenant that was hung up on is barred, twice as long each time
FORGIVEN_S = 300.0  # after so long without a bar, the next one is short again
MORE_THAN_JOIN = 64  # a tenant may have so many more connections without a session than it may have sessions
COMES_PER_S = 8.0  # new connections of a tenant in the long run; at once, twice as many as may lack a session
HELD_S = 3.0  # ZeroMQ ends a handshake that is not answered for so long
MOST_HELD = 1024
AT_A_GLANCE = 64  # tenants' files that are looked at again at a time, in case they changed without a sign
LOOK_SHARE = 0.02  # most of the time that reading the list of tenants may take, in case it changed without a sign
logger = logging.getLogger("symbiosis")


class TenantAuth:
    """The executor's side: its own key, the tenants, and the ZeroMQ context that asks about keys."""

    def __init__(self, keyring: Keyring, reactor: Reactor, inbox: ServerPort) -> None:
        self.context: Any = zmq.Context(IO_THREADS)
        self._own, self.tenants = keyring
        self._reactor, self._inbox = reactor, inbox
        self._barred: dict[str, tuple[float, float]] = {}  # until when, and for how long
        self._most = inbox.limits.max_tenant_sessions + MORE_THAN_JOIN
        self._let_in = defaultdict[str, deque[float]](deque)  # when each tenant's connections without a session came
        self._held: list[tuple[float, list[bytes]]] = []  # unanswered questions, and when they were asked
        self._comes = Allowance(2 * self._most, COMES_PER_S)
        self._asked: Any = self.context.socket(zmq.ROUTER)
        self._asked.linger = 0
        self._asked.bind(ZAP)
        self._fd = int(self._asked.getsockopt(zmq.FD))
        reactor.watch(self._fd, self._answer)
        self._folder = FolderWatch()
        self._next_look = 0.0
        self._look()

    @classmethod
    def at(cls, address: str, reactor: Reactor, inbox: ServerPort) -> "TenantAuth | None":
        """Return that of an address, or None for an executor without keys, which may listen on loopback only."""
        if inbox.keyring is not None:
            return cls(inbox.keyring, reactor, inbox)
        if not is_loopback(address):
            raise ConfigError(open_to_others(address))
        return None

    def guard(self, socket: Any) -> None:
        """Let only clients with known keys connect to `socket`."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = (half.encode() for half in self._own)
        socket.zap_domain = b"symbiosis"

    def tenant_of(self, frame: zmq.Frame) -> str | None:
        """Return the tenant that sent a message, or None if it may not come in any more."""
        return self._name_of(str(frame.get("User-Id")))

    def _name_of(self, public: str) -> str | None:
        """Return the tenant with this key, by what the folder of tenants says now."""
        if self._folder.tells:
            names = self._folder.changed()
            if names is None:
                self._look()
            else:
                self.tenants.look_at(names)
        return self.tenants.name_of(public)

    def _look(self) -> None:
        """Read the whole list of tenants again."""
        self._folder.changed()
        self._folder.follow(self.tenants.folder)
        if self.tenants.look():
            self._tell()

    def _glance(self) -> None:
        """Read the list if it is known to have changed, else a part of it, so that callers do not wait however many tenants there
        are."""
        begun = monotonic()
        if self._folder.tells or self._folder.follow(self.tenants.folder):
            self._look()
        elif self.tenants.glance(AT_A_GLANCE):
            self._tell()
        now = monotonic()
        self._next_look = now + (now - begun) / LOOK_SHARE

    def _tell(self) -> None:
        logger.info("tenants that may come in: %d", len(self.tenants))
        for problem in self.tenants.problems:
            logger.warning("%s", problem)

    def _answer(self) -> None:
        """Answer some of the questions asked so far. ZeroMQ's descriptor tells of changes only, so if more may be left, run again
        soon."""
        with suppress(zmq.Again):
            for _ in range(AT_ONCE):
                self._decide(monotonic(), self._asked.recv_multipart(zmq.NOBLOCK))
            self._reactor.call_soon(self._answer)

    def _decide(self, asked: float, question: list[bytes]) -> None:
        """Let a known key in. A tenant that is barred, comes very often, or has many connections without a session, waits."""
        address, *_, mechanism, key = question[5:9]
        public = z85.encode(key).decode() if mechanism == b"CURVE" and len(key) == 32 else ""
        tenant = self._name_of(public)
        if tenant is None:
            expired = self.tenants.expired.get(public, "")
            self._inbox.kept_out("EXPIRED_KEY" if expired else "UNKNOWN_KEY", address.decode(), expired)
            self._say(question, b"400", b"unknown key", b"")
        elif not self._must_wait(tenant):
            self._let_in[tenant].append(monotonic())
            self._say(question, b"200", b"OK", public.encode())
        elif len(self._held) < MOST_HELD:
            self._held.append((asked, question))

    def _say(self, question: list[bytes], *verdict: bytes) -> None:
        self._asked.send_multipart([*question[:4], *verdict, b""])

    def _must_wait(self, tenant: str) -> bool:
        now, let_in = monotonic(), self._let_in[tenant]
        while let_in and now > let_in[0] + UNJOINED_S:  # the listener has ended such connections
            let_in.popleft()
        barred = self._barred.get(tenant, (0.0, 0.0))[0] > now or len(let_in) >= self._most
        return barred or not self._comes.takes(tenant, now)

    def joined(self, tenant: str) -> None:
        """Note that one of the tenant's connections has a session now."""
        if self._let_in[tenant]:
            self._let_in[tenant].popleft()

    def tick(self) -> None:
        """Look at the list of tenants, and decide again about the connections that still wait."""
        now = monotonic()
        if now >= self._next_look:
            self._glance()
        self._comes.forget(now)
        held, self._held = self._held, []
        for asked, question in held:
            if now < asked + HELD_S:
                self._decide(asked, question)
        if held:
            self._answer()  # sending may have used up the sign that more is asked

    def bar(self, tenant: str) -> None:
        """Let no new connection of the tenant in for a while."""
        now = monotonic()
        until, seconds = self._barred.get(tenant, (0.0, 0.0))
        if now > until:
            seconds = min(2 * seconds, LONGEST_BAR_S) if 0.0 < until > now - FORGIVEN_S else FIRST_BAR_S
            self._barred[tenant] = now + seconds, seconds
            logger.warning("tenant %s ignores refusals: it gets no new connections for %g s", tenant, seconds)

    def close(self) -> None:
        self._reactor.forget(self._fd)
        self._folder.close()
        self._asked.close()
        Thread(target=self.context.term, daemon=True).start()  # it waits until the last replies have gone out
