"""The sessions that are joined: admits clients within the limits, and lets them leave."""

import itertools
from collections.abc import Iterator
from time import monotonic

from symbiosis.build import build
from symbiosis.errors import CallError, Code
from symbiosis.executor.accounts import Account, BytePool, ServedSession, half_of_memory
from symbiosis.executor.model.store import Store
from symbiosis.executor.observe.join_log import JoinLog, name_of
from symbiosis.executor.observe.snapshot import Usage
from symbiosis.executor.options import Options
from symbiosis.protocol import VERSION, Hello, differ
from symbiosis.transport import Peer

MOST_OBSERVERS = 16  # applies without keys; a tenant's observers are sessions like others


class Sessions(dict[int, ServedSession]):
    """The joined sessions, by number."""

    def __init__(self, store: Store, options: Options, register: JoinLog, keyed: bool) -> None:
        """`keyed` says whether keys tell the tenant of each session."""
        self._store, self._limits, self._heartbeat_s = store, options.limits, options.heartbeat_s
        self._register, self._keyed = register, keyed
        most = options.max_bytes or half_of_memory() // options.ranks_on_a_host  # which take from the same memory
        self._pool = BytePool(most, lambda: (session.peer for session in self.values()))
        self.accounts: dict[str, Account] = {}  # by tenant
        self._without_keys = Usage()
        self._numbers = itertools.count(1)
        self.closed = False  # set when no new session may join

    def join(self, peer: Peer, hello: Hello) -> ServedSession:
        """Let a client in, or raise `CallError` to refuse it."""
        client = name_of(hello)
        try:
            account = self._account(peer.tenant)
            self._admit(hello, peer.tenant, account)
        except CallError as error:
            self._register.refused(peer, client, error.code)
            raise
        number = next(self._numbers)
        session = self[number] = ServedSession(
            number, peer, client, hello.priority, hello.observer, monotonic(), account, address=peer.address
        )
        peer.session = session
        account.readers.add(peer)
        self._register.joined(session)
        return session

    def leave(self, session: ServedSession, why: str) -> None:
        """Remove a session whose client has gone, and drop its calls in flight."""
        self.pop(session.number, None)
        session.account.readers.discard(session.peer)
        session.end(session.held, session.in_flight)
        session.peer.session = None
        self._register.left(session, session.ends_for or why)

    def silent(self, now: float) -> Iterator[ServedSession]:
        """Yield the sessions that have no call in flight and have given no sign of life for too long."""
        for session in list(self.values()):
            if not session.in_flight and now - session.heard > self._heartbeat_s:
                yield session

    @property
    def usage(self) -> dict[str, Usage]:
        """The use of each tenant since the start; without keys, of all clients together."""
        named = {tenant: account.usage for tenant, account in list(self.accounts.items())}
        return named if self._keyed else {"": self._without_keys, **named}

    def _account(self, tenant: str | None) -> Account:
        """Return the tenant's account; without keys, a new one."""
        if tenant is None:
            return Account(self._limits, self._pool, self._without_keys)
        return self.accounts.setdefault(tenant, Account(self._limits, self._pool))

    def _admit(self, hello: Hello, tenant: str | None, account: Account) -> None:
        """Raise `CallError` if the client cannot be let in."""
        if hello.version != VERSION:
            raise CallError(
                Code.BAD_VERSION,
                differ(hello.build, build(), (hello.version, VERSION)),
            )
        if self.closed:
            raise CallError(Code.DRAINING, "this executor is shutting down: try again, or use another one")
        if hello.fingerprint not in (None, self._store.fingerprint):
            raise CallError(
                Code.WRONG_MODEL,
                "this executor now serves another model than the one this client joined: "
                "start the executor with the same checkpoint, or wrap the client's model again",
            )
        watches = hello.observer and tenant is None
        alike = sum((s.observer and s.peer.tenant is None) == watches for s in self.values())
        if watches and alike >= MOST_OBSERVERS:
            raise CallError(Code.LIMIT, f"{MOST_OBSERVERS} observers watch this executor: end one (symbiosis top)")
        if not watches and alike >= self._limits.max_sessions:
            raise CallError(Code.LIMIT, f"all {self._limits.max_sessions} sessions are taken: raise --max-sessions")
        if len(account.readers) >= self._limits.max_tenant_sessions:
            raise CallError(
                Code.LIMIT,
                f"a tenant may have {self._limits.max_tenant_sessions} sessions: end one, or ask for a larger --max-tenant-sessions",
            )
