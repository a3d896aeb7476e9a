"""What all answers of a process go through: each request gets its id, is counted, and is told of in the log when it is refused; traces follow it."""

import asyncio
import logging
from collections import Counter
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from symbiosis.server.labelled_figures import Labelled
from symbiosis.server.request_record import STRANGER, RequestRecord, begin
from symbiosis.server.tracing import Tracing
from symbiosis.serving.engine.engine_stats import BETWEEN_TOKENS_S, FIRST_TOKEN_S, WHOLE_S, Histogram
from symbiosis.text import shown

logger = logging.getLogger("symbiosis")

EVERY_S = 10.0  # between two lines about refusals of one kind
LONGEST_WHY = 300  # characters
ID_HEADER = b"x-request-id"


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
        self._tracing, self._every_s = tracing, every_s
        self.answered = Counter[tuple[str, int]]()  # by path and status
        self.tenants = Labelled(Series, pinned={(STRANGER,)})
        self.adapters = Labelled(Series)
        self._untold: dict[tuple[str, str], dict[str, Any]] = {}  # by reason and tenant: the last refusal since a line

    @property
    def refused(self) -> dict[tuple[str, int, str], int]:
        """What was refused, by reason, status and tenant."""
        of_tenants = ((label[0], series.refused) for label, series in self.tenants.shown.items())
        return {(*kind, tenant): count for tenant, refused in of_tenants for kind, count in refused.items()}

    def watch(self, app: ASGIApp) -> ASGIApp:
        """Return an app whose requests are observed."""

        async def observed(scope: Scope, receive: Receive, send: Send) -> None:
            record = begin(scope["headers"])
            record.observe = self._observe
            is_traced = self._tracing is not None and scope["path"].startswith("/v1/")
            span = self._tracing.begin(record, scope) if self._tracing and is_traced else None

            async def told(message: Message) -> None:
                if message["type"] == "http.response.start":
                    record.status = message["status"]
                    message["headers"] = [*message.get("headers", ()), (ID_HEADER, record.id.encode())]
                    self.answered[_path(scope), record.status] += 1
                await send(message)

            try:
                await app(scope, receive, told)
            finally:
                if record.reason:
                    self.tell(record, path=_path(scope), client=(scope.get("client") or [""])[0])
                if self._tracing and span is not None:
                    self._tracing.end(record, span, _path(scope))

        return observed

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

    def _observe(self, record: RequestRecord, is_over: bool) -> None:
        """Count how long a request took until its first token, or its last."""
        for series in (self.tenants.of((record.tenant,)), self.adapters.of((record.model, record.adapter))):
            if not is_over:
                series.first_token_s.observe(record.first - record.came)
                continue
            series.whole_s.observe(record.last - record.came)
            if record.count > record.choices:
                series.token_s.observe((record.last - record.first) / (record.count / record.choices - 1))


def _path(scope: Scope) -> str:
    """Return the path of a route, which are few."""
    endpoint, app = scope.get("endpoint"), scope.get("app")
    return next((route.path for route in app.routes if route.endpoint is endpoint), "other") if app else "other"
