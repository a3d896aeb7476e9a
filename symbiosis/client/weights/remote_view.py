"""Handles of remote tensors, and where each lies: a view (size, stride, storage offset) into a tensor that the executor holds.

So every view of a remote tensor is another one, and the strides that a matrix product wants travel with the call.
"""

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import typing_extensions
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from symbiosis.client.session import Session
from symbiosis.errors import RemoteWeightError, WeightRead
from symbiosis.protocol import MAX_DIM, Layer, Op, View, contiguous_stride
from symbiosis.transport.tensors import DTYPE_NAME, TORCH_DTYPE

aten = torch.ops.aten
Owner = TypeVar("Owner")

UNSAFE_VIEWS = frozenset(  # views that torch does not call so
    (aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default)
)
OTHER_NUMBERS = frozenset(  # views in which the memory means something else
    (
        aten.view.dtype,
        aten.view_as_real.default,
        aten.view_as_complex.default,
        aten._conj.default,
        aten._neg_view.default,
    )
)
COMPRESSED = frozenset((torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc))
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
    bias: Tensor | None = None  # what the executor adds if it is asked to: a copy that nobody else can reach
    is_frozen: bool = False  # whether the unsplit weight would require no grad
    keeps_dtype: bool = False  # whether its layer computes in a dtype of its own, whatever the model is cast to

    def snapshot(self) -> "Handle":
        """Return the executor's tensor as it is, for what is a copy to the caller: writes to one do not show in the other."""
        assert self.private is None
        return replace(self, private=None)

    def is_same_tensor(self, other: "Handle") -> bool:
        if self is other:
            return True
        shared = self.private is None and other.private is None
        return shared and self.is_same_layer(other)

    def with_private(self, value: Tensor) -> "Handle":
        """Return the handle of a private copy: `value` itself if it fills its memory. Strides decide about rounding, so they stay."""
        value = value.detach()
        private = value if is_dense(value) else value.contiguous()
        return replace(self, private=private)

    def is_same_layer(self, other: "Handle") -> bool:
        return self.session is other.session and self.index == other.index

    def copy(self, memo: dict[int, Any]) -> "Handle":
        if id(self) not in memo:
            private = None if self.private is None else self.private.clone()  # which keeps its strides
            memo[id(self)] = replace(self, private=private)
        return memo[id(self)]


class RemoteView(Tensor):
    """A tensor with shape, dtype and device, and no storage. `RemoteWeight` says what torch's operations make of it."""

    handle: Handle
    is_whole: bool  # all of the executor's tensor, as it lies there
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        handle: Handle,
        size: Any = None,
        stride: Any = None,
        offset: int = 0,
        dtype: Any = None,
        device: Any = None,
        **options: Any,
    ) -> Self:
        if not isinstance(handle, Handle):
            return _remade_of(handle, **options)
        weight: Self = without_memory(cls, size, stride, offset, dtype, device)
        weight.handle, shape = handle, handle.layer.shape
        along = contiguous_stride(shape) if handle.private is None else handle.private.stride()
        weight.is_whole = tuple(size) == shape and tuple(stride) == along
        return weight

    @classmethod
    def whole(cls, handle: Handle, dtype: torch.dtype, device: torch.device) -> Self:
        shape, private = handle.layer.shape, handle.private
        return cls(handle, shape, contiguous_stride(shape) if private is None else private.stride(), 0, dtype, device)

    def view_of(self) -> View:
        return View(tuple(self.shape), tuple(self.stride()), int(self.storage_offset()))

    def is_same_view(self, other: "RemoteView") -> bool:
        return self.handle.is_same_tensor(other.handle) and self.view_of() == other.view_of()

    def like_me(self, meta: Tensor) -> Self:
        """Return the remote tensor with the geometry of `meta`."""
        return type(self)(self.handle, meta.shape, meta.stride(), int(meta.storage_offset()), self.dtype, self.device)

    @property
    def has_values(self) -> bool:
        """Whether its values lie on its device, so that reading them takes no way."""
        return self.handle.session.has_values_on(self.device)

    def can_become(self, dtype: torch.dtype) -> bool:
        """Whether a cast of this tensor gives what one of the executor's gives: not if an earlier one lost digits."""
        served = TORCH_DTYPE[self.handle.layer.dtype]
        return dtype == self.dtype or holds(self.dtype, served)

    def converted(self, dtype: torch.dtype | None, device: Any) -> Self:
        return type(self)(self.handle.snapshot(), *self.view_of(), dtype or self.dtype, device or self.device)

    def meta(self) -> Tensor:
        """A tensor of the same geometry without memory, on which views can be tried."""
        base = torch.empty(prod(self.handle.layer.shape), dtype=self.dtype, device="meta")
        return base.as_strided(self.shape, self.stride(), self.storage_offset())

    def values_to_read(self) -> Tensor:
        """Return the values to one who neither writes to them nor keeps them: as they are mapped, else a copy."""
        handle, mapped = self.handle, self.handle.session.mapped
        if handle.private is None and mapped is not None and mapped.device == self.device:
            lying = mapped.weights.get(handle.index)
            if lying is not None and lying.dtype is self.dtype:
                return lying.as_strided(self.shape, self.stride(), lying.storage_offset() + self.storage_offset())
        return self.value()

    def value(self) -> Tensor:
        """Return the values: the private copy's, or the executor's, which it refuses to send unless reads are allowed."""
        handle = self.handle
        if handle.private is not None:
            base = handle.private.to(self.device, self.dtype)
            return base.as_strided(self.shape, self.stride(), base.storage_offset() + self.storage_offset())
        if self.dtype not in DTYPE_NAME:  # which is not sent
            served = TORCH_DTYPE[handle.layer.dtype]
            return type(self)(handle, *self.view_of(), served, self.device).value().to(self.dtype)
        if self.is_whole:
            return handle.session.call(Op.READ, handle.index, dtype=self.dtype).to(self.device)
        if not self.dim():
            return type(self)(handle, (1,), (1,), int(self.storage_offset()), self.dtype, self.device).value()[0]
        size, stride, offset = self.view_of()  # kept as they lie in memory, because strides decide roundings
        if len(size) > MAX_DIM or prod(size) > prod(handle.layer.shape):  # no more travels than there is
            return self.whole(handle, self.dtype, self.device).value().as_strided(size, stride, offset)
        if any(step == 0 and count > 1 for count, step in zip(size, stride, strict=True)):
            once = tuple(1 if step == 0 else count for count, step in zip(size, stride, strict=True))
            return type(self)(handle, once, stride, offset, self.dtype, self.device).value().expand(size)
        order = sorted(range(self.dim()), key=lambda dim: -stride[dim])
        view = View(tuple(size[dim] for dim in order), tuple(stride[dim] for dim in order), offset)
        read = handle.session.call(Op.READ, handle.index, dtype=self.dtype, view=view)
        return spread(read.to(self.device).permute(*(order.index(dim) for dim in range(self.dim()))), stride)


def _remade_of(value: Tensor, requires_grad: bool = False) -> Any:
    """Make `type(weight)(value)`, as accelerate does to offload what it later gets back from a state dict."""
    if not isinstance(value, RemoteView):
        return nn.Parameter(value, requires_grad)
    if value.handle.private is None and not value.handle.session.may_read:
        raise RemoteWeightError(
            f"{value.handle.layer.name!r} cannot be offloaded (at {call_site()}), since the executor holds it, and no memory here: leave "
            "accelerate's cpu_offload and disk_offload out, or start the executor with --allow-read for private copies"
        )
    return value


def without_memory(
    cls: type[Tensor], size: Any, stride: Any, offset: int, dtype: torch.dtype, device: torch.device
) -> Any:
    """Return a tensor of this class. (Under inference_mode, too, a view of an ordinary tensor is an ordinary tensor.)"""
    words: dict[str, Any] = {"strides": stride, "storage_offset": offset, "dtype": dtype, "device": device}
    if not torch.is_inference_mode_enabled():
        made = torch.Tensor._make_wrapper_subclass(cls, size, requires_grad=False, **words)
    else:
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(cls, size, requires_grad=False, **words)
    torch._C._set_throw_on_mutable_data_ptr(made)  # else whatever gets hold of its storage writes to address 0
    return made


class NoMemory(torch.UntypedStorage):
    """The storage of what lies in the executor. It tells tensors apart; torch refuses to read and write it, and does not look before it
    shares one."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise WeightRead(
            f"the storage of a remote weight has no memory here that could be shared or copied (at {call_site()}): share the tensor itself, or "
            "call symbiosis.unwrap(model) first"
        )

    share_memory_ = _share_memory_lock_protected = _share_fd_cpu_ = _share_filename_cpu_ = _share_cuda_ = copy_ = (
        _refuse
    )


def memory_of(made: Any) -> list[int]:
    """Return where the memory of a tensor begins, if it has some.

    >>> memory_of(torch.zeros(3).t()) == [], memory_of(torch.zeros(0)), memory_of(7)
    (False, [], [])
    """
    if type(made) is not Tensor or made.is_meta:
        return []
    if made.layout is torch.sparse_coo:
        made = made._values()
    elif made.layout is not torch.strided:
        made = made.values() if made.layout in COMPRESSED else made.new_empty(0)
    at = made.untyped_storage().data_ptr()
    return [at] if at else []


class Lent(dict[int, Owner]):
    """The memory of the values that an operation runs on, and whose values they are."""

    def add(self, owner: Owner, values: Tensor) -> Tensor:
        """Lend these values. Returns them."""
        self.update((at, owner) for at in memory_of(values))
        return values

    def shared_by(self, made: Any) -> Iterator[Owner]:
        """Yield each owner with whose values lies what the operation has made."""
        if self:
            for one in tree_leaves(made):
                yield from (self[at] for at in memory_of(one) if at in self)


@cache
def holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether `dtype` has all the numbers of `other`."""
    return dtype == other or (other.is_floating_point and torch.promote_types(dtype, other) == dtype)


@cache
def is_view(func: Any) -> bool:
    """Whether what `func` makes lies where its first argument does, as other strides tell."""
    return func in UNSAFE_VIEWS or (func.is_view and func not in OTHER_NUMBERS)


@cache
def is_composite(func: Any) -> bool:
    """Whether torch writes `func` with other operations. Where autograd is at work it does so first, under inference_mode it leaves
    that to us."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def is_dense(value: Tensor) -> bool:
    """Whether the elements lie side by side in memory, in whatever order.

    >>> is_dense(torch.zeros(2, 3).t()), is_dense(torch.zeros(3).expand(2, 3)), is_dense(torch.zeros(2, 4)[:, :3])
    (True, False, False)
    """
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    return value.permute(order).is_contiguous()


def spread(values: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return the values with these strides, unless they would overlap. Sums of what has gaps are rounded otherwise.

    >>> spread(torch.arange(3.0), (2,)).stride(), spread(torch.ones(2, 2), (1, 1)).stride()
    ((2,), (2, 1))
    """
    if values.stride() == stride or not values.numel():
        return values
    span = 1
    for step, count in sorted(zip(stride, values.shape, strict=True)):
        if count > 1:
            if step < span:
                return values
            span += step * (count - 1)
    return values.new_empty(span).as_strided(values.shape, stride).copy_(values)


_INTERNAL = (str(Path(torch.__file__).parent), f"{Path(__file__).parents[2]}/", typing_extensions.__file__)


def call_site() -> str:
    """Return the line of the caller's code, outside of torch and this package."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_INTERNAL):
            return f"{frame.filename}:{frame.lineno}"
    return "?"


def stand_in(weight: Tensor) -> Tensor:
    """Return a real tensor of the same shape, dtype and device that takes no memory."""
    if not isinstance(weight, RemoteView):
        return weight
    return torch.empty((), dtype=weight.dtype, device=weight.device).expand(weight.shape)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that `func` would change, lists of tensors (`_foreach_...`) included."""
    written = [args[position] if position < len(args) else kwargs.get(name) for position, name in _outputs_of(func)]
    return tree_leaves(written) if written else []


@cache
def _outputs_of(func: Any) -> list[tuple[int, str]]:
    """Return places and names of the arguments that `func` changes."""
    arguments = enumerate(func._schema.arguments)
    return [(position, a.name) for position, a in arguments if a.alias_info is not None and a.alias_info.is_write]
