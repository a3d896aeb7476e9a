"""The executor's figures as Prometheus metrics."""

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from symbiosis.executor.observe.process_figures import process_figures
from symbiosis.executor.observe.snapshot import Snapshot

BATCH_EDGES = (1, 2, 4, 8, 16, 32, 64)


class PrometheusCollector(Collector):
    """Shows an executor's figures to `prometheus_client`, computed when they are scraped, in the scraper's thread."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, taken at one moment."""
        now = self._snapshot()
        yield from _by_layer(now)
        yield from _by_tenant(now)
        yield from _by_label(now)
        yield _batch_sizes(now)
        yield from _gauges(now)
        yield from process_figures()


def _by_layer(now: Snapshot) -> Iterator[Metric]:
    for name, field, text in (
        ("calls", "calls", "Calls answered"),
        ("rows", "rows", "Rows of those calls"),
        ("batches", "batches", "Matrix products run"),
        ("wait_seconds", "wait_s", "Seconds that calls waited in the queue"),
        ("compute_seconds", "compute_s", "Seconds spent computing"),
    ):
        family = CounterMetricFamily(f"symbiosis_{name}", text, labels=["layer", "op"])
        for figures in now.layers:
            family.add_metric([figures.layer, figures.op], getattr(figures, field))
        yield family


def _by_tenant(now: Snapshot) -> Iterator[Metric]:
    usage = now.tenants
    for name, field, text in (
        ("calls", "calls", "Calls of a tenant"),
        ("rows", "rows", "Rows of those calls"),
        ("multiplications", "multiplications", "Multiplications, with what takes as long"),
        ("bytes", "bytes", "Bytes of payload, in and out"),
        ("compute_seconds", "seconds", "Seconds of computing, shared with others in proportion"),
        ("direct_rows", "direct_rows", "Rows that its programs multiplied themselves by mapped weights, as they tell"),
        ("direct_multiplications", "direct_multiplications", "Multiplications of those rows"),
    ):
        family = CounterMetricFamily(f"symbiosis_tenant_{name}", text, labels=["tenant"])
        for tenant, used in usage.items():
            family.add_metric([tenant], getattr(used, field))
        yield family


def _by_label(now: Snapshot) -> Iterator[Metric]:
    sessions = Counter({url.partition(":")[0]: 0 for url in now.endpoints})
    sessions.update(session.transport for session in now.clients)
    tenants = Counter(session.tenant for session in now.clients if session.tenant)
    for kind, name, label, text, values in (
        (CounterMetricFamily, "bytes", "transport", "Bytes of payload, in and out", now.bytes),
        (CounterMetricFamily, "errors", "code", "Calls and joins refused", now.errors),
        (
            CounterMetricFamily,
            "refused_handshakes",
            "reason",
            "Connections refused before a join",
            now.kept_out,
        ),
        (CounterMetricFamily, "unwritten_log_lines", "log", "Lines of logs that could not be written", now.unwritten),
        (GaugeMetricFamily, "sessions", "transport", "Clients that are joined", sessions),
        (GaugeMetricFamily, "tenant_sessions", "tenant", "A tenant's clients that are joined", tenants),
    ):
        family = kind(f"symbiosis_{name}", text, labels=[label])
        for key, value in values.items():
            family.add_metric([key], value)
        yield family
    for name, second, text, counts in (
        ("refused_joins", "code", "Joins refused", now.refused_joins),
        ("in_vain_bytes", "transport", "Bytes that came with what was refused", now.in_vain),
    ):
        family = CounterMetricFamily(f"symbiosis_{name}", text, labels=["tenant", second])
        for tenant, label, value in counts:
            family.add_metric([tenant, label], value)
        yield family


def _batch_sizes(now: Snapshot) -> HistogramMetricFamily:
    sizes = now.batch_sizes
    buckets = [(str(edge), sum(n for size, n in sizes.items() if size <= edge)) for edge in BATCH_EDGES]
    buckets.append(("+Inf", sum(sizes.values())))
    family = HistogramMetricFamily("symbiosis_batch_size", "Calls per matrix product")
    family.add_metric([], buckets, sum_value=sum(size * n for size, n in sizes.items()))
    return family


def _gauges(now: Snapshot) -> Iterator[Metric]:
    yield CounterMetricFamily("symbiosis_dropped_sessions", "Sessions dropped for silence", value=now.dropped)
    for name, text, value in (
        ("queue_depth", "Calls that wait", now.queue_depth),
        ("uptime_seconds", "Seconds since the start", now.uptime_s),
        ("resident_bytes", "Memory of the executor's process", now.rss_bytes),
        ("weights_bytes", "Memory of the base model's tensors", now.weights_bytes),
        ("gather_buffers_bytes", "Memory for weights that are gathered from other GPUs", now.gather_bytes),
    ):
        yield GaugeMetricFamily(f"symbiosis_{name}", text, value=value)
