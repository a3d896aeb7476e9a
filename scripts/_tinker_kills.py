"""`symbiosis serve --train` whose processes are killed while clients train, for compat_tinker.py."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _processes import progress

from symbiosis.base.procs import python
from symbiosis.base.reporting import Report
from symbiosis.executor.observe.process_figures import children, command_of

TOLD_S = 600.0  # for a server to be up
PER_PROCESS = 8  # clients
ENGINE = "the engine's process"
KILLED = ("http_process", "executor_main", ENGINE) * 2
GONE_S = 1.0  # until nothing of what was killed answers
APART = 1e-3  # of log probabilities: a step more or less is 0.1
CLIENTS = Path(__file__).with_name("_tinker_clients.py")


class SupervisedServer:
    """A server that is started again whenever it dies, as systemd does."""

    def __init__(self, model: str, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{port}", folder / "server.log"
        self._words = python(
            "-m", "symbiosis", "serve", model, "--train", "--port", str(port), "--memory", "256MiB", "--checkpoints", str(folder / "checkpoints")
        )  # fmt: skip
        self._ended = threading.Event()
        self._process = self._started()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        self.wait()

    def kill(self, which: str) -> None:
        """Kill one of its processes, and wait until it answers again."""
        engine = self._process
        pid = (
            engine.pid if which == ENGINE else next(each for each in children(engine.pid) if which in command_of(each))
        )
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        while which == ENGINE and self._process is engine:
            time.sleep(0.1)
        time.sleep(GONE_S)
        self.wait()
        progress(f"{which} was killed: the server answers again after {time.monotonic() - began:.1f} s")

    def wait(self) -> None:
        deadline = time.monotonic() + TOLD_S
        while True:
            try:
                self.told("health")
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise SystemExit(self._log.read_text()[-5000:]) from None
            time.sleep(0.1)

    def told(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/{path}", timeout=60) as answer:  # noqa: S310
            return json.load(answer)

    def close(self) -> None:
        self._ended.set()
        self._process.terminate()
        self._process.wait(60)
        self._thread.join()

    def _started(self) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as log:
            return subprocess.Popen(self._words, stdout=log, stderr=log)

    def _watch(self) -> None:
        while not self._ended.wait(0.1):
            if self._process.poll() is not None:
                self._process = self._started()


def train_under_kills(report: Report, interpreter: str, model: str, folder: Path, clients: int, seconds: float) -> None:
    """Have clients train for so long while each process of the server is killed twice, and compare them with those that nobody disturbs."""
    server = SupervisedServer(model, folder)
    own = {
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": "tml-demo",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }
    programs, files, end = [], [], folder / "end"
    try:
        for first in range(0, clients, PER_PROCESS):
            files.append(folder / f"clients-{first}.json")
            words = [interpreter, CLIENTS, model, files[-1], first, min(PER_PROCESS, clients - first), end]
            programs.append(subprocess.Popen([*map(str, words)], env={**os.environ, **own}))
        while len(server.told("figures")["runs"]) < clients and all(each.poll() is None for each in programs):
            time.sleep(0.5)
        pause = seconds / (len(KILLED) + 1)
        for which in KILLED:
            time.sleep(pause)
            server.kill(which)
        time.sleep(pause)
        end.touch()
        if any(each.wait(TOLD_S + 10 * seconds) for each in programs):
            raise SystemExit("a client failed, as it says above")
    finally:
        for program in programs:
            program.kill()
        server.close()
    tell(report, [each for file in files for each in json.loads(file.read_text())])


def tell(report: Report, told: Sequence[dict[str, Any]]) -> None:
    report.figure("kills: clients", len(told))
    report.figure("kills: steps", sum(each["steps"] for each in told))
    report.bar("kills: steps lost or doubled", sum(abs(each["steps"] - each["of_server"]) for each in told), "<=", 0)
    report.bar("kills: log probabilities, from those undisturbed", max(each["apart"] for each in told), "<=", APART)
    report.figure("kills: samples", sum(each["samples"] for each in told))
    report.bar("kills: samples with other tokens", sum(each["other_samples"] for each in told), "<=", 0)
    report.bar("kills: of the others, log probabilities", max(each["samples_apart"] for each in told), "<=", APART)
