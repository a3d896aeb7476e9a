"""An executor's figures at one moment. Programs that only watch import this, and no torch."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import astuple, replace

Key = TypeVar("Key")
SUMS = (
    "rss_bytes",
    "weights_bytes",
    "queue_depth",
    "dropped",
    "gather_bytes",
)  # figures of a service that are those of its ranks together
COUNTS = ("batch_sizes", "bytes", "errors", "kept_out", "unwritten")  # ... by key
PAIRS = ("refused_joins", "in_vain")  # ... by two labels


class Usage(msgspec.Struct):
    """What a tenant has used since the executor started, in all its sessions."""

    calls: int = 0
    rows: int = 0
    multiplications: float = 0.0  # as a float: those of a day are more than 64 bits hold
    bytes: int = 0  # payloads and replies
    seconds: float = 0.0  # computing; batched products count in proportion
    direct_rows: int = 0  # rows that its programs multiplied directly, as they report
    direct_multiplications: float = 0.0


class LayerFigures(msgspec.Struct, frozen=True):
    """Totals of one layer and op."""

    layer: str
    op: str
    calls: int
    rows: int
    batches: int
    wait_s: float
    compute_s: float


class SessionFigures(msgspec.Struct, frozen=True):
    """One client, as the executor sees it."""

    number: int
    client: str
    transport: str
    observer: bool
    calls: int
    rows: int
    bytes: int
    in_flight: int
    idle_s: float
    joined_s: float
    tenant: str = ""
    direct_rows: int = 0  # rows that its client multiplied directly
    rank: int = 0  # of the service, that it has joined


class Snapshot(msgspec.Struct, frozen=True):
    """Everything at one moment; counters are totals since the start."""

    uptime_s: float
    policy: str
    endpoints: list[str]
    rss_bytes: int
    weights_bytes: int
    batch_sizes: dict[int, int]
    queue_depth: int
    bytes: dict[str, int]
    errors: dict[str, int]
    dropped: int
    sessions: list[SessionFigures]
    layers: list[LayerFigures]
    tenants: dict[str, Usage] = {}  # by name; without keys, all clients under ""
    refused_joins: list[tuple[str, str, int]] = []  # tenant, code and count
    kept_out: dict[str, int] = {}  # refused handshakes, by reason
    in_vain: list[tuple[str, str, int]] = []  # tenant, transport, and bytes that came with what was refused
    gather_bytes: int = 0  # of buffers for weights that are gathered from other GPUs
    unwritten: dict[str, int] = {}  # lines of logs that could not be written, by log

    @property
    def clients(self) -> list[SessionFigures]:
        """The sessions of those that do not only watch."""
        return [session for session in self.sessions if not session.observer]

    @property
    def calls(self) -> int:
        return sum(layer.calls for layer in self.layers)

    @property
    def rows(self) -> int:
        return sum(layer.rows for layer in self.layers)

    @property
    def direct_rows(self) -> int:
        """Rows that clients multiplied directly."""
        return sum(used.direct_rows for used in self.tenants.values())

    @property
    def mean_batch(self) -> float:
        """Calls per matrix product."""
        return mean_size(self.batch_sizes)


def of_service(ranks: Sequence[tuple[int, Snapshot]]) -> Snapshot:
    """Return the figures of a service from those of its ranks. It is as old as the rank that was started last."""
    each = [told for _, told in ranks]
    layers: dict[tuple[str, str], LayerFigures] = {}
    tenants: dict[str, Usage] = {}
    for told in each:
        for own in told.layers:
            layer, op, *figures = astuple(own)
            key = layer, op
            before = astuple(layers[key])[2:] if key in layers else [0] * len(figures)
            layers[key] = LayerFigures(*key, *(a + b for a, b in zip(before, figures, strict=True)))
        for name, used in told.tenants.items():
            before = astuple(tenants.get(name, Usage()))
            tenants[name] = Usage(*(a + b for a, b in zip(before, astuple(used), strict=True)))
    added: dict[str, Any] = {name: sum(getattr(told, name) for told in each) for name in SUMS}
    added |= {name: _sum([getattr(told, name) for told in each]) for name in COUNTS}
    for name in PAIRS:
        counts = _sum([{(one, two): count for one, two, count in getattr(told, name)} for told in each])
        added[name] = [(*pair, count) for pair, count in counts.items()]
    return replace(
        each[0], uptime_s=min(told.uptime_s for told in each), layers=list(layers.values()), tenants=tenants,
        sessions=[replace(session, rank=rank) for rank, told in ranks for session in told.sessions], **added,
    )  # fmt: skip


def _sum(each: Sequence[dict[Key, int]]) -> dict[Key, int]:
    """Add counts by their keys."""
    total = Counter[Key]()
    for counts in each:
        total.update(counts)
    return dict(total)


def mean_size(batch_sizes: dict[int, int]) -> float:
    """The mean of a histogram {size: count}; 0 if it is empty."""
    batches = sum(batch_sizes.values())
    return sum(size * count for size, count in batch_sizes.items()) / batches if batches else 0.0
