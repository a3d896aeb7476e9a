"""A server in two processes for tests: the engine in this one, HTTP in another; and the command with all of its processes."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import symbiosis
from symbiosis.base import procs
from symbiosis.cluster.controller.local_process import descendants
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.executor.observe.process_figures import command_of
from symbiosis.server.ipc.engine_ipc import EngineReady, FrontOptions
from symbiosis.server.ipc.engine_server import EngineServer
from symbiosis.server.launch.serve_processes import RestartingChild, http_words
from symbiosis.serving import Engine
from tests import light
from tests.forked import Symbiosis

WAIT_S = 60.0
# No test speaks TLS, and reading the certificates for it would take longer than most answers. No connection is kept.
web = httpx.Client(verify=False, limits=httpx.Limits(max_keepalive_connections=0))


def eventually(check: Callable[[], object], seconds: float = WAIT_S) -> None:
    """Until it holds; what fails is what it last said."""
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def is_up(url: str) -> bool:
    try:
        return web.get(f"{url}/health", timeout=WAIT_S).status_code == 200
    except httpx.TransportError:
        return False


def client(url: str, key: str = "none") -> openai.OpenAI:
    plain = openai.DefaultHttpxClient(verify=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=WAIT_S, http_client=plain)


def started(*words: str, before: str) -> "subprocess.Popen[str]":
    code = f"{before}\nfrom symbiosis.cli.main import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )  # fmt: skip


def name_of(pid: int) -> str:
    """By which the kernel knows it."""
    return Path(f"/proc/{pid}/comm").read_text()


@dataclass
class Api:
    """What tests see of a server."""

    url: str
    engine: Engine
    http: RestartingChild

    @property
    def client(self) -> openai.OpenAI:
        return client(self.url)

    @property
    def running(self) -> int:
        figures = self.engine.figures()
        return figures.running + figures.waiting


@contextlib.contextmanager
def http_process(engine: Engine, training: Any = None, forked: bool = True, **options: Any) -> Iterator[Api]:
    """HTTP for an engine of this process, and for a training service beside it. It is forked from a process that has imported what it needs,
    unless it is to be as a user's."""
    options.setdefault("trains", training is not None)
    options.setdefault("model", "demo")
    options.setdefault("folder", str(DEMO_MODEL))
    ours, theirs = socket.socketpair()
    http = RestartingChild("the HTTP process")
    light.begin()
    popen = light.popen if forked else procs.Popen
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with theirs, pytest.MonkeyPatch.context() as patched:
            patched.setattr(procs, "Popen", popen)
            http.start(http_words(listener, theirs, FrontOptions(**options)), (listener.fileno(), theirs.fileno()))
        welcome = EngineReady(
            model=options["model"], longest=engine.longest, most_tokens=engine.most_tokens, vocabulary=engine.vocabulary,
            width=engine.width, ends=tuple(engine.ends),
        )  # fmt: skip
        link = EngineServer(engine, ours, welcome, training and training.ask)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            eventually(lambda: is_up(url))
            yield Api(url, engine, http)
        finally:
            link.close()
            http.kill()


@contextlib.contextmanager
def demo_engine() -> Iterator[Engine]:
    """An engine of the demo model, on an executor of this process."""
    with symbiosis.Executor("demo") as executor, Engine(executor.endpoint, DEMO_MODEL, memory=1 << 25) as engine:
        yield engine


@contextlib.contextmanager
def demo_api() -> Iterator[Api]:
    """HTTP for an engine of the demo model and its adapters, on an executor of this process."""
    with (
        symbiosis.Executor("demo") as executor,
        Engine(executor.endpoint, DEMO_MODEL, adapters=DEMO_MODEL / "adapters", memory=1 << 25) as engine,
        http_process(engine, adapters=str(DEMO_MODEL / "adapters")) as api,
    ):
        yield api


class Command:
    """`symbiosis serve demo ...`, with its three processes. `before` is run by the first one. They import what they need, as a user's do, unless
    they are `forked` from one that has."""

    def __init__(self, *arguments: str, before: str = "", forked: bool = False, forked_http: bool = True) -> None:
        words = ("serve", "demo", "--port", "0", "--memory", "33554432", *arguments)
        self.process = (
            Symbiosis(*words, before=before, forked_http=forked_http) if forked else started(*words, before=before)
        )
        self.errors: list[str] = []
        assert self.process.stdout and self.process.stderr
        self._reader = threading.Thread(target=self.errors.extend, args=(self.process.stderr,), daemon=True)
        self._reader.start()
        line = self.process.stdout.readline()
        assert (found := re.search(r"at (http://\S+)/v1, executor at (\S+)", line)), self.errors
        self.url, self.executor = found[1], found[2]
        assert is_up(self.url), "it said that it is ready"

    def child(self, module: str) -> int:
        """The number of the process that runs this module."""
        return next(pid for pid in descendants(self.process.pid) if module in (command_of(pid) + name_of(pid)))

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe
            pipe.close()
