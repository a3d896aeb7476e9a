"""What a tenant has had of the executor."""

from dataclasses import dataclass
from math import inf

ACTIVE_S = 1.0  # who called within this time may call again at any moment


@dataclass(slots=True, eq=False)
class TenantUse:
    """What the sessions of one tenant (without keys: one session) have had of the executor together."""

    name: str | None = None
    used: float = 0.0
    served: float = -inf
    called: float = -inf
    brief: float = inf  # seconds that the shortest of its calls lately took, or was expected to
    brief_at: float = -inf

    def expects(self, seconds: float, now: float) -> None:
        """A call has come that is expected to take so long."""
        if seconds <= self.brief or now > self.brief_at + ACTIVE_S:
            self.brief, self.brief_at = seconds, now
