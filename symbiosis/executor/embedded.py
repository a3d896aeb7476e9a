"""An executor inside a program: the daemon's server in a thread."""

import atexit
import itertools
import threading
from types import TracebackType
from typing import Any

import msgspec
from torch import nn

from symbiosis.config import Options, load_options
from symbiosis.errors import ConfigError
from symbiosis.executor.load import load_model
from symbiosis.executor.preflight import check
from symbiosis.executor.server import Server
from symbiosis.executor.store import Store

_numbers = itertools.count(1)


class Executor:
    """Serves `model` (a model, a directory, a hub id or "demo") from this process until closed, or until the program ends.

    Options are those of `symbiosis-executor`, with underscores. Without `listen` it answers at an `inproc://` endpoint.
    A model that is handed over is served as it is and frozen: give it a model that nobody trains.

    >>> with Executor("demo", policy="immediate") as executor:
    ...     executor.endpoint.startswith("inproc://")
    True
    """

    server_class: type[Server] = Server

    def __init__(self, model: nn.Module | str, **options: Any) -> None:
        chosen: Options = load_options(options)
        if chosen.mps:
            raise ConfigError("mps is for symbiosis-executor: a program must join MPS before it initialises CUDA")
        if isinstance(model, str):
            elsewhere = tuple(url for url in chosen.listen if not url.startswith("inproc://"))
            check(msgspec.structs.replace(chosen, model=model, listen=elsewhere, metrics_port=None))
            model = load_model(model, chosen.dtype, chosen.device)
        self.server = self.server_class(Store(model, chosen.serve, chosen.integers), chosen)
        self.server.listen(chosen.listen or (f"inproc://executor-{next(_numbers)}",))
        self._thread = threading.Thread(target=self._run, name="symbiosis-executor", daemon=True)
        atexit.register(self.close)  # a thread that computes while the interpreter goes away takes the process down
        self._thread.start()

    def _run(self) -> None:
        try:
            self.server.run()
        finally:
            atexit.unregister(self.close)

    @property
    def endpoints(self) -> list[str]:
        return [listener.url for listener in self.server.listeners]

    @property
    def endpoint(self) -> str:
        return self.endpoints[0]

    def close(self, drain: bool = True) -> None:
        """Answer what has come, then end."""
        (self.server.drain if drain else self.server.stop)()
        self._thread.join(timeout=30)

    def __enter__(self) -> "Executor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
