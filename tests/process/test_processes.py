"""Executors and clients as the processes that people start: options, signals, sockets, and several clients at once."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy
import pytest
import torch

from symbiosis.client.session import Session
from symbiosis.executor.model.load import load_model
from symbiosis.executor.options import PolicyName
from symbiosis.protocol import Op
from tests import programs
from tests.conftest import tiny_llama
from tests.processes import (
    WAIT_S,
    Bystander,
    Client,
    Executor,
    both_transports,
    save_tiny_llama,
    snapshot,
    until,
)

COMMAND = [
    sys.executable,
    "-c",
    "from symbiosis.cli.main import executor_main; executor_main()",
]  # as installed, or not


@pytest.fixture
def start(model: Path, processes: list, tmp_path: Path) -> Callable[..., Any]:
    """Starts an executor (by its options) or a client (by its program); both are gone at the end."""

    def run(first: object, *rest: object, model: Path | str = model) -> Executor | Client:
        if callable(first):
            processes.append(Client(first, *rest))
        else:
            processes.append(Executor(model, str(first), *map(str, rest), log=tmp_path / "executor.log"))
        return processes[-1]

    return run


@pytest.fixture
def log(tmp_path: Path) -> Callable[[], str]:
    return lambda: (tmp_path / "executor.log").read_text()


def listen_at(scheme: str, tmp_path: Path) -> str:
    return f"--listen=local://{tmp_path}/x.sock" if scheme == "local" else "--listen=tcp://127.0.0.1:0"


def echoes(endpoint: str) -> bool:
    session = Session(endpoint)
    try:
        return torch.equal(session.call(Op.ECHO, 0, torch.ones(2, 3)), torch.ones(2, 3))
    finally:
        session.close()


# ---------------------------------------------------------------- the command


def test_the_command_says_where_it_serves_and_ends_when_told(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    process = subprocess.Popen(
        [*COMMAND, str(model), f"--listen=local://{path}", "--listen=tcp://127.0.0.1:0", "--log-format=json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout
        line = process.stdout.readline()
        endpoints = line.rpartition(" at ")[2].split()
        expected = rf"symbiosis-executor ready: {re.escape(str(model))} \(14 layers, \d+ MiB\) at local://{path} tcp://127.0.0.1:\d+\n"
        assert re.fullmatch(expected, line), (line, process.stderr and process.stderr.read() if not line else "")
        assert all(map(echoes, endpoints))
        process.terminate()
        assert process.wait(WAIT_S) == 0
        assert process.stdout.read() == ""
        assert not path.exists()
        assert process.stderr
        events = [json.loads(line)["event"] for line in process.stderr.read().splitlines()]  # and nothing but them
        assert (events[0], events[-1]) == ("memory", "stopped")
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_ends_it_as_sigterm_does(start: Callable, tmp_path: Path) -> None:
    executor = start(listen_at("local", tmp_path))
    executor.signal(signal.SIGINT)
    assert executor.wait() == 0
    assert not (tmp_path / "x.sock").exists()


def test_the_command_line_goes_before_the_file_and_the_file_before_the_default(start: Callable, tmp_path: Path) -> None:
    file = tmp_path / "executor.yaml"
    file.write_text(f"policy: lockstep\nmax-sessions: 7\nlisten: local://{tmp_path}/file.sock\n")
    executor = start(f"--config={file}", "--policy=immediate")
    assert executor.endpoints == [f"local://{tmp_path}/file.sock"]
    assert snapshot(executor.endpoint).policy == "immediate"
    limits = Session(executor.endpoint).welcome.limits
    assert (limits.max_sessions, limits.max_in_flight) == (7, 8)


def test_a_file_may_name_the_model(processes: list, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "executor.yaml"
    file.write_text(f"model: {model}\nmax_wait_us: 7\nlisten: local://{tmp_path}/file.sock\n")
    processes.append(Executor(f"--config={file}", log=tmp_path / "executor.log"))
    assert processes[-1].line.startswith(f"symbiosis-executor ready: {model} (14 layers")


WRONG_OPTIONS = {
    "an unknown key": ("{file}", "polcy: lockstep\n", "unknown option polcy. Known: allow-read, "),
    "a key twice": ("{file}", "max_wait_us: 3\nmax-wait-us: 4\n", "says max-wait-us twice"),
    "a wrong value": ("{file}", "max-wait-us: soon\n", "wrong option: max-wait-us is a whole number"),
    "an unknown policy": ("--policy=fair", "", "wrong option: .*'fair'.*policy"),
    "a limit of nothing": ("--max-rows=0", "", "max-rows must be positive, not 0"),
    "no file": ("--config=/nowhere.yaml", "", "cannot read the configuration file /nowhere.yaml"),
    "a wrong dtype": ("--dtype=float7", "", "--dtype 'float7'"),
    "a dtype that is no float": ("--dtype=int8", "", "--dtype 'int8' is not a floating-point type"),
    "a device that is not there": ("--device=gpu", "", "--device 'gpu': "),
    "no such layers": ("--serve=decoder.*", "", "--serve 'decoder.*' matches no layer. Names look like: "),
    "no endpoint": ("--listen=executor.sock", "", "'executor.sock' is not an endpoint"),
    "a directory that cannot be": ("--listen=local:///proc/x/y.sock", "", "cannot .* local:///proc/x/y.sock"),
    "a name that cannot be": ("--listen=tcp://127.0.0.1:none", "", "cannot listen at tcp://127.0.0.1:none"),
    "a port that cannot be": (
        "--listen=tcp://127.0.0.1:99999",
        "",
        "cannot listen at tcp://127.0.0.1:99999: .*port from 0 to 65535",
    ),
    "where nobody can reach it": ("--listen=inproc://x", "", "cannot listen at inproc://x: .*symbiosis.Executor"),
    "other machines without keys": ("--listen=tcp://0.0.0.0:0", "", "--key and --tenants"),
}


@pytest.mark.parametrize("what", WRONG_OPTIONS)
def test_wrong_options_end_the_command_with_a_message(
    start: Callable, log: Callable, tmp_path: Path, what: str
) -> None:
    option, content, message = WRONG_OPTIONS[what]
    file = tmp_path / "executor.yaml"
    file.write_text(content)
    executor = start(option.replace("{file}", f"--config={file}"))
    assert executor.line == ""
    assert executor.wait() == 2
    assert re.search(f"error: .*{message}", log()), log()
    assert "Traceback" not in log()


def test_a_model_that_is_not_there_ends_the_command_with_a_message(
    start: Callable, log: Callable, tmp_path: Path
) -> None:
    executor = start(listen_at("local", tmp_path), model=tmp_path)
    assert executor.wait() == 2
    assert f"cannot load '{tmp_path}'" in log() and "MODEL is a directory with config.json" in log()


def test_a_directory_that_is_not_there_is_said_so(start: Callable, log: Callable, tmp_path: Path) -> None:
    assert start(listen_at("local", tmp_path), model=tmp_path / "nowhere").wait() == 2
    assert f"error: cannot load '{tmp_path}/nowhere': no such directory\n" in log()


def test_a_damaged_checkpoint_is_said_so_and_wrong_options_before_it_is_read(
    start: Callable, log: Callable, tmp_path: Path, model: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for options, message in {
        (): "a file is damaged or cut short",
        ("--serve=decoder.*",): "--serve 'decoder.*' matches no layer. Names look like: ",
        ("--listen=tcp://127.0.0.1:none",): "cannot listen at tcp://127.0.0.1:none",
    }.items():
        assert start(*(options or (listen_at("local", tmp_path),)), model=damaged).wait() == 2
        assert message in log().splitlines()[-1] and "Traceback" not in log()


def test_a_port_for_metrics_that_is_taken_ends_the_command_with_a_message(
    start: Callable, log: Callable, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert start(listen_at("local", tmp_path), f"--metrics-port={port}").wait() == 2
    assert f"error: cannot serve metrics at 127.0.0.1:{port}" in log()


FORGOTTEN = """
import sys, threading, time, torch, symbiosis
from symbiosis.client.session import Session
from symbiosis.protocol import Op

for endpoint in sys.argv[1:]:
    executor = symbiosis.Executor(torch.nn.Linear(1024, 1024), listen=[endpoint])
    session, x = Session(executor.endpoint), torch.randn(64, 1024)
    run = lambda session=session: [session.call(Op.FORWARD, 0, x) for _ in range(10**6)]
    threading.Thread(target=run, daemon=True).start()
time.sleep(0.3)
"""


@pytest.mark.parametrize("scheme", [pytest.param("inproc", marks=pytest.mark.soak), "local"])
def test_a_program_that_forgets_its_executors_ends_well(scheme: str, tmp_path: Path) -> None:
    endpoints = [f"{scheme}://{tmp_path}/{number}.sock" for number in range(6)]
    ended = subprocess.run(
        [sys.executable, "-c", FORGOTTEN, *endpoints], stderr=subprocess.PIPE, text=True, timeout=WAIT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr


# ---------------------------------------------------------------- sockets


def test_a_socket_that_a_dead_executor_left_is_replaced(start: Callable, tmp_path: Path) -> None:
    first = start(listen_at("local", tmp_path))
    first.kill()
    assert (tmp_path / "x.sock").is_socket()
    assert echoes(start(listen_at("local", tmp_path)).endpoint)


@both_transports
def test_an_endpoint_that_is_taken_is_refused_and_its_owner_unharmed(
    start: Callable, log: Callable, tmp_path: Path, scheme: str
) -> None:
    first = start(listen_at(scheme, tmp_path))
    with Bystander(first.endpoint, tiny_llama()) as bystander:
        assert start(f"--listen={first.endpoint}").wait() == 2
        bystander.goes_on()
    assert echoes(first.endpoint)
    taken = "another executor already serves" if scheme == "local" else "cannot listen at"
    assert f"error: {taken} {first.endpoint}" in log()


def test_what_is_no_socket_is_not_replaced(start: Callable, log: Callable, tmp_path: Path) -> None:
    (tmp_path / "x.sock").write_text("somebody's file")
    assert start(listen_at("local", tmp_path)).wait() == 2
    assert "is not a socket: choose another path" in log()
    assert (tmp_path / "x.sock").read_text() == "somebody's file"


def test_only_the_owner_may_reach_the_socket(start: Callable, tmp_path: Path) -> None:
    start(f"--listen=local://{tmp_path}/new/x.sock")
    assert (tmp_path / "new/x.sock").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


# ---------------------------------------------------------------- draining


@both_transports
def test_what_has_come_is_answered_before_the_end(start: Callable, tmp_path: Path, scheme: str) -> None:
    """... also what waits, under lockstep, for a client that does not call."""
    executor = start(listen_at(scheme, tmp_path), "--policy=lockstep", "--heartbeat-s=60")
    idle = Session(executor.endpoint)
    idle.call(Op.FORWARD, 1, torch.ones(1, 64))  # from now on it is waited for
    waiting = start(programs.call_for_ever, executor.endpoint, 1)
    until(lambda: snapshot(executor.endpoint).queue_depth == 1, "a call that waits")
    before = snapshot(executor.endpoint).calls
    assert executor.stop() == 0
    assert waiting.alive
    calls = int(re.findall(r"stopped calls=(\d+)", executor.log.read_text())[-1])
    assert calls == before + 1


# ---------------------------------------------------------------- several clients

LENGTHS = {41: 6, 42: 25}  # seed: new tokens


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float64 the company that a call has in its product changes no token."""
    return save_tiny_llama(tmp_path_factory.mktemp("double"), dtype=torch.float64)


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_a_trainer_and_generators_come_and_go(start: Callable, double: Path, tmp_path: Path, policy: str) -> None:
    """Each gets what it would get alone, whoever shares the executor meanwhile; and each joins and leaves when it likes."""
    unsplit = load_model(str(double))
    expected_tokens = {seed: programs.generate_tokens(unsplit, length, seed) for seed, length in LENGTHS.items()}
    expected = programs.train_model(unsplit, 6)
    executor = start(listen_at("local", tmp_path), "--listen=tcp://127.0.0.1:0", f"--policy={policy}", model=double)
    local, tcp = executor.endpoints
    trainer = start(programs.train, local, 6)
    assert trainer.heard() == 0
    generators = {
        seed: start(programs.generate, endpoint, length, seed)
        for (seed, length), endpoint in zip(LENGTHS.items(), (local, tcp), strict=True)
    }
    assert {seed: client.result() for seed, client in generators.items()} == expected_tokens
    trained = trainer.result()
    numpy.testing.assert_allclose(trained["losses"], expected["losses"], rtol=1e-7)  # torch's own for float64
    assert trained["adapter"].keys() == expected["adapter"].keys()
    until(lambda: len(snapshot(local).sessions) == 1, "leaving")  # the observer itself
    assert snapshot(local).errors == {}
    assert executor.stop() == 0


@pytest.mark.alone
@both_transports
@pytest.mark.parametrize("policy", ["opportunistic", "lockstep"])
def test_a_frozen_client_holds_up_nobody_for_longer_than_its_heartbeat(
    start: Callable, tmp_path: Path, scheme: str, policy: str
) -> None:
    heartbeat_s = 1.0
    executor = start(listen_at(scheme, tmp_path), f"--policy={policy}", f"--heartbeat-s={heartbeat_s}")
    client = start(programs.call_when_told, executor.endpoint, 0.0)
    with Bystander(executor.endpoint, tiny_llama()) as bystander:
        assert client.result() == 0  # an earlier one has come and gone
        frozen = start(programs.call_when_told, executor.endpoint, 3600.0)
        session = frozen.heard()
        frozen.signal(signal.SIGSTOP)
        begun = time.monotonic()
        until(
            lambda: all(s.number != session for s in snapshot(executor.endpoint).sessions), "dropping the frozen client"
        )
        bystander.goes_on()
        assert time.monotonic() - begun > heartbeat_s / 2  # it was given its time
        if policy == "opportunistic":
            assert bystander.slowest_s < heartbeat_s / 2
        assert snapshot(executor.endpoint).dropped == 1
    frozen.signal(signal.SIGCONT)


def test_sighup_opens_the_audit_log_anew_and_ends_nobody(start: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    executor = start("--listen=tcp://127.0.0.1:0", f"--audit-log={path}")
    executor.signal(signal.SIGHUP)
    assert echoes(executor.endpoint)
    events = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    assert events[:2] == ["started", "joined"]
