"""State dicts of a wrapped model. They hold what the client owns, and the rest if it may be read, and load as if they held everything."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.client.weights.remote_weight import RemoteWeight, remote_weights
from symbiosis.protocol import Layer
from symbiosis.transport.fingerprint import digest
from symbiosis.transport.tensors import TORCH_DTYPE

LOADER = "transformers.core_model_loading"  # of `from_pretrained` and `load_adapter`
logger = logging.getLogger("symbiosis")


def complete(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Complete a module's state dict: it holds what the client owns, private copies included, and the executor's values where reads are
    allowed."""
    for name, parameter in module._parameters.items():
        if not isinstance(parameter, RemoteWeight):
            continue
        if parameter.handle.private is None and not may_read(parameter):
            state.pop(prefix + name, None)
        elif (
            state.get(prefix + name) is not parameter and not _values_later.get()
        ):  # it is if it was asked for variables
            state[prefix + name] = parameter.value()


def may_read(weight: RemoteWeight) -> bool:
    return weight.handle.session.may_read


_values_later: ContextVar[bool] = ContextVar("values_later", default=False)


@contextmanager
def values_later() -> Iterator[None]:
    """Let state dicts hold remote weights as they are in the block, for programs that take only a few of them."""
    token = _values_later.set(True)
    try:
        yield
    finally:
        _values_later.reset(token)


def say_what_is_left_out(root: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Warn a program that asks for the base model's state dict if it lacks remote weights. PEFT asks with a prefix, to save an adapter,
    and loaders want names only."""
    if prefix or sys._getframe(2).f_globals.get("__name__") == LOADER:  # who called `state_dict`, which calls this
        return
    left_out = [weight for weight in remote_weights(root) if weight.handle.private is None and not may_read(weight)]
    if left_out:
        logger.warning(
            "a state dict of a wrapped model holds what is the client's own, not the %d weights that the executor holds: to save "
            "a whole checkpoint, symbiosis.unwrap(model) first",
            len(left_out),
        )


def put_in_remote(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded, replace plain values that equal remote weights by those weights, so that loading changes nothing.
    Values that differ from the executor's stay, and count as a write."""
    for name, parameter in module._parameters.items():
        if isinstance(parameter, RemoteWeight) and _is_served(state.get(prefix + name), parameter):
            state[prefix + name] = parameter


def _is_served(given: Tensor | None, weight: RemoteWeight) -> bool:
    """Whether what is to be loaded, if anything, is what the executor has, and this weight, if it has another dtype."""
    if given is None or isinstance(given, RemoteWeight) or given.device.type == "meta":
        return True
    if weight.handle.private is not None or not is_the_executors(given, weight.handle.layer):
        return False
    served = TORCH_DTYPE[weight.handle.layer.dtype]
    return weight.dtype is served or torch.equal(given.to(served).to(given.dtype), given)


def is_the_executors(value: Tensor, layer: Layer) -> bool:
    return tuple(value.shape) == layer.shape and digest(value.to(TORCH_DTYPE[layer.dtype])) == layer.digest
