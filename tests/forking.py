"""Children that a process which has imported everything forks for others: both ends. Nothing here imports torch.

To whoever looks from outside they are as processes of a Python of their own, but for their command lines and what lay in their environment at
first.
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
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from subprocess import DEVNULL, PIPE, TimeoutExpired
from typing import Any, NoReturn

KEPT, MOST = 500, 600  # where descriptors lie while all others are closed
NUMBER = struct.Struct("i")
PR_SET_NAME = 15

# Forks a process with these words, this environment and these descriptors, by the numbers that it knows them by, whose status is told to the
# last one; returns its number.
Fork = Callable[[list[str], dict[str, str], dict[int, int], int], int]


def ask(
    orders: socket.socket, words: list[str], environment: dict[str, str], given: dict[int, int], status: int
) -> int:
    socket.send_fds(orders, [pickle.dumps((words, environment, list(given)))], [status, *given.values()])
    return int(NUMBER.unpack(orders.recv(NUMBER.size))[0])


class ForkedChild:
    """As much of `subprocess.Popen` as a `Child` uses."""

    def __init__(
        self, fork: Fork, words: list[str], *, stdin: int, stdout: int, stderr: Any, env: Any,
        pass_fds: Sequence[int], bufsize: int, start_new_session: bool,
    ) -> None:  # fmt: skip
        assert stdin == PIPE and stdout in (PIPE, DEVNULL) and bufsize == 0 and start_new_session
        (theirs, ours), (self._status, told) = os.pipe(), os.pipe()
        said, mouth = os.pipe() if stdout == PIPE else (None, os.open(os.devnull, os.O_WRONLY))
        self.stdin, self.stdout = os.fdopen(ours, "wb", 0), said and os.fdopen(said, "rb", 0)
        given = {0: theirs, 1: mouth, 2: stderr.fileno() if stderr else 2, **{number: number for number in pass_fds}}
        self.pid = fork(words, dict(os.environ if env is None else env), given, told)
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


# ---------------------------------------------------------------- in the process that forks, and in what it has forked


class Forks:
    """Those that run, by their descriptors: their numbers, and where their statuses are told."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[int, int]] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._running))

    def ended(self, descriptor: int) -> None:
        pid, status = self._running.pop(descriptor)
        with suppress(BrokenPipeError):  # who started it is gone
            os.write(status, NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        os.close(status)
        os.close(descriptor)

    def fork(self, orders: socket.socket, before: Callable[[dict[str, str]], None]) -> None:
        """Do as one order says. `before` is run in the process with its environment, before what it is for."""
        order, (status, *given), _, _ = socket.recv_fds(orders, 1 << 20, 32)
        words, environment, numbers = pickle.loads(order)
        if (pid := os.fork()) == 0:
            os.setsid()
            only(dict(zip(numbers, given, strict=True)))
            before(environment)
            run(words, environment)
        for descriptor in given:
            os.close(descriptor)
        self._running[os.pidfd_open(pid)] = (pid, status)
        orders.send(NUMBER.pack(pid))


def only(given: dict[int, int]) -> None:
    """Have these descriptors, by these numbers, and no others."""
    kept = {number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, KEPT) for number, descriptor in given.items()}
    os.closerange(3, KEPT)
    for number, descriptor in kept.items():
        os.dup2(descriptor, number)
    os.closerange(KEPT, MOST)


def run(words: Sequence[str], environment: dict[str, str]) -> NoReturn:
    """What Python does with `-c CODE ...` and `-m MODULE ...`."""
    how, what, *arguments = words
    os.environ.clear()
    os.environ.update(environment)
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
    """By which one finds a process of ours: its function, or its module."""
    found = re.search(r"become\('[\w.]+:(\w+)'|run_module\('[\w.]+\.(\w+)'|^[\w.]+\.(\w+)$", code)
    return next(filter(None, found.groups())) if found else "symbiosis"


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
