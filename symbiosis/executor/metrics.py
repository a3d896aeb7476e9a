"""The executor's figures: counted as plain numbers on the way, read as a snapshot (`symbiosis top`) or by Prometheus."""

import resource
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from symbiosis.errors import Code
from symbiosis.executor.account import Usage
from symbiosis.executor.batch import Batch
from symbiosis.executor.store import Store
from symbiosis.protocol import Call, Op, Reply

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import HistogramMetricFamily, Metric

    from symbiosis.executor.server import Server

BATCH_EDGES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(slots=True)
class Line:
    """Totals of one layer and op."""

    calls: int = 0
    rows: int = 0
    batches: int = 0
    wait_s: float = 0.0
    compute_s: float = 0.0


class LayerFigures(msgspec.Struct, frozen=True):
    """A `Line`, and what it is about."""

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
    lines: list[LayerFigures]
    tenants: dict[str, Usage] = {}  # by name; without keys, all of them under none

    @property
    def calls(self) -> int:
        return sum(line.calls for line in self.lines)

    @property
    def rows(self) -> int:
        return sum(line.rows for line in self.lines)

    @property
    def mean_batch(self) -> float:
        """Calls per matrix product."""
        return mean_size(self.batch_sizes)


class Figures:
    """Counters since the start."""

    def __init__(self, store: Store) -> None:
        self._names = [layer.name for layer in store.manifest]
        self.weights_bytes = store.nbytes
        self.started = monotonic()
        self.lines: defaultdict[tuple[int, Op], Line] = defaultdict(Line)
        self.batch_sizes: Counter[int] = Counter()
        self.bytes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.refused_joins: Counter[tuple[str, str]] = Counter()  # by tenant and code
        self.kept_out: Counter[str] = Counter()  # handshakes that were refused, by reason
        self.dropped = 0

    def ran(self, batch: Batch, seconds: float) -> None:
        self._multiplied(batch.slices[0].item.work.calls, len(batch.slices), seconds)

    def launched(self, work: Any, reply: Reply) -> None:
        """A call of a GPU was answered alone; how long it took no CPU knows."""
        self._called([work])
        self._multiplied(work.calls, 1, 0.0)
        if reply.code is not Code.OK:
            self.refused(reply.code)

    def joined(self, batch: Batch) -> None:
        """Calls of GPUs were answered together."""
        self._called([piece.item.work for piece in batch.slices])
        self._line(batch.slices[0].item.work.call).wait_s += sum(
            batch.formed - piece.item.arrived for piece in batch.slices
        )

    def together(self, works: Sequence[Any], wait_s: float, seconds: float) -> None:
        """Calls of GPUs were answered by one product that had been foreseen."""
        self._called(works)
        self._multiplied(works[0].calls, len(works), seconds)
        self._line(works[0].call).wait_s += wait_s

    def _called(self, works: Sequence[Any]) -> None:
        """These calls of GPUs, of one key, have come."""
        for calls in zip(*(work.calls for work in works), strict=True):
            line = self._line(calls[0])
            line.calls += len(calls)
            line.rows += sum(call.rows for call in calls)
        for work in works:
            self.bytes[work.peer.transport] += work.plan.held

    def _multiplied(self, calls: Sequence[Call], together: int, seconds: float) -> None:
        """Products of so many calls each have run."""
        for call in calls:
            line = self._line(call)
            line.batches += 1
            line.compute_s += seconds / len(calls)
        self.batch_sizes[together] += len(calls)

    def answered(self, work: Any, reply: Reply) -> None:
        """A call, or all of a round."""
        line = self._line(work.call)
        line.wait_s += reply.wait_us / 1e6
        if work.round is None:
            line.calls += 1
            line.rows += work.call.rows
            self.bytes[work.peer.transport] += work.call.nbytes + reply.nbytes
        else:
            self._called([work])
        if reply.code is not Code.OK:
            self.refused(reply.code)

    def _line(self, call: Call) -> Line:
        return self.lines[call.layer, call.op]

    def refused(self, code: Code) -> None:
        self.errors[code.name] += 1

    def by_layer(self) -> list[LayerFigures]:
        """The lines, under the names that people know. Callable from any thread."""
        return [
            LayerFigures(layer="" if op is Op.ECHO else self._names[layer], op=op.name, **asdict(line))
            for (layer, op), line in list(self.lines.items())
        ]

    def snapshot(self, server: "Server") -> bytes:
        """A `Snapshot`, as msgpack: what `symbiosis top` shows."""
        now = monotonic()
        snapshot = Snapshot(
            uptime_s=now - self.started,
            policy=server.batcher.policy,
            endpoints=[listener.url for listener in server.listeners],
            rss_bytes=rss_bytes(),
            weights_bytes=self.weights_bytes,
            batch_sizes=dict(self.batch_sizes),
            queue_depth=server.waiting,
            bytes=dict(self.bytes),
            errors=dict(self.errors),
            dropped=self.dropped,
            sessions=[
                SessionFigures(
                    s.number, s.client, s.peer.transport, s.observer, s.calls, s.rows, s.bytes, s.in_flight,
                    idle_s=now - s.heard, joined_s=now - s.joined,
                )
                for s in server.sessions.values()
            ],
            lines=self.by_layer(),
            tenants=server.usage,
        )  # fmt: skip
        return msgspec.msgpack.encode(snapshot)


class PrometheusCollector:
    """Shows an executor's figures to `prometheus_client`, computed when they are scraped, in the scraper's thread."""

    def __init__(self, server: "Server") -> None:
        self._server = server

    def collect(self) -> "Iterator[Metric]":
        yield from self._by_layer()
        yield from self._by_tenant()
        yield from self._by_label()
        yield self._batch_sizes()
        yield from self._gauges()

    def _by_layer(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily

        lines = self._server.figures.by_layer()
        for name, field, text in (
            ("calls", "calls", "Calls answered"),
            ("rows", "rows", "Rows of those calls"),
            ("batches", "batches", "Matrix products run"),
            ("wait_seconds", "wait_s", "Seconds that calls waited in the queue"),
            ("compute_seconds", "compute_s", "Seconds spent computing"),
        ):
            family = CounterMetricFamily(f"symbiosis_{name}", text, labels=["layer", "op"])
            for line in lines:
                family.add_metric([line.layer, line.op], getattr(line, field))
            yield family

    def _by_tenant(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily

        usage = self._server.usage
        for name, field, text in (
            ("calls", "calls", "Calls of a tenant"),
            ("rows", "rows", "Rows of those calls"),
            ("multiplications", "multiplications", "Multiplications, with what takes as long"),
            ("bytes", "bytes", "Bytes of payload, in and out"),
            ("compute_seconds", "seconds", "Seconds of computing, shared with others in proportion"),
        ):
            family = CounterMetricFamily(f"symbiosis_tenant_{name}", text, labels=["tenant"])
            for tenant, used in usage.items():
                family.add_metric([tenant], getattr(used, field))
            yield family

    def _by_label(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        figures = self._server.figures
        sessions = Counter({listener.url.partition(":")[0]: 0 for listener in self._server.listeners})
        clients = [session for session in list(self._server.sessions.values()) if not session.observer]
        sessions.update(session.peer.transport for session in clients)
        tenants = Counter(session.peer.tenant for session in clients if session.peer.tenant)
        for kind, name, label, text, values in (
            (CounterMetricFamily, "bytes", "transport", "Bytes of payload, in and out", figures.bytes),
            (CounterMetricFamily, "errors", "code", "Calls and joins refused", figures.errors),
            (
                CounterMetricFamily,
                "refused_handshakes",
                "reason",
                "Connections refused before a join",
                figures.kept_out,
            ),
            (GaugeMetricFamily, "sessions", "transport", "Clients that are joined", sessions),
            (GaugeMetricFamily, "tenant_sessions", "tenant", "A tenant's clients that are joined", tenants),
        ):
            family = kind(f"symbiosis_{name}", text, labels=[label])
            for key, value in list(values.items()):
                family.add_metric([key], value)
            yield family
        family = CounterMetricFamily("symbiosis_refused_joins", "Joins refused", labels=["tenant", "code"])
        for (tenant, code), value in list(figures.refused_joins.items()):
            family.add_metric([tenant, code], value)
        yield family

    def _batch_sizes(self) -> "HistogramMetricFamily":
        from prometheus_client.core import HistogramMetricFamily

        sizes = dict(self._server.figures.batch_sizes)
        buckets = [(str(edge), sum(n for size, n in sizes.items() if size <= edge)) for edge in BATCH_EDGES]
        buckets.append(("+Inf", sum(sizes.values())))
        family = HistogramMetricFamily("symbiosis_batch_size", "Calls per matrix product")
        family.add_metric([], buckets, sum_value=sum(size * n for size, n in sizes.items()))
        return family

    def _gauges(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        figures, server = self._server.figures, self._server
        yield CounterMetricFamily("symbiosis_dropped_sessions", "Sessions dropped for silence", value=figures.dropped)
        for name, text, value in (
            ("queue_depth", "Calls that wait", server.waiting),
            ("uptime_seconds", "Seconds since the start", monotonic() - figures.started),
            ("resident_bytes", "Memory of the executor's process", rss_bytes()),
            ("weights_bytes", "Memory of the base model's tensors", figures.weights_bytes),
        ):
            yield GaugeMetricFamily(f"symbiosis_{name}", text, value=value)


def mean_size(batch_sizes: dict[int, int]) -> float:
    """The mean of a histogram {size: count}; 0 if it is empty."""
    batches = sum(batch_sizes.values())
    return sum(size * count for size, count in batch_sizes.items()) / batches if batches else 0.0


def rss_bytes() -> int:
    """Resident memory of this process."""
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * resource.getpagesize()
