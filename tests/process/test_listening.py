"""Endpoints of an executor: addresses in use, stale sockets, several at once."""

import logging
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import symbiosis
import symbiosis.client.session
from symbiosis.client.session import Session
from symbiosis.errors import ConfigError
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


def test_an_executor_answers_at_several_addresses(tmp_path: Path, serve: Callable) -> None:
    urls = ["inproc://one", f"local://{tmp_path}/x.sock", "tcp://127.0.0.1:0"]
    executor = serve(tiny_llama(), listen=urls)
    assert executor.endpoints[:2] == urls[:2]
    for endpoint in executor.endpoints:
        session = Session(endpoint)
        assert echoed(session, anything((3, 5)))
        session.close()
