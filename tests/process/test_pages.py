"""/health and /metrics: what they say, to whom, and what connections to them may cost."""

import gzip
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

import symbiosis
from symbiosis.errors import ConfigError
from symbiosis.executor.observe import pages as pages_module
from symbiosis.executor.observe.pages import LONGEST_HEAD, MOST_CONNECTIONS, Pages
from symbiosis.executor.observe.prometheus import PrometheusCollector
from tests.conftest import tiny_llama
from tests.processes import until

WAIT_S = 60.0


@pytest.fixture
def pages() -> Iterator[Pages]:
    with symbiosis.Executor(tiny_llama()) as executor:
        pages = Pages("127.0.0.1", 0)
        pages.show(executor.server, PrometheusCollector(executor.server.snapshot))
        until(lambda: status(pages, "/health") == 200, "a ready executor")
        yield pages


def ask(pages: Pages, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", pages.port, timeout=WAIT_S)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    return connection.getresponse()


def status(pages: Pages, path: str, method: str = "GET") -> int:
    return ask(pages, path, method).status


def said(pages: Pages, request: bytes) -> bytes:
    """What comes back for these bytes, until the other side ends."""
    with socket.create_connection(("127.0.0.1", pages.port), timeout=WAIT_S) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_health_tells_probes_by_its_status() -> None:
    pages = Pages("127.0.0.1", 0)
    assert (status(pages, "/health"), status(pages, "/metrics")) == (503, 503)
    executor = symbiosis.Executor(tiny_llama())
    pages.show(executor.server, PrometheusCollector(executor.server.snapshot))
    until(lambda: status(pages, "/health") == 200, "a ready executor")
    answer = ask(pages, "/health")
    told = json.load(answer)
    assert answer.headers["Content-Type"] == "application/json" and told["status"] == "ready" and told["turned_s"] >= 0
    assert told["clients"] == 0 and told["shares_weights"] is False
    model = symbiosis.from_executor(executor.endpoint)
    assert json.load(ask(pages, "/health"))["clients"] == 1
    del model
    executor.close()
    answer = ask(pages, "/health")
    assert answer.status == 503 and json.load(answer)["status"] == "draining"


def test_a_loop_that_stands_is_no_ready_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "STALLED_S", 1.0)
    pages, stands, go_on = Pages("127.0.0.1", 0), threading.Event(), threading.Event()
    with symbiosis.Executor(tiny_llama()) as executor:
        pages.show(executor.server, PrometheusCollector(executor.server.snapshot))
        until(lambda: status(pages, "/health") == 200, "a ready executor")
        executor.server.reactor.call_soon(lambda: stands.set() or go_on.wait(WAIT_S))
        assert stands.wait(WAIT_S)
        until(lambda: status(pages, "/health") == 503, "a word of it")
        told = json.load(ask(pages, "/health"))
        assert told["status"] == "stalled" and told["turned_s"] >= 1.0
        go_on.set()
        until(lambda: status(pages, "/health") == 200, "an executor that goes on")


def test_pages_are_what_prometheus_expects(pages: Pages) -> None:
    plain = ask(pages, "/metrics")
    body = plain.read().decode()
    assert plain.headers["Content-Type"].startswith("text/plain; version=")
    assert "# TYPE symbiosis_weights_bytes gauge" in body
    assert gzip.decompress(ask(pages, "/metrics", Accept_Encoding="gzip").read()).decode().startswith("# HELP")
    opened = ask(pages, "/metrics", Accept="application/openmetrics-text; version=1.0.0").read().decode()
    assert opened.endswith("# EOF\n")
    one = ask(pages, "/metrics?name[]=symbiosis_weights_bytes").read().decode()
    assert "symbiosis_weights_bytes" in one and "symbiosis_queue_depth" not in one
    head = ask(pages, "/metrics", "HEAD")
    assert head.status == 200 and int(head.headers["Content-Length"]) > 100 and not head.read()


@pytest.mark.parametrize("path", ["/", "/metrics/", "/favicon.ico", "/../metrics", "/health/x", "//metrics"])
def test_other_pages_are_not_there(path: str, pages: Pages) -> None:
    assert status(pages, path) == 404


def test_a_web_page_whose_name_leads_here_reads_nothing(pages: Pages) -> None:
    for path in ("/health", "/metrics", "/nothing"):
        assert ask(pages, path, host="rebound.example.com").status == 400
    assert {ask(pages, "/metrics", host=host).status for host in ("localhost:1", "127.0.0.1", "[::1]")} == {200}


@pytest.mark.parametrize("between", [b"\x85", b"\x0b", b"\x0c", b"\x1c", b"\x1d", b"\x1e", b"\r\n"])
@pytest.mark.parametrize("goes_first", [True, False])
def test_no_second_name_hides_the_one_that_a_browser_sends(between: bytes, goes_first: bool, pages: Pages) -> None:
    """A page of another site may write headers of its own, with bytes that some take for the end of a line."""
    lines = [b"Host: rebound.example.com", b"X-A: a" + between + b"Host: 127.0.0.1"]
    head = b"\r\n".join(lines if goes_first else lines[::-1])
    assert said(pages, b"GET /metrics HTTP/1.1\r\n" + head + b"\r\n\r\n").startswith(b"HTTP/1.0 400 ")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
def test_pages_are_read_only(method: str, pages: Pages) -> None:
    answer = ask(pages, "/metrics", method)
    assert answer.status == 405 and answer.headers["Allow"] == "GET, HEAD"


def test_a_refusal_is_read_by_those_who_still_send(pages: Pages) -> None:
    assert said(pages, b"POST /metrics HTTP/1.1\r\n\r\n" + b"x" * 500_000).startswith(b"HTTP/1.0 405 ")


@pytest.mark.parametrize(
    ("request_bytes", "answer"),
    [
        (b"\r\n\r\n", b""), (b"GET\r\n\r\n", b"Bad request"), (b"GET /metrics HTTP/9\r\n\r\n", b"Bad request"), (b"\x16\x03\x01\x02\n\n", b"Bad request"),
        (b"GET http://[ HTTP/1.1\r\n\r\n", b"HTTP/1.0 400 "), (b"GET /metrics?" + b"&a=1" * 100 + b" HTTP/1.1\r\n\r\n", b"HTTP/1.0 400 "),
        (b"GET /health HTTP/1.1\r\nX: " + b"x" * 20 * LONGEST_HEAD, b"HTTP/1.0 200 "), (b"GET /health HTTP/1.0\n\n", b"HTTP/1.0 200 "),
        (b"GET /health HTTP/1.1\r\n\xff\xfe\x00: \x00\r\nno colon\r\n\r\n", b"HTTP/1.0 200 "),
    ],
)  # fmt: skip
def test_rubbish_is_answered_and_hurts_nobody(request_bytes: bytes, answer: bytes, pages: Pages) -> None:
    assert answer in said(pages, request_bytes)
    assert status(pages, "/health") == 200


def test_half_open_requests_take_few_threads_few_descriptors_and_nobodys_place(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newcomers take the places of the oldest: none of these would be given up while the test waits."""
    monkeypatch.setattr(pages_module, "VISIT_S", 10 * WAIT_S)
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    halves = []
    for number in range(4 * MOST_CONNECTIONS):
        half = socket.create_connection(("127.0.0.1", pages.port), timeout=WAIT_S)
        half.sendall(b"GET /metrics HTTP/1.1\r\n" if number % 2 else b"G")
        halves.append(half)
    assert status(pages, "/health") == 200 and status(pages, "/metrics") == 200
    until(lambda: threading.active_count() <= threads + MOST_CONNECTIONS, "the end of those that gave way")
    assert len(os.listdir("/proc/self/fd")) - descriptors <= len(halves) + MOST_CONNECTIONS  # noqa: PTH208
    for half in halves[:-MOST_CONNECTIONS]:  # they are hung up on
        assert half.recv(1) == b""
    for half in halves:
        half.close()
    until(lambda: len(pages._open) == 0, "the end of all connections")


def test_a_half_open_request_is_given_up(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "VISIT_S", 1.0)
    with socket.create_connection(("127.0.0.1", pages.port), timeout=WAIT_S) as half:
        half.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert half.recv(1) == b""
    until(lambda: len(pages._open) == 0, "the end of the connection")


def test_one_byte_at_a_time_is_given_up(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "VISIT_S", 1.0)
    with socket.create_connection(("127.0.0.1", pages.port), timeout=WAIT_S) as slow:
        begun = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT011
            while time.monotonic() < begun + WAIT_S:
                slow.sendall(b"G")
                time.sleep(0.05)


def test_figures_are_collected_for_a_share_of_the_time_only(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting them keeps the executor from running; probes do not wait for it."""
    busy = 0.1
    plain = PrometheusCollector.collect
    monkeypatch.setattr(PrometheusCollector, "collect", lambda self: (time.sleep(busy), plain(self))[1])
    begun = time.monotonic()
    asked = [threading.Thread(target=status, args=(pages, "/metrics")) for _ in range(3)]
    for thread in asked:
        thread.start()
    assert status(pages, "/health") == 200
    for thread in asked:
        thread.join()
    assert time.monotonic() - begun > 2 * busy / pages_module.SCRAPE_SHARE


def test_a_figure_that_fails_is_an_error_and_no_end(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pages, "health", lambda self: 1 / 0)
    assert status(pages, "/health") == 500
    assert status(pages, "/metrics") == 200


def test_a_port_in_use_is_told(pages: Pages) -> None:
    with pytest.raises(ConfigError, match=f"cannot serve metrics at 127.0.0.1:{pages.port}"):
        Pages("127.0.0.1", pages.port)
