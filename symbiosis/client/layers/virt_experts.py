"""Modules with stacks of matrices and a forward of their own, such as a mixture's experts.

Their parameters are remote weights, and each product with one is a call. Where the weights are mapped, and the rule says to multiply here,
the forward finds the mapped tensors in their place, and runs as it does in the unsplit model, down to the last kernel.
"""

import threading
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from symbiosis.client.layers.virt_layer import ORIGINAL, PROXY, VirtPackedLinear, is_as_served
from symbiosis.client.requests import are_tensors_seen, is_watched
from symbiosis.client.weights.remote_weight import RemoteWeight
from symbiosis.protocol import Layer


class _Running(threading.local):
    """The module whose forward runs in this thread, and the tensors that it finds."""

    module: nn.Module | None = None
    weights: Mapping[str, Tensor] = {}


_running = _Running()


class VirtExperts(nn.Module):
    """What `wrap` makes of such a module's class: a subclass of both. `kind` is the class that it was."""

    kind: ClassVar[Any]

    def __getattr__(self, name: str) -> Any:
        if not torch.compiler.is_compiling() and _running.module is self and name in _running.weights:
            return _running.weights[name]
        return super().__getattr__(name)

    @torch.jit.ignore
    def forward(self, *args: Any, **named: Any) -> Any:
        weights = {} if is_watched() or are_tensors_seen() else _mapped(self, tree_leaves((args, named)))
        if not weights:
            return super().forward(*args, **named)
        outer = _running.module, _running.weights
        _running.module, _running.weights = self, weights
        try:
            return super().forward(*args, **named)
        finally:
            _running.module, _running.weights = outer

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        made: Any = super().__reduce_ex__(protocol)
        return _remade, (self.kind,), *made[2:]


def _mapped(module: nn.Module, given: list[Any]) -> dict[str, Tensor]:
    """The mapped tensors of the module's remote weights; none if this client should not multiply by them itself."""
    remote: dict[str, Any] = {
        name: weight for name, weight in module._parameters.items() if isinstance(weight, RemoteWeight)
    }
    tensors = [one for one in given if isinstance(one, Tensor)]
    x = next((one for one in tensors if one.is_floating_point()), None)
    if x is None or not remote or not all(map(is_as_served, remote.values())):
        return {}
    session = next(iter(remote.values())).handle.session
    if session.mapped is None:
        return {}
    routed = [one.numel() for one in tensors if not one.is_floating_point()]  # a row for each expert of a token
    numbers = {name: (weight.handle.index, weight.dtype) for name, weight in remote.items()}
    return session.mapped.weights_for_local_products(numbers, x, max(routed, default=0), module.training)


@cache
def virtual(kind: Any) -> type[nn.Module]:
    """The class that stands for the class `kind`."""
    names = {"kind": kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (VirtExperts, kind), names)


def proxy_of(module: nn.Module, layer: Layer) -> type[nn.Module]:
    """The class of a module in which the executor computes `layer`."""
    kind: Any = type(module)
    if layer.kind == "tensor" and not isinstance(module, VirtExperts):
        return virtual(kind)
    if issubclass(kind, nn.Linear) and kind.__module__.startswith("bitsandbytes."):
        return VirtPackedLinear
    return PROXY.get(kind, kind)


def original_of(module: nn.Module) -> type[nn.Module]:
    """The class that it was before."""
    kind = type(module)
    return vars(kind).get("kind") or ORIGINAL.get(kind, kind)


def _remade(kind: Any) -> nn.Module:
    made: Any = virtual(kind)
    return made.__new__(made)
