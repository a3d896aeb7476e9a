"""Waiting for an executor: for as long as the user says, told of after a while, and ended by ctrl-C at once."""

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import symbiosis
from symbiosis.client.session import Session
from symbiosis.errors import ConfigError, ExecutorUnavailable
from symbiosis.protocol import Op
from symbiosis.transport import inproc, patience
from symbiosis.transport.tcp import client
from tests.conftest import tiny_llama
from tests.fault_proxy import deaf_listener
from tests.processes import WAIT_S, Program, until

SOON_S = 40.0  # far below the patience that a user has by default


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What is said of waits, at once."""
    monkeypatch.setattr(patience, "SILENT_S", 0.05)
    with caplog.at_level(logging.WARNING, "symbiosis"):
        yield lambda: [record.getMessage() for record in caplog.records if "executor at" in record.getMessage()]


def start(endpoint: str) -> symbiosis.Executor:
    return symbiosis.Executor(tiny_llama(), listen=[endpoint])


def test_patience_ends_a_wait(serve: Callable, ids: Tensor, told: Callable) -> None:
    executor = serve(tiny_llama(), listen=["inproc://patience"])
    for model in (
        symbiosis.wrap(tiny_llama(), executor.endpoint, patience=0.3),
        symbiosis.from_executor(executor.endpoint, patience=0.3),
    ):
        executor.close()
        begun = time.monotonic()
        with pytest.raises(ExecutorUnavailable):
            model(ids)
        assert 0.3 <= time.monotonic() - begun < SOON_S
        executor = serve(tiny_llama(), listen=["inproc://patience"])


@pytest.mark.parametrize("words", [{"patience": -1.0}, {"wait": -1.0}, {"patience": float("nan")}])
def test_times_that_are_none_are_refused(words: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must not be negative"):
        symbiosis.wrap(tiny_llama(), "inproc://nobody", **words)


def test_a_wait_is_told_of_once_and_so_is_its_end(url: str, told: Callable, caplog: pytest.LogCaptureFixture) -> None:
    """However many threads and models wait for the same executor."""
    first = start(url)
    sessions = [Session(first.endpoint) for _ in range(3)]
    assert all(torch.equal(s.call(Op.ECHO, 0, torch.ones(2)), torch.ones(2)) for s in sessions)
    first.close()
    caplog.clear()  # a join may have taken its time
    callers = [threading.Thread(target=s.call, args=(Op.ECHO, 0, torch.ones(2))) for s in sessions]
    for caller in callers:
        caller.start()
    until(told, "a line")
    time.sleep(0.2)  # for more of them
    assert len(told()) == 1
    assert told()[0].startswith(f"waiting for an executor at {first.endpoint}, for up to 60 s (patience=")
    assert "ctrl-C" in told()[0]
    with start(first.endpoint):
        for caller in callers:
            caller.join(WAIT_S)
        assert len(told()) == 2 and "answers, after" in told()[1]
        for session in sessions:
            session.close()


def test_a_short_wait_is_not_told_of(url: str, told: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "SILENT_S", WAIT_S)
    first = start(url)
    session = Session(first.endpoint)
    session.call(Op.ECHO, 0, torch.ones(2))
    first.close()
    with start(first.endpoint):
        session.call(Op.ECHO, 0, torch.ones(2))
        assert session.stats.reconnects == 1 and not told()
        session.close()


@pytest.mark.parametrize("build", [lambda to, **w: symbiosis.wrap(tiny_llama(), to, **w), symbiosis.from_executor])
def test_an_executor_that_is_not_up_yet_is_waited_for(build: Callable, tmp_path: Path, ids: Tensor) -> None:
    endpoint = f"local://{tmp_path}/later.sock"
    with pytest.raises(ExecutorUnavailable, match=r"Start one with.*patience=.*waits for longer"):
        build(endpoint, patience=0.1)
    executors: list[symbiosis.Executor] = []
    later = threading.Timer(0.5, lambda: executors.append(start(endpoint)))
    later.start()
    model: nn.Module = build(endpoint)
    assert torch.equal(model(ids).logits, tiny_llama()(ids).logits)
    executors[0].close()


def test_an_executor_that_does_not_come_up_is_given_up_in_time(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(ExecutorUnavailable, match=r"Start one with.* \(wait=, --wait-s waits for longer\)"):
        Session(f"local://{tmp_path}/never.sock", wait=0.3).call(Op.ECHO, 0, torch.ones(2))
    assert 0.3 <= time.monotonic() - begun < SOON_S


@pytest.mark.parametrize("build", [lambda to, **w: symbiosis.wrap(tiny_llama(), to, **w), symbiosis.from_executor])
def test_a_host_that_drops_packets_is_given_up_when_the_patience_is_over(build: Callable) -> None:
    with deaf_listener() as address:
        begun = time.monotonic()
        with pytest.raises(ExecutorUnavailable, match="patience=.*waits for longer"):
            build(f"tcp://{address}", patience=1)
        assert 1.0 <= time.monotonic() - begun < 3.0


MORE = " (patience=, $SYMBIOSIS_PATIENCE_S waits for longer)"
START = ". Start one with: symbiosis-executor MODEL --listen "


@pytest.mark.parametrize(
    ("endpoints", "text"),
    [
        (
            ["inproc://nobody"],
            "inproc://nobody (none of this process has the name). "
            "Start one with: symbiosis.Executor(model, listen='inproc://nobody'), in this program",
        ),
        (["local:///no.sock"], f"local:///no.sock (No such file or directory){START}local:///no.sock{MORE}"),
        (
            ["tcp://127.0.0.1:1?nccl=no"],
            f"tcp://127.0.0.1:1?nccl=no (it accepts no connection){START}tcp://127.0.0.1:1{MORE}",
        ),
        (["tcp://SILENT"], f"tcp://SILENT ({patience.SAYS_NOTHING}){MORE}"),
        (
            ["tcp://SILENT", "tcp://127.0.0.1:1"],
            f"tcp://SILENT ({patience.SAYS_NOTHING}) or tcp://127.0.0.1:1 (it accepts no connection){START}tcp://127.0.0.1:1{MORE}",
        ),
    ],
)
def test_the_error_says_once_what_is_wrong_with_each_endpoint(endpoints: list[str], text: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        with pytest.raises(ExecutorUnavailable) as error:
            symbiosis.from_executor([url.replace("SILENT", address) for url in endpoints], patience=0.4)
    assert str(error.value) == f"no executor at {text.replace('SILENT', address)}"


def test_a_host_that_accepts_no_connection_is_given_up_before_the_join_is(
    serve: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CONNECT_S", 0.2)
    with deaf_listener() as address:
        replicas = [f"tcp://{address}", serve(tiny_llama(), listen=["tcp://127.0.0.1:0"]).endpoint]
        begun = time.monotonic()
        assert Session(replicas, wait=60.0).welcome.manifest
        assert 0.2 <= time.monotonic() - begun < 5.0


def test_an_executor_that_breaks_off_once_it_has_let_a_client_in_is_joined_again(
    serve: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = serve(tiny_llama(), listen=["inproc://breaks"])
    session = Session(executor.endpoint, share=True)
    with monkeypatch.context() as broken:
        broken.setattr(inproc.InprocConnection, "served_weights", lambda self: self._next(0.0))
        assert session.welcome.manifest
    assert torch.equal(session.call(Op.ECHO, 0, torch.ones(2)), torch.ones(2))
    session.close()


def test_a_host_that_drops_packets_leaves_time_for_its_replica(serve: Callable, ids: Tensor) -> None:
    with deaf_listener() as address:
        replicas = [f"tcp://{address}", serve(tiny_llama(), listen=["tcp://127.0.0.1:0"]).endpoint]
        begun = time.monotonic()
        model = symbiosis.from_executor(replicas, patience=2)
        assert time.monotonic() - begun < 2.0
        assert torch.equal(model(ids).logits, tiny_llama()(ids).logits)


NEVER_UP = """
import symbiosis, torch
symbiosis.from_executor(ENDPOINT, patience=600)
"""
LOST = """
import symbiosis, torch
from symbiosis.client.session import Session
session = Session(ENDPOINT)
session.call(symbiosis.protocol.Op.ECHO, 0, torch.ones(2))
print("joined", flush=True)
while True:
    session.call(symbiosis.protocol.Op.ECHO, 0, torch.ones(2))
"""


@pytest.mark.parametrize("program", [NEVER_UP, LOST], ids=["never up", "lost"])
@pytest.mark.parametrize("scheme", ["local", "tcp"])
def test_ctrl_c_ends_a_wait_that_is_told_of(program: str, scheme: str, tmp_path: Path, processes: list) -> None:
    """In a program that knows nothing of logging."""
    executor = start(f"local://{tmp_path}/x.sock" if scheme == "local" else "tcp://127.0.0.1:0")
    if program == NEVER_UP:
        executor.close()
    script = tmp_path / "program.py"
    script.write_text(program.replace("ENDPOINT", repr(executor.endpoint)))
    running = Program(str(script))
    processes.append(running)
    if program == LOST:
        until(lambda: "joined" in running.output(), "the join")
        executor.close()
    until(lambda: "waiting for an executor at" in running.errors(), "a line")
    begun = time.monotonic()
    running.signal(signal.SIGINT)
    running.wait()
    assert time.monotonic() - begun < SOON_S
    assert "KeyboardInterrupt" in running.errors()


def test_what_answers_nothing_is_not_told_to_be_absent() -> None:
    error = patience.unavailable({"local:///x.sock": patience.Reason.of(TimeoutError("timed out"))})
    assert "says nothing" in str(error) and "Start one" not in str(error)


@pytest.mark.parametrize("build", [lambda to, **w: symbiosis.wrap(tiny_llama(), to, **w), symbiosis.from_executor])
def test_an_executor_that_is_just_started_again_is_waited_for(build: Callable, url: str, ids: Tensor) -> None:
    """Whether it was ended in order, or its socket lies there still; and the line of the wait says why."""
    first = start(url)
    endpoint = first.endpoint
    first.close()
    if endpoint.startswith("inproc://"):
        pytest.skip("an executor of this process is not started again by others")
    executors: list[symbiosis.Executor] = []
    later = threading.Timer(1.0, lambda: executors.append(start(endpoint)))
    later.start()
    model: nn.Module = build(endpoint)
    assert torch.equal(model(ids).logits, tiny_llama()(ids).logits)
    later.join()
    executors[0].close()


def test_the_line_of_a_first_wait_says_why(tmp_path: Path, told: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "SILENT_S", 0.1)
    with pytest.raises(ExecutorUnavailable):
        symbiosis.from_executor(f"local://{tmp_path}/never.sock", patience=0.5)
    (line,) = told()
    assert "patience=" in line and "Start one with" in line and "No such file" in line


def test_the_argument_that_went_is_still_taken(tmp_path: Path) -> None:
    begun = time.monotonic()
    for wait in (0, 0.3):
        with pytest.warns(FutureWarning, match="patience="), pytest.raises(ExecutorUnavailable):
            symbiosis.from_executor(f"local://{tmp_path}/never.sock", wait=wait)
    assert 0.3 <= time.monotonic() - begun < SOON_S
