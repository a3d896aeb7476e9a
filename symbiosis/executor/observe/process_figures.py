"""What processes take of their machine, for Prometheus: `process_resident_memory_bytes`, `process_open_fds` and the others that its client
libraries have for every program, what the machine has left, and which build they are."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from prometheus_client import ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric

from symbiosis.base.memory import free_memory, whole_memory
from symbiosis.build import labels
from symbiosis.protocol import VERSION


def process_figures(others: Mapping[str, int] | None = None) -> Iterator[Metric]:
    """Yield the figures of this process.

    Args:
        others: Processes that have no page of their own, by their names. Then all figures have the label `process`, which is `http` for
            this process itself.
    """
    about = labels(VERSION)
    this = GaugeMetricFamily("symbiosis_build_info", "1: which build this is.", labels=list(about))
    this.add_metric(list(about.values()), 1)
    yield this
    yield GaugeMetricFamily("symbiosis_memory_bytes", "Memory of the machine, or of its cgroup.", value=whole_memory())
    yield GaugeMetricFamily("symbiosis_memory_free_bytes", "... that a new process could have.", value=free_memory())
    if others is None:
        yield from _of("self")
        return
    found: dict[str, Metric] = {}
    for name, pid in (("http", "self"), *others.items()):
        for family in _of(str(pid)):
            merged = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += [sample._replace(labels={"process": name}) for sample in family.samples]
    yield from found.values()


def _of(pid: str) -> Iterator[Metric]:
    yield from ProcessCollector(pid=lambda: pid, registry=None).collect()


def command_of(pid: int) -> str:
    """Return with which words a process was started; none if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and that have not ended."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended meanwhile
            found += map(int, file.read_text().split())
    return found
