"""Endpoints of an executor: addresses in use, stale sockets, several at once."""

import errno
import logging
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import symbiosis
import symbiosis.client.session
from symbiosis.client.connection import reconnect
from symbiosis.client.session import Session
from symbiosis.errors import ConfigError, ExecutorUnavailable
from symbiosis.executor.daemon import serve_store
from symbiosis.executor.gpu.launcher import Launcher
from symbiosis.executor.model.store import Store
from symbiosis.executor.options import Options
from symbiosis.transport.local import listener as local
from symbiosis.transport.reactor import Reactor
from tests.conftest import tiny_llama
from tests.processes import Client, Executor, Say, killed_at_the_end, save_tiny_llama
from tests.transports import anything, echoed


def test_an_address_in_use_is_refused(executor: symbiosis.Executor) -> None:
    with pytest.raises(ConfigError, match="already|cannot listen"):
        symbiosis.Executor(tiny_llama(), listen=[executor.endpoint])


def test_one_that_is_in_use_leaves_none_behind(executor: symbiosis.Executor, tmp_path: Path, serve: Callable) -> None:
    url = f"local://{tmp_path}/first.sock"
    with pytest.raises(ConfigError, match="already|cannot listen"):
        symbiosis.Executor(tiny_llama(), listen=[url, executor.endpoint])
    assert not (tmp_path / "first.sock").exists()
    assert serve(tiny_llama(), listen=[url]).endpoint == url


def test_a_program_that_is_interrupted_while_its_executor_starts_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By ctrl-C, for example: nobody could close it."""
    before = set(threading.enumerate())

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)

    monkeypatch.setattr(Launcher, "use_stream", prepare_slowly(interrupt))
    with pytest.raises(KeyboardInterrupt):
        symbiosis.Executor(tiny_llama(), listen=[f"local://{tmp_path}/x.sock"])
    assert not (tmp_path / "x.sock").exists()
    assert not [
        thread for thread in threading.enumerate() if thread.name == "symbiosis-executor" and thread not in before
    ]


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


def prepare_slowly(then: Callable[[], object]) -> Callable[[Launcher], None]:
    """Takes its time, as a GPU does whose kernels have yet to be compiled."""

    def use_stream(_: Launcher) -> None:
        time.sleep(0.3)
        then()

    return use_stream


def test_a_program_has_its_executor_when_that_is_ready(monkeypatch: pytest.MonkeyPatch, serve: Callable) -> None:
    prepared = threading.Event()
    monkeypatch.setattr(Launcher, "use_stream", prepare_slowly(prepared.set))
    serve(tiny_llama())
    assert prepared.is_set()


def daemon_that_prepares(say: Say, where: str) -> None:
    Launcher.use_stream = prepare_slowly(lambda: say("prepared"))  # type: ignore[method-assign, assignment]
    serve_store(Store(tiny_llama()), Options(listen=(where,)), None, lambda _: say("ready"))


def test_the_daemon_says_that_it_is_ready_when_it_is(tmp_path: Path) -> None:
    with killed_at_the_end() as processes:
        daemon = Client(daemon_that_prepares, f"local://{tmp_path}/a.sock")
        processes.append(daemon)
        assert [daemon.heard(), daemon.heard()] == ["prepared", "ready"]
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0


def test_an_executor_that_cannot_prepare_tells_its_program(monkeypatch: pytest.MonkeyPatch, serve: Callable) -> None:
    def fails(_: Launcher) -> None:
        raise RuntimeError("no GPU any more")

    with monkeypatch.context() as broken, pytest.raises(RuntimeError, match="no GPU any more"):
        broken.setattr(Launcher, "use_stream", fails)
        symbiosis.Executor(tiny_llama(), listen=["inproc://once"])
    session = Session(serve(tiny_llama(), listen=["inproc://once"]).endpoint)  # it has left its address
    assert echoed(session, anything((3, 5)))
    session.close()


def test_one_that_is_stopped_is_not_told_to_be_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnect, "JOIN_S", 0.5)
    with killed_at_the_end() as processes:
        stopped = Executor(
            save_tiny_llama(tmp_path / "model"), f"--listen=local://{tmp_path}/a.sock", log=tmp_path / "log"
        )
        processes.append(stopped)
        stopped.signal(signal.SIGSTOP)
        with pytest.raises(ExecutorUnavailable, match="takes connections, and says nothing") as told:
            _ = Session(stopped.endpoint).welcome
        assert "Start one" not in str(told.value)


def test_an_executor_answers_at_several_addresses(tmp_path: Path, serve: Callable) -> None:
    urls = ["inproc://one", f"local://{tmp_path}/x.sock", "tcp://127.0.0.1:0"]
    executor = serve(tiny_llama(), listen=urls)
    assert executor.endpoints[:2] == urls[:2]
    for endpoint in executor.endpoints:
        session = Session(endpoint)
        assert echoed(session, anything((3, 5)))
        session.close()


def test_a_client_for_whom_no_descriptor_is_left_waits_without_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, tried = Reactor(), []
    inbox: Any = SimpleNamespace(device=torch.device("cpu"), left=lambda peer: None)
    listener = local.LocalListener(f"{tmp_path}/socket", loop, inbox)
    listening = listener._socket

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(listening, name)

        def accept(self) -> Any:
            tried.append(True)
            raise OSError(errno.EMFILE, "Too many open files")

    listener._socket = Full()  # type: ignore[assignment]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(f"{tmp_path}/socket")
        for _ in range(20):
            loop.poll(0.01)
        assert len(tried) == 1
        listener.tick()
        loop.poll(0.01)
        assert len(tried) == 2, "it is looked again"
        listener._socket = listening
        listener.tick()
        loop.poll(0.01)
        assert len(listener._peers) == 1
    listener.close()
    loop.close()
