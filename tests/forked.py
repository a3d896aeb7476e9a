"""`symbiosis ...` with all of its processes, none of which imports torch: they are forked from one that has imported everything.

A process that starts others by `procs.Child` gets a template beside it, forked before it begins, which forks what it starts. To whoever
looks from outside they are as processes of a Python of their own, but for their command lines and what lay in their environment at first.
The process that speaks HTTP, which must not have torch, is started by Python as ever.
"""

import atexit
import ctypes
import fcntl
import os
import pickle
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import DEVNULL, PIPE, TimeoutExpired
from typing import Any, NoReturn

import torch

from tests.processes import WAIT_S, Process, context

LIGHT = "symbiosis.server.http_process"
KEPT, MOST = 500, 600  # where descriptors lie while all others are closed
NUMBER = struct.Struct("i")
PR_SET_NAME = 15


class Symbiosis(Process):
    """The command, with as much of `subprocess.Popen` as tests use. `before` is run by its first process."""

    def __init__(self, *words: str, before: str = "", errors: Path | None = None) -> None:
        out, stdout = context.Pipe(duplex=False)
        err, stderr = context.Pipe(duplex=False)
        super().__init__(_run_first, stdout, stderr, str(errors or ""), before, words, dict(os.environ))
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
    _run(["-c", f"{before}\nfrom symbiosis.cli.main import main; main()", *words], environment)


class Template:
    """A process that forks others. It ends with the one that has it."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        if os.fork() == 0:
            empty = os.open(os.devnull, os.O_RDWR)
            _only({0: empty, 1: empty, 2: 2, 3: theirs.detach()})
            _fork_as_told(socket.socket(fileno=3))
        theirs.close()

    def popen(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes] | ForkedChild":
        """What takes the place of `subprocess.Popen`."""
        words = list(command[command.index("-P") + 1 :])
        return subprocess.Popen(command, **options) if LIGHT in words[1] else ForkedChild(self, words, **options)

    def fork(self, words: list[str], environment: dict[str, str], given: dict[int, int], status: int) -> int:
        """Return the number of a process that has the descriptors `given`, by the numbers that it knows them by."""
        with self._lock:
            order = pickle.dumps((words, environment, list(given)))
            socket.send_fds(self._orders, [order], [status, *given.values()])
            return int(NUMBER.unpack(self._orders.recv(NUMBER.size))[0])


class ForkedChild:
    """As much of `subprocess.Popen` as a `Child` uses."""

    def __init__(
        self, template: Template, words: list[str], *, stdin: int, stdout: int, stderr: Any, env: Any,
        pass_fds: Sequence[int], bufsize: int, start_new_session: bool,
    ) -> None:  # fmt: skip
        assert stdin == PIPE and stdout in (PIPE, DEVNULL) and bufsize == 0 and start_new_session
        (theirs, ours), (self._status, told) = os.pipe(), os.pipe()
        said, mouth = os.pipe() if stdout == PIPE else (None, os.open(os.devnull, os.O_WRONLY))
        self.stdin, self.stdout = os.fdopen(ours, "wb", 0), said and os.fdopen(said, "rb", 0)
        given = {0: theirs, 1: mouth, 2: stderr.fileno() if stderr else 2, **{number: number for number in pass_fds}}
        self.pid = template.fork(words, dict(os.environ if env is None else env), given, told)
        for descriptor in (theirs, mouth, told):
            os.close(descriptor)
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            told = select.poll()
            told.register(self._status, select.POLLIN)
            if not told.poll(None if timeout is None else 1000 * timeout):
                raise TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            with self._lock:
                if self.returncode is None:
                    self.returncode = int(NUMBER.unpack(os.read(self._status, NUMBER.size))[0])
        return self.returncode

    def poll(self) -> int | None:
        with suppress(TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# ---------------------------------------------------------------- in the template, and in what it has forked


def _fork_as_told(orders: socket.socket) -> NoReturn:
    running: dict[int, tuple[int, int]] = {}  # by their descriptors: their numbers, and where their statuses are told
    while True:
        for ready in select.select([orders.fileno(), *running], [], [])[0]:
            if ready != orders.fileno():
                pid, status = running.pop(ready)
                os.write(status, NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                os.close(status)
                os.close(ready)
                continue
            order, (status, *given), _, _ = socket.recv_fds(orders, 1 << 20, 32) if _is_there(orders) else os._exit(0)
            words, environment, numbers = pickle.loads(order)
            if (pid := os.fork()) == 0:
                os.setsid()
                _only(dict(zip(numbers, given, strict=True)))
                _run(words, environment)
            for descriptor in given:
                os.close(descriptor)
            running[os.pidfd_open(pid)] = (pid, status)
            orders.send(NUMBER.pack(pid))


def _is_there(orders: socket.socket) -> bool:
    """Whether there is an order, and not the end."""
    return bool(orders.recv(1, socket.MSG_PEEK))


def _only(given: dict[int, int]) -> None:
    """Have these descriptors, by these numbers, and no others."""
    kept = {number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, KEPT) for number, descriptor in given.items()}
    os.closerange(3, KEPT)
    for number, descriptor in kept.items():
        os.dup2(descriptor, number)
    os.closerange(KEPT, MOST)


def _run(words: Sequence[str], environment: dict[str, str]) -> NoReturn:
    """What Python does with `-c CODE ...` and `-m MODULE ...`."""
    from symbiosis.base import procs

    procs.Popen = Template().popen  # type: ignore[assignment, misc]
    how, what, *arguments = words
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115, PTH123
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115, PTH123
    tempfile.tempdir = None  # where it is was asked before
    sys.argv = [how, *arguments]
    ctypes.CDLL(None).prctl(PR_SET_NAME, name_of(what).encode())
    code = what if how == "-c" else f"import runpy; runpy.run_module({what!r}, run_name='__main__', alter_sys=True)"
    status = _status_of(lambda: exec(code, {"__name__": "__main__"}))
    threading._shutdown()  # type: ignore[attr-defined]  (it waits for threads)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 255)


def name_of(code: str) -> str:
    """By which one finds a process of ours: its function."""
    found = re.search(r"become\('[\w.]+:(\w+)'", code)
    return found[1] if found else "symbiosis"


def _status_of(run: Callable[[], None]) -> int:
    try:
        run()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
