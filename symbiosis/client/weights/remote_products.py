"""Products with a remote weight, however they are spelled: each is a call to the executor.

Below autograd, torch's own formulas apply. The gradient of `x @ V` is `dy @ V.t()`, which is another call with another view, and nothing is
saved for it. For anything that is no product that the executor knows, the result is `NotImplemented`.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from symbiosis.client.layers.bias import add_rest, who_adds_bias
from symbiosis.client.requests import is_watched, lies_by_columns, priority_of
from symbiosis.client.weights.remote_view import RemoteView, stand_in
from symbiosis.protocol import Op, View, contiguous_stride

aten = torch.ops.aten


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _call(op: Op, weight: RemoteView, x: Tensor, view: View | None, ends: Tensor | None = None) -> Tensor:
    handle, gradient = weight.handle, _in_backward()
    training = gradient or torch.is_grad_enabled()
    priority = priority_of(x, training)
    gradient &= op is not Op.DGRAD  # which is one anyway
    return handle.session.call(op, handle.index, x, view=view, ends=ends, priority=priority, gradient=gradient)


def _op_by(weight: RemoteView) -> Op:
    """Return the op that computes `x @ V`: FORWARD or DGRAD, with which other clients' calls can be batched, if V is the whole weight or its
    transpose, else PRODUCT."""
    kind, base = weight.handle.layer.kind, weight.handle.layer.shape
    if kind == "tensor" or weight.dim() != 2:
        return Op.PRODUCT
    if weight.is_whole:
        return Op.FORWARD if kind == "conv1d" else Op.DGRAD
    if tuple(weight.shape) == base[::-1] and weight.stride() == contiguous_stride(base)[::-1]:
        return Op.DGRAD if kind == "conv1d" else Op.FORWARD
    return Op.PRODUCT


def _op_for(x: Tensor, weight: RemoteView) -> tuple[Op, View | None]:
    """Return the op for these rows, and the view that it takes. Rows that lie column by column are multiplied as they lie."""
    by_columns = lies_by_columns(Op.PRODUCT, x) and not weight.handle.session.keeps_secrets
    op = Op.PRODUCT if by_columns else _op_by(weight)
    return op, weight.view_of() if op is Op.PRODUCT else None


def _rows_times(x: Tensor, weight: RemoteView) -> Tensor:
    if x.numel() == 0:
        return x.new_zeros(*x.shape[:-1], weight.shape[-1])
    op, view = _op_for(x, weight)
    return _call(op, weight, x.to(weight.dtype), view)


def _is_folded(weight: RemoteView) -> bool:
    """Whether a stack of matrices is one matrix, again and again, that multiplies all rows at once: as torch multiplies by a weight that
    is not frozen, and as rows can be masked."""
    if weight.handle.is_frozen and not weight.handle.session.keeps_secrets:
        return False
    return weight.dim() == 3 > len(weight.handle.layer.shape) and (weight.stride(0) == 0 or weight.shape[0] == 1)


def times(x: Any, weight: Any) -> Any:
    """Multiply two matrices or stacks of matrices, one of which is remote."""
    if isinstance(x, RemoteView):
        if isinstance(weight, RemoteView):
            return NotImplemented
        if weight.numel() == 0:
            return weight.new_zeros(*x.shape[:-1], weight.shape[-1])
        if _is_folded(x):
            return times(weight.transpose(1, 2), x.transpose(1, 2)).transpose(1, 2)
        return _call(Op.LEFT, x, weight.to(x.dtype), x.view_of())
    if _is_folded(weight):
        return _rows_times(x.reshape(-1, x.shape[-1]), weight[0]).view(*x.shape[:-1], weight.shape[-1])
    return _rows_times(x, weight)


def _plus(bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """Return `beta * bias + alpha * x @ V`. The base's own bias is added inside the executor's product, so that it rounds once."""
    if isinstance(bias, RemoteView):
        return NotImplemented
    if isinstance(weight, RemoteView) and beta == alpha == 1 and _op_by(weight) is Op.FORWARD and x.numel():
        handle = weight.handle
        added, left = who_adds_bias(handle, bias, x.dtype, is_watched())
        if added:
            (op, view), gradient = _op_for(x, weight), _in_backward()
            priority = priority_of(x, gradient or torch.is_grad_enabled())
            y = handle.session.call(op, handle.index, x, bias=True, view=view, priority=priority, gradient=gradient)
            return add_rest(y, bias, handle.bias) if left else y
    y = times(x, weight)
    return NotImplemented if y is NotImplemented else beta * bias + alpha * y


def _plus_in_place(bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    if isinstance(bias, RemoteView):
        return NotImplemented
    y = times(x, weight)
    return NotImplemented if y is NotImplemented else bias.mul_(beta).add_(y, alpha=alpha)


def _into(x: Any, weight: Any, *, out: Tensor) -> Any:
    y = times(x, weight)
    if y is NotImplemented:
        return y
    if y.dtype != out.dtype:
        raise RuntimeError(f"expected out tensor to have dtype {y.dtype}, but got {out.dtype} instead")
    if y.shape != out.shape:
        out.resize_(y.shape)
    return out.copy_(y)


def _matrix_vector(weight: Any, x: Any) -> Any:
    if isinstance(x, RemoteView):
        return NotImplemented
    return times(weight, x.unsqueeze(-1)).squeeze(-1)


def _grouped(x: Any, weight: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    if isinstance(x, RemoteView) or offs is None or bias is not None or x.dim() != 2:
        return NotImplemented
    if out_dtype not in (None, x.dtype):
        raise RuntimeError("Grouped gemm output dtype must match `mat_a` dtype")  # as torch says it
    if x.numel() == 0:
        return x.new_zeros(x.shape[0], weight.shape[-1])
    return _call(Op.GROUPED, weight, x.to(weight.dtype), weight.view_of(), offs.to(torch.int32))


def _grouped_backward(x: Any, weight: Any, offs: Any, dy: Any) -> Any:
    """Return the gradients of compiled experts: that of the rows, and a stand-in for that of the weight, which nobody wants."""
    if not isinstance(weight, RemoteView) or isinstance(x, RemoteView):
        return NotImplemented
    return _grouped(dy, weight.transpose(-2, -1), offs), stand_in(weight)


def _lookup(weight: Any, ids: Any, *_: Any) -> Any:
    if weight.handle.layer.kind != "embedding" or not weight.is_whole or not ids.numel():
        return NotImplemented
    handle = weight.handle
    rows = handle.session.call(Op.LOOKUP, handle.index, ids.reshape(-1).to(torch.int64), dtype=weight.dtype)
    return rows.view(*ids.shape, -1)


PRODUCTS: dict[Any, Callable[..., Any]] = {
    aten.mm.default: times,
    aten.mm.out: _into,
    aten.bmm.default: times,
    aten.mv.default: _matrix_vector,
    aten.addmm.default: _plus,
    aten.baddbmm.default: _plus,
    aten.addmm_.default: _plus_in_place,
    aten._grouped_mm.default: _grouped,
    aten.embedding.default: _lookup,
}
with suppress(ImportError, AttributeError):  # what transformers makes of grouped products where a compiler knows none
    import transformers.integrations.moe  # noqa: F401

    PRODUCTS[torch.ops.transformers.grouped_mm_fallback.default] = _grouped
    PRODUCTS[torch.ops.transformers.grouped_mm_fallback_backward.default] = _grouped_backward
