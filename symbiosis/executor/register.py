"""Who joined, was refused, was struck off and left: for the log, the audit log and the figures."""

import logging
from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING, Any

from symbiosis.errors import Code
from symbiosis.executor.audit_log import AuditLog
from symbiosis.executor.log import log, worth_logging
from symbiosis.executor.metrics import Figures
from symbiosis.keys import Tenants
from symbiosis.protocol import Hello
from symbiosis.text import shown
from symbiosis.transport import Peer
from symbiosis.transport.allowance import Allowance

if TYPE_CHECKING:
    from symbiosis.executor.server import Session

LONGEST_NAME = 64  # characters of what a client calls itself
MOST_TOLD_APART = 4096  # who are refused: then their times are counted anew
LINES_AT_ONCE, LINES_PER_S = 200, 1.0  # of refusals of one kind
ALARM_S = 60.0  # between two warnings of the same


def name_of(hello: Hello) -> str:
    """What a client calls itself, fit to be shown: it may hold anything."""
    return shown(hello.client, LONGEST_NAME)


class Register:
    """Tells of everybody once; of those who are refused again and again the 1st, 2nd, 4th, ... time."""

    def __init__(self, figures: Figures, audit: AuditLog | None, tenants: Tenants | None) -> None:
        self._figures, self._audit, self._tenants = figures, audit, tenants
        self._members: frozenset[str] | None = None  # the tenants who may come in, as they were last told
        self._times: Counter[tuple[str, str]] = Counter()  # of refusals
        self._lines = Allowance(LINES_AT_ONCE, LINES_PER_S)
        self._next_alarm = 0.0
        self.reopen = False  # the audit log; set by a signal

    def joined(self, session: "Session") -> None:
        who = {**_who(session.peer, session.client), "observer": session.observer}
        log(logging.INFO, "session joined", session=session.number, **who)
        self._write("joined", session=session.number, **who, address=session.peer.address)

    def refused(self, peer: Peer, client: str, code: Code) -> None:
        """... to join."""
        self._figures.refused(code)
        self._figures.refused_joins[peer.tenant or "", code.name] += 1
        if times := self._times_to_tell(code.name, peer.tenant or peer.transport):
            who = {**_who(peer, client), "code": code.name, "times": times}
            log(logging.WARNING, "join refused", **who)
            self._write("refused", **who, address=peer.address)

    def kept_out(self, why: str, address: str, tenant: str) -> None:
        """... before it could ask to join."""
        self._figures.kept_out[why] += 1
        if times := self._times_to_tell(why, address):
            who = {"code": why, "address": address, **({"tenant": tenant} if tenant else {}), "times": times}
            log(logging.WARNING, "kept out", **who)
            self._write("kept out", **who)

    def left(self, session: "Session", why: str) -> None:
        used = {
            "calls": session.calls, "rows": session.rows, "multiplications": session.multiplications,
            "bytes": session.bytes, "refused": session.refused, "seconds": round(monotonic() - session.joined, 1),
        }  # fmt: skip
        log(logging.INFO, "session left", session=session.number, why=why, **used)
        who = _who(session.peer, session.client)
        self._write("left", session=session.number, **who, address=session.address, why=why, **used)

    def look(self) -> None:
        """Whether the list of tenants has changed."""
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
        """How often that was, with this time; 0 if it need not be told: nobody can fill a disk, however many they are."""
        if len(self._times) >= MOST_TOLD_APART:
            self._times.clear()
        self._times[code, whom] += 1
        times = self._times[code, whom]
        return times if worth_logging(times) and self._lines.takes(code, monotonic()) else 0

    def _write(self, event: str, **fields: Any) -> None:
        if self._audit is None:
            return
        try:
            if self.reopen:
                self.reopen = False
                self._audit.close()
            self._audit.write(event, **fields)
        except OSError as error:  # the executor goes on: who watches it is told
            if monotonic() > self._next_alarm:
                self._next_alarm = monotonic() + ALARM_S
                log(logging.ERROR, "cannot write the audit log", file=str(self._audit.path), error=str(error))


def _who(peer: Peer, client: str) -> dict[str, str]:
    return {"client": client, "transport": peer.transport, **({"tenant": peer.tenant} if peer.tenant else {})}
