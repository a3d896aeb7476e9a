"""An executor's pages: `/health` for probes, `/metrics` for Prometheus. One thread serves a few connections at a time, each for a few
seconds, so that visitors cannot take more of the executor than that."""

import gzip
import json
import logging
import re
import selectors
import socket
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread
from time import monotonic
from typing import NamedTuple, Protocol
from urllib.parse import parse_qs, urlsplit

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from symbiosis.base.hosts import Hosts
from symbiosis.errors import ConfigError
from symbiosis.protocol.endpoints import is_loopback

MOST_CONNECTIONS = 32  # another one takes the place of the oldest
LONGEST_HEAD = 8 << 10  # bytes of a request
HEAD_S, ANSWER_S, GOODBYE_S = 2.0, 10.0, 1.0  # limits for a request, an answer and the end of a connection
SCRAPE_SHARE = 0.1  # most of the time that collecting figures may take: it keeps the executor's thread from running
STALLED_S = 30.0  # an executor whose loop has not looked at its clock for so long is stalled
REQUEST = re.compile(r"([A-Z]{1,16}) (\S+) HTTP/1\.[01]")
REASONS = {
    200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 431: "Request Header Fields Too Large",
    500: "Internal Server Error", 503: "Service Unavailable",
}  # fmt: skip
logger = logging.getLogger("symbiosis.executor")


class PageSource(Protocol):
    """What the pages need of an executor."""

    def health(self, stalled_s: float) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def turned_s(self) -> float: ...

    @property
    def clients(self) -> int: ...


class PageRequest(NamedTuple):
    """A request: its path, its query, and its headers by their names in small letters."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]


class PageAnswer(NamedTuple):
    """An HTTP response."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "text/plain; charset=utf-8"),)

    @classmethod
    def error(cls, status: int, text: str, *headers: tuple[str, str]) -> "PageAnswer":
        return cls(status, f"{text}\n".encode(), (*cls._field_defaults["headers"], *headers))

    def as_bytes(self, with_body: bool) -> bytes:
        headers = (*self.headers, ("Content-Length", str(len(self.body))), ("Connection", "close"))
        head = [f"HTTP/1.1 {self.status} {REASONS[self.status]}", *(f"{name}: {value}" for name, value in headers)]
        return "\r\n".join((*head, "", "")).encode() + (self.body if with_body else b"")


def parsed(head: bytes) -> PageRequest | PageAnswer:
    """Return the request in `head`, or the error to answer with.

    >>> parsed(b"GET /metrics?a=1 HTTP/1.1\\r\\nAccept: text/plain\\r\\n")
    PageRequest(method='GET', path='/metrics', query={'a': ['1']}, headers={'accept': 'text/plain'})
    >>> parsed(b"POST /metrics HTTP/1.1").status
    405
    """
    first, *lines = head.decode("latin-1").splitlines() or [""]
    match = REQUEST.fullmatch(first)
    if match is None:
        return PageAnswer.error(400, "this is not an HTTP/1.1 request")
    if match[1] not in ("GET", "HEAD"):
        return PageAnswer.error(405, "these pages are read-only", ("Allow", "GET, HEAD"))
    try:
        target = urlsplit(match[2])
        query = parse_qs(target.query, max_num_fields=64)
    except ValueError:
        return PageAnswer.error(400, "this is not a valid address")
    pairs = (line.partition(":") for line in lines)
    return PageRequest(match[1], target.path, query, {name.strip().lower(): value.strip() for name, _, value in pairs})


@dataclass(slots=True, eq=False)
class Visitor:
    """One connection: what it has sent, and what is still to be sent to it."""

    socket: socket.socket
    ends: float
    head: bytearray = field(default_factory=bytearray)
    request: PageRequest | None = None
    answer: memoryview | None = None
    leaving: bool = False


class Named(NamedTuple):
    """Those of some figures that have one of these names, which is how Prometheus asks for a few."""

    figures: Collector
    names: Container[str]

    def collect(self) -> Iterator[Metric]:
        for metric in self.figures.collect():
            metric.samples = [sample for sample in metric.samples if sample.name in self.names]
            if metric.samples:
                yield metric


class Pages:
    """Serves `http://HOST:PORT/health` and `/metrics`, also while the executor starts and there is no `server` yet."""

    server: PageSource | None = None

    def __init__(self, host: str, port: int) -> None:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=MOST_CONNECTIONS)
        except OSError as error:
            raise ConfigError(f"cannot serve metrics at {host}:{port}: {error}") from None
        self._socket.setblocking(False)
        # beyond this machine, whoever connects may read them, by whatever name
        self._hosts = Hosts(host, () if is_loopback(f"{host}:{port}") else "*")
        self.port: int = self._socket.getsockname()[1]
        self._visitors: dict[Visitor, None] = {}  # the oldest first
        self._next_scrape = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ, self._accept)
        Thread(target=self._run, name="symbiosis-pages", daemon=True).start()

    def url(self, path: str) -> str:
        host = self._socket.getsockname()[0]
        return f"http://[{host}]:{self.port}{path}" if ":" in host else f"http://{host}:{self.port}{path}"

    def show(self, server: PageSource, figures: Collector) -> None:
        """Show this executor, and these figures, from now on."""
        self._figures, self.server = figures, server

    # ------------------------------------------------------------------ what is told

    def health(self) -> PageAnswer:
        """Answer 200 if calls are answered, else 503, with the status (`starting`, `ready`, `draining` or `stalled`), the seconds since the
        loop last ran, how many clients are joined, and the fingerprint of the model."""
        status = "starting" if self.server is None else self.server.health(STALLED_S)
        told: dict[str, object] = {"status": status}
        if self.server is not None and status != "starting":
            told |= {"turned_s": round(self.server.turned_s, 1), "clients": self.server.clients}
            told["fingerprint"] = self.server.fingerprint
        body = json.dumps(told).encode() + b"\n"
        return PageAnswer(200 if status == "ready" else 503, body, (("Content-Type", "application/json"),))

    def metrics(self, request: PageRequest) -> PageAnswer:
        """Answer as Prometheus's own servers do."""
        if self.server is None:
            return PageAnswer.error(503, "the executor is starting")
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        names = request.query.get("name[]")
        body = encode(Named(self._figures, names) if names else self._figures)  # type: ignore[arg-type]
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return PageAnswer(200, body, (("Content-Type", kind),))
        return PageAnswer(200, gzip.compress(body), (("Content-Type", kind), ("Content-Encoding", "gzip")))

    def _answer(self, request: PageRequest) -> PageAnswer:
        if "host" in request.headers and not self._hosts.has(request.headers["host"]):
            return PageAnswer.error(400, "these pages are not known by that name: ask for them by their address")
        try:
            if request.path == "/health":
                return self.health()
            return (
                self.metrics(request)
                if request.path == "/metrics"
                else PageAnswer.error(404, "see /health and /metrics")
            )
        except Exception as error:  # whatever it is, the pages stay up
            logger.exception("cannot answer %s", request.path)
            return PageAnswer.error(500, f"{type(error).__name__}: see the executor's log")

    # ------------------------------------------------------------------ connections

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(self._sleep_s()):
                key.data()
            self._scrape()
            for visitor in [one for one in self._visitors if one.ends <= monotonic()]:
                self._end(visitor)

    def _sleep_s(self) -> float | None:
        """Return how long to sleep if nothing arrives; None for as long as it takes."""
        ends = [visitor.ends for visitor in self._visitors]
        if any(self._wants_figures(visitor) for visitor in self._visitors):
            ends.append(self._next_scrape)
        return max(0.0, min(ends) - monotonic()) if ends else None

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # the visitor has gone, or no descriptor is left
            return
        connection.setblocking(False)
        if len(self._visitors) >= MOST_CONNECTIONS:
            # the oldest of those that have asked nothing yet
            self._end(min(self._visitors, key=lambda one: (one.answer or one.request) is not None))
        visitor = Visitor(connection, monotonic() + HEAD_S)
        self._visitors[visitor] = None
        self._await(visitor, selectors.EVENT_READ, self._read)

    def _await(self, visitor: Visitor, what: int, then: Callable[[Visitor], None]) -> None:
        def act() -> None:
            try:
                then(visitor)
            except BlockingIOError:
                pass
            except Exception as error:  # whatever it is, it ends this connection only
                if not isinstance(error, OSError):
                    logger.exception("a page's connection")
                self._end(visitor)

        with suppress(KeyError):
            self._selector.unregister(visitor.socket)
        self._selector.register(visitor.socket, what, act)

    def _read(self, visitor: Visitor) -> None:
        said = visitor.socket.recv(LONGEST_HEAD)
        if not said:
            self._end(visitor)
        if visitor.request or visitor.leaving or not said:  # what follows a request is ignored
            return
        visitor.head += said
        head, ended, _ = bytes(visitor.head).replace(b"\r\n", b"\n").partition(b"\n\n")
        if len(head) > LONGEST_HEAD:
            self._say(visitor, PageAnswer.error(431, f"a request may have {LONGEST_HEAD} bytes"))
        elif ended:
            request = parsed(head)
            if isinstance(request, PageAnswer):
                self._say(visitor, request)
                return
            visitor.request, visitor.ends = request, monotonic() + ANSWER_S
            if not self._wants_figures(visitor):
                self._say(visitor, self._answer(request))

    def _wants_figures(self, visitor: Visitor) -> bool:
        return visitor.answer is None and visitor.request is not None and visitor.request.path == "/metrics"

    def _scrape(self) -> None:
        """Collect figures for one visitor, unless the last time was too recent for what it took (`SCRAPE_SHARE`)."""
        waiting = [visitor for visitor in self._visitors if self._wants_figures(visitor)]
        begun = monotonic()
        if waiting and waiting[0].request and begun >= self._next_scrape:
            self._say(waiting[0], self._answer(waiting[0].request))
            now = monotonic()
            self._next_scrape = now + (now - begun) * (1 / SCRAPE_SHARE - 1)

    def _say(self, visitor: Visitor, answer: PageAnswer) -> None:
        with_body = visitor.request is None or visitor.request.method == "GET"
        visitor.answer, visitor.ends = memoryview(answer.as_bytes(with_body)), monotonic() + ANSWER_S
        self._await(visitor, selectors.EVENT_WRITE, self._write)

    def _write(self, visitor: Visitor) -> None:
        assert visitor.answer is not None
        visitor.answer = visitor.answer[visitor.socket.send(visitor.answer) :]
        if not visitor.answer:  # closing before the visitor has read all would reset the connection and lose the answer
            visitor.leaving, visitor.ends = True, monotonic() + GOODBYE_S
            visitor.socket.shutdown(socket.SHUT_WR)
            self._await(visitor, selectors.EVENT_READ, self._read)

    def _end(self, visitor: Visitor) -> None:
        if visitor in self._visitors:
            del self._visitors[visitor]
            with suppress(KeyError):
                self._selector.unregister(visitor.socket)
            visitor.socket.close()
