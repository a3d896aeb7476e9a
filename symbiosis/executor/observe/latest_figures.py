"""Takes snapshots of the executor's figures, for `symbiosis top` and for Prometheus."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import monotonic

import msgspec

from symbiosis.base.logs import unwritten
from symbiosis.base.memory import rss_bytes
from symbiosis.executor.accounts import RateLimit, ServedSession
from symbiosis.executor.ledger import Ledger
from symbiosis.executor.observe.snapshot import LayerFigures, SessionFigures, Snapshot, Usage
from symbiosis.protocol import Op

SNAPSHOTS_PER_S = 20  # most that are made for clients


def snapshot_of(
    ledger: Ledger,
    sessions: Sequence[ServedSession],
    usage: dict[str, Usage],
    policy: str,
    endpoints: list[str],
    waiting: int,
) -> Snapshot:
    """Return the figures as they are now. `waiting` calls have arrived and not begun to run."""
    now = monotonic()
    return Snapshot(
        uptime_s=now - ledger.started,
        policy=policy,
        endpoints=endpoints,
        rss_bytes=rss_bytes(),
        weights_bytes=ledger.weights_bytes,
        gather_bytes=ledger.gather_bytes,
        batch_sizes=dict(ledger.batch_sizes),
        queue_depth=waiting,
        bytes=dict(ledger.bytes),
        errors=dict(ledger.errors),
        dropped=ledger.dropped,
        sessions=[
            SessionFigures(
                s.number, s.client, s.peer.transport, s.observer, s.calls, s.rows, s.bytes, s.in_flight,
                idle_s=now - s.heard, joined_s=now - s.joined, tenant=s.peer.tenant or "", direct_rows=s.direct.rows,
            )
            for s in sessions
        ],
        layers=[
            LayerFigures(layer="" if op is Op.ECHO else ledger.names[layer], op=op.name, **asdict(totals))
            for (layer, op), totals in list(ledger.totals.items())
        ],
        tenants=usage,
        refused_joins=[(tenant, code, times) for (tenant, code), times in list(ledger.refused_joins.items())],
        kept_out=dict(ledger.kept_out),
        in_vain=[(tenant, transport, nbytes) for (tenant, transport), nbytes in list(ledger.in_vain.items())],
        unwritten=dict(unwritten),
    )  # fmt: skip


class LatestFigures:
    """The snapshot that clients receive. If they ask very often, it is a moment old."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot, self._fresh, self._raw = snapshot, RateLimit(SNAPSHOTS_PER_S), b""

    @property
    def nbytes(self) -> int:
        """Bytes of the latest snapshot."""
        return len(self._raw)

    def told(self, now: float) -> bytes:
        """Return a snapshot as msgpack."""
        if not self._raw or not self._fresh.wait(now):
            self._fresh.take(1)
            self._raw = msgspec.msgpack.encode(self._snapshot())
        return self._raw
