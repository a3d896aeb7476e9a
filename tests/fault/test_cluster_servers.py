"""A server of a cluster is cut off by the network, or fails at all that it is asked: what it had, or would have got, goes on elsewhere."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

import symbiosis
from symbiosis.base.ownership import make_folder
from symbiosis.cluster.router.router_options import RouterOptions
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.protocol.cluster_state import Member, Told, folder_of, tell
from symbiosis.serving import Engine
from symbiosis.serving.engine.engine_loop import Loop
from tests.fault_proxy import FaultProxy, deaf_listener
from tests.serving_api import Api, client, eventually, http_process, is_up, web

FRONT = "from symbiosis.cluster.router.router_process import main; main()"
LONG: dict[str, Any] = {"model": "demo", "prompt": "def average(numbers):", "max_tokens": 200, "extra_body": {"ignore_eos": True}}  # fmt: skip
DRAWS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 7, "n": 2}, {"temperature": 1.5, "top_p": 0.9, "seed": 1}]  # fmt: skip


PAUSE_S = 0.009  # before each step: a text takes seconds, during which something can happen to it


@dataclass
class Two:
    """Two servers behind a front end, one of them at the far end of a network. Placement likes that one better."""

    url: str
    far: Api
    near: Api
    network: FaultProxy

    @property
    def ready(self) -> list[int]:
        return sorted(web.get(f"{self.url}/health", timeout=10).json()["ready"])

    def sees(self, number: int, url: str) -> bool:
        """Whether the front end knows that this server is there."""
        members = web.get(f"{self.url}/cluster", timeout=10).json()["members"]
        return any((each["number"], each["url"]) == (number, url) for each in members)


def tell_of(*urls: str) -> None:
    """Let front ends know of servers at these addresses. What is equally busy is asked from the last to the first."""
    servers = [
        Member(
            name=f"demo-server-{n}", kind="server", model="demo", number=n, url=url, state="ready", pid=hash(url), batch=16
        )
        for n, url in enumerate(urls, 1)
    ]  # fmt: skip
    tell(Told(name="test", url="", members=tuple(servers)))


@contextlib.contextmanager
def front_end(folder: Path, *urls: str) -> Iterator[str]:
    """A front end for servers at these addresses."""
    make_folder(folder_of("test"))
    tell_of(*urls)
    with socket.create_server(("127.0.0.1", 0)) as listener, (folder / "stderr").open("w") as log:
        started = msgspec.json.encode(RouterOptions(cluster="test", listener=listener.fileno())).decode()
        process = subprocess.Popen(
            [sys.executable, "-c", FRONT, started], pass_fds=[listener.fileno()], stdout=subprocess.DEVNULL, stderr=log
        )
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            eventually(lambda: is_up(url))
            yield url
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    step = Loop._step
    monkeypatch.setattr(Loop, "_step", lambda self, now: (time.sleep(PAUSE_S), step(self, now))[1])
    with ExitStack() as stack:
        executor = stack.enter_context(symbiosis.Executor("demo"))
        engines = [stack.enter_context(Engine(executor.endpoint, DEMO_MODEL, memory=1 << 25)) for _ in "ab"]
        near, far = (stack.enter_context(http_process(engine)) for engine in engines)
        network = stack.enter_context(FaultProxy(far.url.replace("http://", "tcp://")))
        url = stack.enter_context(front_end(tmp_path, near.url, network.endpoint.replace("tcp://", "http://")))
        made = Two(url, far, near, network)
        eventually(lambda: made.ready == [1, 2])
        yield made


def read(two: Two, draws: dict[str, Any], found: dict[int, str], counts: list[int]) -> None:
    """Read a stream to its end."""
    fields = {**LONG, **draws, "stream": True, "stream_options": {"include_usage": True}}
    for event in client(two.url).completions.create(**fields):
        for choice in event.choices:
            found[choice.index] = found.get(choice.index, "") + choice.text
        if event.usage:
            counts.append(event.usage.completion_tokens)


@pytest.mark.timeout(180)
def test_streams_of_a_server_that_is_cut_off_go_on_elsewhere(two: Two) -> None:
    wanted = [{c.index: c.text for c in client(two.far.url).completions.create(**LONG, **draws).choices} for draws in DRAWS]  # fmt: skip
    found: list[dict[int, str]] = [{} for _ in DRAWS]
    counts: list[int] = []
    reading = [threading.Thread(target=read, args=[two, draws, into, counts]) for draws, into in zip(DRAWS, found, strict=True)]  # fmt: skip
    for thread in reading:
        thread.start()
    eventually(lambda: all(found))
    assert two.far.running and not two.near.running
    two.network.hang()
    whole = client(two.url).completions.create(**LONG, **DRAWS[0])  # it is sent into the silence
    for thread in reading:
        thread.join(60)
    assert found == wanted and sorted(counts) == [200, 200, 400], "nothing is lost, and no token comes twice"
    assert whole.choices[0].text == wanted[0][0] and whole.usage.completion_tokens == 200
    health = web.get(f"{two.url}/health").json()
    assert health["moved"] == len(DRAWS) + 1 and health["requests"] == 0 and not health["waiting"]
    assert two.ready == [1]
    two.network.resume()
    eventually(lambda: two.ready == [1, 2])
    eventually(lambda: not two.far.running and not two.near.running)


def test_a_server_to_which_nobody_can_connect_is_left_aside(two: Two) -> None:
    with deaf_listener() as address:
        url = f"http://{address}"
        tell_of(two.near.url, url)
        eventually(lambda: two.sees(2, url))
        text = client(two.url).completions.create(**{**LONG, "max_tokens": 20}).choices[0].text
        assert len(text) > 0 and two.ready == [1]
        assert web.get(f"{two.url}/health").json()["requests"] == 0


class Limping(BaseHTTPRequestHandler):
    """Says that it works, and fails at every request, as one does that lacks memory."""

    asked = 0

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._say(200, b'{"status": "serving", "requests": 0}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).asked += 1
        self._say(500, b'{"error": {"message": "MemoryError"}}')

    def log_message(self, *_: object) -> None:
        pass


def test_a_request_at_which_a_server_fails_goes_to_another_one(two: Two) -> None:
    """Placement would choose the failing one again and again, since it is the last of those that have nothing to do."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Limping) as limping:
        threading.Thread(target=limping.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{limping.server_port}"
        tell_of(two.near.url, url)
        eventually(lambda: two.sees(2, url))
        eventually(lambda: two.ready == [1, 2])
        for stream in (False, True):
            before = Limping.asked
            told = client(two.url).completions.create(**{**LONG, "max_tokens": 20}, stream=stream)
            count = len("".join(event.choices[0].text for event in told)) if stream else told.usage.completion_tokens
            assert count > 0 and Limping.asked == before + 1
        limping.shutdown()
