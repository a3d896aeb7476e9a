"""Decoder layers that keep nothing for the backward pass but what they were given, and compute the rest again in it: less memory, a third more time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.modeling_layers import GradientCheckpointingLayer

from symbiosis.kernels.row_invariant import is_row_invariant, row_invariant
from symbiosis.training.run_adapter import RunAdapter
from symbiosis.training.sequence_packing import Layout, packed_as


class RecomputedLayers:
    """The decoder layers of a model, which are computed again in passes that say so.

    Args:
        anchor: Requires a gradient, so that the first layer has a backward pass, too.
    """

    def __init__(self, model: nn.Module, anchor: Tensor) -> None:
        self._anchor = anchor
        self._layout: Layout | None = None  # of the pass under way, if it says so
        self._adapters: Sequence[RunAdapter] = ()  # of it, that draw random numbers
        self._layers = list(_outermost(model))
        for layer in self._layers:
            layer.forward = partial(self._forward, layer.forward)  # type: ignore[method-assign]

    def __bool__(self) -> bool:
        return bool(self._layers)

    @contextmanager
    def acting(self, layout: Layout, adapters: Sequence[RunAdapter]) -> Iterator[None]:
        """In the block, which is a whole pass of these adapters, layers are computed again."""
        self._layout, self._adapters = layout, [adapter for adapter in dict.fromkeys(adapters) if adapter.drawn]
        try:
            yield
        finally:
            self._layout, self._adapters = None, ()

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._layout is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        call = _LayerCall(forward, args, kwargs, self._layout, {each: each.drawn for each in self._adapters})
        inputs = call.take_inputs()
        return call.result(_Recomputed.apply(self._anchor, call, *inputs))  # type: ignore[no-untyped-call]


class _LayerCall:
    """A call of a layer, which can be made again with other tensors in the places of those that have a gradient."""

    def __init__(
        self,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        layout: Layout,
        drawn: Mapping[RunAdapter, tuple[Tensor, ...]],
    ) -> None:
        self._forward, self._layout, self._drawn = forward, layout, drawn
        self._given, self._structure = tree_flatten((args, kwargs))
        self._places = [at for at, x in enumerate(self._given) if isinstance(x, Tensor) and x.requires_grad]
        self._made: list[Any] = []  # what the layer returned, without its tensors
        self._returned: Any = None
        self._by_rows = is_row_invariant()

    def take_inputs(self) -> list[Tensor]:
        inputs = [self._given[at] for at in self._places]
        for at in self._places:
            self._given[at] = None
        return inputs

    def make(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Call the layer, and return the tensors that it returns."""
        given = self._given.copy()
        for at, each in zip(self._places, inputs, strict=True):
            given[at] = each
        args, kwargs = tree_unflatten(given, self._structure)
        with packed_as(self._layout), row_invariant(self._by_rows and not is_row_invariant()):
            made, self._returned = tree_flatten(self._forward(*args, **kwargs))
        self._made = [Tensor if isinstance(each, Tensor) else each for each in made]
        return [each for each in made if isinstance(each, Tensor)]

    def make_again(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Call it once more: dropout draws what it drew before."""
        now = {adapter: adapter.drawn for adapter in self._drawn}
        _draw_from(self._drawn)
        try:
            return self.make(inputs)
        finally:
            _draw_from(now)

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the layer returned, with these tensors."""
        each = iter(tensors)
        return tree_unflatten([next(each) if one is Tensor else one for one in self._made], self._returned)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: _LayerCall, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*inputs)
        made = call.make(inputs)
        ctx.mark_non_differentiable(*(each for each in made if not each.is_floating_point()))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        leaves = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            made = ctx.call.make_again(leaves)
        wanted = [at for at, each in enumerate(made) if each.requires_grad]
        # adds to the gradients of the adapters, too
        torch.autograd.backward([made[at] for at in wanted], [slopes[at] for at in wanted])
        return None, None, *(leaf.grad for leaf in leaves)


def _outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers that transformers can compute again, but not those within one."""
    for child in model.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from _outermost(child)


def _draw_from(drawn: Mapping[RunAdapter, tuple[Tensor, ...]]) -> None:
    for adapter, state in drawn.items():
        adapter.drawn = state
