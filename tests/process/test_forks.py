"""Forked children: sessions are joined anew, answers are tested by the child itself, and an embedded executor stays its parent's."""

import copy
import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import symbiosis
from symbiosis.base import forks
from symbiosis.client.session import Session
from symbiosis.errors import CallError, ExecutorUnavailable
from symbiosis.protocol import Op
from tests.processes import Client, Executor, Process
from tests.unit.test_verify import BATCH, EXECUTOR, layer, of


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def test_forked_process_joins_anew(ids: Tensor, llama: nn.Module, serve: Callable, tmp_path: Path) -> None:
    executor = serve(llama, listen=[f"local://{tmp_path}/x.sock"])
    model = symbiosis.wrap(copy.deepcopy(llama), executor.endpoint)
    expected = logits(model, ids)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(logits(model, ids), expected) else 1)
    torch.set_num_threads(threads)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(logits(model, ids), expected)


def called_after_a_fork_by_libc(say: Callable, url: str, leaves: bool) -> tuple[bool, bool, int]:
    """Whether parent and child got their answers, the child in a session of its own, and how often the parent had to join again."""
    session, x = Session(url), torch.ones(2, 3)
    number = session.welcome.session
    for _ in range(6):  # CPython hangs in a child if another thread waited for its lock when it was forked
        reader, writer = os.pipe()
        if not (child := ctypes.PyDLL(None).fork()):
            signal.alarm(8)
            if leaves:
                session.close()
            else:
                right = torch.equal(session.call(Op.ECHO, 0, x), x) and session.welcome.session != number
                os.write(writer, b"y" if right else b"n")
            os._exit(0)
        os.close(writer)
        theirs = os.read(reader, 1) == b"y"
        os.close(reader)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGALRM:
            break
    return torch.equal(session.call(Op.ECHO, 0, 2 * x), 2 * x), theirs or leaves, session.stats.reconnects


@pytest.mark.parametrize("leaves", [False, True], ids=["calls", "leaves"])
@pytest.mark.parametrize("listen", ["local://{}/x.sock", "tcp://127.0.0.1:0"], ids=["local", "tcp"])
def test_a_child_that_python_is_not_told_of_leaves_its_parents_session_alone(
    listen: str, leaves: bool, processes: list[Process], tmp_path: Path
) -> None:
    executor = Executor("demo", "--listen", listen.format(tmp_path), log=tmp_path / "log")
    processes.append(executor)
    client = Client(called_after_a_fork_by_libc, executor.endpoint, leaves)
    processes.append(client)
    assert client.result() == (True, True, 0)


def test_forked_process_leaves_the_connections_of_its_parents_threads_alone(
    llama: nn.Module, serve: Callable, tmp_path: Path
) -> None:
    """The thread that forks has one of its own, and another thread holds the session's."""
    executor = serve(llama, listen=[f"local://{tmp_path}/x.sock"])
    session, x = Session(executor.endpoint), torch.ones(2, 3)
    assert session.welcome
    with session._lock:  # as another thread does in a call
        assert torch.equal(session.call(Op.ECHO, 0, x), x) and len(session._lanes) == 1
        child = os.fork()
        if child == 0:
            right = torch.equal(session.call(Op.ECHO, 0, 2 * x), 2 * x)
            os._exit(0 if right and not len(session._lanes) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(session.call(Op.ECHO, 0, x), x)
    assert session.stats.reconnects == 0
    session.close()


def test_forked_process_cannot_use_an_executor_of_its_parent(llama: nn.Module, ids: Tensor) -> None:
    """The thread that answers is the parent's: the child is told so at once, and the parent goes on."""
    with symbiosis.Executor(copy.deepcopy(llama)) as executor:
        model = symbiosis.wrap(copy.deepcopy(llama), executor.endpoint)
        expected = logits(model, ids)
        child = os.fork()
        if child == 0:
            begun = time.monotonic()
            try:
                logits(model, ids)
            except ExecutorUnavailable as error:
                os._exit(0 if "of this process" in str(error) and time.monotonic() - begun < 5 else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(logits(model, ids), expected)


def test_a_forked_child_tests_its_answers_by_itself() -> None:
    """Also if a thread of its parent is at it then."""
    x_TK, w_KN, proofs = layer(torch.bfloat16, 64, 64)
    drift = proofs._drifts[0, Op.FORWARD, torch.bfloat16]
    lie = of(lambda y: 1.003 * y)
    with drift._lock:
        pid = os.fork()
        if pid == 0:
            found = 1
            for seed in range(30):
                x_TK = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
                try:
                    proofs.check(EXECUTOR, Op.FORWARD, 0, x_TK, lie(x_TK, w_KN))  # type: ignore[arg-type]
                except CallError:
                    found = 0
            os._exit(found)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("by_libc", [False, True], ids=["Python", "libc"])
def test_a_child_with_its_parents_process_id_is_noticed(by_libc: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are 1 where a container's first process has a child in a namespace of its own."""
    forgotten = list[int]()
    monkeypatch.setattr(forks, "_forget", [lambda: forgotten.append(1)])
    monkeypatch.setattr(os, "getpid", lambda: forks._known[0])
    child = ctypes.CDLL(None).fork() if by_libc else os.fork()
    if child == 0:
        forks.look_for_fork()
        forks.look_for_fork()
        os._exit(len(forgotten))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1 and not forgotten
