"""Who calls: the sessions with their rhythms, and the tenants with what they have used. Plain Python, no clock of its own."""

from collections.abc import Container, Hashable, Iterable, Iterator
from math import inf

from symbiosis.executor.scheduling.forecast import Habits, Rhythm
from symbiosis.executor.scheduling.queue import Item
from symbiosis.executor.scheduling.rules import Rules
from symbiosis.executor.scheduling.tenant_use import ACTIVE_S, TenantUse

ALONE_S = 0.1  # after this time in which nobody else called, a session is alone
CREDIT_S = 0.1  # of use that a tenant saves up while it does not call


class Callers:
    """The sessions that are here; `live`: those that have made calls which others can join."""

    def __init__(self, rules: Rules, rounds: Container[Hashable]) -> None:
        """`rounds`: keys that may follow on themselves."""
        self._rules, self._rounds = rules, rounds
        self.sessions: dict[int, Rhythm] = {}
        self.live: dict[int, Rhythm] = {}
        self._habits: dict[str | None, Habits] = {}  # by tenant
        self._tenants: dict[str, TenantUse] = {}  # by name
        self._recent: dict[TenantUse, None] = {}  # who called lately, the last one at the end
        self._least_used = self._least_used_by_tenants = 0.0  # by those who were served last
        self._looked = -inf  # for silent sessions

    def __getitem__(self, item: Item) -> Rhythm:
        return self.sessions[item.session]

    @property
    def are_tenants(self) -> bool:
        """Whether keys tell of several who they are."""
        return len(self._tenants) > 1

    def join(self, session: int, tenant: str | None, watches: bool) -> None:
        use = TenantUse()
        if tenant is not None:
            use = self._tenants.setdefault(tenant, TenantUse(tenant, self._least_used_by_tenants))
        habits = self._habits.setdefault(tenant, Habits())
        self.sessions[session] = Rhythm(use, habits, self._rules, self._rounds, watches, self._least_used)

    def leave(self, session: int) -> list[Item]:
        """Forget a session; returns what it still waited for."""
        rhythm = self.sessions.pop(session, None)
        self.live.pop(session, None)
        if rhythm is None:
            return []
        self._habits[rhythm.tenant.name].adopt(rhythm)
        if rhythm.tenant.name is None:
            self._recent.pop(rhythm.tenant, None)
        return rhythm.pending

    def calls(self, rhythm: Rhythm, now: float) -> None:
        """One of them makes a call. If it waited for nothing till now, idleness has earned no credit."""
        tenant = rhythm.tenant
        if not rhythm.watches:
            tenant.called = now
            self._recent.pop(tenant, None)
            self._recent[tenant] = None
        if not rhythm.pending:
            tenant.used = max(tenant.used, self._least_used_by_tenants - CREDIT_S)
            rhythm.used = max(rhythm.used, self._least_used)

    def served(self, rhythms: Iterable[Rhythm], now: float, head: Rhythm | None = None) -> None:
        """Their calls run now. `head` was first in rank, else they all were: nobody who comes later has used less than those."""
        used = tenant_used = inf
        for rhythm in rhythms:
            tenant = rhythm.tenant
            rhythm.served = tenant.served = now
            if head is None or rhythm is head:
                used, tenant_used = min(used, rhythm.used), min(tenant_used, tenant.used)
        self._least_used = max(self._least_used, used)
        self._least_used_by_tenants = max(self._least_used_by_tenants, tenant_used)

    def others(self, own: set[TenantUse], since: float) -> Iterator[TenantUse]:
        """Who else has called shortly before `since`, or later; the last one first."""
        for tenant in reversed(self._recent):
            if tenant.called <= since - ACTIVE_S:
                return
            if tenant not in own:
                yield tenant

    def other_tenants_call(self, item: Item) -> bool:
        """Whether tenants other than the one of this call have called lately."""
        if not self._tenants:
            return False
        return any(tenant.name is not None for tenant in self.others({self[item].tenant}, item.arrived))

    def forget_silent(self, now: float) -> None:
        """Who has long not called, and is not expected to, is not live until the next call. Looked for now and then."""
        if now <= self._looked + ALONE_S:
            return
        self._looked = now
        for session, rhythm in list(self.live.items()):
            latest = rhythm.due(now).latest if rhythm.next is not None else rhythm.replied
            if not rhythm.pending and now > max(rhythm.replied + ALONE_S, latest):
                del self.live[session]
