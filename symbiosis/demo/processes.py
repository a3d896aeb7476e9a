"""Executors and clients that the demo and the benchmarks start. They are read line by line, and end with the block that started them."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

from symbiosis.base.procs import Child, program
from symbiosis.errors import SymbiosisError

START = b"start\n"
START_S, STOP_S = 180.0, 10.0  # the longest waits for a process to start and to end
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # nothing is fetched from anywhere


class ProcessError(SymbiosisError):
    """A process failed, or took too long."""


class Participant(Child):
    """A process whose lines on stdout are read as they come. `state` holds the newest value of every field it sent."""

    def __init__(self, name: str, arguments: list[str], folder: Path, threads: int = 1) -> None:
        self.name, self.state, self.lines = name, dict[str, Any](), list[str]()
        self._is_begun = False
        self._errors = folder / f"{name}.stderr"
        environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
        with self._errors.open("wb") as errors:
            super().__init__(arguments, environment=environment, stdout=PIPE, stderr=errors)
        self._reader = threading.Thread(target=self._read, name=f"{name}-reader", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in map(bytes.decode, self.stdout):
            if line.startswith("{"):
                self.state.update(json.loads(line))
            else:
                self.lines.append(line.rstrip())

    @property
    def log(self) -> str:
        """What it has written to stderr."""
        return self._errors.read_text(errors="replace").strip()

    @property
    def endpoints(self) -> list[str]:
        """The endpoints of an executor, from its first line."""
        return self.lines[0].rpartition(" at ")[2].split()

    @property
    def ready(self) -> bool:
        """Whether it waits for its start, or has started."""
        return "done" in self.state

    def start(self) -> None:
        """Let a client begin; once more does no harm."""
        if not self._is_begun:
            self._is_begun = True
            self.say(START)

    def still_runs(self) -> bool:
        """Whether it still runs; `ProcessError` with what it wrote to stderr if it failed."""
        status = self.status
        if status is None:
            return True
        self._reader.join(STOP_S)
        if status:
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            raise ProcessError(f"{self.name} {how}. It wrote:\n{self.log}")
        return False

    def close(self) -> None:
        """End it, gently at first."""
        self.signal(signal.SIGTERM)
        if not self.wait(STOP_S):
            self.kill()
        self._reader.join(STOP_S)
        self.stdout.close()


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """Let SIGTERM wait until the block is over: a process that was started must be known, so that it can be ended, and its end must not be
    broken off."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for number in came[:1]:
            signal.raise_signal(number)


@contextlib.contextmanager
def executor(folder: Path, *arguments: str, threads: int = 1) -> Iterator[Participant]:
    """Run `symbiosis-executor ARGUMENT ...`, and yield it when it can be joined. Its log goes to `folder`."""
    child = None
    try:
        with whole():
            child = Participant("executor", program("symbiosis.cli.main:executor_main", *arguments), folder, threads)
        deadline = time.monotonic() + START_S
        while not child.lines:
            if not child.still_runs():
                raise ProcessError("the executor ended at once, without a message")
            if time.monotonic() > deadline:
                raise ProcessError(f"the executor was not ready within {START_S:g} s")
            time.sleep(0.05)
        yield child
    finally:
        if child:
            with whole():
                child.close()


@contextlib.contextmanager
def clients(arguments: dict[str, list[str]], folder: Path) -> Iterator[list[Participant]]:
    """Start clients, by name, all at the same time."""
    started: list[Participant] = []
    try:
        for name, words in arguments.items():
            with whole():
                started.append(Participant(name, words, folder))
        yield started
    finally:
        with whole():
            for child in started:
                child.close()
