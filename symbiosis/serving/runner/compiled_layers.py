"""Compiles decoder layers by torch.compile: what they compute between products and attention becomes a few kernels.

Attention and products with adapters are custom ops. A tensor tells an op which layer it is for: a number would be compiled into the code,
so that each layer would be compiled again.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from symbiosis.base.folders import check_caches
from symbiosis.serving.runner.attention import attention


class SharedInput:
    """Stands for linear layers that see the same rows. When the first is called, `products` computes the products of all, and the others
    take theirs when they are called."""

    def __init__(self, products: Callable[[Tensor], list[Tensor]], widths: list[int]) -> None:
        self.products, self.widths = products, widths
        self.number = torch.tensor(id(self))
        self._given: Tensor | None = None
        self._ready: list[Tensor] = []
        places[id(self)] = self

    def take(self, member: int, x: Tensor) -> Tensor:
        """Return the product of one of the layers, by its number."""
        if self._given is not x:
            self._ready = self.traced(x) if torch.compiler.is_compiling() else self.products(x)
            self._given = x
        y = self._ready[member]
        if member == len(self.widths) - 1:
            self._given, self._ready = None, []
        return y

    def traced(self, x: Tensor) -> list[Tensor]:
        """Return the products as a compiler sees them: an op."""
        return _adapted_products(x, self.number, self.widths)


places: "WeakValueDictionary[int, SharedInput]" = WeakValueDictionary()


@torch.library.custom_op("symbiosis::adapted_products", mutates_args=())
def _adapted_products(x: Tensor, place: Tensor, widths: list[int]) -> list[Tensor]:
    return places[int(place)].products(x)


@_adapted_products.register_fake
def _shapes_of_products(x: Tensor, place: Tensor, widths: list[int]) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], width) for width in widths]


@torch.library.custom_op("symbiosis::paged_attention", mutates_args=())
def _paged_attention(
    query: Tensor, key: Tensor, value: Tensor, layer: Tensor, scaling: float | None, window: int | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    module: Any = SimpleNamespace(layer_idx=int(layer))
    return attention(module, query, key, value, None, scaling, window, softcap, sinks)[0]


@_paged_attention.register_fake
def _shape_of_attention(
    query: Tensor, key: Tensor, value: Tensor, layer: Tensor, scaling: float | None, window: int | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


class SharesInput:
    """A linear layer that takes its products from a place; a mixin."""

    symbiosis_place: SharedInput
    symbiosis_member: int

    def forward(self, x: Tensor) -> Tensor:
        return self.symbiosis_place.take(self.symbiosis_member, x)


_kinds: dict[type[nn.Module], type[nn.Module]] = {}


def put_in_place(modules: Sequence[nn.Module], products: Callable[[Tensor], list[Tensor]], widths: list[int]) -> None:
    """Let these layers take what `products` computes. They come in the order in which they are called."""
    take_from(SharedInput(products, widths), modules)


def take_from(place: SharedInput, modules: Sequence[nn.Module]) -> None:
    for member, module in enumerate(modules):
        kind = type(module)
        if kind not in _kinds:
            _kinds[kind] = type(kind.__name__, (SharesInput, kind), {"__module__": kind.__module__})
        object.__setattr__(module, "symbiosis_place", place)
        object.__setattr__(module, "symbiosis_member", member)
        module.__class__ = _kinds[kind]


def compile_layers(model: nn.Module, count: int, backend: Any = "inductor") -> int:
    """Compile the decoder layers of a model, of which there are `count`, and return how many were found."""
    check_caches(inductor=True)
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == count]
    layers = list(lists[0]) if lists else []
    for layer in layers:
        for module in layer.modules():
            if isinstance(number := getattr(module, "layer_idx", None), int):
                object.__setattr__(module, "symbiosis_layer", torch.tensor(number))
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)
    return len(layers)
