"""An executor inside a program: the daemon's server in a thread."""

import atexit
import logging
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
from torch import nn

from symbiosis.errors import ConfigError
from symbiosis.executor.loop import ExecutorLoop
from symbiosis.executor.model.load import load_model
from symbiosis.executor.model.store import Store
from symbiosis.executor.options import Options, load_options
from symbiosis.executor.preflight import check, check_quantised
from symbiosis.protocol.endpoints import is_within_process, socket_path
from symbiosis.transport.inproc import new_url

KEEPS = (
    "clients at %s do not map the weights, and call for each product: this program keeps its own model, which it may change. "
    "share_weights=True shares a second copy of them, and a model that is given by its name or folder is shared as it is; share_weights=False "
    "says that this is meant"
)
logger = logging.getLogger("symbiosis")


class Executor:
    """Serves `model` (a model, a directory, a hub id or "demo") from this process until closed, or until the program ends.

    Options are those of `symbiosis-executor`, with underscores. Without `listen` it answers at an `inproc://` endpoint.
    A model that is handed over is served as it is and frozen: give it a model that nobody trains. As it keeps its own weights, clients at
    `local://` map them only with `share_weights=True`, which makes a second copy.

    >>> with Executor("demo", policy="immediate") as executor:
    ...     executor.endpoint.startswith("inproc://")
    True
    """

    server_class: type[ExecutorLoop] = ExecutorLoop

    def __init__(self, model: nn.Module | str | Path, **options: Any) -> None:
        chosen: Options = load_options({name: _as_said(value) for name, value in options.items()})
        if chosen.mps:
            raise ConfigError("mps is for symbiosis-executor: a program must join MPS before it initialises CUDA")
        if len(chosen.places) > 1:
            raise ConfigError("ranks are processes of symbiosis-executor: an Executor in a program is one")
        shares = chosen.shares_weights and (not isinstance(model, nn.Module) or bool(chosen.share_weights))
        if isinstance(model, Path):
            model = os.path.join(".", model)  # noqa: PTH118  (a Path never names a model on the hub)
        if isinstance(model, str):
            elsewhere = tuple(url for url in chosen.listen if not is_within_process(url))
            check(msgspec.structs.replace(chosen, model=model, listen=elsewhere, metrics_port=None))
            model = load_model(model, chosen.dtype, chosen.device, (), chosen.quantize, chosen.serve)
        else:
            _check_model(model, chosen)
            if chosen.shares_weights and not shares:
                logger.warning(KEEPS, ", ".join(filter(socket_path, chosen.listen)))
        store = Store(model, chosen.serve, chosen.integers)
        del model  # so that the store lets go of a tensor when it moves it
        if shares:
            store.share_weights()
        self.server = self.server_class(store, chosen)
        self.server.listen(chosen.listen or (new_url(),))
        self._ready = Future[None]()
        self._thread = threading.Thread(target=self._run, name="symbiosis-executor", daemon=True)
        atexit.register(self.close)  # a thread that computes while the interpreter goes away takes the process down
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:  # it failed, or this program is interrupted
            self.close(drain=False)
            raise

    def _run(self) -> None:
        try:
            self.server.run(lambda: self._ready.set_result(None))
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)  # for the program that starts it
        finally:
            atexit.unregister(self.close)

    @property
    def endpoints(self) -> list[str]:
        return [listener.url for listener in self.server.listeners]

    @property
    def endpoint(self) -> str:
        return self.endpoints[0]

    def close(self, drain: bool = True) -> None:
        """End the executor; with `drain`, answer the calls that have arrived first."""
        (self.server.drain if drain else self.server.stop)()
        self._thread.join(timeout=30)

    def __enter__(self) -> "Executor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_said(value: Any) -> Any:
    """Return a torch device or dtype by its name on the command line, and any other value as it is."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.device | torch.dtype) else value


def _check_model(model: Any, options: Options) -> None:
    """Raise `ConfigError` if `model` is not a base model with weights, or the options contradict it."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"Executor takes a model, not {model!r:.80}: a model, its directory, a hub id, or 'demo'")
    if getattr(model, "is_quantized", False) and (config := getattr(model, "config", None)) is not None:
        check_quantised(msgspec.structs.replace(options, model=type(model).__name__, quantize=None), config.to_dict())
    if options.quantize:
        raise ConfigError(
            "quantize is for models that the executor loads: hand over the name or folder of a checkpoint"
        )
    for name, module in model.named_modules():
        if type(module).__module__.startswith("peft."):
            raise ConfigError(
                f"Executor serves a base model, and this one has adapters ({name or type(module).__name__}), which belong to clients: "
                "hand over the model as it was before get_peft_model (model.unload() gives it back; model.merge_and_unload() with the "
                "adapter in its weights)"
            )
    for name, parameter in model.named_parameters():
        if parameter.is_meta or hasattr(parameter, "handle"):
            raise ConfigError(
                f"Executor serves a model's weights, and this model does not have them ({name}): it is wrapped, or on the meta device. "
                "Load it with from_pretrained, or symbiosis.unwrap(model) first"
            )
    for name, said in (("device", options.device != "cpu"), ("dtype", options.dtype is not None)):
        if said and getattr(options, name) not in _own(model, name):
            raise ConfigError(
                f"{name}={getattr(options, name)!r} is for models that the executor loads, and this one is {' and '.join(_own(model, name))}: "
                f"call model.to(...) first"
            )


def _own(model: nn.Module, name: str) -> list[str]:
    """Return the devices or dtypes of a model's parameters; a GPU both with its number and without."""
    found = {str(getattr(parameter, name)).removeprefix("torch.") for parameter in model.parameters()}
    return sorted(found | {one.partition(":")[0] for one in found})
