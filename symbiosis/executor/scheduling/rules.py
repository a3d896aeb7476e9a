"""What the provider chose of how calls are batched, and what was measured of this machine."""

from dataclasses import dataclass
from math import inf

from symbiosis.config import Policy

WRITTEN = ("immediate", "lockstep", "opportunistic")  # policies
JOIN_BELOW = 256  # rows from which a product is bound by arithmetic: joining two gains nothing and costs copies


@dataclass(slots=True)
class Rules:
    """What the parts of the batcher have in common. The server may change them while it runs."""

    policy: Policy
    max_wait: float = 0.0  # seconds that a call waits for others at most
    max_rows: int = 4096  # of a product of several calls, and of a slice of one
    idle_s: float = inf  # under lockstep nobody waits for a session that has been silent for so long
    invariant: bool = False  # what runs together, and how calls are cut, never depends on other sessions
    spread: float = (
        1.0  # those who go together are waited for, from the first to the last, as long as so many products take
    )
    overdue: float = 1.5  # a session is not expected any more after so many times its usual pause
    join_below: int = JOIN_BELOW
    contention: float = 1.0  # threads that want each core: what a product costs all together, in its own times

    def __post_init__(self) -> None:
        if self.policy not in WRITTEN:
            raise NotImplementedError(
                f"{self.policy} is a policy that nobody has written: say what it does wherever `rules.policy` is asked for "
                "(waiting, ranking, cutting, batcher, dispatch, server), then add it to WRITTEN in symbiosis/executor/scheduling/rules.py"
            )
        if self.invariant:
            self.policy = "immediate"
