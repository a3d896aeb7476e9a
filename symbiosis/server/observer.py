"""What is told of requests when they end: figures, traces, and, of those that were refused, lines in the log."""

import asyncio
import logging
from collections import Counter
from typing import Any

from symbiosis.server.labelled_figures import Labelled
from symbiosis.server.request_record import STRANGER, RequestRecord
from symbiosis.server.tracing import Tracing
from symbiosis.serving.engine.engine_stats import BETWEEN_TOKENS_S, FIRST_TOKEN_S, WHOLE_S, Histogram
from symbiosis.text import shown

logger = logging.getLogger("symbiosis")

EVERY_S = 10.0  # between two lines about refusals of one kind
LONGEST_WHY = 300  # characters


class Series:
    """What is counted of a tenant or an adapter."""

    def __init__(self) -> None:
        self.first_token_s = Histogram.of(FIRST_TOKEN_S)
        self.token_s = Histogram.of(BETWEEN_TOKENS_S)
        self.whole_s = Histogram.of(WHOLE_S)
        self.refused = Counter[tuple[str, int]]()  # by reason and status


class Observer:
    """Counts the requests of one process.

    Args:
        every_s: Between two lines of the log about refusals of one reason and tenant. The second one says how many there were.
    """

    def __init__(self, tracing: Tracing | None = None, every_s: float = EVERY_S) -> None:
        self.tracing, self._every_s = tracing, every_s
        self.answered = Counter[tuple[str, int]]()  # by path and status
        self.completions = Counter[tuple[str, str]]()  # by model and tenant
        self.tokens = Counter[tuple[str, str]]()
        self.tenants = Labelled(Series, pinned={(STRANGER,)})
        self.adapters = Labelled(Series)
        self._untold: dict[tuple[str, str], dict[str, Any]] = {}  # by reason and tenant: the last refusal since a line

    @property
    def refused(self) -> dict[tuple[str, int, str], int]:
        """What was refused, by reason, status and tenant."""
        of_tenants = ((label[0], series.refused) for label, series in self.tenants.shown.items())
        return {(*kind, tenant): count for tenant, refused in of_tenants for kind, count in refused.items()}

    def end(self, record: RequestRecord, path: str, span: Any = None, client: str = "") -> None:
        """Count a request that has ended, on a route, and tell of it if it was refused. `span`: its trace, if it has one."""
        if record.model:
            self.completions[record.model, record.tenant] += record.choices
            self.tokens[record.model, record.tenant] += record.count
        if record.last:
            for labelled, key in ((self.tenants, (record.tenant,)), (self.adapters, (record.model, record.adapter))):
                series = labelled.shown[labelled.label(key)]
                if record.first:
                    series.first_token_s.observe(record.first - record.came)
                if record.is_whole:
                    series.whole_s.observe(record.last - record.came)
                if record.is_whole and record.count > record.choices:
                    series.token_s.observe((record.last - record.first) / (record.count / record.choices - 1))
        if record.reason:
            self.tell(record, path=path, client=client)
        if self.tracing and span:
            self.tracing.end(record, span, path)

    def tell(self, record: RequestRecord, **where: str) -> None:
        """Count a request that was refused or has failed, and tell of it in the log, but not so often that it fills."""
        label = self.tenants.label((record.tenant,))
        self.tenants.shown[label].refused[record.reason, record.status] += 1
        told = {
            "request": record.id, "reason": record.reason, "status": record.status, "tenant": record.tenant,
            **where, "why": shown(record.message, LONGEST_WHY),
        }  # fmt: skip
        kind = record.reason, label[0]
        if kind in self._untold:
            self._untold[kind] = {**told, "times": self._untold[kind].get("times", 0) + 1}
        else:
            self._log(kind, told)

    def _log(self, kind: tuple[str, str], told: dict[str, Any]) -> None:
        logger.warning("request refused", extra={"fields": told})
        self._untold[kind] = {}
        asyncio.get_running_loop().call_later(self._every_s, self._log_more, kind)

    def _log_more(self, kind: tuple[str, str]) -> None:
        """Tell of the last refusal of a kind, and how many there were since the last line."""
        if told := self._untold.pop(kind):
            self._log(kind, told)
