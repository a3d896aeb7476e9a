"""How much of the executor a tenant has used."""

from dataclasses import dataclass
from math import inf

ACTIVE_S = 1.0  # a tenant that called within this time may call again at any moment


@dataclass(slots=True, eq=False)
class TenantUse:
    """How much of the executor the sessions of one tenant (without keys: one session) have used together."""

    name: str | None = None
    used: float = 0.0
    served: float = -inf
    called: float = -inf
    brief: float = inf  # expected seconds of the shortest of its recent calls
    brief_at: float = -inf
