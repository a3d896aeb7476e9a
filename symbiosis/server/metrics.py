"""Figures for Prometheus. Where vLLM has the same figure, the name is vLLM's, with `symbiosis_serve_` for its `vllm:`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import nlargest
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from symbiosis.base.logs import unwritten
from symbiosis.executor.observe.process_figures import children, command_of, process_figures
from symbiosis.server.api_keys import Keys
from symbiosis.server.labelled_figures import MOST
from symbiosis.server.observer import Observer, Series
from symbiosis.server.tinker.training_figures import TenantTraining
from symbiosis.serving.engine.engine_stats import EngineStats, Histogram

FamilyFigures = tuple[str, str, list[str], Mapping[Any, float]]  # name, help, labels, and values by those
PREFIX = "symbiosis_serve_"
GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Completions in the batch.", lambda f: f.running),
    "num_requests_waiting": ("Completions under way that are not in the batch: prepared, or waiting for a place.", lambda f: f.waiting),
    "kv_cache_usage_perc": ("Of the memory for keys, values and adapters, what is in use: 1 is all.", lambda f: f.cache_usage),
    "pages": ("Pages of that memory.", lambda f: f.pages),
    "adapters": ("Adapters that are known.", lambda f: f.adapters),
    "adapters_loaded": ("Adapters in the host's memory.", lambda f: f.adapters_loaded),
    "adapter_bytes": ("What they take there.", lambda f: f.adapter_bytes),
    "adapters_resident": ("Adapters in that memory.", lambda f: f.adapters_here),
}  # fmt: skip
COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "prompt_tokens": ("Tokens of prompts.", lambda f: f.prompt_tokens),
    "generation_tokens": ("Tokens that were generated.", lambda f: f.generated_tokens),
    "num_preemptions": ("Sequences that gave up their memory to others, and were computed again.", lambda f: f.evictions),
    "prefix_cache_queries": ("Tokens of prompts for which computed ones were looked for.", lambda f: f.prefix_tokens),
    "prefix_cache_hits": ("... and found.", lambda f: f.prefix_hits),
    "spec_decode_num_draft_tokens": ("Draft tokens.", lambda f: f.drafted_tokens),
    "spec_decode_num_accepted_tokens": ("... that were chosen.", lambda f: f.accepted_tokens),
    "steps": ("Forward passes.", lambda f: f.steps),
    "adapter_loads": ("Adapters that were copied into the memory.", lambda f: f.adapter_fetches),
    "adapter_evictions": ("Adapters that made room for others.", lambda f: f.adapter_evictions),
}  # fmt: skip
HISTOGRAMS: dict[str, tuple[str, Callable[[EngineStats], Histogram]]] = {
    "time_to_first_token_seconds": ("From a request to its first token.", lambda f: f.first_token_s),
    "inter_token_latency_seconds": ("Between two tokens.", lambda f: f.between_tokens_s),
    "request_queue_time_seconds": ("Until a request's first step.", lambda f: f.queue_s),
    "e2e_request_latency_seconds": ("From a request to its last token.", lambda f: f.whole_s),
}
TRAINING: dict[Any, dict[str, tuple[str, Callable[[TenantTraining], float]]]] = {
    CounterMetricFamily: {
        "tenant_training_tokens": ("Tokens that were trained on, or scored.", lambda t: t.tokens),
        "tenant_training_steps": ("Steps of optimizers.", lambda t: t.steps),
    },
    GaugeMetricFamily: {
        "tenant_training_runs": ("Runs.", lambda t: t.runs),
        "tenant_training_requests_waiting": ("Requests of runs whose outcome is not there yet.", lambda t: t.waiting),
    },
}
LATENCIES: dict[str, tuple[str, Callable[[Series], Histogram]]] = {
    "time_to_first_token_seconds": ("From a request to its first token, as HTTP sees it.", lambda s: s.first_token_s),
    "request_time_per_output_token_seconds": ("Per token after the first.", lambda s: s.token_s),
    "e2e_request_latency_seconds": ("From a request to its last token.", lambda s: s.whole_s),
}


class Collected(Collector):
    """The figures at one moment, and what the process of HTTP has counted. `engine` is a process, with an executor that it may have started;
    `training` is by tenant."""

    def __init__(
        self, figures: EngineStats, observer: Observer, engine: int, training: Mapping[str, TenantTraining], keys: Keys
    ) -> None:
        self._figures, self._observer, self._engine, self._training = figures, observer, engine, training
        self._keys = keys

    def collect(self) -> Iterable[Metric]:
        figures = self._figures
        for name, (help, value) in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, help, value=value(figures))
        for name, (help, value) in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, help, value=value(figures))
        for name, (help, of) in HISTOGRAMS.items():
            family = HistogramMetricFamily(PREFIX + name, help)
            _add(family, [], of(figures))
            yield family
        finished = ("request_success", "Completions, by why they ended.", ["finished_reason"], figures.finished)
        yield from families(CounterMetricFamily, PREFIX, [finished])
        yield from observed(PREFIX, self._observer, self._keys)
        for kind, told in TRAINING.items():
            named = [(name, help, ["tenant"], _values(self._training, of)) for name, (help, of) in told.items()]
            yield from families(kind, PREFIX, named)
        yield from process_figures(dict(_others(self._engine)) if self._engine else {})


def families(kind: Any, prefix: str, several: Iterable[FamilyFigures]) -> Iterator[Metric]:
    """Yield a family for each of several: its name, its help, its labels, and its values by those."""
    for name, help, labels, values in several:
        family = kind(prefix + name, help, labels=labels)
        for key, value in values.items():
            family.add_metric([*map(str, key if isinstance(key, tuple) else (key,))], value)
        yield family


def _of_days(keys: Keys) -> list[FamilyFigures]:
    """Return what those keys have had of their day that have had most of it."""
    shares = {
        name: (each.day.spent + each.day.reserved, each.line.tokens_per_day) for name, each in keys.with_days().items()
    }
    names = nlargest(MOST, shares, key=lambda name: shares[name][0] / shares[name][1])
    today, most = ({name: shares[name][which] for name in names} for which in (0, 1))
    return [
        ("tenant_tokens_today", "Tokens of a key's day, by UTC, with those reserved.", ["tenant"], today),
        ("tenant_tokens_per_day", "How many it may have in this process.", ["tenant"], most),
    ]


def _values(training: Mapping[str, TenantTraining], of: Callable[[TenantTraining], float]) -> dict[str, float]:
    return {tenant: of(told) for tenant, told in training.items()}


def observed(prefix: str, observer: Observer, keys: Keys) -> Iterable[Metric]:
    """Yield what is counted of the requests of a process: a server's or a front end's."""
    yield from families(GaugeMetricFamily, prefix, _of_days(keys))
    counted: list[FamilyFigures] = [
        ("http_requests", "Answers of HTTP.", ["path", "status"], observer.answered),
        ("refused_requests", "Requests that were refused or failed.", ["reason", "status", "tenant"], observer.refused),
        ("unwritten_log_lines", "Lines of logs that could not be written.", ["log"], unwritten),
    ]  # fmt: skip
    yield from families(CounterMetricFamily, prefix, counted)
    for kind, labels, labelled in (
        ("tenant", ["tenant"], observer.tenants),
        ("adapter", ["model", "adapter"], observer.adapters),
    ):
        for name, (help, of_series) in LATENCIES.items():
            histogram = HistogramMetricFamily(f"{prefix}{kind}_{name}", f"{help} By {kind}.", labels=labels)
            for values, series in labelled.shown.items():
                _add(histogram, [*values], of_series(series))
            yield histogram


def _add(family: HistogramMetricFamily, labels: list[str], of: Histogram) -> None:
    upto, buckets = 0, []
    for bound, count in zip([*map(str, of.bounds), "+Inf"], of.counts, strict=True):
        upto += count
        buckets.append((bound, upto))
    family.add_metric(labels, buckets, of.total)


def _others(engine: int) -> Iterator[tuple[str, int]]:
    """Yield the engine's process, and the executor that it has started, if it has."""
    yield "engine", engine
    yield from (("executor", pid) for pid in children(engine) if "executor_main" in command_of(pid))


def text(
    figures: EngineStats, observer: Observer, engine: int, training: Mapping[str, TenantTraining], keys: Keys
) -> bytes:
    """Return the figures as Prometheus reads them."""
    registry = CollectorRegistry()
    registry.register(Collected(figures, observer, engine, training, keys))
    return generate_latest(registry)
