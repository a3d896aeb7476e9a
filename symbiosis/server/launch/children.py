"""The two processes beside the engine's: an executor, and the one that speaks HTTP. They end with this process, and are started again
when they die."""

import socket
import time
from collections import deque

import msgspec

from symbiosis.base.procs import Child, program
from symbiosis.errors import SymbiosisError
from symbiosis.server.ipc.engine_ipc import FrontOptions, Started
from symbiosis.serving.serve_options import ServeOptions

MOST_STARTS, WITHIN_S = 5, 60.0
STOP_S = 10.0


class KeepsDying(SymbiosisError):
    """A process dies again and again, and starting it once more would not help."""


class RestartingChild:
    """A process that is started again when it dies, unless that happens too often. What it prints when it is ready is not shown: this server
    has a line of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._child: Child | None = None
        self._starts: deque[float] = deque(maxlen=MOST_STARTS)

    def start(self, words: list[str], descriptors: tuple[int, ...] = ()) -> None:
        now = time.monotonic()
        if len(self._starts) == MOST_STARTS and now - self._starts[0] < WITHIN_S:
            raise KeepsDying(f"{self.name} died {MOST_STARTS} times within {WITHIN_S:g} s: see what it wrote")
        self._starts.append(now)
        self._child = Child(words, descriptors=descriptors)

    @property
    def child(self) -> Child:
        """The process that was started last."""
        assert self._child is not None
        return self._child

    @property
    def is_dead(self) -> bool:
        return self._child is not None and self._child.status is not None

    def stop(self) -> None:
        """Let it finish, if it was started."""
        if self._child is not None:
            self._child.stop(STOP_S)

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()


def executor_code(options: ServeOptions, endpoint: str) -> list[str]:
    of_dtype = ["--dtype", options.dtype] if options.dtype else []
    words = [str(options.model), "--listen", endpoint, "--log-format", options.log_format, *of_dtype]
    return program("symbiosis.cli.main:executor_main", *words, name="executor")


def http_code(listener: socket.socket, link: socket.socket, options: FrontOptions) -> list[str]:
    started = msgspec.json.encode(Started(listener.fileno(), link.fileno(), options)).decode()
    return ["-m", "symbiosis.server.http_process", started]
