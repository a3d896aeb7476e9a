"""A weight that lives in the executor: a tensor with shape, dtype and device, and no storage.

Its size, stride and storage offset are those of a view into the executor's tensor, so that every view of it is another
remote weight, and whatever strides a matrix product wants travel with the call. Below autograd, torch's own formulas
apply: the gradient of `x @ V` is `dy @ V.t()`, another call with another view, and nothing is saved for it.

What happens to it:

* a matrix product (mm, addmm, bmm, grouped, ...) or an embedding lookup: a call to the executor;
* a view or a cast: another remote weight;
* `W + delta`: a `RemoteSum`, whose products are the remote product plus the local one;
* anything else reads values: a `READ` where the provider allows it, else `WeightRead` naming layer, op and line;
* a write: a private copy where reads are allowed, else `WeightWrite`.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from symbiosis.client.session import Session
from symbiosis.errors import WeightRead, WeightWrite
from symbiosis.protocol import MAX_DIM, Layer, Op, Priority, View

aten = torch.ops.aten

VIEWS = frozenset(
    (
        aten.t.default, aten.transpose.int, aten.permute.default, aten.select.int, aten.slice.Tensor,
        aten.detach.default, aten.alias.default, aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default,
        aten.squeeze.default, aten.squeeze.dim, aten.expand.default, aten.unbind.int, aten.split.Tensor,
        aten.split_with_sizes.default, aten.as_strided.default, aten.chunk.default, aten.narrow.default,
    )
)  # fmt: skip
LIKE = frozenset(
    (
        aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
        aten.rand_like.default, aten.randn_like.default, aten.new_empty.default, aten.new_zeros.default,
        aten.new_ones.default, aten.new_full.default, aten.new_empty_strided.default,
    )
)  # fmt: skip


@dataclass(eq=False)
class Handle:
    """One remote parameter: which layer of which session, and the private copy that a permitted write made."""

    session: Session
    index: int
    layer: Layer
    private: Tensor | None = None
    own_bias: tuple[nn.Parameter, int] | None = None  # the base's own bias, and its version when it was taken over

    def is_own_bias(self, bias: Tensor | None) -> bool:
        """Whether `bias` is still what the executor adds, too."""
        own = self.own_bias
        if own is None or bias is not own[0] or bias._version != own[1]:
            return False
        return not (bias.requires_grad and torch.is_grad_enabled())

    def snapshot(self) -> "Handle":
        """The executor's tensor as it is, for what is a copy to the caller: writes to the one do not show in the other."""
        assert self.private is None
        return Handle(self.session, self.index, self.layer, own_bias=self.own_bias)

    def is_same_tensor(self, other: "Handle") -> bool:
        if self is other:
            return True
        shared = self.private is None and other.private is None
        return shared and self.session is other.session and self.index == other.index

    def copy(self, memo: dict[int, Any]) -> "Handle":
        if id(self) not in memo:
            private = None if self.private is None else self.private.clone()
            memo[id(self)] = Handle(self.session, self.index, self.layer, private)
        return memo[id(self)]


class RemoteWeight(Tensor):
    """A view into a tensor of the executor."""

    handle: Handle
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, handle: Handle, size: Any, stride: Any, offset: int, dtype: torch.dtype, device: torch.device
    ) -> "RemoteWeight":
        weight = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, storage_offset=offset, dtype=dtype, device=device, requires_grad=False
        )
        weight.handle = handle
        return weight

    @classmethod
    def whole(cls, handle: Handle, dtype: torch.dtype, device: torch.device) -> "RemoteWeight":
        shape = handle.layer.shape
        return cls(handle, shape, contiguous_stride(shape), 0, dtype, device)

    @property
    def is_whole(self) -> bool:
        shape = self.handle.layer.shape
        return tuple(self.shape) == tuple(shape) and self.stride() == contiguous_stride(shape)

    def view_of(self) -> View:
        return View(tuple(self.shape), tuple(self.stride()), int(self.storage_offset()))

    def is_same_view(self, other: "RemoteWeight") -> bool:
        return self.handle.is_same_tensor(other.handle) and self.view_of() == other.view_of()

    def like_me(self, meta: Tensor) -> "RemoteWeight":
        """The remote weight with the geometry of `meta`."""
        return RemoteWeight(self.handle, meta.shape, meta.stride(), int(meta.storage_offset()), self.dtype, self.device)

    def converted(self, dtype: torch.dtype | None, device: Any) -> "RemoteWeight":
        return RemoteWeight(self.handle.snapshot(), *self.view_of(), dtype or self.dtype, device or self.device)

    def meta(self) -> Tensor:
        """A tensor of the same geometry without memory, on which views can be tried."""
        base = torch.empty(prod(self.handle.layer.shape), dtype=self.dtype, device="meta")
        return base.as_strided(self.shape, self.stride(), self.storage_offset())

    def value(self) -> Tensor:
        """The values: the private copy's, or read from the executor (which refuses if it was not told to allow it)."""
        handle = self.handle
        if handle.private is not None:
            base = handle.private.to(self.device, self.dtype)
            return base.as_strided(self.shape, self.stride(), self.storage_offset())
        if self.is_whole:
            return handle.session.call(Op.READ, handle.index, dtype=self.dtype).to(self.device)
        size, stride, offset = self.view_of()  # kept as they lie in memory, because strides decide roundings
        if len(size) > MAX_DIM:
            return RemoteWeight.whole(handle, self.dtype, self.device).value().as_strided(size, stride, offset)
        order = sorted(range(self.dim()), key=lambda dim: -stride[dim])
        view = View(tuple(size[dim] for dim in order), tuple(stride[dim] for dim in order), offset)
        read = handle.session.call(Op.READ, handle.index, dtype=self.dtype, view=view)
        return read.to(self.device).permute(*(order.index(dim) for dim in range(self.dim())))

    # What torch.Tensor has as attributes and must not be bypassed.

    @property
    def data(self) -> "RemoteWeight":  # type: ignore[override]
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: Tensor) -> None:
        if isinstance(value, RemoteWeight) and value.handle.is_same_tensor(self.handle):
            torch._C.TensorBase.data.__set__(self, value)  # type: ignore[attr-defined]
        else:
            self.privatise("data=", value)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return False

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        self.requires_grad_(flag)

    def requires_grad_(self, flag: bool = True) -> "RemoteWeight":  # type: ignore[override]
        if flag and self.is_whole:  # nn.Parameter(W.t()), as PEFT writes it, asks too, and means nothing by it
            raise WeightWrite(
                f"the shared base weight {self.handle.layer.name!r} is frozen and cannot require grad (at {call_site()}). "
                "To train it, keep the layer on the client: wrap(model, layers=[...]) without it"
            )
        return self

    def privatise(self, what: str, value: Tensor | None = None) -> None:
        """A write: from now on this parameter is a private copy. Only where reads are allowed."""
        handle = self.handle
        if not handle.session.welcome.allow_read:
            raise WeightWrite(
                f"{what} would write to the shared base weight {handle.layer.name!r} (at {call_site()}). Keep the layer "
                "on the client (wrap's layers=), or start the executor with --allow-read for a private copy"
            )
        if value is None:
            whole = RemoteWeight.whole(handle, self.dtype, self.device)
            value = handle.private if handle.private is not None else whole.value().clone()
        elif isinstance(value, RemoteWeight | RemoteSum):
            value = value.value().clone()
        if tuple(value.shape) != handle.layer.shape:
            raise WeightWrite(
                f"{what} would give {handle.layer.name!r} the shape {tuple(value.shape)} (at {call_site()})"
            )
        handle.private = value.detach().to(self.dtype).contiguous()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"RemoteWeight({self.handle.layer.name}, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "RemoteWeight":
        if id(self) not in memo:
            handle = self.handle.copy(memo)
            own = self.handle.own_bias
            if own is not None:
                bias = memo.get(id(own[0]))
                if bias is None:
                    import copy

                    bias = copy.deepcopy(own[0], memo)
                handle.own_bias = (bias, bias._version) if self.handle.is_own_bias(own[0]) else None
            memo[id(self)] = _remade(handle, self.view_of(), self.dtype, self.device, hasattr(self, "_is_param"))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        handle = self.handle
        parts = handle.session, handle.index, handle.layer, handle.private
        return _unpickled, (*parts, self.view_of(), self.dtype, self.device, hasattr(self, "_is_param"))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in VIEWS:
            return _view(func, args, kwargs)
        if func is aten._to_copy.default and args[0].handle.private is None:
            return args[0].converted(kwargs.get("dtype"), kwargs.get("device"))
        if func in LIKE:
            return func(_stand_in(args[0]), *args[1:], **kwargs)
        remote = [a for a in tree_leaves((args, kwargs)) if isinstance(a, RemoteWeight)]
        if any(weight.handle.private is not None for weight in remote):
            return _on_values(func, args, kwargs)
        if product := PRODUCTS.get(func):
            result = product(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if written := _written(func, args, kwargs):
            return _write(func, written, args, kwargs)
        if func in SUMS and (total := _sum(func, args, kwargs)) is not NotImplemented:
            return total
        if not remote[0].handle.session.welcome.allow_read:
            raise WeightRead(
                f"{func} reads the values of the remote weight {remote[0].handle.layer.name!r} (at {call_site()}). "
                "If only an initialisation reads them, call get_peft_model before wrap; else use a method that needs only "
                "the layer's output, keep the layer on the client (wrap's layers=), or start the executor with --allow-read"
            )
        return _on_values(func, args, kwargs)


@cache
def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for dim in reversed(shape):
        stride.append(step)
        step *= max(1, dim)
    return tuple(reversed(stride))


_INTERNAL = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def call_site() -> str:
    """The line of the caller's code, outside torch and this package."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_INTERNAL):
            return f"{frame.filename}:{frame.lineno}"
    return "?"


def _remade(handle: Handle, view: View, dtype: torch.dtype, device: torch.device, is_param: bool) -> RemoteWeight:
    weight = RemoteWeight(handle, *view, dtype, device)
    return nn.Parameter(weight, requires_grad=False) if is_param else weight  # type: ignore[return-value]


def _unpickled(
    session: Session, index: int, layer: Layer, private: Tensor | None, view: View, dtype: Any, device: Any, param: bool
) -> RemoteWeight:
    return _remade(Handle(session, index, layer, private), view, dtype, device, param)


def _stand_in(weight: Tensor) -> Tensor:
    """A real tensor of the same shape, dtype and device that takes no memory."""
    if not isinstance(weight, RemoteWeight):
        return weight
    return torch.empty((), dtype=weight.dtype, device=weight.device).expand(weight.shape)


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    weight = args[0]
    result = func(weight.meta(), *args[1:], **kwargs)
    if isinstance(result, list | tuple):
        return [weight.like_me(part) for part in result]
    return weight.like_me(result)


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map(lambda a: a.value() if isinstance(a, RemoteWeight) else a, (args, kwargs))
    return func(*args, **kwargs)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The remote weights and sums that `func` would change, lists of them (`_foreach_...`) included."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return [value for value in tree_leaves(written) if isinstance(value, RemoteWeight | RemoteSum)]


def _write(func: Any, written: list[RemoteWeight], args: Any, kwargs: Any) -> Any:
    weight, source = written[0], args[1] if len(args) > 1 else None
    if isinstance(source, RemoteWeight) and source.is_same_view(weight):
        return weight  # set_ or copy_ from itself, as parametrize and load_state_dict do
    for one in written:
        one.privatise(str(func))
    _on_values(func, args, kwargs)
    return None if isinstance(args[0], list | tuple) else weight


# ---------------------------------------------------------------- products


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _call(op: Op, weight: RemoteWeight, x: Tensor, view: View | None, ends: Tensor | None = None) -> Tensor:
    handle, gradient = weight.handle, in_backward()
    training = gradient or torch.is_grad_enabled()
    priority = Priority.TRAIN if training else Priority.DECODE if x.shape[0] <= 16 else Priority.PREFILL
    call = handle.session.call
    return call(op, handle.index, x, view=view, ends=ends, priority=priority, gradient=gradient)


def _rows_times(x: Tensor, weight: RemoteWeight) -> Tensor:
    """`x @ V`. If V is the whole weight it is FORWARD or DGRAD, which other clients' calls can join."""
    if x.numel() == 0:
        return x.new_zeros(*x.shape[:-1], weight.shape[-1])
    x = x.to(weight.dtype)
    kind, base = weight.handle.layer.kind, weight.handle.layer.shape
    if kind != "tensor" and weight.dim() == 2:
        stride = contiguous_stride(base)
        if tuple(weight.shape) == base and weight.stride() == stride:
            return _call(Op.FORWARD if kind == "conv1d" else Op.DGRAD, weight, x, None)
        if tuple(weight.shape) == base[::-1] and weight.stride() == stride[::-1]:
            return _call(Op.DGRAD if kind == "conv1d" else Op.FORWARD, weight, x, None)
    return _call(Op.PRODUCT, weight, x, weight.view_of())


def _is_repeated(weight: RemoteWeight) -> bool:
    """Whether a stack of matrices is one matrix, again and again: then all rows that it multiplies make one call."""
    return weight.dim() == 3 > len(weight.handle.layer.shape) and (weight.stride(0) == 0 or weight.shape[0] == 1)


def times(x: Any, weight: Any) -> Any:
    """The product of two matrices or stacks of matrices, one of which is remote."""
    if isinstance(x, RemoteWeight):
        if isinstance(weight, RemoteWeight):
            return NotImplemented
        if weight.numel() == 0:
            return weight.new_zeros(*x.shape[:-1], weight.shape[-1])
        if _is_repeated(x):
            return times(weight.transpose(1, 2), x.transpose(1, 2)).transpose(1, 2)
        return _call(Op.LEFT, x, weight.to(x.dtype), x.view_of())
    if _is_repeated(weight):
        return _rows_times(x.reshape(-1, x.shape[-1]), weight[0]).view(*x.shape[:-1], weight.shape[-1])
    return _rows_times(x, weight)


def _plus(bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """`beta * bias + alpha * x @ V`; the base's own bias is added inside the executor's product, so that it rounds once."""
    if isinstance(bias, RemoteWeight) and isinstance(weight, RemoteWeight):
        return NotImplemented
    if isinstance(bias, RemoteWeight):  # the weight plus a low-rank product, as PEFT's baddbmm writes it
        delta = torch.matmul(x, weight)
        return RemoteSum.of(bias, delta * alpha) if beta == 1 and delta.shape == bias.shape else NotImplemented
    own = isinstance(weight, RemoteWeight) and beta == alpha == 1 and weight.handle.is_own_bias(bias)
    if own and weight.dim() == 2 and x.numel():
        handle = weight.handle
        return handle.session.call(Op.FORWARD, handle.index, x, bias=True, gradient=in_backward())
    y = times(x, weight)
    return NotImplemented if y is NotImplemented else beta * bias + alpha * y


def _plus_in_place(bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    if isinstance(bias, RemoteWeight):
        return NotImplemented
    y = times(x, weight)
    return NotImplemented if y is NotImplemented else bias.mul_(beta).add_(y, alpha=alpha)


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if isinstance(x, RemoteWeight):
        return NotImplemented
    rows = x.reshape(-1, x.shape[-1])
    y = times(rows, weight.t()) if bias is None else _plus(bias, rows, weight.t())
    return y.view(*x.shape[:-1], -1)


def _matrix_vector(weight: Any, x: Any) -> Any:
    if isinstance(x, RemoteWeight):
        return NotImplemented
    return times(weight, x.unsqueeze(-1)).squeeze(-1)


def _grouped(x: Any, weight: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    if isinstance(x, RemoteWeight) or offs is None or bias is not None or x.dim() != 2:
        return NotImplemented
    if x.numel() == 0:
        return x.new_zeros(x.shape[0], weight.shape[-1])
    return _call(Op.GROUPED, weight, x.to(weight.dtype), weight.view_of(), offs.to(torch.int32))


def _lookup(weight: Any, ids: Any, *_: Any) -> Any:
    if weight.handle.layer.kind != "embedding" or not weight.is_whole or not ids.numel():
        return NotImplemented
    handle = weight.handle
    rows = handle.session.call(Op.LOOKUP, handle.index, ids.reshape(-1).to(torch.int64), dtype=weight.dtype)
    return rows.view(*ids.shape, -1)


PRODUCTS: dict[Any, Callable[..., Any]] = {
    aten.mm.default: times,
    aten.bmm.default: times,
    aten.mv.default: _matrix_vector,
    aten.addmm.default: _plus,
    aten.baddbmm.default: _plus,
    aten.addmm_.default: _plus_in_place,
    aten.linear.default: _linear,
    aten._grouped_mm.default: _grouped,
    aten.embedding.default: _lookup,
}


# ---------------------------------------------------------------- W + delta


class RemoteSum(Tensor):
    """`W + delta`, W remote and delta a local tensor: kept as two terms, because a product distributes over them."""

    weight: RemoteWeight
    delta: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, weight: RemoteWeight, delta: Tensor) -> "RemoteSum":
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[return-value]
            cls, weight.shape, strides=weight.stride(), dtype=delta.dtype, device=weight.device, requires_grad=False
        )

    def __init__(self, weight: RemoteWeight, delta: Tensor) -> None:
        self.weight, self.delta = weight, delta

    @classmethod
    def of(cls, weight: RemoteWeight, delta: Tensor, fresh: bool = True) -> "RemoteSum":
        """A new tensor to the caller: neither a later write to W nor one to `delta` (unless it is fresh) changes it."""
        dtype = torch.promote_types(weight.dtype, delta.dtype)
        if not fresh or delta.dtype != dtype or delta.stride() != weight.stride():
            delta = torch.empty_strided(weight.shape, weight.stride(), dtype=dtype, device=weight.device).copy_(delta)
        return cls(weight.converted(dtype, None), delta)

    def value(self) -> Tensor:
        return self.weight.value() + self.delta

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"RemoteSum({self.weight!r} + delta)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        sums = [a for a in tree_leaves((args, kwargs)) if isinstance(a, RemoteSum)]
        first = args[0]
        if func in _VIEWS_OF_SUMS:
            weights, deltas = func(first.weight, *args[1:], **kwargs), func(first.delta, *args[1:], **kwargs)
            if isinstance(weights, list | tuple):
                return [RemoteSum(w, d) for w, d in zip(weights, deltas, strict=True)]
            return RemoteSum(weights, deltas)
        if func in LIKE:
            return func(_stand_in(first.weight), *args[1:], **kwargs)
        if func in SUMS and isinstance(first, RemoteSum) and len(sums) == 1 and _keeps_layout(first.weight, kwargs):
            delta = func(first.delta, *args[1:], **kwargs)
            if delta.shape == first.shape:
                return RemoteSum.of(first.weight, delta)
        if func is aten.add_.Tensor and isinstance(first, RemoteSum) and len(sums) == 1:
            first.delta.add_(*args[1:], **kwargs)
            return first
        if func in PRODUCTS and len(sums) == 1 and not isinstance(first if func in _WITH_BIAS else None, RemoteSum):
            return _both_terms(func, args, kwargs)
        name, written = sums[0].weight.handle.layer.name, _written(func, args, kwargs)
        if any(isinstance(one, RemoteSum) for one in written):
            raise WeightWrite(
                f"{func} would change a sum with the remote weight {name!r} in place, which only adding can "
                f"(at {call_site()}): write it without the in-place operation"
            )
        if not sums[0].weight.handle.session.welcome.allow_read:
            raise WeightRead(
                f"{func} reads the values of the remote weight {name!r} plus a local change (at {call_site()}): "
                "use another method, keep the layer on the client (wrap's layers=), or start the executor with --allow-read"
            )
        args, kwargs = tree_map(lambda a: a.value() if isinstance(a, RemoteSum) else a, (args, kwargs))
        return func(*args, **kwargs)


_VIEWS_OF_SUMS = (VIEWS - {aten.as_strided.default}) | {aten._to_copy.default}  # its offset counts from W's beginning
_WITH_BIAS = frozenset((aten.addmm.default, aten.baddbmm.default, aten.addmm_.default))
_WITHOUT_BIAS = {
    aten.addmm.default: aten.mm.default, aten.addmm_.default: aten.mm.default, aten.baddbmm.default: aten.bmm.default
}  # fmt: skip
SUMS = frozenset((aten.add.Tensor, aten.scatter_add.default, aten.clone.default, aten.index_add.default))


def _keeps_layout(weight: RemoteWeight, kwargs: Any) -> bool:
    """A clone that must be contiguous is none of a transposed weight."""
    return kwargs.get("memory_format") is not torch.contiguous_format or weight.is_contiguous()


def _part(arguments: Any, name: str) -> Any:
    return tree_map(lambda a: getattr(a, name) if isinstance(a, RemoteSum) else a, arguments)


def _both_terms(func: Any, args: Any, kwargs: Any) -> Any:
    """The product with W, bias included, plus the product with delta, without it."""
    remote, local = _part((args, kwargs), "weight"), _part((args, kwargs), "delta")
    if plain := _WITHOUT_BIAS.get(func):
        addend = plain(*local[0][1:]) * kwargs.get("alpha", 1)
        return func(*remote[0], **remote[1]).add_(addend)
    if func is aten.linear.default:
        return func(*remote[0], **remote[1]) + func(*local[0][:2])
    return func(*remote[0], **remote[1]) + func(*local[0], **local[1])


def _sum(func: Any, args: Any, kwargs: Any) -> Any:
    """`W + delta` and its kin as a RemoteSum."""
    weight = args[0]
    if func is aten.clone.default:
        zeros = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        return RemoteSum.of(weight, zeros) if _keeps_layout(weight, kwargs) else NotImplemented
    if func is aten.add.Tensor:
        weight, delta = (args[0], args[1]) if isinstance(args[0], RemoteWeight) else (args[1], args[0])
        if isinstance(delta, RemoteWeight) or not isinstance(delta, Tensor) or delta.shape != weight.shape:
            return NotImplemented
        if delta.layout is not torch.strided or (kwargs.get("alpha", 1) != 1 and weight is not args[0]):
            return NotImplemented
        return RemoteSum.of(weight, delta * kwargs["alpha"] if "alpha" in kwargs else delta, fresh="alpha" in kwargs)
    if not isinstance(weight, RemoteWeight):
        return NotImplemented
    zeros = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    return RemoteSum.of(weight, func(zeros, *args[1:], **kwargs))
