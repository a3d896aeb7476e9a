"""The sessions with their rhythms, and the tenants with what they have used. Plain Python, no clock of its own."""

from collections.abc import Container, Hashable, Iterable, Iterator
from math import inf

from symbiosis.executor.scheduling.arrival_model import ArrivalModel, Habits
from symbiosis.executor.scheduling.queue import Batch, Item
from symbiosis.executor.scheduling.rules import Rules
from symbiosis.executor.scheduling.tenant_use import ACTIVE_S, TenantUse

ALONE_S = 0.1  # a session is alone if no other has called for so long
CREDIT_S = 0.1  # use that a tenant can save up while it does not call


class Callers:
    """The joined sessions. `live` are those that make calls with which others can be batched."""

    def __init__(self, rules: Rules, rounds: Container[Hashable]) -> None:
        """`rounds` are the keys that may follow themselves."""
        self._rules, self._rounds = rules, rounds
        self.sessions: dict[int, ArrivalModel] = {}
        self.live: dict[int, ArrivalModel] = {}
        self._habits: dict[str | None, Habits] = {}  # by tenant
        self._tenants: dict[str, TenantUse] = {}  # by name
        self._recent: dict[TenantUse, None] = {}  # tenants that called lately, the last one at the end
        self._least_used = self._least_used_by_tenants = 0.0  # the least use among those that were served last
        self._looked = -inf  # when silent sessions were last looked for

    def __getitem__(self, item: Item) -> ArrivalModel:
        return self.sessions[item.session]

    def of(self, batch: Batch) -> list[ArrivalModel]:
        """Return the sessions whose calls are in a batch, without those that have left."""
        sessions = self.sessions
        return [sessions[item.session] for item, _, _ in batch.slices if item.session in sessions]

    @property
    def are_tenants(self) -> bool:
        """Whether keys identify more than one tenant."""
        return len(self._tenants) > 1

    def join(self, session: int, tenant: str | None, watches: bool) -> None:
        use = TenantUse()
        if tenant is not None:
            use = self._tenants.setdefault(tenant, TenantUse(tenant, self._least_used_by_tenants))
        habits = self._habits.setdefault(tenant, Habits())
        self.sessions[session] = ArrivalModel(use, habits, self._rules, self._rounds, watches, self._least_used)

    def leave(self, session: int) -> list[Item]:
        """Forget a session. Return its calls that were still waiting."""
        rhythm = self.sessions.pop(session, None)
        self.live.pop(session, None)
        if rhythm is None:
            return []
        self._habits[rhythm.tenant.name].adopt(rhythm)
        if rhythm.tenant.name is None:
            self._recent.pop(rhythm.tenant, None)
        return rhythm.pending

    def calls(self, rhythm: ArrivalModel, now: float, seconds: float | None = None) -> None:
        """Note that a session makes a call, which is expected to take so long. If it had none in flight, the time that it was idle earns
        it no credit."""
        tenant = rhythm.tenant
        if not rhythm.watches:
            if seconds is not None and (seconds <= tenant.brief or now > tenant.brief_at + ACTIVE_S):
                tenant.brief, tenant.brief_at = seconds, now
            tenant.called = now
            self._recent.pop(tenant, None)
            self._recent[tenant] = None
        if not rhythm.pending:
            tenant.used = max(tenant.used, self._least_used_by_tenants - CREDIT_S)
            rhythm.used = max(rhythm.used, self._least_used)

    def served(self, rhythms: Iterable[ArrivalModel], now: float, head: ArrivalModel | None = None) -> None:
        """Note that calls of these sessions run now. `head` ranked first; without it, all did. A session that becomes active later
        counts as having used at least as much as they."""
        used = tenant_used = inf
        for rhythm in rhythms:
            tenant = rhythm.tenant
            rhythm.served = tenant.served = now
            if head is None or rhythm is head:
                used, tenant_used = min(used, rhythm.used), min(tenant_used, tenant.used)
        self._least_used = max(self._least_used, used)
        self._least_used_by_tenants = max(self._least_used_by_tenants, tenant_used)

    def others(self, own: set[TenantUse], since: float) -> Iterator[TenantUse]:
        """Yield the other tenants that have called shortly before `since` or later, the last one first."""
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
        """Forget, until they call again, live sessions that have long been silent and are not expected to call."""
        if now <= self._looked + ALONE_S:
            return
        self._looked = now
        for session, rhythm in list(self.live.items()):
            latest = rhythm.due(now).latest if rhythm.next is not None else rhythm.replied
            if not rhythm.pending and now > max(rhythm.replied + ALONE_S, latest):
                del self.live[session]
