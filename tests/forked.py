"""`symbiosis ...` with all of its processes, none of which imports torch: they are forked from one that has imported everything.

A process that starts others by `procs.Child` gets a template beside it, forked before it begins, which forks what it starts. To whoever
looks from outside they are as processes of a Python of their own, but for their command lines and what lay in their environment at first.
The process that speaks HTTP, which must not have torch, is forked from one without it (tests/light.py).
"""

import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, NoReturn

import torch

from tests import light
from tests.forking import ForkedChild, Forks, ask, only, run
from tests.processes import WAIT_S, Process, context


class Symbiosis(Process):
    """The command, with as much of `subprocess.Popen` as tests use. `before` is run by its first process. What speaks HTTP is started by Python
    unless it is `forked_http`."""

    def __init__(self, *words: str, before: str = "", errors: Path | None = None, forked_http: bool = True) -> None:
        environment = dict(os.environ)
        if forked_http:
            environment[light.PLACE] = light.begin()
        else:
            environment.pop(light.PLACE, None)
        out, stdout = context.Pipe(duplex=False)
        err, stderr = context.Pipe(duplex=False)
        super().__init__(_run_first, stdout, stderr, str(errors or ""), before, words, environment)
        stdout.close()
        stderr.close()
        self.stdout, self.stderr = open(os.dup(out.fileno())), open(os.dup(err.fileno()))  # noqa: SIM115, PTH123
        out.close()
        err.close()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float = WAIT_S) -> int:
        self._process.join(seconds)
        if (code := self.poll()) is None:
            raise TimeoutExpired("symbiosis", seconds)
        return code

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.signal(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run_first(
    stdout: Connection,
    stderr: Connection,
    errors: str,
    before: str,
    words: tuple[str, ...],
    environment: dict[str, str],
) -> None:
    os.setsid()
    os.dup2(stdout.fileno(), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT, 0o600) if errors else stderr.fileno(), 2)
    stdout.close()
    stderr.close()
    _as_if_started(environment)
    run(["-c", f"{before}\nfrom symbiosis.cli.main import main; main()", *words], environment)


class Template:
    """A process that forks others. It ends with the one that has it."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        if os.fork() == 0:
            empty = os.open(os.devnull, os.O_RDWR)
            only({0: empty, 1: empty, 2: 2, 3: theirs.detach()})
            _fork_as_told(socket.socket(fileno=3))
        theirs.close()

    def popen(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes] | ForkedChild":
        """What takes the place of `subprocess.Popen`."""
        if light.runs(command):
            return light.popen(command, **options)
        return ForkedChild(self.fork, light.words_of(command), **options)

    def fork(self, words: list[str], environment: dict[str, str], given: dict[int, int], status: int) -> int:
        """Return the number of a process that has the descriptors `given`, by the numbers that it knows them by."""
        with self._lock:
            return ask(self._orders, words, environment, given, status)


# ---------------------------------------------------------------- in the template, and in what it has forked


def _fork_as_told(orders: socket.socket) -> NoReturn:
    forks = Forks()
    while True:
        for ready in select.select([orders.fileno(), *forks], [], [])[0]:
            if ready != orders.fileno():
                forks.ended(ready)
            elif orders.recv(1, socket.MSG_PEEK):  # and not the end
                forks.fork(orders, _as_if_started)
            else:
                os._exit(0)


def _as_if_started(environment: dict[str, str]) -> None:
    """Have a template, and as many threads as torch would have."""
    from symbiosis.base import procs

    procs.Popen = Template().popen  # type: ignore[assignment, misc]
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
