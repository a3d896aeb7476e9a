"""Real executors and clients for tests: processes that can be killed, frozen and started again, and a bystander to watch.

They are forked from one server process that has imported everything, so that starting one takes a fraction of a second.
(The demo's and benchmarks' are started from nothing, as users start them: symbiosis/demo/processes.py.) Whatever is waited for is waited
for on a descriptor or on a condition, and not for ever.
"""

import atexit
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from symbiosis.cli import top
from symbiosis.client.session import Session
from symbiosis.executor.observe.snapshot import Snapshot
from symbiosis.protocol import Op
from tests import tally
from tests.conftest import tiny_llama

WAIT_S = 60.0  # the longest wait for anything: machines that run tests are busy
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.preload"])
both_transports = pytest.mark.parametrize("scheme", ["local", "tcp"])


def save_tiny_llama(directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint of the tests' Llama; another seed, another model of the same shape."""
    model = tiny_llama()
    if seed:
        torch.manual_seed(seed)
        model.apply(lambda module: nn.init.normal_(module.weight, std=0.1) if isinstance(module, nn.Linear) else None)
    model.to(dtype).save_pretrained(directory)
    return directory


def until(true: Callable[[], Any], what: str = "it", seconds: float = WAIT_S) -> None:
    """Returns when `true`; fails if that takes longer than it may."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:g} s"
        time.sleep(0.002)


def p99(times: Sequence[float]) -> float:
    return float(numpy.percentile(times, 99))


def turns() -> Any:
    """What a child waits for, as often as it is released here."""
    return context.Semaphore(0)


def pipe() -> tuple[Connection, Connection]:
    """Between two children."""
    return context.Pipe()


class Process:
    """A child process that is killed at the end of the test, whatever state it is in."""

    killed_ones = ""  # as what its kills are counted

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._process = context.Process(target=target, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = WAIT_S) -> int:
        """The exit code; that of a process ended by a signal is negative."""
        self._process.join(seconds)
        code = self._process.exitcode
        assert code is not None, f"process {self.pid} still runs after {seconds:g} s"
        return code

    def kill(self) -> None:
        """A fault, which is counted."""
        if self.alive and self.killed_ones:
            tally.done[self.killed_ones] += 1
        self.end()

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._process.join(WAIT_S)

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def resident_bytes(self) -> int:
        """Memory of its own and shared memory that it has touched."""
        with Path(f"/proc/{self.pid}/statm").open() as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def cpu_seconds(self) -> float:
        """That it has used so far."""
        used = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


class Executor(Process):
    """`symbiosis-executor MODEL OPTION ...`, ready when this returns. It is there to be called, unless it says `--share-weights`."""

    killed_ones = tally.EXECUTORS

    def __init__(self, model: Path | str, *options: str, log: Path) -> None:
        self.model, self.options, self.log, self._ended = model, options, log, False
        reader, writer = context.Pipe(duplex=False)
        super().__init__(_run_executor, writer, str(log), [str(model), "--no-share-weights", *options])
        writer.close()
        self.line = self._first_line(reader)

    def _first_line(self, reader: Connection) -> str:
        """The ready line; empty if there was none, because the executor ended."""
        line, deadline = b"", time.monotonic() + WAIT_S
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no ready line within {WAIT_S:g} s. Its log:\n{self.log.read_text()}"
            byte = os.read(reader.fileno(), 1)
            if not byte:
                break
            line += byte
        reader.close()
        return line.decode().strip()

    @property
    def endpoints(self) -> list[str]:
        return self.line.rpartition(" at ")[2].split()

    @property
    def endpoint(self) -> str:
        return self.endpoints[0]

    def again(self, *more: str) -> "Executor":
        """Another one with the same model and options, at the same endpoints."""
        kept = [option for option in self.options if not option.startswith("--listen")]
        listen = [f"--listen={endpoint}" for endpoint in self.endpoints]
        return Executor(self.model, *kept, *listen, *more, log=self.log)

    def retire(self) -> None:
        """SIGTERM. Returns as soon as somebody else may listen at its endpoint; it may still answer what has come."""
        self.signal(signal.SIGTERM)
        until(lambda: not _listens(self.endpoint), "the end of listening")

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def end(self) -> None:
        """... which counts a crash, if it was ready and has gone by itself."""
        if not self._ended and not self.alive and self.line and self._process.exitcode != 0:
            tally.done[tally.CRASHES] += 1
        self._ended = True
        super().end()


def _listens(endpoint: str) -> bool:
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    family, where = (socket.AF_UNIX, address) if scheme == "local" else (socket.AF_INET, (host, int(port)))
    with socket.socket(family) as one:
        return one.connect_ex(where) == 0


def _run_executor(stdout: Connection, log: str, arguments: list[str]) -> None:
    _become(["symbiosis-executor", *arguments], stdout.fileno(), log)
    stdout.close()
    from symbiosis.base import procs
    from symbiosis.cli.main import executor_main

    procs.Popen = ForkedRank  # type: ignore[assignment, misc]
    executor_main()


class ForkedRank:
    """A rank's process, forked from the service's, which has imported everything: as much of `subprocess.Popen` as a `Child` uses."""

    _ours: set[int] = set()  # the service's ends of pipes

    def __init__(self, *_: object, **__: object) -> None:
        (orders, stdin), (stdout, said) = os.pipe(), os.pipe()
        self._ours |= {stdin, stdout}
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.dup2(orders, 0)
            os.dup2(said, 1)
            for descriptor in self._ours:  # a rank would not hear that the service is gone
                with suppress(OSError):
                    os.close(descriptor)
            _run_rank()
        os.close(orders)
        os.close(said)
        self.stdin, self.stdout = (os.fdopen(stdin, "wb", 0), os.fdopen(stdout, "rb", 0))
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is not None:
            return self.returncode
        descriptor = os.pidfd_open(self.pid)
        try:
            if not select.select([descriptor], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        finally:
            os.close(descriptor)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _run_rank() -> None:
    code: Any = 1
    try:
        from symbiosis.base.procs import become

        become("symbiosis.executor.ranks.rank:main", hears=True)
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _become(command: list[str], stdout: int, stderr: str) -> None:
    """What a shell makes of a process."""
    os.dup2(stdout, 1)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115, PTH123
    sys.argv = command
    torch.set_num_threads(1)


class Program(Process):
    """`symbiosis WORD ...`; or, if the first word is a file of Python, that file."""

    def __init__(self, *words: str, folder: Path | None = None, **environment: str) -> None:
        self._written = tempfile.TemporaryDirectory()
        self._out, self._err = (Path(self._written.name) / name for name in ("out", "err"))
        super().__init__(_run_program, words, folder or Path.cwd(), environment, str(self._out), str(self._err))

    def done(self, seconds: float = WAIT_S) -> "subprocess.CompletedProcess[str]":
        """Its exit code, and what it wrote."""
        code = self.wait(seconds)
        return subprocess.CompletedProcess(str(self), code, self.output(), self.errors())

    def output(self) -> str:
        """What it has written so far."""
        return self._out.read_text() if self._out.exists() else ""

    def errors(self) -> str:
        return self._err.read_text() if self._err.exists() else ""

    def end(self) -> None:
        super().end()
        self._written.cleanup()


def run(*words: str, seconds: float = WAIT_S, folder: Path | None = None, **environment: str) -> Any:
    """A program to its end."""
    with killed_at_the_end() as processes:
        program = Program(*words, folder=folder, **environment)
        processes.append(program)
        return program.done(seconds)


def _run_program(words: tuple[str, ...], folder: Path, environment: dict[str, str], stdout: str, stderr: str) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    if words[0].endswith(".py"):
        _become([*words], os.open(stdout, os.O_WRONLY | os.O_CREAT, 0o600), stderr)
        runpy.run_path(words[0], run_name="__main__")
        return
    _become(["symbiosis", *words], os.open(stdout, os.O_WRONLY | os.O_CREAT, 0o600), stderr)
    from symbiosis.cli.main import main

    main()


Say = Callable[[Any], None]


class Client(Process):
    """A process that runs `program(say, *arguments)`: `say` sends what the test hears by `heard`, the rest is `result`."""

    killed_ones = tally.CLIENTS

    def __init__(self, program: Callable[..., Any], *arguments: Any) -> None:
        self._ear, mouth = context.Pipe(duplex=False)
        super().__init__(_run_client, mouth, program, arguments)
        mouth.close()

    def heard(self, seconds: float = WAIT_S) -> Any:
        """The next thing that the program says."""
        kind, what = self._next(seconds)
        assert kind == "said", f"the client ended with {kind}: {what}"
        return what

    def result(self, seconds: float = WAIT_S) -> Any:
        """What the program returns. It may take as long as it needs, but must not be silent for so long."""
        while True:
            kind, what = self._next(seconds)
            if kind != "said":
                assert kind == "returned", what
                return what

    def _next(self, seconds: float) -> tuple[str, Any]:
        assert self._ear.poll(max(0.0, seconds)), f"client {self.pid} says nothing for {seconds:g} s"
        try:
            return self._ear.recv()
        except EOFError:
            raise AssertionError(f"client {self.pid} died: {self.wait()}") from None

    def end(self) -> None:
        super().end()
        self._ear.close()


def _run_client(mouth: Connection, program: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        mouth.send(("returned", program(lambda what: mouth.send(("said", what)), *arguments)))
    except BaseException:
        mouth.send(("raised", traceback.format_exc()))
    atexit._run_exitfuncs()  # which a process of multiprocessing skips: sessions leave


@contextmanager
def killed_at_the_end() -> Iterator[list[Process]]:
    """A list: processes that are put into it do not outlive the block."""
    processes: list[Process] = []
    try:
        yield processes
    finally:
        for process in processes:
            process.end()


@contextmanager
def watching(endpoint: str) -> Iterator[Callable[[], Snapshot]]:
    """The executor's own figures, as an observer sees them whenever it looks."""
    session = Session(endpoint, observer=True)
    try:
        yield lambda: top.snapshot(session)
    finally:
        session.close()


def snapshot(endpoint: str) -> Snapshot:
    with watching(endpoint) as look:
        return look()


def layer_number(session: Session, name: str) -> int:
    return next(number for number, layer in enumerate(session.manifest) if layer.name == name)


class Bystander:
    """A client in a thread of this process that makes one call again and again and knows the answer, bit for bit."""

    LAYER = "model.layers.0.mlp.up_proj"

    def __init__(self, endpoint: str | Sequence[str], model: nn.Module) -> None:
        self.session = Session(endpoint)
        self.calls, self.slowest_s = 0, 0.0
        self.times: list[float] = []  # of each call
        self.most_retries = 0  # of one call
        self.problem: object = None
        self._number = layer_number(self.session, self.LAYER)
        weight: Tensor = model.get_submodule(self.LAYER).weight.detach()  # type: ignore[assignment, operator]
        self._x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(7))
        self._expected = self._x @ weight.t()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set() and self.problem is None:
            begun, retries = time.monotonic(), self.session.stats.retries
            try:
                if not torch.equal(self.session.call(Op.FORWARD, self._number, self._x), self._expected):
                    self.problem = "a wrong result"
            except Exception as error:
                self.problem = error
            self.most_retries = max(self.most_retries, self.session.stats.retries - retries)
            self.times.append(time.monotonic() - begun)
            self.slowest_s = max(self.slowest_s, self.times[-1])
            self.calls += 1

    def goes_on(self) -> None:
        """Returns when it has made another few calls, on the connection that it has had from the beginning."""
        target = self.calls + 3
        until(lambda: self.calls >= target or self.problem is not None, "another call of the bystander")
        assert self.problem is None, self.problem
        assert self.session.stats.reconnects == 0, "the bystander lost its connection"

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        self.session.close()

    def __enter__(self) -> "Bystander":
        self.goes_on()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
