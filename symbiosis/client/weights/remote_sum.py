"""`W + delta` for a remote W and a local delta. It is kept as two terms: its product is the remote product plus the local one."""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from symbiosis.client.weights.remote_products import PRODUCTS
from symbiosis.client.weights.remote_view import (
    LIKE,
    Lent,
    RemoteView,
    call_site,
    is_composite,
    is_view,
    stand_in,
    without_memory,
    written_by,
)
from symbiosis.errors import WeightRead, WeightWrite

aten = torch.ops.aten


class RemoteSum(Tensor):
    """`W + delta`, kept as two terms, because a product distributes over them."""

    weight: RemoteView
    delta: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, weight: RemoteView, delta: Tensor) -> "RemoteSum":
        return without_memory(cls, weight.shape, weight.stride(), 0, delta.dtype, weight.device)  # type: ignore[no-any-return]

    def __init__(self, weight: RemoteView, delta: Tensor) -> None:
        self.weight, self.delta = weight, delta

    @classmethod
    def of(cls, weight: RemoteView, delta: Tensor, fresh: bool = True) -> "RemoteSum":
        """Return a sum that is a new tensor to the caller: no later write to W, nor to `delta` unless it is fresh, changes it."""
        dtype = torch.promote_types(weight.dtype, delta.dtype)
        if not fresh or delta.dtype != dtype or delta.stride() != weight.stride():
            delta = torch.empty_strided(weight.shape, weight.stride(), dtype=dtype, device=weight.device).copy_(delta)
        return cls(weight.converted(dtype, None), delta)

    def refuse_write(self, func: Any) -> NoReturn:
        raise WeightWrite(
            f"{func} would change a sum with the remote weight {self.weight.handle.layer.name!r} in place, which only adding "
            f"can (at {call_site()}): write it without the in-place operation"
        )

    def refuse_view(self, func: Any) -> NoReturn:
        raise WeightRead(
            f"{func} would make a view of a sum with the remote weight {self.weight.handle.layer.name!r}, which lies nowhere (at "
            f"{call_site()}): add the two as ordinary tensors, `W * 1 + delta`, or use a copy"
        )

    def value(self) -> Tensor:
        return self.weight.values_to_read() + self.delta

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"RemoteSum({self.weight!r} + delta)"

    @classmethod
    @torch.compiler.disable  # what runs here are calls, and bookkeeping
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        sums = [a for a in tree_leaves((args, kwargs)) if isinstance(a, RemoteSum)]
        first = args[0]
        if is_composite(func):
            return func.decompose(*args, **kwargs)
        if func is aten._to_copy.default and not first.weight.can_become(kwargs.get("dtype") or first.dtype):
            return func(_readable(first, func).value(), **kwargs)
        if func is aten._to_copy.default or (is_view(func) and func is not aten.as_strided.default):
            weights, deltas = func(first.weight, *args[1:], **kwargs), func(first.delta, *args[1:], **kwargs)
            if isinstance(weights, list | tuple):
                return [RemoteSum(w, d) for w, d in zip(weights, deltas, strict=True)]
            return RemoteSum(weights, deltas)
        if func in LIKE:
            return func(stand_in(first.weight), *args[1:], **kwargs)
        if func in _ADDS and isinstance(first, RemoteSum) and len(sums) == 1 and _keeps_layout(first.weight, kwargs):
            delta = func(first.delta, *args[1:], **kwargs)
            if delta.shape == first.shape and first.weight.can_become(delta.dtype):
                return RemoteSum.of(first.weight, delta)
        if func is aten.add_.Tensor and isinstance(first, RemoteSum) and len(sums) == 1:
            first.delta.add_(*args[1:], **kwargs)
            return first
        if func in PRODUCTS and len(sums) == 1 and not isinstance(first if func in _WITH_BIAS else None, RemoteSum):
            return _both_terms(func, args, kwargs)
        for one in written_by(func, args, kwargs):
            if isinstance(one, RemoteSum):
                one.refuse_write(func)
        _readable(sums[0], func)
        return _on_values(func, args, kwargs)


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the values of sums, which lie nowhere: what would be another view of them is refused."""
    lent = Lent[RemoteSum]()

    def value(given: Any) -> Any:
        return lent.add(given, given.value()) if isinstance(given, RemoteSum) else given

    made = func(*tree_map(value, args), **tree_map(value, kwargs))
    for one in lent.shared_by(made):
        one.refuse_view(func)
    return made


def _readable(one: RemoteSum, func: Any) -> RemoteSum:
    handle = one.weight.handle
    if not handle.session.may_read:
        raise WeightRead(
            f"{func} reads the values of the remote weight {handle.layer.name!r} plus a local change (at {call_site()}): "
            "use another method, keep the layer on the client (wrap's layers=), or start the executor with --allow-read"
        )
    return one


_WITH_BIAS = frozenset((aten.addmm.default, aten.baddbmm.default, aten.addmm_.default))
_WITHOUT_BIAS = {
    aten.addmm.default: aten.mm.default, aten.addmm_.default: aten.mm.default, aten.baddbmm.default: aten.bmm.default
}  # fmt: skip


def _keeps_layout(weight: RemoteView, kwargs: Any) -> bool:
    """Whether a clone keeps the layout: one that must be contiguous is no clone of a transposed weight."""
    return kwargs.get("memory_format") is not torch.contiguous_format or weight.is_contiguous()


def _part(arguments: Any, name: str) -> Any:
    return tree_map(lambda a: getattr(a, name) if isinstance(a, RemoteSum) else a, arguments)


def _both_terms(func: Any, args: Any, kwargs: Any) -> Any:
    """Add the product with W, bias included, and the product with delta, without it."""
    remote, local = _part((args, kwargs), "weight"), _part((args, kwargs), "delta")
    if plain := _WITHOUT_BIAS.get(func):
        addend = plain(*local[0][1:]) * kwargs.get("alpha", 1)
        return func(*remote[0], **remote[1]).add_(addend)
    return func(*remote[0], **remote[1]) + func(*local[0], **local[1])


# ---------------------------------------------------------------- how a sum comes about


def _added(x: Any, y: Any, *, alpha: float = 1) -> Any:
    weight, delta = (x, y) if isinstance(x, RemoteView) else (y, x)
    if isinstance(delta, RemoteView) or not isinstance(delta, Tensor) or delta.shape != weight.shape:
        return NotImplemented
    if delta.layout is not torch.strided or (alpha != 1 and weight is not x):
        return NotImplemented
    if not weight.can_become(torch.promote_types(weight.dtype, delta.dtype)):
        return NotImplemented
    return RemoteSum.of(weight, delta if alpha == 1 else delta * alpha, fresh=alpha != 1)


def _cloned(weight: Any, **kwargs: Any) -> Any:
    return RemoteSum.of(weight, _zeros(weight)) if _keeps_layout(weight, kwargs) else NotImplemented


def _added_in_places(func: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(weight, RemoteView):
        return NotImplemented
    return RemoteSum.of(weight, func(_zeros(weight), *args, **kwargs))


def _added_product(weight: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """Add a low-rank product to the weight, as PEFT's baddbmm writes it."""
    if not isinstance(weight, RemoteView) or isinstance(b, RemoteView):
        return NotImplemented
    delta = torch.matmul(a, b)
    return RemoteSum.of(weight, delta * alpha) if beta == 1 and delta.shape == weight.shape else NotImplemented


def _zeros(weight: RemoteView) -> Tensor:
    return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)


SUMS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: _added,
    aten.clone.default: _cloned,
    aten.scatter_add.default: partial(_added_in_places, aten.scatter_add.default),
    aten.index_add.default: partial(_added_in_places, aten.index_add.default),
    aten.addmm.default: _added_product,
    aten.baddbmm.default: _added_product,
}
_ADDS = SUMS.keys() - _WITH_BIAS  # what a sum does to its delta alone
