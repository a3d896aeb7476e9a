"""CUDA MPS: found, joined, started and stopped; without a GPU by a stand-in for its tool, with one by the tool itself."""

import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from symbiosis.errors import ConfigError
from symbiosis.executor import daemon, mps
from symbiosis.executor.loop import ExecutorLoop
from symbiosis.executor.model.load import load_model
from symbiosis.executor.mps import CONTROL, LOGS, PIPES, PipesState
from symbiosis.executor.options import Options
from tests.processes import WAIT_S, Client, Say, killed_at_the_end, until


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """To be called when only silence is waited for: the stand-in itself may need longer on a busy machine."""
    return lambda: monkeypatch.setattr(mps, "ANSWER_S", 0.3)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged as a warning by mps.py."""
    said: list[str] = []
    monkeypatch.setattr(mps.logger, "warning", said.append)
    return said


def gone(pipes: Path) -> None:
    until(lambda: mps.state(pipes) is PipesState.ABSENT, "the end of the daemon")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# ---------------------------------------------------------------- whether one serves


def test_no_daemon(fake_mps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mps.state(fake_mps) is PipesState.ABSENT
    fake_mps.mkdir()
    (fake_mps / "control").touch()
    assert mps.state(fake_mps) is PipesState.ABSENT, "a socket that a daemon left behind"
    monkeypatch.setenv("FAKE_MPS", "fail")
    assert mps.state(fake_mps) is PipesState.ABSENT


def test_a_daemon_that_hangs_is_not_waited_for(
    fake_mps: Path, impatient: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mps.running() as pipes:
        assert mps.state(pipes) is PipesState.SERVES
        monkeypatch.setenv("FAKE_MPS", "hang")
        impatient()
        begun = time.monotonic()
        assert mps.state(pipes) is PipesState.SILENT
        assert time.monotonic() - begun < WAIT_S


def test_a_shared_socket_counts_where_the_tool_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container into which the pipes of its host are mounted."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(PIPES, str(tmp_path))
    (tmp_path / "control").touch()
    assert mps.state(tmp_path) is PipesState.SERVES
    with mps.running() as pipes:
        assert pipes == tmp_path


def test_where_to_look(fake_mps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mps.places() == [fake_mps, tmp_path / "symbiosis" / "mps"]
    monkeypatch.setenv(PIPES, "/somewhere")
    assert mps.places() == [Path("/somewhere")]


# ---------------------------------------------------------------- starting and stopping


def test_one_is_started_where_clients_look_and_stopped(
    fake_mps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with mps.running() as pipes:
        assert pipes == fake_mps and os.environ[PIPES] == str(fake_mps)
        assert mps.state(pipes) is PipesState.SERVES
        assert "no variable" in mps.how_to_join(pipes)
        logs = tmp_path / "symbiosis" / "mps-log"
        assert [mode(path) for path in (pipes, logs, logs.parent)] == [0o700] * 3
        inherited = (pipes / "environment").read_text().splitlines()
        assert {f"{PIPES}={pipes}", f"{LOGS}={logs}"} <= set(inherited)
        assert not any(line.startswith("CUDA_VISIBLE_DEVICES=") for line in inherited), "it would renumber the devices"
    gone(pipes)


@pytest.mark.parametrize("obstacle", ["a file", "a link", "open to others", "another user's", "another user's daemon"])
def test_a_default_place_that_is_not_free(fake_mps: Path, tmp_path: Path, obstacle: str) -> None:
    if obstacle == "a file":
        fake_mps.touch()
    elif obstacle == "a link":
        (tmp_path / "trap").mkdir()
        fake_mps.symlink_to(tmp_path / "trap")
    elif obstacle == "open to others":
        fake_mps.mkdir()
        fake_mps.chmod(0o777)
    elif os.getuid() == 0:
        fake_mps.mkdir()
        os.chown(fake_mps, 12345, 12345)
        if obstacle == "another user's daemon":
            (fake_mps / "control").touch()
            assert mps.state(fake_mps) is PipesState.FOREIGN
    else:
        pytest.skip("only root can make a directory of another user")
    with mps.running() as pipes:
        assert pipes == tmp_path / "symbiosis" / "mps" and mode(pipes) == 0o700
        assert f"{PIPES}={pipes}" in mps.how_to_join(pipes)
        os.environ.pop(PIPES)
        with mps.running() as joined:
            assert joined == pipes, "a second executor finds the first one's"
        assert mps.state(pipes) is PipesState.SERVES, "and leaves it"
    gone(pipes)


def test_a_default_place_of_our_own_is_closed_to_others(fake_mps: Path) -> None:
    fake_mps.mkdir()
    fake_mps.chmod(0o755)
    with mps.running() as pipes:
        assert pipes == fake_mps and mode(pipes) == 0o700


def test_the_place_that_a_user_named(fake_mps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "named"
    named.mkdir()
    named.chmod(0o750)
    monkeypatch.setenv(PIPES, str(named))
    monkeypatch.setenv(LOGS, str(tmp_path / "logs"))
    with mps.running() as pipes:
        assert pipes == named and mode(named) == 0o750
        assert mode(tmp_path / "logs") == 0o700
    gone(named)


def test_a_daemon_that_was_there_stays(fake_mps: Path) -> None:
    fake_mps.mkdir()
    subprocess.run([CONTROL, "-d"], env={**os.environ, PIPES: str(fake_mps)}, check=True, timeout=WAIT_S)
    pid = mps.daemon_pid(fake_mps)
    with mps.running() as pipes:
        assert pipes == fake_mps
    assert mps.state(fake_mps) is PipesState.SERVES and mps.daemon_pid(fake_mps) == pid


def test_a_daemon_that_took_the_place_of_ours_stays(fake_mps: Path) -> None:
    with mps.running() as pipes:
        mps.quit_daemon(pipes)
        gone(pipes)
        subprocess.run([CONTROL, "-d"], check=True, timeout=WAIT_S)
    assert mps.state(pipes) is PipesState.SERVES


def test_a_daemon_that_is_already_gone(fake_mps: Path, warnings: list[str]) -> None:
    with mps.running() as pipes:
        mps.quit_daemon(pipes)
        gone(pipes)
    assert not warnings


def test_a_daemon_that_others_use_stays(fake_mps: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with mps.running() as pipes:
        (pipes / "clients").write_text(f"{os.getppid()}\n{os.getpid()}\n")
        monkeypatch.setattr(mps, "ANSWER_S", 1.0)
    assert mps.daemon_pid(pipes), "the stand-in's quit removes it"
    assert f"echo quit | {PIPES}={pipes} {CONTROL}" in warnings[0]


def test_others_that_are_leaving_are_waited_for(fake_mps: Path) -> None:
    with mps.running() as pipes:
        (pipes / "clients").write_text(str(os.getppid()))
        threading.Timer(0.5, (pipes / "clients").write_text, [""]).start()
    gone(pipes)


def test_a_daemon_that_hangs_at_the_end(
    fake_mps: Path, impatient: Callable, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with mps.running():
        monkeypatch.setenv("FAKE_MPS", "hang")
        impatient()
        begun = time.monotonic()
    assert time.monotonic() - begun < WAIT_S
    assert "does not answer" in warnings[0]


def test_a_client_that_stops_the_daemon_need_not_wait_for_itself(fake_mps: Path) -> None:
    """As the executor: it has a CUDA context until its process is gone, and `quit` waits for that."""
    with killed_at_the_end() as processes:
        client = Client(client_with_a_daemon, dict(os.environ))
        processes.append(client)
        pipes = Path(client.heard())
        assert client.result() < 5, "it waits a second for the tool, which then goes on alone"
        client.wait()
        gone(pipes)


def client_with_a_daemon(say: Say, environment: dict[str, str]) -> float:
    os.environ.update(environment)
    os.environ[PIPES] = str(Path(environment["XDG_RUNTIME_DIR"]) / "pipes")
    with mps.running() as pipes:
        (pipes / "clients").write_text(str(os.getpid()))
        say(str(pipes))
        begun = time.monotonic()
    return time.monotonic() - begun


# ---------------------------------------------------------------- what goes wrong is said


def test_it_is_not_installed(fake_mps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="nvidia-compute-utils"), mps.running():
        pass


def test_it_does_not_start(fake_mps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "ANSWER_S", 1.0)
    monkeypatch.setenv("FAKE_MPS", "fail")
    with pytest.raises(ConfigError, match="no GPU that it could share.*mps-log"), mps.running():
        pass


def test_it_hangs_when_started(fake_mps: Path, impatient: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MPS", "hang")
    impatient()
    with pytest.raises(ConfigError, match="cannot start CUDA MPS: .*timed out"), mps.running():
        pass


def test_the_place_that_a_user_named_is_taken(
    fake_mps: Path, tmp_path: Path, impatient: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PIPES, str(tmp_path))
    (tmp_path / "control").touch()
    monkeypatch.setenv("FAKE_MPS", "hang")
    impatient()
    with (
        pytest.raises(ConfigError, match="has a daemon that does not answer.*set CUDA_MPS_PIPE_DIRECTORY"),
        mps.running(),
    ):
        pass


# ---------------------------------------------------------------- the executor


@pytest.fixture
def on_a_pretended_gpu(fake_mps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PipesState]]:
    """`daemon.serve` with the model on the CPU whatever the device, ending when it is ready; the states seen then."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    seen: list[PipesState] = []

    def end(server: ExecutorLoop, ready: Any) -> None:
        seen.append(mps.state(mps.places()[0]))
        for listener in server.listeners:
            listener.close()
        server.reactor.close()

    monkeypatch.setattr(daemon, "load_model", lambda name, dtype, device, *_: load_model(name, dtype))
    monkeypatch.setattr(daemon, "set_up_logging", lambda log_format: None)
    monkeypatch.setattr(daemon.ExecutorLoop, "run", end)
    yield seen
    for number, handler in handlers.items():
        signal.signal(number, handler)


def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[str]:
    """What the executor logs."""
    events: list[str] = []
    monkeypatch.setattr(daemon, "log", lambda level, event, **fields: events.append(event))
    daemon.serve("demo", Options(listen=(f"local://{tmp_path}/x.sock",), **options))
    return events


def test_the_executor_starts_and_stops_it(
    on_a_pretended_gpu: list[PipesState], fake_mps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = serve(tmp_path, monkeypatch, device="cuda:0", mps=True)
    assert events[0] == f"CUDA MPS is in {fake_mps}: clients on this host need no variable"
    assert on_a_pretended_gpu == [PipesState.SERVES]
    gone(fake_mps)


def test_the_executor_warns_without_it(
    on_a_pretended_gpu: list[PipesState], fake_mps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = serve(tmp_path, monkeypatch, device="cuda")
    assert "300 us" in events[0] and "--mps" in events[0]
    assert on_a_pretended_gpu == [PipesState.ABSENT]
    assert serve(tmp_path, monkeypatch, device="cpu") == ["memory", "stopped"]
    with mps.running():
        assert serve(tmp_path, monkeypatch, device="cuda") == ["memory", "stopped"], "nothing to warn of"


def test_an_executor_that_cannot_load_stops_it(
    on_a_pretended_gpu: list[PipesState], fake_mps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="/nowhere"):
        daemon.serve("/nowhere", Options(device="cuda", mps=True))
    gone(fake_mps)


def test_an_executor_that_is_told_to_end_while_it_loads_stops_it(fake_mps: Path) -> None:
    with killed_at_the_end() as processes:
        executor = Client(executor_that_loads_for_ever, dict(os.environ))
        processes.append(executor)
        pipes = Path(executor.heard())
        assert mps.state(pipes) is PipesState.SERVES
        executor.signal(signal.SIGTERM)
        executor.wait()
        gone(pipes)


def executor_that_loads_for_ever(say: Say, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.environ[PIPES] = str(Path(environment["XDG_RUNTIME_DIR"]) / "pipes")

    def load(*arguments: object) -> None:
        say(os.environ[PIPES])
        time.sleep(WAIT_S)

    daemon.load_model = load  # type: ignore[assignment]
    daemon.serve("demo", Options(device="cuda", mps=True))


# ---------------------------------------------------------------- on a GPU

NO_MPS = not torch.cuda.is_available() or shutil.which(CONTROL) is None
EXECUTOR = "from symbiosis.cli.main import executor_main; executor_main()"
CLIENT = """
import sys, torch, symbiosis
from symbiosis.executor.model.load import load_model
model, split = load_model("demo", device="cuda"), symbiosis.wrap(load_model("demo", device="cuda"), sys.argv[1])
ids = torch.arange(3, 12, device="cuda").unsqueeze(0)
with torch.no_grad():
    assert torch.equal(split(ids).logits, model(ids).logits)
"""


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Pipes of the test's own, with a path short enough for sockets; whatever was started there is gone at the end."""
    if NO_MPS:
        pytest.skip(f"needs a CUDA device and {CONTROL}")
    directory = Path(tempfile.mkdtemp(prefix="mps-", dir="/tmp"))
    pipes = directory / "pipes"
    monkeypatch.setenv(PIPES, str(pipes))
    monkeypatch.setenv(LOGS, str(directory / "log"))
    yield pipes
    if pid := mps.daemon_pid(pipes):
        with suppress(subprocess.TimeoutExpired):
            subprocess.run([CONTROL], input="quit -t 1\n", text=True, timeout=20)
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().startswith("nvidia-cuda-mps"):
                os.kill(int(pid), signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.gpu
def test_the_true_daemon_starts_and_stops_and_starts_again(private: Path) -> None:
    for _ in range(2):
        with mps.running() as pipes:
            assert pipes == private and mode(pipes) == 0o700
            assert mps.state(pipes) is PipesState.SERVES
            assert int(mps.daemon_pid(pipes)) > 0
            assert mps.alone(pipes)
        gone(pipes)


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_an_executor_and_a_client_under_the_true_daemon(private: Path, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log, subprocess.Popen(
        [sys.executable, "-c", EXECUTOR, "demo", "--device=cuda", "--mps", "--listen=tcp://127.0.0.1:0"],
        stdout=subprocess.PIPE, stderr=log, text=True,
    ) as executor:  # fmt: skip
        try:
            assert executor.stdout and select.select([executor.stdout], [], [], 2 * WAIT_S)[0], "no ready line"
            endpoint = executor.stdout.readline().rpartition(" at ")[2].strip()
            assert endpoint, (tmp_path / "log").read_text()
            assert f"{PIPES}={private}" in (tmp_path / "log").read_text()
            assert mps.state(private) is PipesState.SERVES
            assert not mps.alone(private), "the executor is a client of the daemon"
            subprocess.run([sys.executable, "-c", CLIENT, endpoint], check=True, timeout=2 * WAIT_S)
            executor.send_signal(signal.SIGTERM)
            assert executor.wait(WAIT_S) == 0
        finally:
            executor.kill()
    assert "left running" not in (tmp_path / "log").read_text()
    gone(private)
