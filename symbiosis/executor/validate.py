"""What a call must look like, checked before anything is allocated or computed for it; and the shape of its reply."""

from math import isfinite, prod

from msgspec.structs import replace
from torch import Tensor

from symbiosis.config import Options
from symbiosis.errors import CallError, Code
from symbiosis.executor.store import Store
from symbiosis.protocol import FLOATS, ITEMSIZE, MAX_DIM, WEIGHT_BITS, Call, Layer, Op, View

MOST_GROUPS = 1 << 12  # more experts than any model has: each takes time, even without rows
_CHECKED = frozenset((Op.FORWARD, Op.PRODUCT, Op.LEFT, Op.GROUPED))


def reply_shape(call: Call, store: Store, options: Options) -> tuple[int, ...]:
    """The shape of the reply to `call`; `CallError` with what to change if the call is wrong."""
    options.limits.check(call)
    if call.op is Op.STATS:
        raise CallError(Code.UNKNOWN_OP, "figures are of no layer: they cannot be registered")
    if call.seeded:
        _check_seeded(call, options)
    if call.also:
        shape = _group_reply_shape(call, store, options)
    else:
        shape = call.shape if call.op is Op.ECHO else _layer_reply_shape(call, store, options)
    if len(shape) > MAX_DIM:
        raise CallError(
            Code.BAD_SHAPE, f"the reply {shape} has more than {MAX_DIM} dimensions: ask for a view of fewer"
        )
    if prod(shape) * ITEMSIZE[call.dtype] > options.max_call_bytes:
        raise CallError(Code.TOO_LARGE, f"the reply {shape} exceeds {options.max_call_bytes} bytes: send fewer rows")
    return shape


def _check_seeded(call: Call, options: Options) -> None:
    """What the seed grows into must be rows that could have been sent."""
    if call.dtype not in WEIGHT_BITS or len(call.shape) != 2:
        raise CallError(Code.BAD_DTYPE, f"a seed stands for rows of integers, not for {call.shape} of {call.dtype}")
    options.limits.check(replace(call, seeded=False))


def _group_reply_shape(call: Call, store: Store, options: Options) -> tuple[int, ...]:
    """That of each member, as if it were called alone, put together."""
    if call.op not in (Op.FORWARD, Op.DGRAD) or len(call.shape) != 2:
        raise CallError(Code.UNKNOWN_OP, f"a group of layers takes FORWARD and DGRAD of rows, not {call.op.name}")
    for layer in call.layers:
        if layer >= len(store.manifest) or store.manifest[layer].kind not in ("linear", "conv1d"):
            raise CallError(Code.UNKNOWN_LAYER, f"number {layer} is no linear layer that is served: not in a group")
    rows, widths = call.shape[0], [store.width(layer) for layer in call.layers]
    taken = widths if call.op is Op.DGRAD else [call.shape[1]] * len(widths)
    alone = [
        replace(call, layer=layer, also=(), shape=(rows, width))
        for layer, width in zip(call.layers, taken, strict=True)
    ]  # fmt: skip
    shapes = [_layer_reply_shape(one, store, options) for one in alone]
    if call.op is Op.FORWARD:
        return rows, sum(widths)
    if sum(widths) != call.shape[1] or len(set(shapes)) != 1:
        raise CallError(
            Code.BAD_SHAPE, f"rows {call.shape} are no gradients of layers {call.layers}, one after another"
        )
    return shapes[0]


def _layer_reply_shape(call: Call, store: Store, options: Options) -> tuple[int, ...]:
    if call.layer >= len(store.manifest):
        raise CallError(Code.UNKNOWN_LAYER, f"there is no layer number {call.layer}: the model has other layers")
    layer = store.manifest[call.layer]
    if call.view is not None:
        _check_view(call, call.view, layer, options)
    if call.op is Op.READ:
        if layer.kind != "client" and not options.allow_read:
            raise CallError(Code.READ_DENIED, f"{layer.name}: the executor was not started with --allow-read")
        return tuple(store.matrix(call.layer, call.op, call.view).shape)
    if layer.kind == "client":
        raise CallError(Code.UNKNOWN_LAYER, f"{layer.name} is not served: it belongs to the client")
    if call.dtype not in FLOATS:
        _check_integers(call, layer, store)
    if call.bias and (call.op is not Op.FORWARD or not layer.bias):
        raise CallError(Code.UNKNOWN_OP, f"{layer.name} has no bias to add in {call.op.name}")
    return _SHAPES[call.op](call, layer, store)


def _check_view(call: Call, view: View, layer: Layer, options: Options) -> None:
    """One element in many places is many elements to a product. So a view in which elements come more than once is no larger than the
    tensor, but for a matrix that stands for a stack of the same, as `expand` makes it. What is read costs what its reply is long."""
    if prod(view.size) > max(prod(layer.shape), options.max_call_bytes):
        raise CallError(Code.BAD_VIEW, f"{layer.name}: a view of shape {view.size} exceeds what any call may be")
    if call.op is Op.READ:
        return
    stacked = len(view.size) == 3 and view.stride[0] == 0
    larger = prod(view.size[stacked:]) > prod(layer.shape)
    if larger and not _are_distinct(view.size[stacked:], view.stride[stacked:]):
        raise CallError(
            Code.BAD_VIEW,
            f"{layer.name}: in a view of shape {view.size} with strides {view.stride} elements come more than once, and there are more "
            f"than the {prod(layer.shape)} of the weight: multiply by the weight itself, and expand the result",
        )


def _are_distinct(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether all indices surely lead to different elements: each stride is longer than all that lies within."""
    within = 0
    for step, count in sorted(zip(stride, size, strict=True)):
        if count > 1 and step <= within:
            return False
        within += (count - 1) * step
    return True


def _check_integers(call: Call, layer: Layer, store: Store) -> None:
    bits = WEIGHT_BITS.get(call.dtype)
    if bits is None or call.op not in (Op.FORWARD, Op.DGRAD):
        raise CallError(Code.BAD_DTYPE, f"{layer.name}: {call.op.name} takes rows of floating point, not {call.dtype}")
    if call.bias or not store.offers(call.layer, bits):
        raise CallError(
            Code.BAD_DTYPE,
            f"{layer.name}: this executor does not multiply {call.dtype} by it. For linear layers, without bias, it "
            f"would: start it with --integers {bits}",
        )


def _rows_by_matrix(call: Call, layer: Layer, store: Store) -> tuple[int, ...]:
    if call.op is not Op.PRODUCT and (call.view is not None or layer.kind == "tensor"):
        raise CallError(Code.UNKNOWN_OP, f"{call.op.name} works on whole matrices, {layer.name} is a {layer.kind}")
    matrix = store.matrix(call.layer, call.op, call.view)
    if len(call.shape) != matrix.dim() or matrix.dim() not in (2, 3) or call.shape[:-2] != matrix.shape[:-2]:
        raise CallError(Code.BAD_SHAPE, f"{layer.name}: rows {call.shape} cannot multiply {tuple(matrix.shape)}")
    _expect_width(call, layer, matrix.shape[-2])
    return (*call.shape[:-1], matrix.shape[-1])


def _matrix_by_columns(call: Call, layer: Layer, store: Store) -> tuple[int, ...]:
    matrix = store.matrix(call.layer, call.op, call.view)
    same = len(call.shape) == matrix.dim() and call.shape[:-2] == matrix.shape[:-2]
    if not same or matrix.dim() not in (2, 3) or call.shape[-2] != matrix.shape[-1]:
        raise CallError(Code.BAD_SHAPE, f"{layer.name}: {tuple(matrix.shape)} cannot multiply {call.shape}")
    return (*matrix.shape[:-1], call.shape[-1])


def _rows_by_groups(call: Call, layer: Layer, store: Store) -> tuple[int, ...]:
    matrix = store.matrix(call.layer, call.op, call.view)
    if matrix.dim() != 3 or len(call.shape) != 2 or call.groups != matrix.shape[0] or call.groups > MOST_GROUPS:
        raise CallError(
            Code.BAD_SHAPE, f"{layer.name}: {call.groups} groups of rows {call.shape} for {tuple(matrix.shape)}"
        )
    if call.dtype == "float64":
        raise CallError(Code.BAD_DTYPE, f"{layer.name}: torch has no grouped products of float64, use float32")
    _expect_width(call, layer, matrix.shape[1])
    return call.shape[0], matrix.shape[2]


def _lookup(call: Call, layer: Layer, store: Store) -> tuple[int, ...]:
    if layer.kind != "embedding" or len(call.shape) != 1:
        raise CallError(Code.UNKNOWN_OP, f"{layer.name} is a {layer.kind}: only embeddings are looked up, by flat ids")
    if call.view is not None or call.groups:
        raise CallError(Code.BAD_VIEW, f"{layer.name}: rows are looked up in the whole embedding, without groups")
    return call.shape[0], layer.shape[1]


def _norms(call: Call, layer: Layer, store: Store) -> tuple[int, ...]:
    if layer.kind not in ("linear", "conv1d"):
        raise CallError(Code.UNKNOWN_OP, f"{layer.name} is a {layer.kind}: row norms are defined for linear layers")
    return (layer.shape[0] if layer.kind == "linear" else layer.shape[1],)


def _expect_width(call: Call, layer: Layer, width: int) -> None:
    if call.shape[-1] != width:
        raise CallError(
            Code.BAD_SHAPE,
            f"{layer.name}: {call.op.name} takes rows of {width} values, not {call.shape[-1]}",
        )


_SHAPES = {
    Op.FORWARD: _rows_by_matrix,
    Op.DGRAD: _rows_by_matrix,
    Op.PRODUCT: _rows_by_matrix,
    Op.LEFT: _matrix_by_columns,
    Op.GROUPED: _rows_by_groups,
    Op.LOOKUP: _lookup,
    Op.NORMS: _norms,
}


def check_values(call: Call, payload: tuple[Tensor, ...], store: Store) -> None:
    """What only the values tell: ids and group ends in range."""
    if call.op is Op.LOOKUP:
        rows = store.manifest[call.layer].shape[0]
        if call.nbytes and not 0 <= int(payload[0].min()) <= int(payload[0].max()) < rows:
            raise CallError(Code.BAD_SHAPE, f"{store.manifest[call.layer].name}: ids must lie between 0 and {rows - 1}")
    if call.op is Op.GROUPED:
        ends = payload[1].tolist()
        if ends != sorted(ends) or ends[0] < 0 or ends[-1] > call.rows:
            raise CallError(Code.BAD_SHAPE, f"group ends must rise from 0 to at most {call.rows}")


def must_be_finite(call: Call, payload: tuple[Tensor, ...], options: Options) -> bool:
    """Whether the rows are looked at, just before they are multiplied."""
    numbers = call.op in _CHECKED and call.dtype not in WEIGHT_BITS and not call.gradient
    return numbers and options.non_finite == "refuse" and not payload[0].is_cuda  # nobody waits for a GPU to look


def check_finite(call: Call, payload: tuple[Tensor, ...], rows: slice, store: Store) -> None:
    if call.op is Op.GROUPED:  # those of no group are not used
        rows = slice(int(payload[1][-1]))
    _must_be_finite(payload[0][rows], call, store)


def check_share(call: Call, payload: tuple[Tensor, ...], first: float, last: float, store: Store) -> None:
    """The same of a part of the values: from `first`, a part of all, to `last`."""
    rows = payload[0][: int(payload[1][-1])] if call.op is Op.GROUPED else payload[0]
    values = rows.reshape(-1)
    _must_be_finite(values[int(first * len(values)) : int(last * len(values))], call, store)


def _must_be_finite(values: Tensor, call: Call, store: Store) -> None:
    if not _finite(values):
        raise CallError(
            Code.NON_FINITE,
            f"{store.manifest[call.layer].name}: the rows hold NaN or infinity. Look for them in the client's "
            "activations (torch.autograd.set_detect_anomaly), or start the executor with --non-finite pass",
        )


def _finite(rows: Tensor) -> bool:
    """The sum tells, and quickly; unless it overflows."""
    return isfinite(rows.sum().item()) or bool(rows.isfinite().all())
