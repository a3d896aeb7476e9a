"""Decoder layers under torch.compile: what lies between products and attention becomes a few kernels.

Products with adapters and attention are custom ops there. Which layer, or which place, is told by a tensor, as a number would be compiled
into the code: one compilation serves all layers.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from symbiosis.serving.attention import attend_now


class Place:
    """Of a linear layer: what is called in its stead."""

    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        self.forward = forward
        self.number = torch.tensor(id(self))
        _places[id(self)] = self


_places: "WeakValueDictionary[int, Place]" = WeakValueDictionary()


@torch.library.custom_op("symbiosis::adapted_product", mutates_args=())
def _adapted_product(x: Tensor, place: Tensor, width: int) -> Tensor:
    return _places[int(place)].forward(x)


@_adapted_product.register_fake
def _shape_of_product(x: Tensor, place: Tensor, width: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], width)


@torch.library.custom_op("symbiosis::paged_attention", mutates_args=())
def _paged_attention(
    query: Tensor, key: Tensor, value: Tensor, layer: Tensor, scaling: float | None, window: int | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    module: Any = SimpleNamespace(layer_idx=int(layer))
    return attend_now(module, query, key, value, scaling, window, softcap, sinks)


@_paged_attention.register_fake
def _shape_of_attention(
    query: Tensor, key: Tensor, value: Tensor, layer: Tensor, scaling: float | None, window: int | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


class Placed:
    """A linear layer in whose stead a place is called; a mixin."""

    symbiosis_place: Place
    symbiosis_number: Tensor
    symbiosis_width: int

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return _adapted_product(x, self.symbiosis_number, self.symbiosis_width)
        return self.symbiosis_place.forward(x)


_kinds: dict[type[nn.Module], type[nn.Module]] = {}


def put_in_place(module: nn.Module, forward: Callable[[Tensor], Tensor], width: int) -> None:
    kind = type(module)
    if kind not in _kinds:
        _kinds[kind] = type(kind.__name__, (Placed, kind), {"__module__": kind.__module__})
    place = Place(forward)
    for name, value in (("place", place), ("number", place.number), ("width", width)):
        object.__setattr__(module, f"symbiosis_{name}", value)
    module.__class__ = _kinds[kind]


def compile_layers(model: nn.Module, count: int, backend: str = "inductor") -> int:
    """Says how many."""
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == count]
    layers = list(lists[0]) if lists else []
    for layer in layers:
        for module in layer.modules():
            if isinstance(number := getattr(module, "layer_idx", None), int):
                object.__setattr__(module, "symbiosis_layer", torch.tensor(number))
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)
    return len(layers)
