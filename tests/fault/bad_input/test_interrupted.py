"""Calls that are interrupted, connections that end in the middle, and processes of other users."""

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import symbiosis
from symbiosis import transport
from symbiosis.client.session import Session
from symbiosis.errors import CallError, ConnectionLost
from symbiosis.protocol import (
    Hello,
    Op,
    Refusal,
    decode_from_executor,
)
from tests.conftest import tiny_llama
from tests.fault.bad_input.raw import WAIT_S, WIDTH, rows
from tests.processes import until


@pytest.mark.parametrize("scheme", ["local", "tcp", "inproc"])
def test_the_call_after_an_interrupted_one_gets_its_own_answer(scheme: str, start: Callable) -> None:
    """Ctrl-C in the middle of a call: its late reply must not be taken for the next one's."""
    listen = {"listen": ["inproc://interrupted"]} if scheme == "inproc" else {}
    executor = start(scheme, policy="lockstep", **listen)
    other, session = Session(executor.endpoint), Session(executor.endpoint)
    other.call(Op.FORWARD, 1, rows(1))
    assert session.welcome  # joined, so that the interrupt meets the call and not the join

    def interrupt() -> None:
        until(lambda: len(executor.server.batcher) == 1)
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        session.call(Op.FORWARD, 1, rows(3))  # waits for the other session
    helper.join(WAIT_S)
    other.close()
    big = torch.arange(1000.0 * WIDTH).view(1000, WIDTH)
    assert torch.equal(session.call(Op.ECHO, 0, big), big)
    session.close()


def test_an_unexpected_hang_up_is_a_lost_connection(tmp_path: Path) -> None:
    """Something that accepts and says nothing, or nonsense, is no executor."""
    path = tmp_path / "mute.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(ConnectionLost, match="takes connections, and says nothing"):
            transport.connect(f"local://{path}", Hello(), 0.2)

        def nonsense() -> None:
            peer = server.accept()[0]
            peer.recv(4096)
            peer.send(b"\xc1nonsense")
            peer.close()

        server.accept()[0].close()
        thread = threading.Thread(target=nonsense)
        thread.start()
        with pytest.raises(CallError, match="not a control message"):
            transport.connect(f"local://{path}", Hello(), WAIT_S)
        thread.join(WAIT_S)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_users_process_is_turned_away_whatever_the_sockets_mode() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "executor.sock"
        with symbiosis.Executor(tiny_llama(), listen=f"local://{path}") as executor:
            assert path.stat().st_mode & 0o777 == 0o600
            assert answer_to_user(65534, path) == b"no way in"
            Path(folder).chmod(0o755)
            path.chmod(0o666)
            refused = decode_from_executor(answer_to_user(65534, path))
            assert isinstance(refused, Refusal) and "own user only" in refused.message
            assert not executor.server.sessions


def answer_to_user(uid: int, path: Path) -> bytes:
    """What a process of that user hears when it connects and asks to join."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not (pid := os.fork()):
        try:
            os.setuid(uid)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(WAIT_S)
                sock.connect(str(path))
                theirs.send(sock.recv(4096))
        except OSError:
            theirs.send(b"no way in")
        finally:
            os._exit(0)
    with ours, theirs:
        ours.settimeout(WAIT_S)
        heard = ours.recv(4096)
    os.waitpid(pid, 0)
    return heard
