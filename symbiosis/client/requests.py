"""Builds the headers of a client's calls, from a cache where possible, and refuses inputs that no call can carry."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from msgspec.structs import replace
from torch import Tensor
from torch._C import _is_tracing, _len_torch_dispatch_stack
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from symbiosis.client.direct.rule import DECODE_ROWS
from symbiosis.client.layers.groups import GroupMember
from symbiosis.errors import CallError, Code, RemoteWeightError
from symbiosis.kernels.row_invariant import RowInvariant
from symbiosis.protocol import DTYPES, Call, Op, Priority, View
from symbiosis.transport.tensors import DTYPE_NAME, Shapes

LARGEST = 64 << 20  # bytes of rows in one call through the host: while an executor takes them in, others wait
FEWEST = 64  # rows of a part of them
FIRST_OF_TWO = "_checkpoint_hook"  # where torch keeps tensors of what a checkpoint computes for the first time
TRACERS = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE


@lru_cache(maxsize=1 << 14)
def call_of(
    op: Op,
    layer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    bias: bool,
    priority: Priority,
    view: View | None,
    groups: int,
    gradient: bool,
    also: tuple[int, ...],
    columns: bool = False,
) -> Call:
    """Return the (cached) Call with these fields."""
    name = DTYPE_NAME.get(dtype)
    if name is None:
        raise CallError(Code.BAD_DTYPE, f"layer {layer}: {dtype} cannot be sent. Use one of {', '.join(DTYPES)}")
    return Call(op, layer, name, shape, bias, priority, view, groups, gradient, also, columns=columns)


@lru_cache(maxsize=1 << 14)
def rows_call(
    op: Op, group: tuple[GroupMember, ...], dtype: torch.dtype, shape: torch.Size, priority: Priority
) -> tuple[Call, Shapes]:
    """Return the (cached) Call for the rows of a tensor of this shape, and the shapes of its results."""
    first, *others = group
    also, rows = tuple(member.layer for member in others), (shape[:-1].numel(), shape[-1])
    call = call_of(op, first.layer, dtype, rows, first.bias, priority, None, 0, False, also)
    return call, tuple((*shape[:-1], member.width) for member in group)


def priority_of(x: Tensor, training: bool) -> Priority:
    """Return the priority of a call for these rows.

    >>> priority_of(torch.zeros(3, 2000, 16), training=False).name
    'PREFILL'
    """
    if training:
        return Priority.TRAIN
    return Priority.DECODE if x.numel() <= DECODE_ROWS * x.shape[-1] else Priority.PREFILL


def lies_by_columns(op: Op, x: Tensor) -> bool:
    """Whether `x` is a matrix, or a stack, that libraries multiply column by column, as it lies in a CPU's memory.

    >>> lies_by_columns(Op.PRODUCT, torch.zeros(3, 8, 5).mT), lies_by_columns(Op.PRODUCT, torch.zeros(3, 5, 8))
    (True, False)
    """
    if x.dim() not in (2, 3) or x.device.type != "cpu" or "columns" not in op.traits.uses:
        return False
    (*_, rows, columns), (*_, down, along) = x.shape, x.stride()
    return (along != 1 or down < columns) and down == 1 and along >= rows


def goes_in_parts(call: Call, shapes: Shapes) -> bool:
    """Whether the rows of a large call (`LARGEST`) can go in several calls. The results of a group lie one member after another, so they can
    be taken apart only if their shapes are known."""
    members_apart = not call.also or (call.op is Op.FORWARD and bool(shapes))
    return call.rows > FEWEST and call.by_rows and members_apart


def pieces_of(x_TK: Tensor) -> Sequence[Tensor]:
    """Split rows into parts, each of which goes in a call of its own."""
    most = LARGEST // max(1, x_TK.shape[1] * x_TK.element_size())
    return x_TK.split(max(FEWEST, most // FEWEST * FEWEST))


def in_parts(
    call: Call, x: Tensor, shapes: Shapes, make: Callable[[Call, tuple[Tensor, ...], Shapes], list[Tensor]]
) -> list[Tensor]:
    """Make a large call part by part, and return its results."""
    results = []
    for part in pieces_of(x.reshape(call.shape)):
        some = replace(call, shape=tuple(part.shape))
        results.append(make(some, (part,), tuple((len(part), shape[-1]) for shape in shapes)))
    whole = [torch.cat(parts) for parts in zip(*results, strict=True)]
    return [unshared(y, shape) for y, shape in zip(whole, shapes, strict=True)] if shapes else whole


def is_watched() -> bool:
    """Whether a compiler, a tracer or a dispatch mode records or replaces torch's operations."""
    return is_compiling() or _len_torch_dispatch_stack() > 0 or _is_tracing()


def are_tensors_seen() -> bool:
    """Whether a function mode of the user's sees the tensors of torch's operations, and could write to them. (A default device is such a
    mode, too, and so are our products of rows by themselves; these write to nothing.)"""
    return any(not isinstance(mode, DeviceContext | RowInvariant) for mode in _get_current_function_mode_stack())


def will_be_made_again() -> bool:
    """Whether a checkpoint will compute anew what is computed now, before the backward."""
    hooks = _top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith(FIRST_OF_TWO)


def unshared(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshape a result so that autograd does not take it for a view: then it may be changed in place."""
    return torch.ops.aten._unsafe_view.default(y, shape)  # type: ignore[no-any-return]


def refuse_tracers() -> None:
    """Refuse to run under tracers: they would record results as constants, and fake tensors have no rows."""
    if torch._C._len_torch_dispatch_stack() and any(torch._C._get_dispatch_mode(tracer) for tracer in TRACERS):
        raise RemoteWeightError(
            "make_fx and FakeTensorMode cannot see a remote weight used outside its own linear layer: keep this layer on the client (wrap's "
            "layers=)"
        )


def is_transformed() -> bool:
    """Whether a transform of torch.func is active, or tangents are computed."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse_transforms(x: Tensor) -> None:
    """Refuse torch.func transforms and tangents: a call sends plain rows, so they would be lost silently."""
    if torch._C._are_functorch_transforms_active():
        raise RemoteWeightError(
            "torch.func transforms (grad, jvp, vmap, ...) do not reach through remote layers: use torch.autograd"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise RemoteWeightError(
            "tangents (torch.autograd.forward_ad, jacobian's forward-mode) do not reach through remote layers: use gradients"
        )
    if torch._C._functorch.is_legacy_batchedtensor(x):
        raise RemoteWeightError(
            "batches of gradients (is_grads_batched, jacobian's vectorize) do not reach through remote layers: take them one by one"
        )
