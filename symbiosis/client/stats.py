"""A client's own measurements of its executor."""

from dataclasses import dataclass, field, replace
from functools import lru_cache

from symbiosis.protocol import Call, Reply


@dataclass
class Stats:
    """A client's own measurements. The executor reports waits and computing, the client measures the round trip."""

    calls: int = 0
    rows: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    wait_s: float = 0.0
    compute_s: float = 0.0
    round_trip_s: float = 0.0
    batched_calls: int = 0  # that ran in the products of this client's calls, these included
    reconnects: int = 0
    retries: int = 0  # attempts to join again, two a second while there is no executor, and calls that were sent again
    slowed_s: float = 0.0  # waited because the executor said that this tenant has enough under way
    direct: int = 0  # products that this client made by itself, by mapped weights
    direct_rows: int = 0
    by_op: dict[str, int] = field(default_factory=dict)

    @property
    def mean_batch(self) -> float:
        """Calls per product, as this client's calls met others."""
        return self.batched_calls / self.calls if self.calls else 0.0

    def count(self, call: Call, reply: Reply | None = None, received: int = 0, seconds: float = 0.0) -> None:
        """Count a call. Of one that a GPU makes, no more is known."""
        rows, nbytes, op = _figures(call)
        self.calls += 1
        self.rows += rows
        self.bytes_sent += nbytes
        self.by_op[op] = self.by_op.get(op, 0) + 1
        if reply is not None:
            self.bytes_received += received
            self.wait_s += reply.wait_us * 1e-6
            self.compute_s += reply.compute_us * 1e-6
            self.round_trip_s += seconds
            self.batched_calls += reply.batch

    def add(self, other: "Stats") -> None:
        """Count what `other` counted, once more."""
        for name, value in vars(other).items():
            if name == "by_op":
                for op, calls in other.by_op.items():
                    self.by_op[op] = self.by_op.get(op, 0) + calls
            else:
                setattr(self, name, getattr(self, name) + value)

    def copy(self) -> "Stats":
        return replace(self, by_op=dict(self.by_op))

    def taken_back(self, old: "Stats") -> "Stats":
        """Return what was counted since `old`, and take it off."""
        made = replace(
            self, **{name: getattr(self, name) - value for name, value in vars(old).items() if name != "by_op"}
        )
        made.by_op = {op: calls - old.by_op.get(op, 0) for op, calls in self.by_op.items()}
        vars(self).update(vars(old))
        return made


@lru_cache(maxsize=1 << 14)
def _figures(call: Call) -> tuple[int, int, str]:
    return call.rows, call.nbytes, call.op.name
