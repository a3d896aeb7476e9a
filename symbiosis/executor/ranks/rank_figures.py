"""The figures and the health of a service, from the pages of its ranks: every sample with the label `rank`."""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from symbiosis.executor.observe.pages import read_page
from symbiosis.executor.observe.process_figures import process_figures

WORST_LAST = ("ready", "draining", "starting", "stalled")


class RankFigures(Collector):
    """Shows the figures of all ranks to `prometheus_client`, and those of this process, which have no label `rank`. `ports`: of their pages,
    by rank; a rank that is away has none."""

    def __init__(self, ports: Mapping[int, int]) -> None:
        self._ports = ports

    def collect(self) -> Iterator[Metric]:
        """Yield every metric once, with the samples of all ranks."""
        found: dict[str, Metric] = {family.name: family for family in process_figures()}
        for rank, text in sorted(pages(self._ports, "/metrics").items()):
            for family in text_string_to_metric_families(text or ""):
                merged = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.samples.append(sample._replace(labels={"rank": str(rank), **sample.labels}))
        yield from found.values()


def health_of(ports: Mapping[int, int], ranks: int) -> tuple[str, float, int]:
    """Return the worst status of all ranks, the longest time since a loop ran, and the most clients that one has."""
    told = [json.loads(text or '{"status": "stalled"}') for text in pages(ports, "/health").values()]
    told += [{"status": "starting"}] * (ranks - len(told))
    worst = max((str(one["status"]) for one in told), key=WORST_LAST.index)
    return worst, max(float(one.get("turned_s", 0.0)) for one in told), max(int(one.get("clients", 0)) for one in told)


def pages(ports: Mapping[int, int], path: str) -> dict[int, str | None]:
    """Return a page of each rank. All are asked at the same time, because several may be stalled."""
    asked = dict(ports)  # the service changes it meanwhile
    with ThreadPoolExecutor(len(asked) or 1) as pool:
        return dict(
            zip(asked, pool.map(lambda port: read_page(f"http://127.0.0.1:{port}{path}"), asked.values()), strict=True)
        )
