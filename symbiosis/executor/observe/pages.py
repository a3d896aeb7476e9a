"""An executor's pages: `/health` for probes, `/metrics` for Prometheus. Few connections are served at a time, each for a few seconds, so that
visitors cannot take more of the executor than that."""

import gzip
import json
import logging
import socket
import sys
from collections.abc import Container, Iterator
from contextlib import suppress
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from socketserver import TCPServer, ThreadingMixIn
from threading import Lock, Thread
from time import monotonic, sleep
from typing import Any, NamedTuple, Protocol
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit
from urllib.request import ProxyHandler, build_opener

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from symbiosis.base.hosts import Hosts
from symbiosis.errors import ConfigError
from symbiosis.protocol.endpoints import is_loopback

MOST_CONNECTIONS = 32  # another one takes the place of the oldest
LONGEST_HEAD = 8 << 10  # bytes of a request
VISIT_S, LOOK_S = 10.0, 0.5  # the longest connection; between two looks at how long they last
SCRAPE_SHARE = 0.1  # most of the time that collecting figures may take: it keeps the executor's thread from running
STALLED_S = 30.0  # an executor whose loop has not looked at its clock for so long is stalled
ANSWER_S = 2.0  # for a page that is read: a process that takes longer is stalled
logger = logging.getLogger("symbiosis.executor")


_opener = build_opener(ProxyHandler({}))


def read_page(url: str) -> str | None:
    """Return a page of a process of ours, whatever its status; None if it does not answer."""
    try:
        try:
            answer = _opener.open(url, timeout=ANSWER_S)
        except HTTPError as error:
            answer = error
        with answer:
            return str(answer.read().decode())
    except (OSError, HTTPException, ValueError):
        return None


class PageSource(Protocol):
    """What the pages need of an executor."""

    def health(self, stalled_s: float) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def shares_weights(self) -> bool: ...

    @property
    def turned_s(self) -> float: ...

    @property
    def clients(self) -> int: ...


class PageAnswer(NamedTuple):
    """The status of an answer, its body and its headers."""

    status: int
    body: bytes
    headers: dict[str, str] = {}


class Named(NamedTuple):
    """Those of some figures that have one of these names, which is how Prometheus asks for a few."""

    figures: Collector
    names: Container[str]

    def collect(self) -> Iterator[Metric]:
        for metric in self.figures.collect():
            metric.samples = [sample for sample in metric.samples if sample.name in self.names]
            if metric.samples:
                yield metric


class PageRequest(BaseHTTPRequestHandler):
    """One connection, which asks for one page."""

    server: "Pages"
    timeout = VISIT_S

    def setup(self) -> None:
        """Read the head of the request, and no more than a head may have."""
        super().setup()
        head = b""
        while (line := self.rfile.readline(LONGEST_HEAD - len(head))).strip():
            head += line
        self.rfile = BytesIO(head + b"\r\n")

    def parse_request(self) -> bool:
        is_one = super().parse_request()
        if is_one and self.command not in ("GET", "HEAD"):
            self._respond(PageAnswer(405, b"these pages are read-only\n", {"Allow": "GET, HEAD"}))
            return False
        return is_one

    def do_GET(self) -> None:
        self._respond(self.server.answer(self.requestline.split()[1], self.headers))

    do_HEAD = do_GET

    def _respond(self, answer: PageAnswer) -> None:
        self.send_response(answer.status)
        headers = {
            "Content-Type": "text/plain; charset=utf-8",
            "Content-Length": str(len(answer.body)),
            **answer.headers,
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, *_: object) -> None: ...


class Pages(ThreadingMixIn, TCPServer):
    """Serves `http://HOST:PORT/health` and `/metrics`, also while the executor starts and there is no executor to `show` yet."""

    daemon_threads = allow_reuse_address = True
    request_queue_size = MOST_CONNECTIONS
    _executor: PageSource | None = None

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), PageRequest)
        except OSError as error:
            raise ConfigError(f"cannot serve metrics at {host}:{port}: {error}") from None
        # beyond this machine, whoever connects may read them, by whatever name
        self._hosts = Hosts(host, () if is_loopback(f"{host}:{port}") else "*")
        self.port: int = self.server_address[1]
        self._open: dict[Any, float] = {}  # connections, the oldest first, and when each has to end
        self._scrapes, self._next_scrape = Lock(), 0.0
        Thread(target=self.serve_forever, args=[LOOK_S], name="symbiosis-pages", daemon=True).start()

    def url(self, path: str) -> str:
        host = self.server_address[0]
        return f"http://[{host!s}]:{self.port}{path}" if ":" in str(host) else f"http://{host!s}:{self.port}{path}"

    def show(self, executor: PageSource, figures: Collector) -> None:
        """Show this executor, and these figures, from now on."""
        self._figures, self._executor = figures, executor

    def answer(self, target: str, headers: Any) -> PageAnswer:
        """Return what is at a path, for a request with these headers."""
        if not all(map(self._hosts.has, headers.get_all("host", ()))):
            return PageAnswer(400, b"these pages are not known by that name: ask for them by their address\n")
        try:
            path, query = urlsplit(target).path, parse_qs(urlsplit(target).query, max_num_fields=64)
        except ValueError:
            return PageAnswer(400, b"this is not a valid address\n")
        try:
            if path == "/health":
                return self.health()
            if path == "/metrics":
                return self.metrics(query.get("name[]"), headers.get("accept", ""), headers.get("accept-encoding", ""))
        except Exception as error:  # whatever it is, the pages stay up
            logger.exception("cannot answer %s", path)
            return PageAnswer(500, f"{type(error).__name__}: see the executor's log\n".encode())
        return PageAnswer(404, b"see /health and /metrics\n")

    def health(self) -> PageAnswer:
        """Answer 200 if calls are answered, else 503, with the status (`starting`, `ready`, `draining` or `stalled`), the seconds since the
        loop last ran, how many clients are joined, the fingerprint of the model, and whether clients may map its weights."""
        executor = self._executor
        status = "starting" if executor is None else executor.health(STALLED_S)
        told: dict[str, object] = {"status": status}
        if executor is not None and status != "starting":
            told |= {"turned_s": round(executor.turned_s, 1), "clients": executor.clients}
            told |= {"fingerprint": executor.fingerprint, "shares_weights": executor.shares_weights}
        body = json.dumps(told).encode() + b"\n"
        return PageAnswer(200 if status == "ready" else 503, body, {"Content-Type": "application/json"})

    def metrics(self, names: list[str] | None, accepts: str, encodings: str) -> PageAnswer:
        """Answer as Prometheus's own servers do, in turn, and not more often than `SCRAPE_SHARE` allows."""
        if self._executor is None:
            return PageAnswer(503, b"the executor is starting\n")
        encode, kind = choose_encoder(accepts)
        with self._scrapes:
            sleep(max(0.0, self._next_scrape - monotonic()))
            begun = monotonic()
            body = encode(Named(self._figures, names) if names else self._figures)  # type: ignore[arg-type]
            self._next_scrape = begun + (monotonic() - begun) / SCRAPE_SHARE
        if "gzip" not in encodings:
            return PageAnswer(200, body, {"Content-Type": kind})
        return PageAnswer(200, gzip.compress(body), {"Content-Type": kind, "Content-Encoding": "gzip"})

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own."""
        if len(self._open) >= MOST_CONNECTIONS:
            self._hang_up(next(iter(self._open)))
        self._open[request] = monotonic() + VISIT_S
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Hang up on who takes too long, whatever it is that he does."""
        for request, ends in list(self._open.items()):
            if monotonic() > ends:
                self._hang_up(request)

    def _hang_up(self, request: Any) -> None:
        """End a connection; its thread notices."""
        self._open.pop(request, None)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with suppress(OSError):  # closing while the visitor still sends would reset the connection and lose the answer
            request.shutdown(socket.SHUT_WR)
            while request.recv(LONGEST_HEAD):
                pass
        self._open.pop(request, None)
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whatever it is, it ends this connection only."""
        if not isinstance(sys.exception(), OSError):
            logger.exception("a page's connection")
