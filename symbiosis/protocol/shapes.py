"""The shape of the reply to a call, which both ends work out from the call and the manifest."""

from collections.abc import Callable, Sequence
from functools import cache

from symbiosis.protocol.headers import Call, View
from symbiosis.protocol.messages import Layer
from symbiosis.protocol.ops import Op

Shape = tuple[int, ...]


@cache
def contiguous_stride(shape: Shape) -> Shape:
    """Return the strides of a tensor of this shape whose rows lie one behind the other.

    >>> contiguous_stride((3, 4, 5))
    (20, 5, 1)
    """
    stride, step = [], 1
    for dim in reversed(shape):
        stride.append(step)
        step *= max(1, dim)
    return tuple(reversed(stride))


def width(layer: Layer, op: Op = Op.FORWARD) -> int:
    """Return the width of the rows that `op` (FORWARD or DGRAD) makes on a linear layer."""
    outputs_last = layer.kind == "conv1d"
    return layer.shape[1 if outputs_last == (op is Op.FORWARD) else 0]


def view_of_outputs(layer: Layer, begin: int, end: int) -> View:
    """Return the matrix that makes these outputs of a linear layer.

    >>> view_of_outputs(Layer("up", "linear", (96, 64), "float32", ""), 32, 40)
    View(size=(64, 8), stride=(1, 64), offset=2048)
    """
    rows, columns = layer.shape
    if layer.kind == "conv1d":
        return View((rows, end - begin), (columns, 1), begin)
    return View((columns, end - begin), (1, columns), begin * columns)


def outputs_of(layer: Layer, view: View) -> slice | None:
    """Return which outputs of a linear layer a view makes; None if it is any other matrix.

    >>> outputs_of(Layer("up", "linear", (96, 64), "float32", ""), View((64, 8), (1, 64), 2048))
    slice(32, 40, None)
    """
    if layer.kind not in ("linear", "conv1d") or len(view.size) != 2:
        return None
    begin = view.offset if layer.kind == "conv1d" else view.offset // layer.shape[1]
    end = begin + view.size[1]
    return slice(begin, end) if end <= width(layer) and view == view_of_outputs(layer, begin, end) else None


def shape_of_reply(call: Call, manifest: Sequence[Layer]) -> Shape:
    """Return the shape of the reply to a valid call, whose rows may have any shape. Raise `IndexError` if there is none.

    >>> served = [Layer("up", "linear", (96, 64), "float32", ""), Layer("gate", "linear", (32, 64), "float32", "")]
    >>> shape_of_reply(Call(Op.FORWARD, 0, "float32", (2, 64), also=(1,)), served)
    (2, 128)
    """
    return SHAPES[call.op](call, [manifest[layer] for layer in call.layers] if "layer" in call.op.traits.uses else [])


def _matrix(call: Call, layers: Sequence[Layer]) -> Shape:
    """Return the shape of the matrix that rows are multiplied by, or that is read."""
    return layers[0].shape if call.view is None else call.view.size


SHAPES: dict[Op, Callable[[Call, Sequence[Layer]], Shape]] = {  # nobody knows before how long STATS are
    Op.FORWARD: lambda call, layers: (*call.shape[:-1], sum(map(width, layers))),
    Op.DGRAD: lambda call, layers: (*call.shape[:-1], width(layers[0], Op.DGRAD)),
    Op.PRODUCT: lambda call, layers: (*call.shape[:-1], _matrix(call, layers)[-1]),
    Op.LEFT: lambda call, layers: (*_matrix(call, layers)[:-1], call.shape[-1]),
    Op.GROUPED: lambda call, layers: (*call.shape[:-1], _matrix(call, layers)[-1]),
    Op.LOOKUP: lambda call, layers: (*call.shape, layers[0].shape[1]),
    Op.NORMS: lambda call, layers: (width(layers[0]),),
    Op.READ: _matrix,
    Op.ECHO: lambda call, layers: call.shape,
}
