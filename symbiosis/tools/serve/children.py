"""The two processes beside the engine's: an executor, and the one that speaks HTTP. They end with this process, and are started again
when they die."""

import logging
import signal
import socket
import subprocess
import sys
import time
from collections import deque

import msgspec

from symbiosis.errors import SymbiosisError
from symbiosis.serving.http.link.messages import FrontOptions, Started
from symbiosis.serving.options import ServeOptions

logger = logging.getLogger("symbiosis")

EXECUTOR = (
    "from symbiosis.tools.serve.executor import end_with_parent; end_with_parent(); "
    "from symbiosis.logs import name_process; name_process('executor'); from symbiosis.cli import executor_main; executor_main()"
)
MOST_STARTS, WITHIN_S = 5, 60.0
STOP_S = 10.0


class KeepsDying(SymbiosisError):
    """A process dies again and again, and starting it once more would not help."""


class RestartingChild:
    """A process that is started again when it dies, unless that happens too often."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._starts: deque[float] = deque(maxlen=MOST_STARTS)

    def start(self, code: list[str], descriptors: tuple[int, ...] = ()) -> None:
        now = time.monotonic()
        if len(self._starts) == MOST_STARTS and now - self._starts[0] < WITHIN_S:
            raise KeepsDying(f"{self.name} died {MOST_STARTS} times within {WITHIN_S:g} s: see what it wrote")
        self._starts.append(now)
        self._process = subprocess.Popen(
            [sys.executable, *code],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the line that says that it is ready: this server has its own
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_dead(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    @property
    def status(self) -> int:
        assert self._process is not None
        return self._process.poll() or 0

    def wait(self, seconds: float) -> bool:
        """Whether it has ended by then."""
        assert self._process is not None
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)
        if not self.wait(STOP_S):
            self._process.kill()
            self._process.wait()


def executor_code(options: ServeOptions, endpoint: str) -> list[str]:
    of_dtype = ["--dtype", options.dtype] if options.dtype else []
    return ["-c", EXECUTOR, str(options.model), "--listen", endpoint, "--log-format", options.log_format, *of_dtype]


def http_code(listener: socket.socket, link: socket.socket, options: FrontOptions) -> list[str]:
    started = msgspec.json.encode(Started(listener.fileno(), link.fileno(), options)).decode()
    return ["-m", "symbiosis.serving.http.process", started]
