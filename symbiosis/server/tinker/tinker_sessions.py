"""Sessions of Tinker's clients. Each has a folder, which outlives the process: what belongs to a session is there as long as it is."""

import logging
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from symbiosis.server.server_marks import ID, mark_in, mark_of, new_session_id
from symbiosis.server.tinker import tinker_messages as m
from symbiosis.server.tinker.checkpoint_store import NOTHING, metadata, read_facts, write_facts
from symbiosis.server.tinker.disk_shares import DiskShares
from symbiosis.server.tinker.tinker_messages import TinkerRefusal

logger = logging.getLogger("symbiosis")

SESSION_S = 600.0  # a session that is silent for so long has ended: the SDK says every 10 s that it is there
SESSIONS = 4096  # of one tenant, at a time
SESSION_BYTES = 1 << 12  # that a session takes on the disk when it begins
FACTS = "session.json"
WARNING = (
    "This server computes importance_sampling where stable_reinforce is asked for (its formula is not published; kl_coeff is not used), "
    "and trains no adapter at the output layer (train_unembed)."
)


class SessionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a session, in its folder."""

    tenant: str
    created: float
    display_name: str | None = None
    user_metadata: msgspec.Raw = NOTHING


@dataclass(eq=False)
class TinkerSession:
    """A session. What its client has told of it is on the disk only."""

    id: str
    tenant: str
    created: float
    folder: Path
    seen: float

    @property
    def facts(self) -> SessionFacts | None:
        """What its folder tells; None, if it has just ended."""
        return read_facts(self.folder / FACTS, SessionFacts)  # type: ignore[no-any-return]


class SessionsElsewhere:
    """The sessions of the other servers of a cluster, as the folder tells that all of them share: limits of a key are those of the cluster.

    Args:
        folder: That of this server's sessions, in a folder of its own beside those of the others.
        server: The name of this server; None: it is alone.

    >>> SessionsElsewhere(Path("/nowhere/sessions"), None).of("anna")
    []
    """

    def __init__(self, folder: Path, server: str | None) -> None:
        self._server, self._name, self._servers = server, folder.name, folder.parent.parent
        self._tenants: dict[Path, str] = {}  # of sessions: each is read once

    def of(self, tenant: str) -> list[Path]:
        """Return the folders of a tenant's sessions there."""
        if self._server is None:
            return []
        known, found = self._tenants, dict[Path, str]()
        for folder in self._servers.glob(f"*/{self._name}/*"):
            if folder.parts[-3] == self._server:
                continue
            if folder in known:
                found[folder] = known[folder]
            elif (facts := read_facts(folder / FACTS, SessionFacts)) is not None:
                found[folder] = facts.tenant
        self._tenants = found
        return [folder for folder, whose in found.items() if whose == tenant]

    def count(self, tenant: str, pattern: str) -> int:
        """Return how many files or folders of such names a tenant's sessions have there."""
        return sum(1 for folder in self.of(tenant) for _ in folder.glob(pattern))


class TinkerSessions:
    """The sessions of all tenants.

    Args:
        folder: In which each has a folder.
        when_over: Called with a session that has ended, before its folder goes, and with the reason.
        server: The name of this server among those that share checkpoints.
        shares: What tenants may have on the disk.
    """

    def __init__(
        self,
        folder: Path,
        when_over: Callable[[TinkerSession, str], object],
        shares: DiskShares,
        server: str | None = None,
    ) -> None:
        self.folder, self._when_over, self._shares, self._server = folder, when_over, shares, server
        self.elsewhere = SessionsElsewhere(folder, server)
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._sessions: dict[str, TinkerSession] = {}
        now = time.monotonic()
        for each in folder.iterdir():
            if (facts := read_facts(each / FACTS, SessionFacts)) is not None:
                self._sessions[each.name] = TinkerSession(each.name, facts.tenant, facts.created, each, now)
            else:  # of a process that was killed in between
                shutil.rmtree(each, ignore_errors=True)

    def __iter__(self) -> Any:
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, id: str) -> TinkerSession | None:
        return self._sessions.get(id)

    def create(self, tenant: str, asked: m.CreateSession) -> Any:
        self._shares.take(tenant, SESSION_BYTES + len(asked.metadata))
        with self._lock:
            if asked.session_id is not None and self._is_there(tenant, asked.session_id):
                return {"type": "create_session", "session_id": asked.session_id, "warning_message": WARNING}
            here = sum(each.tenant == tenant for each in self._sessions.values())
            if here + len(self.elsewhere.of(tenant)) >= SESSIONS:
                raise TinkerRefusal(f"this key has {SESSIONS} sessions: finish some", 429)
            id = asked.session_id or new_session_id(self._server)
            folder = self.folder / id
            folder.mkdir(mode=0o700)
            facts = SessionFacts(
                tenant=tenant, created=time.time(), display_name=asked.display_name, user_metadata=metadata(asked)
            )
            write_facts(folder / FACTS, facts)
            self._sessions[id] = TinkerSession(id, tenant, facts.created, folder, time.monotonic())
        return {"type": "create_session", "session_id": id, "warning_message": WARNING}

    def _is_there(self, tenant: str, id: str) -> bool:
        """Whether a session of this id that somebody has chosen has begun. Raises `TinkerRefusal` if it cannot be theirs."""
        if self._server is None or not ID.fullmatch(id) or mark_in(id) != mark_of(self._server):
            raise TinkerRefusal("session_id is what this server says: leave it out")
        if (known := self._sessions.get(id)) is not None and known.tenant != tenant:
            raise TinkerRefusal(f"there is a session {id} already", 409)
        return known is not None

    def heartbeat(self, tenant: str, asked: m.Heartbeat) -> Any:
        self.of(tenant, asked.session_id)
        return {"type": "session_heartbeat"}

    def finish(self, tenant: str, asked: m.FinishSession) -> Any:
        session = self.get(asked.session_id)
        if session is not None and session.tenant == tenant:
            self.end(session, "its session is finished: begin a new one from a checkpoint")
        return {}

    def of(self, tenant: str, id: str) -> TinkerSession:
        """Return a session of this tenant's, which shows that it is there."""
        session = self._sessions.get(id)
        if session is None or session.tenant != tenant:
            raise TinkerRefusal(
                f"there is no session {id[:80]!r}, or it has ended: begin a new one, from the last checkpoint", 410
            )
        session.seen = time.monotonic()
        return session

    def end_silent(self) -> None:
        for session in self:
            if time.monotonic() - session.seen > SESSION_S:
                logger.info("session %s of %s is silent for %g s", session.id, session.tenant or "nobody", SESSION_S)
                self.end(
                    session,
                    f"its session was silent for {SESSION_S:g} s, and has ended: begin a new one from a checkpoint",
                )

    def end(self, session: TinkerSession, why: str) -> None:
        with self._lock:
            if self._sessions.pop(session.id, None) is None:
                return
        self._when_over(session, why)
        (session.folder / FACTS).unlink(missing_ok=True)
        shutil.rmtree(session.folder, ignore_errors=True)

    def list(self, tenant: str, asked: m.ListSessions) -> Any:
        mine = sorted((each for each in self if each.tenant == tenant), key=lambda each: -each.created)
        return {"sessions": [each.id for each in mine][asked.offset : asked.offset + asked.limit]}
