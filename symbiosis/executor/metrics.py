"""The executor's figures: counted as plain numbers on the way, read as a snapshot (`symbiosis top`) or by Prometheus."""

import resource
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from symbiosis.errors import Code
from symbiosis.executor.batcher import Batch
from symbiosis.executor.store import Store
from symbiosis.protocol import Call, Op, Reply

if TYPE_CHECKING:
    from collections.abc import Iterator

    from symbiosis.executor.server import Server


@dataclass(slots=True)
class Line:
    """Totals of one layer and op."""

    calls: int = 0
    rows: int = 0
    batches: int = 0
    wait_s: float = 0.0
    compute_s: float = 0.0


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
        self.dropped = 0

    def ran(self, batch: Batch, seconds: float) -> None:
        call: Call = batch.slices[0].item.work.call
        line = self.lines[call.layer, call.op]
        line.batches += 1
        line.compute_s += seconds
        self.batch_sizes[len(batch.slices)] += 1

    def answered(self, call: Call, reply: Reply, transport: str) -> None:
        line = self.lines[call.layer, call.op]
        line.calls += 1
        line.rows += call.rows
        line.wait_s += reply.wait_us / 1e6
        self.bytes[transport] += call.nbytes + reply.nbytes
        if reply.code is not Code.OK:
            self.refused(reply.code)

    def refused(self, code: Code) -> None:
        self.errors[code.name] += 1

    @property
    def mean_batch(self) -> float:
        batches = self.batch_sizes.total()
        return sum(size * count for size, count in self.batch_sizes.items()) / batches if batches else 0.0

    def name(self, layer: int, op: Op) -> str:
        return self._names[layer] if op not in (Op.ECHO, Op.STATS) else ""

    def snapshot(self, server: "Server") -> bytes:
        """Everything, as msgpack: what `symbiosis top` shows."""
        now = monotonic()
        return msgspec.msgpack.encode(
            {
                "uptime_s": now - self.started,
                "policy": server.options.policy,
                "endpoints": [listener.url for listener in server.listeners],
                "rss_bytes": rss_bytes(),
                "weights_bytes": self.weights_bytes,
                "mean_batch": self.mean_batch,
                "batch_sizes": {str(size): count for size, count in sorted(self.batch_sizes.items())},
                "queue_depth": len(server.batcher),
                "bytes": dict(self.bytes),
                "errors": dict(self.errors),
                "dropped": self.dropped,
                "sessions": [
                    {
                        "number": s.number, "client": s.client, "transport": s.peer.transport, "observer": s.observer,
                        "calls": s.calls, "rows": s.rows, "bytes": s.bytes, "in_flight": s.in_flight,
                        "idle_s": now - s.heard, "joined_s": now - s.joined,
                    }
                    for s in server.sessions.values()
                ],
                "lines": [
                    {"layer": self.name(layer, op), "op": op.name, **asdict(line)}
                    for (layer, op), line in self.lines.items()
                ],
            }
        )  # fmt: skip


class PrometheusCollector:
    """Shows an executor's figures to `prometheus_client`, computed when they are scraped."""

    def __init__(self, server: "Server") -> None:
        self._server = server

    def collect(self) -> "Iterator[Any]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        figures, server = self._server.figures, self._server
        lines = [(figures.name(layer, op), op.name, line) for (layer, op), line in list(figures.lines.items())]
        for name, text in (
            ("calls", "Calls answered"),
            ("rows", "Rows of those calls"),
            ("batches", "Matrix products run"),
            ("wait_s", "Seconds that calls waited in the queue"),
            ("compute_s", "Seconds spent computing"),
        ):
            unit = name.replace("_s", "_seconds")
            family = CounterMetricFamily(f"symbiosis_{unit}", text, labels=["layer", "op"])
            for layer, op, line in lines:
                family.add_metric([layer, op], getattr(line, name))
            yield family
        for name, values, label in (("bytes", figures.bytes, "transport"), ("errors", figures.errors, "code")):
            family = CounterMetricFamily(f"symbiosis_{name}", f"{name.capitalize()} by {label}", labels=[label])
            for key, value in list(values.items()):
                family.add_metric([key], value)
            yield family
        yield self._batch_histogram(HistogramMetricFamily)
        for name, value, text in (
            ("sessions", len(server.sessions), "Clients that are joined"),
            ("queue_depth", len(server.batcher), "Calls that wait"),
            ("resident_bytes", rss_bytes(), "Memory of the executor's process"),
            ("weights_bytes", figures.weights_bytes, "Memory of the base model's tensors"),
        ):
            yield GaugeMetricFamily(f"symbiosis_{name}", text, value=value)

    def _batch_histogram(self, family_type: Any) -> Any:
        sizes = dict(self._server.figures.batch_sizes)
        buckets, total = [], 0
        for edge in (1, 2, 4, 8, 16, 32, 64):
            total = sum(count for size, count in sizes.items() if size <= edge)
            buckets.append((str(edge), total))
        buckets.append(("+Inf", sum(sizes.values())))
        family = family_type("symbiosis_batch_size", "Calls per matrix product")
        family.add_metric([], buckets, sum_value=sum(size * count for size, count in sizes.items()))
        return family


def rss_bytes() -> int:
    """Resident memory of this process."""
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * resource.getpagesize()
