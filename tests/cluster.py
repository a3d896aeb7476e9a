"""A cluster for tests: the command, with a front end, servers and executors of the demo model."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from symbiosis.cluster.router.app import make_app
from symbiosis.cluster.router.router_state import RouterState
from symbiosis.cluster.router.server_registry import ServerRegistry
from symbiosis.protocol.cluster_state import Member, Told, folder_of, tell, told_by
from symbiosis.server.api_app import SECRET_HEADER
from symbiosis.server.connections import server_of
from tests.forked import Symbiosis
from tests.serving_api import eventually, web

START_S = 110.0
BEFORE = "import secrets; secrets.token_hex = lambda n: 'secret' * n"
UP = f"{BEFORE}; from symbiosis.cli.main import main; main()"
AS_FRONT = {SECRET_HEADER: "secret" * 32}  # what a front end shows to servers


@dataclass
class Front:
    """A front end of this process."""

    url: str


@dataclass
class Running:
    """A cluster that runs."""

    url: str
    process: "subprocess.Popen[str] | Symbiosis"
    name: str = "test"

    @property
    def told(self) -> Told:
        return told_by(self.name)

    def servers(self, state: str = "ready") -> list[Member]:
        return [each for each in self.told.of_kind("server") if each.state == state]


@contextlib.contextmanager
def cluster(folder: Path, text: str, forked: bool = False, forked_http: bool = True) -> Iterator[Running]:
    """Run `symbiosis cluster up` on a file with this text. Its processes import what they need, as a user's do, unless they are `forked` from
    one that has."""
    file = folder / "test.yaml"
    file.write_text(text)
    process = (
        Symbiosis("cluster", "up", str(file), before=BEFORE, errors=folder / "stderr", forked_http=forked_http)
        if forked
        else started(file)
    )
    try:
        assert process.stdout
        line = process.stdout.readline()
        found = re.fullmatch(r"cluster test at (http://\S+)/v1\n", line)
        assert found, line + (folder / "stderr").read_text()
        yield Running(found[1], process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@contextlib.contextmanager
def cluster_at(folder: Path, text: str, forked: bool = False, forked_http: bool = True) -> Iterator[Running]:
    """Run a cluster with its files in this folder. Its sockets are where this process, too, finds them, and where a socket's path is not too long."""
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory() as sockets:
        patched.setenv("XDG_RUNTIME_DIR", sockets)
        with cluster(folder, text, forked, forked_http) as found:
            yield found


@contextlib.contextmanager
def front_of(folder: Path, urls: dict[str, str], api_keys: str | None = None, trains: bool = False) -> Iterator[Front]:
    """A front end of this process, for servers: by name, which begins with that of the model, where each is."""
    members = tuple(
        Member(
            name=name,
            kind="server",
            model=name.partition("-")[0],
            number=n,
            url=url,
            state="ready",
            batch=8,
            trains=trains,
        )
        for n, (name, url) in enumerate(urls.items(), 1)
    )
    with pytest.MonkeyPatch.context() as patched, socket.create_server(("127.0.0.1", 0)) as listener:
        patched.setenv("XDG_RUNTIME_DIR", str(folder))
        folder_of("test").mkdir(parents=True)
        tell(Told(name="test", url="", members=members))
        front = RouterState(ServerRegistry("test", {}), api_keys)
        server = server_of(make_app(front), front.observer, [listener], 1.0)

        async def serve() -> None:
            following = asyncio.create_task(front.view.follow())
            await server.serve(sockets=[listener])
            following.cancel()

        thread = threading.Thread(target=asyncio.run, args=[serve()])
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            eventually(lambda: len(web.get(f"{url}/health").json().get("ready", ())) == len(urls))
            yield Front(url)
        finally:
            server.should_exit = True
            thread.join()


def started(file: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", UP, "cluster", "up", str(file)],
        stdout=subprocess.PIPE, stderr=file.with_name("stderr").open("w"), text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def wait_for_servers(running: Running, count: int) -> None:
    eventually(lambda: len(running.servers()) == count, START_S)
