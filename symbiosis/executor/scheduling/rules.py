"""How calls are batched: the policies, the provider's choices, and what was measured on this machine."""

from dataclasses import dataclass
from math import inf

BATCH_BELOW = 256  # a product of so many rows is bound by arithmetic: batching two gains nothing and costs copies


@dataclass(frozen=True, slots=True)
class Policy:
    """What a policy does with calls. One that does neither of these runs every call by itself, at once."""

    name: str
    batches: bool = False  # calls of one key may run as one product
    waits_for_all: bool = False  # a call runs when every active session waits for an answer
    foresees: bool = False  # a call waits for those that are expected, as long as that pays


IMMEDIATE = Policy("immediate")
LOCKSTEP = Policy("lockstep", batches=True, waits_for_all=True)
OPPORTUNISTIC = Policy("opportunistic", batches=True, foresees=True)
POLICIES = {policy.name: policy for policy in (IMMEDIATE, LOCKSTEP, OPPORTUNISTIC)}


@dataclass(slots=True)
class Rules:
    """The settings that the parts of the batcher share. The server may change them while it runs."""

    policy: Policy
    max_wait: float = 0.0  # most seconds that a call waits for others
    max_rows: int = 4096  # most rows of a product of several calls, and of a slice of one
    idle_s: float = inf  # under `lockstep` nobody waits for a session that has been silent for so long
    invariant: bool = False  # results must not depend on other sessions: nothing is batched, or cut because of them
    spread: float = 1.0  # a product is awaited if its calls come within so many times what it takes
    overdue: float = 1.5  # a session is given up after so many times its usual pause
    batch_below: int = BATCH_BELOW
    contention: float = 1.0  # threads that want each core

    def __post_init__(self) -> None:
        if self.invariant:
            self.policy = IMMEDIATE
