"""Records who joined, was refused, was struck off and left, for the log, the audit log and the figures."""

import logging
from collections import Counter
from time import monotonic
from typing import Any

from symbiosis.base.allowance import Allowance
from symbiosis.base.curve_keys import Tenants
from symbiosis.base.logs import worth_logging
from symbiosis.errors import Code
from symbiosis.executor.accounts import ServedSession
from symbiosis.executor.ledger import Ledger
from symbiosis.executor.observe.log import AuditLog, log
from symbiosis.protocol import Hello
from symbiosis.text import shown
from symbiosis.transport import Peer

LONGEST_NAME = 64  # characters of what a client calls itself
MOST_TOLD_APART = 4096  # refused clients; beyond so many, counting starts again
LINES_AT_ONCE, LINES_PER_S = 200, 1.0  # lines about refusals of one kind
SESSIONS_AT_ONCE, SESSIONS_PER_S = 1000, 10.0  # sessions that are logged without keys


def name_of(hello: Hello) -> str:
    """Return a client's own name, made fit to be shown, because it may hold anything."""
    return shown(hello.client, LONGEST_NAME)


class JoinLog:
    """Records everybody once, and clients that are refused again and again the 1st, 2nd, 4th, ... time."""

    def __init__(self, ledger: Ledger, audit: AuditLog | None, tenants: Tenants | None) -> None:
        self._ledger, self._audit, self._tenants = ledger, audit, tenants
        self._members: frozenset[str] | None = None  # the tenants who may come in, as they were last told
        self._times: Counter[tuple[str, str]] = Counter()  # of refusals
        self._lines = Allowance(LINES_AT_ONCE, LINES_PER_S)
        self._sessions = Allowance(SESSIONS_AT_ONCE, SESSIONS_PER_S)
        self._untold: set[int] = set()  # sessions that last, of which no line was written
        self._left_out = 0  # such sessions since the last line

    def joined(self, session: ServedSession) -> None:
        """Record a session, unless clients without keys join too often: they must not fill the disk. (Tenants who come often must wait.)"""
        if not session.peer.tenant and not self._sessions.takes("", monotonic()):
            self._untold.add(session.number)
            self._left_out += 1
            return
        who = {**_who(session.peer, session.client), "observer": session.observer}
        if self._left_out:
            who["untold"], self._left_out = self._left_out, 0
        log(logging.INFO, "session joined", session=session.number, **who)
        self._write("joined", session=session.number, **who, address=session.peer.address)

    def refused(self, peer: Peer, client: str, code: Code) -> None:
        """Record a client that was refused when it asked to join."""
        self._ledger.refused(code)
        self._ledger.refused_joins[peer.tenant or "", code.name] += 1
        if times := self._times_to_tell(code.name, peer.tenant or peer.transport):
            who = {**_who(peer, client), "code": code.name, "times": times}
            log(logging.WARNING, "join refused", **who)
            self._write("refused", **who, address=peer.address)

    def kept_out(self, why: str, address: str, tenant: str = "") -> None:
        """Record a connection that was closed before it could ask to join."""
        self._ledger.kept_out[why] += 1
        if times := self._times_to_tell(why, address):
            who = {"code": why, "address": address, **({"tenant": tenant} if tenant else {}), "times": times}
            log(logging.WARNING, "kept out", **who)
            self._write("kept out", **who)

    def left(self, session: ServedSession, why: str) -> None:
        if session.number in self._untold:
            self._untold.discard(session.number)
            return
        used = {
            "calls": session.calls, "rows": session.rows, "multiplications": session.multiplications,
            "direct_rows": session.direct.rows, "bytes": session.bytes, "refused": session.refused, "seconds": round(monotonic() - session.joined, 1),
        }  # fmt: skip
        log(logging.INFO, "session left", session=session.number, why=why, **used)
        who = _who(session.peer, session.client)
        self._write("left", session=session.number, **who, address=session.address, why=why, **used)

    def look(self) -> None:
        """Record tenants that were added to the list or struck off since the last look."""
        if self._tenants is None or self._tenants.members is self._members:
            return
        before, self._members = self._members, self._tenants.members
        for tenant in sorted(self._members - before) if before is not None else ():
            self._write("let in", tenant=tenant)
        for tenant in sorted((before or frozenset()) - self._members):
            why = self._tenants.why_not(tenant)
            log(logging.WARNING, "struck off", tenant=tenant, why=why)
            self._write("struck off", tenant=tenant, why=why)

    def began(self) -> None:
        self._write("started")
        self.look()

    def ended(self) -> None:
        self._write("stopped")
        if self._audit:
            self._audit.close()

    def _times_to_tell(self, code: str, whom: str) -> int:
        """Count a refusal and return how often it has happened, or 0 if it is not to be recorded, so that refused clients cannot fill
        the disk."""
        if len(self._times) >= MOST_TOLD_APART:
            self._times.clear()
        self._times[code, whom] += 1
        times = self._times[code, whom]
        return times if worth_logging(times) and self._lines.takes(code, monotonic()) else 0

    def _write(self, event: str, **fields: Any) -> None:
        if self._audit is not None:
            self._audit.tell(event, **fields)


def _who(peer: Peer, client: str) -> dict[str, str]:
    return {"client": client, "transport": peer.transport, **({"tenant": peer.tenant} if peer.tenant else {})}
