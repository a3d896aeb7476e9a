"""Endpoints of an executor: addresses in use, stale sockets, several at once."""

import logging
import signal
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import symbiosis
import symbiosis.client.session
from symbiosis.client.session import Session
from symbiosis.config import Options
from symbiosis.errors import ConfigError
from symbiosis.executor.daemon import serve_store
from symbiosis.executor.gpu.launcher import Launcher
from symbiosis.executor.model.store import Store
from symbiosis.executor.server import Server
from symbiosis.transport.local import listener as local
from symbiosis.transport.reactor import Reactor
from tests.conftest import tiny_llama
from tests.transports import anything, echoed


def test_an_address_in_use_is_refused(executor: symbiosis.Executor) -> None:
    with pytest.raises(ConfigError, match="already|cannot listen"):
        symbiosis.Executor(tiny_llama(), listen=[executor.endpoint])


def test_a_stale_socket_is_replaced_and_another_file_is_not(tmp_path: Path, serve: Callable) -> None:
    path = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    assert stat.S_ISSOCK(path.stat().st_mode)
    executor = serve(tiny_llama(), listen=[f"local://{path}"])
    session = Session(executor.endpoint)
    assert echoed(session, anything((3, 5)))
    session.close()
    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(ConfigError, match="is not a socket"):
        symbiosis.Executor(tiny_llama(), listen=[f"local://{file}"])
    assert file.read_text() == "kept"


def test_an_executor_that_closes_leaves_a_successors_socket_alone(tmp_path: Path, serve: Callable) -> None:
    path = tmp_path / "x.sock"
    first = serve(tiny_llama(), listen=[f"local://{path}"])
    path.unlink()
    second = serve(tiny_llama(), listen=[f"local://{path}"])
    first.close()
    session = Session(second.endpoint)
    assert echoed(session, anything((3, 5)))
    session.close()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_executor_on_a_gpu_says_whom_local_is_for(
    device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Reactor()
    with caplog.at_level(logging.INFO, "symbiosis"):
        local.LocalListener(f"{tmp_path}/socket", loop, SimpleNamespace(device=torch.device(device))).close()  # type: ignore[arg-type]
    assert ("tenants of one owner only" in caplog.text) == (device == "cuda")
    loop.close()


@pytest.fixture
def prepares(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What an executor has prepared, for which it takes its time, as a GPU does whose kernels have yet to be compiled."""
    done: list[str] = []

    def slowly(_: Launcher) -> None:
        time.sleep(0.3)
        done.append("the GPU")

    monkeypatch.setattr(Launcher, "use_stream", slowly)
    return done


def test_a_program_has_its_executor_when_that_is_ready(prepares: list[str], serve: Callable) -> None:
    serve(tiny_llama())
    assert prepares


def test_the_daemon_says_that_it_is_ready_when_it_is(prepares: list[str], tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    found: list[list[str]] = []

    def ready(server: Server) -> None:
        found.append([*prepares])
        server.drain()

    serve_store(Store(tiny_llama()), Options(listen=(f"local://{tmp_path}/a.sock",)), None, ready)
    for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
        signal.signal(number, handler)
    assert found == [["the GPU"]]


def test_an_executor_that_cannot_prepare_tells_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Launcher) -> None:
        raise RuntimeError("no GPU any more")

    monkeypatch.setattr(Launcher, "use_stream", fails)
    with pytest.raises(RuntimeError, match="no GPU any more"):
        symbiosis.Executor(tiny_llama())


def test_an_executor_answers_at_several_addresses(tmp_path: Path, serve: Callable) -> None:
    urls = ["inproc://one", f"local://{tmp_path}/x.sock", "tcp://127.0.0.1:0"]
    executor = serve(tiny_llama(), listen=urls)
    assert executor.endpoints[:2] == urls[:2]
    for endpoint in executor.endpoints:
        session = Session(endpoint)
        assert echoed(session, anything((3, 5)))
        session.close()
