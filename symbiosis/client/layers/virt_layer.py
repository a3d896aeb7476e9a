"""The proxies of frozen layers, and the custom op behind them.

A frozen linear layer computes `y = x Wᵀ (+ b)`, and the gradient of its input is `dx = dy W`. Both need only W, which the
executor has, so no rows are saved for the backward pass:

    VirtLinear.forward(x)  ->  FORWARD of x, for the layer and those of its group  ->  Session.rows
    backward(dy)           ->  DGRAD of dy                                         ->  Session.rows

(With mapped weights the forward is mostly `F.linear`, and the backward torch's own.) Each is an autograd function, and under torch.compile the custom op `symbiosis::product`. The op takes integers besides the rows, so a
compiled model keeps one graph; and the gradient of a DGRAD is a FORWARD, so it can be differentiated any number of times. To everybody
who looks, a VirtLinear is an `nn.Linear` and a VirtConv1D a transformers `Conv1D`: `wrap` changes the class of the layer in place and
leaves hooks, name and mode as they are.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula
from transformers.pytorch_utils import Conv1D

from symbiosis.client.connection.lifetime import session_of
from symbiosis.client.layers.bias import add_rest, add_rest_to_rows, who_adds_bias
from symbiosis.client.layers.groups import GroupMember
from symbiosis.client.layers.stacks import (
    can_be_stacked,
    gradient_by_columns,
    is_by_columns,
    is_one_matrix,
    is_strided,
    product_of_columns,
    product_of_stack,
)
from symbiosis.client.requests import is_watched, priority_of, refuse_transforms, unshared
from symbiosis.client.session import Session
from symbiosis.client.weights.remote_weight import RemoteWeight
from symbiosis.errors import CallError, Code, RemoteWeightError
from symbiosis.protocol import Op, Priority

INVERSE = {Op.FORWARD: Op.DGRAD, Op.DGRAD: Op.FORWARD}  # what makes the gradient

_library = torch.library.Library("symbiosis", "DEF")
# Graphs that a compiler replays would neither announce calls nor see their errors.
_library.define(
    "product(Tensor x, int session, int layer, int op, int width, bool bias, int priority, bool stacked) -> Tensor",
    tags=torch.Tag.cudagraph_unsafe,
)


def _product(
    x: Tensor, session: Session, layer: int, op: Op, width: int, bias: bool, priority: Priority, stacked: bool
) -> Tensor:
    """Multiply the rows of `x` by the layer's weight, in the executor. `width` is the width of the result, `stacked` whether each matrix
    of `x` is multiplied by itself."""
    if not x.numel():
        return x.new_zeros(*x.shape[:-1], width)
    if stacked:
        return product_of_stack(x, session, layer, op, width, priority)
    if is_by_columns(x) and can_be_stacked(x, session):
        return product_of_columns(x, session, layer, op, width, bias, priority)
    return session.rows(op, (GroupMember(layer, width, bias),), x, priority)[0]


def _shape_of_product(
    x: Tensor, session: int, layer: int, op: int, width: int, bias: bool, priority: int, stacked: bool
) -> Tensor:
    return x.new_empty(*x.shape[:-1], width)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor | None) -> None:
    """Keep what the op's gradient needs."""
    x, ctx.session, ctx.layer, op, *_, ctx.stacked = inputs
    ctx.inverse, ctx.width = INVERSE[Op(op)], x.shape[-1]


class EagerProduct(torch.autograd.Function):
    """The op for code that is not compiled: a custom op's way through the dispatcher costs as much as a small call. Its graph keeps the
    session, so that the backward pass works after the model is gone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: tuple[Any, ...], made: tuple[Tensor] | None) -> Tensor:
        """Multiply. `how` are the op's other arguments. `made` is the result, if it is there already; as a tensor of its own it would
        count as an input."""
        *_, stacked = how
        ctx.how, ctx.width, ctx.by_columns = how, x.shape[-1], not stacked and is_by_columns(x)
        return _product(x, *how) if made is None else made[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        session, layer, op, *_, stacked = ctx.how
        if is_watched():  # the backward pass alone: compiled autograd traces it
            return _gradient_by_op(dy, session.number, layer, INVERSE[op], ctx.width, stacked), None, None
        how = session, layer, INVERSE[op], ctx.width, False, Priority.TRAIN, stacked
        if dy.requires_grad and torch.is_grad_enabled():
            return _tracked_product(dy, how, None), None, None
        if ctx.by_columns and dy.numel() and can_be_stacked(dy, session):
            return gradient_by_columns(dy, session, layer, INVERSE[op], ctx.width, Priority.TRAIN), None, None
        return _product(dy, *how), None, None


_apply: Callable[..., Tensor] = super(torch.autograd.Function, EagerProduct).apply  # type: ignore[misc]


def _tracked_product(x: Tensor, how: tuple[Any, ...], made: tuple[Tensor] | None) -> Tensor:
    """Apply `EagerProduct` without its check for torch.func, which doubles the cost; transforms were refused before."""
    return _apply(torch._C._functorch.unwrap_if_dead(x), how, made)


class GroupProduct(torch.autograd.Function):
    """The products of a group of layers: one call, and one for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, session: Session, group: tuple[GroupMember, ...], priority: Priority
    ) -> tuple[Tensor, ...]:
        ctx.session, ctx.group, ctx.shape = session, group, x.shape
        ctx.set_materialize_grads(False)
        return tuple(session.rows(Op.FORWARD, group, x, priority))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gradients need wrap(..., exact=True)")
        given = [(member, dy) for member, dy in zip(ctx.group, dys, strict=True) if dy is not None]
        if not given:
            return None, None, None, None
        if is_watched():
            gradients = [
                _gradient_by_op(dy, ctx.session.number, member.layer, Op.DGRAD, ctx.shape[-1]) for member, dy in given
            ]
            return torch.stack(gradients).sum(0), None, None, None
        first, *others = (member.layer for member, _ in given)
        rows = [dy.reshape(-1, dy.shape[-1]) for _, dy in given]
        one = rows[0] if not others else torch.cat([dy.reshape(-1) for dy in rows]).view(rows[0].shape[0], -1)
        dx = ctx.session.call(Op.DGRAD, first, one, priority=Priority.TRAIN, also=tuple(others))
        return dx.view(ctx.shape), None, None, None


def _op(x: Tensor, session: int, layer: int, op: int, width: int, bias: bool, priority: int, stacked: bool) -> Tensor:
    return _product(x, session_of(session), layer, Op(op), width, bias, Priority(priority), stacked)


def _gradient_of_op(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return the op's gradient, by the op again: a compiler traces this in a thread that does not know that it is compiling."""
    dx = _gradient_by_op(dy, ctx.session, ctx.layer, ctx.inverse, ctx.width, ctx.stacked)
    return dx, None, None, None, None, None, None, None


def _gradient_by_op(dy: Tensor, session: int, layer: int, op: Op, width: int, stacked: bool = False) -> Tensor:
    how = session, layer, int(op), width, False, int(Priority.TRAIN), stacked
    return torch.ops.symbiosis.product(dy, *how)  # type: ignore[no-any-return]


_library.impl("product", _op, "CompositeExplicitAutograd")
torch.library.register_fake("symbiosis::product", _shape_of_product)
torch.library.register_autograd("symbiosis::product", _gradient_of_op, setup_context=_remember)


@register_flop_formula(torch.ops.symbiosis.product)  # type: ignore[untyped-decorator]
def _flops_of_product(x_shape: torch.Size, session: int, layer: int, op: int, width: int, *_: Any, **__: Any) -> int:
    """Count multiplications as torch does for `mm`: without the bias."""
    return 2 * x_shape.numel() * width


def remote_product(layer: nn.Module, x: Tensor, weight: RemoteWeight, bias: Tensor | None, width: int) -> Tensor:
    """Have the executor compute `layer`, together with other layers that are known to receive the same tensor."""
    handle, given = weight.handle, x
    if torch._C._is_any_autocast_enabled():
        x = _as_autocast(x)
    if x.dtype is not weight.dtype:
        _refuse_other_rows(x, weight)
    watched = is_watched()
    added, left = (False, False) if bias is None else who_adds_bias(handle, bias, x.dtype, watched)
    if watched:  # alone: a compiler knows neither a tensor's identity nor its version
        number, priority = handle.session.number, int(priority_of(x, layer.training and torch.is_grad_enabled()))
        y = torch.ops.symbiosis.product(x, number, handle.index, int(Op.FORWARD), width, added, priority, False)
    else:
        y = _grouped_product(layer, given, x, handle.session, GroupMember(handle.index, width, added))
    return y if bias is None or not left else add_rest_to_rows(y, bias, handle.bias if added else None)


def _product_of_strided(layer: nn.Module, x: Tensor, weight: RemoteWeight, bias: Tensor | None, width: int) -> Tensor:
    """Multiply rows that do not lie one after another as `F.linear` would by the unsplit weight: as one matrix if the weight is not
    frozen, else matrix by matrix. The bias is added afterwards."""
    handle, session = weight.handle, weight.handle.session
    if not handle.is_frozen and (mapped := _mapped(layer, weight, x)) is not None:
        y = unshared(F.linear(x.reshape(-1, x.shape[-1]), mapped), (*x.shape[:-1], width))
    else:
        if x.dtype is not weight.dtype:
            _refuse_other_rows(x, weight)
        stacked = handle.is_frozen and not is_one_matrix(x) and can_be_stacked(x, session)
        priority = priority_of(x, layer.training and torch.is_grad_enabled())
        if is_watched():
            traced = session.number, handle.index, int(Op.FORWARD), width, False, int(priority), stacked
            y = torch.ops.symbiosis.product(x, *traced)
        elif stacked:
            refuse_transforms(x)
            own = session, handle.index, Op.FORWARD, width, False, priority, True
            y = _tracked_product(x, own, None)
        else:
            y = _grouped_product(layer, x, x, session, GroupMember(handle.index, width, False))
    return y if bias is None else add_rest(y, bias, None)


def _refuse_other_rows(x: Any, weight: RemoteWeight) -> None:
    name = weight.handle.layer.name
    if not isinstance(x, Tensor):
        raise RemoteWeightError(
            f"{name}: torch.fx.symbolic_trace runs a model on proxies instead of tensors, and these cannot be sent: trace the model before wrap, or use torch.export"
        )
    if not (torch.is_autocast_enabled(x.device.type) and x.is_floating_point()):
        raise CallError(
            Code.BAD_DTYPE,
            f"{name}: torch does not multiply rows of dtype {x.dtype} by a weight of dtype {weight.dtype}: cast one of them, or use "
            "torch.autocast",
        )
    if not weight.can_become(x.dtype):
        raise RemoteWeightError(
            f"{name}: autocast would cast a weight to {x.dtype} that was rounded to {weight.dtype}, and the executor rounds once: let "
            f"both be the same dtype, or keep the model in {weight.handle.layer.dtype}"
        )


def _grouped_product(layer: nn.Module, given: Tensor, x: Tensor, session: Session, member: GroupMember) -> Tensor:
    """Return the product of `x`, from a group's earlier call if it was made there. `given` is the layer's input before any cast."""
    refuse_transforms(x)
    groups, recorded = session.thread.groups, torch.is_grad_enabled()
    tracked = x.requires_grad and recorded
    made = groups.fetch(given, x.dtype, member) if groups.ready else None
    if made is not None and made.requires_grad:
        return made if tracked else made.detach()
    priority = priority_of(x, layer.training and recorded)
    how = session, member.layer, Op.FORWARD, member.width, member.bias, priority, False
    if made is None and is_by_columns(x):  # by itself, as it lies
        return _tracked_product(x, how, None)
    if made is None:
        group = groups.begin(given, x.dtype, member)
        if not x.numel():
            made = x.new_zeros(*x.shape[:-1], member.width)
        elif tracked and len(group) > 1 and not session.exact:
            return groups.keep(given, group, list(GroupProduct.apply(x, session, group, priority)))  # type: ignore[no-untyped-call]
        else:
            results = session.rows(Op.FORWARD, group, x.detach() if tracked else x, priority)
            made = groups.keep(given, group, results) if len(group) > 1 else results[0]
    return _tracked_product(x, how, (made,)) if tracked else made


def _as_autocast(x: Tensor) -> Tensor:
    """Cast `x` as autocast would, which leaves double precision alone."""
    kind = "cuda" if x.is_cuda else x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def own_tensor(layer: nn.Module, name: str) -> Any:
    """Get `layer.name`, in a tenth of the time that attribute access takes to find a parameter."""
    parameters = layer._parameters
    return parameters[name] if name in parameters else getattr(layer, name)


def is_as_served(weight: Tensor) -> TypeGuard[RemoteWeight]:
    """Whether a layer's weight is still what `wrap` put there; else it was tied, replaced, parametrized or written to."""
    return isinstance(weight, RemoteWeight) and weight.is_whole and weight.handle.private is None


def local_value(weight: Tensor) -> Tensor:
    """Return the values of a private copy. Any other weight, remote or local, is returned as it is."""
    return weight.value() if isinstance(weight, RemoteWeight) and weight.handle.private is not None else weight


def is_multiplied_here(layer: nn.Module, rows: int) -> bool:
    """Whether the product of so many rows, in a step that is captured and records no gradients, is computed by this process, and not by a call."""
    weight = layer._parameters.get("weight")
    if not isinstance(weight, RemoteWeight):
        return weight is not None
    mapped = weight.handle.session.mapped
    return is_as_served(weight) and mapped is not None and mapped.multiplies(weight.handle.index, weight.dtype, rows)


def _mapped(layer: nn.Module, weight: RemoteWeight, x: Tensor) -> Tensor | None:
    """Return the layer's mapped weight if this client should multiply by itself. None means that the executor is called."""
    handle = weight.handle
    if (mapped := handle.session.mapped) is None:
        return None
    return mapped.weight_for_local_product(handle.index, weight.dtype, x, layer.training)


def _refuse_quantisation(layer: nn.Module) -> None:
    """Refuse quantisation: `torch.ao.quantization` replaces what is exactly an `nn.Linear`, and would pass these layers by without a
    word."""
    weight = own_tensor(layer, "weight")
    name = f"{weight.handle.layer.name!r} " if isinstance(weight, RemoteWeight) else ""
    raise RemoteWeightError(
        f"torch.ao.quantization cannot quantise the layer {name}that an executor holds: quantise the parts that stay with the client one "
        "by one, or the model that the executor serves, or symbiosis.unwrap(model) first"
    )


class VirtLinear(nn.Linear):
    """An `nn.Linear` whose weight lives in the executor."""

    __jit_unused_properties__ = ("qconfig",)

    @property
    def qconfig(self) -> Any:
        """The attribute that `torch.ao.quantization` gives every layer that it may replace."""
        raise AttributeError("qconfig")

    @qconfig.setter
    def qconfig(self, config: Any) -> None:
        _refuse_quantisation(self)

    @torch.jit.ignore
    def forward(self, x: Tensor) -> Tensor:
        # eager code pays for each call of a function, so none is made here
        parameters: dict[str, Any] = self._parameters
        if "weight" in parameters and "bias" in parameters:
            weight, bias = parameters["weight"], parameters["bias"]
        else:  # parametrized
            weight, bias = self.weight, self.bias
        if not isinstance(weight, RemoteWeight) or not weight.is_whole or weight.handle.private is not None:
            return F.linear(x, local_value(weight), bias)
        handle = weight.handle
        frozen, mapped, matrix = handle.is_frozen, handle.session.mapped, None
        if frozen and mapped is not None:
            matrix = mapped.weight_for_local_product(handle.index, weight.dtype, x, self.training)
        if matrix is None and is_strided(x, bias is not None):
            x = _as_autocast(x)
            if is_strided(x, bias is not None):
                return _product_of_strided(self, x, weight, bias, self.out_features)
        if not frozen and mapped is not None:
            matrix = mapped.weight_for_local_product(handle.index, weight.dtype, x, self.training)
        if matrix is not None:
            return F.linear(x, matrix, bias)
        return remote_product(self, x, weight, bias, self.out_features)


class VirtPackedLinear(VirtLinear):
    """A layer that computes in its weight's dtype, and returns its rows' own, as the packed layers of bitsandbytes do."""

    @torch.jit.ignore
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class VirtConv1D(Conv1D):
    """A transformers `Conv1D` (a linear layer with the weight transposed) whose weight lives in the executor."""

    @torch.jit.ignore
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = own_tensor(self, "weight"), own_tensor(self, "bias")
        mapped = None
        if is_as_served(weight) and (mapped := _mapped(self, weight, x)) is None:
            return remote_product(self, x, weight, bias, self.nf)
        matrix = local_value(weight) if mapped is None else mapped
        y = torch.addmm(bias, x.reshape(-1, x.shape[-1]), matrix)
        return y.view(*x.shape[:-1], self.nf)


PROXY: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: VirtLinear, Conv1D: VirtConv1D}
ORIGINAL = {proxy: original for original, proxy in PROXY.items()} | {VirtPackedLinear: nn.Linear}
