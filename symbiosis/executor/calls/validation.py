"""Checks a call before anything is allocated or computed for it."""

from collections.abc import Callable
from math import isfinite, prod

import torch
from msgspec.structs import replace
from torch import Tensor

from symbiosis.errors import CallError, Code
from symbiosis.executor.model.store import Store
from symbiosis.executor.options import Options
from symbiosis.protocol import (
    ELSEWHERE,
    FLOATS,
    ITEMSIZE,
    MAX_DIM,
    WEIGHT_BITS,
    Call,
    Layer,
    Op,
    View,
    outputs_of,
    shape_of_reply,
    width,
)
from symbiosis.transport.tensors import TORCH_DTYPE

MOST_GROUPS = 1 << 12  # more experts than any model has; each takes time, even without rows


def check_call(call: Call, store: Store, options: Options) -> tuple[int, ...]:
    """Return the shape of the reply to `call`, or raise `CallError`, which says what to change. Fields that the op does not use have
    been checked to be empty (`protocol.checked`)."""
    options.limits.check(call)
    if call.op is Op.STATS:
        raise CallError(Code.UNKNOWN_OP, "STATS does not belong to a layer, so it cannot be registered")
    if call.seeded:
        _check_seeded(call, options)
    if call.columns and len(call.shape) not in (2, 3):
        raise CallError(Code.BAD_SHAPE, f"matrices may lie column by column, not a shape {call.shape}")
    if call.also:
        _check_group(call, store, options)
    elif call.op is not Op.ECHO:
        _check_layer(call, store, options)
    shape = shape_of_reply(call, store.manifest)
    if len(shape) > MAX_DIM:
        raise CallError(
            Code.BAD_SHAPE, f"the reply {shape} has more than {MAX_DIM} dimensions: ask for a view of fewer dimensions"
        )
    if prod(shape) * ITEMSIZE[call.dtype] > options.max_call_bytes:
        raise CallError(Code.TOO_LARGE, f"the reply {shape} exceeds {options.max_call_bytes} bytes: send fewer rows")
    return shape


def _check_seeded(call: Call, options: Options) -> None:
    """Check that the seed grows into rows that could have been sent."""
    if call.dtype not in WEIGHT_BITS or len(call.shape) != 2:
        raise CallError(Code.BAD_DTYPE, f"a seed stands for rows of integers, not for {call.shape} of {call.dtype}")
    options.limits.check(replace(call, seeded=False))


def _check_group(call: Call, store: Store, options: Options) -> None:
    """Check each member as if it were called alone."""
    if len(call.shape) != 2:
        raise CallError(Code.UNKNOWN_OP, f"a group of layers takes rows, not a tensor of shape {call.shape}")
    for layer in call.layers:
        if layer >= len(store.manifest) or store.manifest[layer].kind not in ("linear", "conv1d"):
            raise CallError(
                Code.UNKNOWN_LAYER,
                f"number {layer} is not a linear layer that this executor serves: it cannot be in a group",
            )
    members = [store.manifest[layer] for layer in call.layers]
    rows, taken = call.shape[0], [call.shape[1]] * len(members)
    if call.op is Op.DGRAD:
        taken = list(map(width, members))
        if sum(taken) != call.shape[1] or len({width(member, Op.DGRAD) for member in members}) != 1:
            raise CallError(
                Code.BAD_SHAPE, f"rows {call.shape} are not gradients of layers {call.layers}, one after another"
            )
    for layer, values in zip(call.layers, taken, strict=True):
        _check_layer(replace(call, layer=layer, also=(), shape=(rows, values)), store, options)


def _check_layer(call: Call, store: Store, options: Options) -> None:
    if call.layer >= len(store.manifest):
        raise CallError(Code.UNKNOWN_LAYER, f"there is no layer number {call.layer}: the model has other layers")
    layer = store.manifest[call.layer]
    if layer.kind == ELSEWHERE:
        raise CallError(Code.UNKNOWN_LAYER, f"{layer.name} is held by another rank of this service: call that one")
    if call.view is not None:
        _check_view(call, call.view, layer, options)
    if call.op is Op.READ:
        if layer.kind != "client" and not options.allow_read:
            raise CallError(Code.READ_DENIED, f"{layer.name}: the executor was not started with --allow-read")
    elif layer.kind == "client":
        raise CallError(Code.UNKNOWN_LAYER, f"{layer.name} is not served: it belongs to the client")
    elif call.dtype not in FLOATS:
        _check_integers(call, layer, store)
    elif call.bias and not layer.bias:
        raise CallError(Code.UNKNOWN_OP, f"{layer.name} has no bias to add")
    elif call.bias and call.op is Op.PRODUCT and not _has_outputs(call, layer):
        raise CallError(
            Code.BAD_VIEW, f"a bias is added to rows that some outputs of {layer.name} make, and to no others"
        )
    CHECKS[call.op](call, layer, store)


def _check_view(call: Call, view: View, layer: Layer, options: Options) -> None:
    """Bound a view's size. An element that a view repeats is many elements to a product and to a reply. So a view that repeats elements
    may not be larger than the tensor, except for a product with a stack of one matrix, as `expand` makes it."""
    if prod(view.size) > max(prod(layer.shape), options.max_call_bytes):
        raise CallError(
            Code.BAD_VIEW, f"{layer.name}: a view of shape {view.size} exceeds the size that any call may have"
        )
    stacked = call.op is not Op.READ and len(view.size) == 3 and view.stride[0] == 0
    larger = prod(view.size[stacked:]) > prod(layer.shape)
    if larger and not _are_distinct(view.size[stacked:], view.stride[stacked:]):
        raise CallError(
            Code.BAD_VIEW,
            f"{layer.name}: in a view of shape {view.size} with strides {view.stride} elements come more than once, and there are more "
            f"than the {prod(layer.shape)} of the weight: take the weight itself, and expand the result",
        )


def _has_outputs(call: Call, layer: Layer) -> bool:
    """Whether the matrix that a single matrix of rows is multiplied by is what makes some outputs of a layer."""
    return len(call.shape) == 2 and call.view is not None and outputs_of(layer, call.view) is not None


def _are_distinct(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether all indices surely lead to different elements, because each stride is longer than all that lies within it."""
    within = 0
    for step, count in sorted(zip(stride, size, strict=True)):
        if count > 1 and step <= within:
            return False
        within += (count - 1) * step
    return True


def _check_integers(call: Call, layer: Layer, store: Store) -> None:
    bits = WEIGHT_BITS.get(call.dtype)
    if bits is None or not call.op.traits.of_whole_layers:
        raise CallError(Code.BAD_DTYPE, f"{layer.name}: {call.op.name} takes floating-point rows, not {call.dtype}")
    if call.bias or not store.offers(call.layer, bits):
        raise CallError(
            Code.BAD_DTYPE,
            f"{layer.name}: this executor does not multiply {call.dtype} rows by it: start it with --integers {bits}, "
            "and ask for linear layers, without bias",
        )


def _rows_by_matrix(call: Call, layer: Layer, store: Store) -> None:
    if call.op.traits.of_whole_layers and layer.kind == "tensor":
        raise CallError(Code.UNKNOWN_OP, f"{call.op.name} works on whole matrices, {layer.name} is a {layer.kind}")
    matrix = store.matrix(call.layer, call.op, call.view)
    if len(call.shape) != matrix.dim() or matrix.dim() not in (2, 3) or call.shape[:-2] != matrix.shape[:-2]:
        raise CallError(Code.BAD_SHAPE, f"{layer.name}: rows {call.shape} cannot multiply {tuple(matrix.shape)}")
    _expect_width(call, layer, matrix.shape[-2])


def _matrix_by_columns(call: Call, layer: Layer, store: Store) -> None:
    matrix = store.matrix(call.layer, call.op, call.view)
    same = len(call.shape) == matrix.dim() and call.shape[:-2] == matrix.shape[:-2]
    if not same or matrix.dim() not in (2, 3) or call.shape[-2] != matrix.shape[-1]:
        raise CallError(Code.BAD_SHAPE, f"{layer.name}: {tuple(matrix.shape)} cannot multiply {call.shape}")


def _rows_by_groups(call: Call, layer: Layer, store: Store) -> None:
    matrix = store.matrix(call.layer, call.op, call.view)
    if matrix.dim() != 3 or len(call.shape) != 2 or call.groups != matrix.shape[0] or call.groups > MOST_GROUPS:
        raise CallError(
            Code.BAD_SHAPE, f"{layer.name}: {call.groups} groups of rows {call.shape} for {tuple(matrix.shape)}"
        )
    if call.dtype == "float64":
        raise CallError(Code.BAD_DTYPE, f"{layer.name}: torch does not have grouped products in float64: use float32")
    _expect_width(call, layer, matrix.shape[1])
    if not _can_be_grouped(matrix, TORCH_DTYPE[call.dtype]):
        raise CallError(
            Code.BAD_VIEW,
            f"{layer.name}: torch has grouped products for rows and matrices whose rows (or a matrix's columns) lie one after another and "
            f"begin at multiples of 16 bytes, not for a view of shape {tuple(matrix.shape)} with strides {matrix.stride()} in {call.dtype}",
        )


def _can_be_grouped(matrices: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch multiplies contiguous rows by these."""
    _, taken, given = matrices.shape
    place = torch.empty_strided(matrices.shape, matrices.stride(), dtype=matrices.dtype, device="meta")
    _, rows, columns = place.to(dtype).stride()
    if columns == 1 and rows >= given:
        apart = rows
    elif rows == 1 and columns >= taken:
        apart = columns
    else:
        return False
    return apart * dtype.itemsize % 16 == 0 and taken * dtype.itemsize % 16 == 0


def _flat_ids(call: Call, layer: Layer, store: Store) -> None:
    if layer.kind != "embedding" or len(call.shape) != 1:
        raise CallError(Code.UNKNOWN_OP, f"{layer.name} is a {layer.kind}: only embeddings are looked up, by flat ids")


def _linear_layer(call: Call, layer: Layer, store: Store) -> None:
    if layer.kind not in ("linear", "conv1d"):
        raise CallError(Code.UNKNOWN_OP, f"{layer.name} is a {layer.kind}: row norms are defined for linear layers")


def _view_within(call: Call, layer: Layer, store: Store) -> None:
    store.matrix(call.layer, call.op, call.view)


def _expect_width(call: Call, layer: Layer, values: int) -> None:
    if call.shape[-1] != values:
        raise CallError(
            Code.BAD_SHAPE,
            f"{layer.name}: {call.op.name} takes rows of {values} values, not {call.shape[-1]}",
        )


CHECKS: dict[Op, Callable[[Call, Layer, Store], None]] = {  # for the ops that name a layer
    Op.FORWARD: _rows_by_matrix,
    Op.DGRAD: _rows_by_matrix,
    Op.PRODUCT: _rows_by_matrix,
    Op.LEFT: _matrix_by_columns,
    Op.GROUPED: _rows_by_groups,
    Op.LOOKUP: _flat_ids,
    Op.NORMS: _linear_layer,
    Op.READ: _view_within,
}


def must_be_finite(call: Call, options: Options) -> bool:
    """Whether to refuse rows that are not finite. They are checked just before they are multiplied."""
    numbers = call.op.traits.activations and call.dtype not in WEIGHT_BITS and not call.gradient
    return numbers and options.non_finite == "refuse"


def check_finite(call: Call, payload: tuple[Tensor, ...], rows: slice, store: Store) -> None:
    """Refuse these rows of a call if they are not finite. The sum tells, and quickly, unless it overflows."""
    if call.op is Op.GROUPED:  # rows of no group are not used
        rows = slice(int(payload[1][-1]))
    values = payload[0][rows]
    if not isfinite(values.sum().item()):
        _must_be_finite(values, call, store)


def check_share(call: Call, payload: tuple[Tensor, ...], first: float, last: float, store: Store) -> None:
    """Check a part of the values for those that are not finite: from `first` to `last`, both as fractions of all values."""
    rows = payload[0][: int(payload[1][-1])] if call.op is Op.GROUPED else payload[0]
    values = rows.reshape(-1)
    part = values[int(first * len(values)) : int(last * len(values))]
    if not isfinite(part.sum().item()):
        _must_be_finite(part, call, store)


def _must_be_finite(values: Tensor, call: Call, store: Store) -> None:
    if not values.isfinite().all():
        raise CallError(
            Code.NON_FINITE,
            f"{store.manifest[call.layer].name}: the rows hold NaN or infinity. Look for them in the client's "
            "activations (torch.autograd.set_detect_anomaly), or start the executor with --non-finite pass",
        )
