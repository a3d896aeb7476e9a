"""The words of a client's call, which are looked up rather than built anew; and what no call can carry."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd import forward_ad

from symbiosis.client.groups import Member
from symbiosis.errors import CallError, Code, RemoteWeightError
from symbiosis.protocol import DTYPES, Call, Layer, Op, Priority, View
from symbiosis.transport.tensors import DTYPE_NAME, Shapes

DECODE_ROWS = 16  # as many rows as this, made without gradients, are taken for tokens that somebody waits for
LARGEST = 64 << 20  # bytes of rows in one call through the host: while an executor takes them in, others wait
FEWEST = 64  # rows of a part of them
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
) -> Call:
    """The call of these words, looked up rather than built anew."""
    name = DTYPE_NAME.get(dtype)
    if name is None:
        raise CallError(Code.BAD_DTYPE, f"layer {layer}: {dtype} does not travel. Use one of {', '.join(DTYPES)}")
    return Call(op, layer, name, shape, bias, priority, view, groups, gradient, also)


@lru_cache(maxsize=1 << 14)
def rows_call(
    op: Op, group: tuple[Member, ...], dtype: torch.dtype, shape: torch.Size, priority: Priority
) -> tuple[Call, Shapes]:
    """The call for the rows of a tensor of this shape, and the shapes of its results."""
    first, *others = group
    also, rows = tuple(member.layer for member in others), (shape[:-1].numel(), shape[-1])
    call = call_of(op, first.layer, dtype, rows, first.bias, priority, None, 0, False, also)
    return call, tuple((*shape[:-1], member.width) for member in group)


def priority_of(x: Tensor, training: bool) -> Priority:
    """Of a call for these rows.

    >>> priority_of(torch.zeros(3, 2000, 16), training=False).name
    'PREFILL'
    """
    if training:
        return Priority.TRAIN
    return Priority.DECODE if x.numel() <= DECODE_ROWS * x.shape[-1] else Priority.PREFILL


def shape_of_result(call: Call, layer: Layer) -> tuple[int, ...]:
    """Of a call that carries rows."""
    if call.op is Op.LEFT and call.view is not None:
        return (*call.view.size[:-1], call.shape[-1])
    if call.op is Op.LOOKUP:
        return (*call.shape, layer.shape[1])
    outputs_last = (call.op is Op.FORWARD) == (layer.kind == "conv1d")
    width = call.view.size[-1] if call.view is not None else layer.shape[1 if outputs_last else 0]
    return (*call.shape[:-1], width)


def goes_in_parts(call: Call, shapes: Shapes) -> bool:
    """Whether its rows are very many, and may go by themselves. What several members get or make lies one member after another:
    results can be taken apart where their shapes are known."""
    members_apart = not call.also or (call.op is Op.FORWARD and bool(shapes))
    return call.nbytes > LARGEST and call.rows > FEWEST and call.by_rows and members_apart


def parts_of(x_TK: Tensor) -> Sequence[Tensor]:
    """Rows that go one call after another."""
    most = LARGEST // max(1, x_TK.shape[1] * x_TK.element_size())
    return x_TK.split(max(FEWEST, most // FEWEST * FEWEST))


def is_watched() -> bool:
    """Whether somebody writes down what goes through torch's dispatcher, or replaces it: compilers, tracers, modes."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or torch._C._is_tracing()


def unshared(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A result in this shape that autograd takes for no view: what a custom function returns may be changed in place then."""
    return torch.ops.aten._unsafe_view.default(y, shape)  # type: ignore[no-any-return]


def refuse_tracers() -> None:
    """Who writes down torch's operations would take the results of such a call for constants, and a fake tensor has no rows."""
    if torch._C._len_torch_dispatch_stack() and any(torch._C._get_dispatch_mode(tracer) for tracer in TRACERS):
        raise RemoteWeightError(
            "make_fx and FakeTensorMode see no use of a remote weight but by its own linear layer: keep this layer on the client (wrap's "
            "layers=)"
        )


def refuse_transforms(x: Tensor) -> None:
    """What a call sends are plain rows: a tangent would be lost, and nobody would notice."""
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
