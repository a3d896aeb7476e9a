"""Serves a training program's adapter while it trains."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from http.client import HTTPException
from pathlib import PurePath
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import torch
from safetensors.torch import save
from torch import Tensor, nn

from symbiosis.errors import AdapterError, ConfigError
from symbiosis.serving.lora.adapter_files import METADATA, AdapterWeights
from symbiosis.serving.lora.adapter_folder import check_name
from symbiosis.text import shown

PATIENCE_S = 60.0
Result = TypeVar("Result")


class TakesAdapters(Protocol):
    """What adapters are published to: here an `Engine` in this program."""

    def publish(self, name: str, model: Any, adapter: str | None = None) -> Any: ...


def publish(
    model: Any,
    name: str,
    server: TakesAdapters | str,
    *,
    adapter: str | None = None,
    key: str | None = None,
    base: str | None = None,
) -> Any:
    """Serve the adapter as it is now, under this name. Requests that come from now on get it; those under way keep the version that they
    have. Returns the version if the server is an `Engine`: what its answers have as `model_version`.

    Its values are copied, so training may go on at once. An `Engine` on the same device copies a LoRA from the trainer's parameters, on that device
    and in their dtype; other kinds go through the host's memory.

    Args:
        model: Of PEFT, with the adapter; or a run of `symbiosis.training.Engine`.
        name: What requests call it.
        server: A `symbiosis.serving.Engine` in this program, or the URL of a `symbiosis serve` or of a cluster.
        adapter: Which of the model's adapters. Default: the active one.
        key: The server's key for administrators, if it has keys.
        base: What a cluster of several models calls the one that the adapter is for.

    >>> import symbiosis
    >>> from peft import LoraConfig, get_peft_model
    >>> from symbiosis.serving import Engine
    >>> with symbiosis.Executor("demo") as executor, Engine(executor.endpoint, memory=1 << 24) as engine:
    ...     model = symbiosis.from_executor(executor.endpoint)
    ...     model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
    ...     version = symbiosis.publish(model, "mine", engine)
    ...     answer = engine.generate(list(b"Once upon a time"), adapter="mine", max_tokens=4)
    >>> len(answer.tokens), answer.model_version == version
    (4, True)
    """
    check_name(name)
    if isinstance(server, str):
        weights = of_trainer(model, lambda peft: weights_of(peft, adapter_of(peft, adapter)))
        return _put(server, name, weights, key, base)
    if not hasattr(server, "publish"):
        raise ConfigError(
            f"publish takes the URL of a server such as http://127.0.0.1:8000, or an Engine, not {server!r:.80}"
        )
    if base is not None:
        raise ConfigError("base= is for clusters, which have several models: an Engine has one")
    return server.publish(name, model, adapter)


def of_trainer(model: Any, look: Callable[[Any], Result]) -> Result:
    """Return what a look at a PEFT model finds; of a run, when all of its commands before have been done."""
    if isinstance(model, nn.Module):
        return look(model)
    when_done: Callable[..., Future[Result]] | None = getattr(model, "when_done", None)
    if when_done is None:
        raise AdapterError(
            f"{type(model).__name__} has no adapter: publish takes what peft.get_peft_model returns, or a run"
        )
    return when_done(lambda: look(model.model)).result()


def adapter_of(model: Any, adapter: str | None) -> str:
    """Return the name of one of a PEFT model's adapters; by default of the active one."""
    configs: dict[str, Any] | None = getattr(model, "peft_config", None)
    if not configs:
        raise AdapterError(f"{type(model).__name__} has no adapter: publish takes what peft.get_peft_model returns")
    adapter = str(getattr(model, "active_adapter", next(iter(configs)))) if adapter is None else adapter
    if adapter not in configs:
        raise AdapterError(f"the model has no adapter {adapter!r}: it has {', '.join(configs)}")
    return adapter


@torch.no_grad()
def weights_of(model: Any, adapter: str) -> AdapterWeights:
    """Return a copy of one adapter of a PEFT model, as PEFT would save it."""
    from peft import get_peft_model_state_dict

    found = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in found.items()}
    config = json.loads(json.dumps(model.peft_config[adapter].to_dict(), default=_plain))
    return AdapterWeights(config, tensors, trained=trained_in(tensors.values()))


def trained_in(tensors: Iterable[Tensor]) -> torch.dtype | None:
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return max(dtypes, key=lambda dtype: dtype.itemsize, default=None)


def _plain(value: Any) -> Any:
    """Return a configuration as PEFT writes it to JSON."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(value) if isinstance(value, PurePath) else vars(value)


def _put(url: str, name: str, weights: AdapterWeights, key: str | None, base: str | None) -> None:
    to = _route(url, name, base)
    body = save(weights.tensors, {METADATA: json.dumps(weights.config)})
    headers = {"Content-Type": "application/octet-stream"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(to, body, headers, method="PUT")  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S):  # noqa: S310
            pass
    except urllib.error.HTTPError as error:
        with error:
            told = error.read(1 << 16)
        raise AdapterError(f"{shown(url)} does not take the adapter {name!r}: {_message(told)}") from None
    except (OSError, HTTPException) as error:
        raise ConfigError(
            f"no server answers at {shown(url)} ({error}). Start one with: symbiosis serve MODEL"
        ) from None


def _route(url: str, name: str, base: str | None) -> str:
    """Return where an adapter is sent.

    >>> _route("http://127.0.0.1:8000/v1/", "mine", base="a model")
    'http://127.0.0.1:8000/v1/adapters/mine?model=a+model'
    """
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{shown(url)} is not the URL of a server: give one such as http://127.0.0.1:8000, or an Engine"
        ) from None
    path = f"{parts.path.rstrip('/').removesuffix('/v1')}/v1/adapters/{quote(name, safe='')}"
    query = parts.query if base is None else urlencode({"model": base})
    return parts._replace(path=path, query=query, fragment="").geturl()


def _message(body: bytes) -> str:
    """Return the message of an error as an API like OpenAI's gives it."""
    try:
        return shown(str(json.loads(body)["error"]["message"]))
    except (ValueError, LookupError, TypeError):
        return shown(body.decode(errors="replace"), 300)
