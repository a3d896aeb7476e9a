"""LoRA of layers that share their input (q/k/v; gate/up), in one autograd node: for x [T, K], stacked A [R, K] and each layer's B [N, r]

    L = s x Aᵀ      y = x Wᵀ + L Bᵀ      M = s dy B      dB = dyᵀ L      dA = Mᵀ x      dx = Σ dy W + M A

All in the dtype of the rows; sums are float32, and so are gradients of float32 parameters. `+ L Bᵀ` and `+ M A` are added by the product itself.
"""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch._C import _functorch
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from symbiosis.client.layers.virt_layer import VirtConv1D, VirtLinear, is_as_served
from symbiosis.training.fused.module_forward import ModuleForward, has_hooks, is_watched

MISSES_ALLOWED = 3  # so often in a row may layers of a group not be called, until PEFT computes them


class LoraMatrices(NamedTuple):
    """What acts at one layer."""

    a: nn.Parameter  # [r, K]
    b: nn.Parameter  # [N, r]
    scale: float


class Operands(NamedTuple):
    """What acts at the layers of a group: parameters, and their values in the dtype of the rows, all A in one matrix."""

    a: list[nn.Parameter]
    b: list[nn.Parameter]
    scale: float
    a_RK: Tensor
    b_NR: list[Tensor]


class FrozenProduct(NamedTuple):
    """How the frozen product of one layer is made: by a matrix [N, K] and a bias; or it is there already."""

    matrix: Tensor | None
    bias: Tensor | None
    y: Tensor | None


class LoraGroup:
    """Layers that are given the very same tensor, in the order in which they are called."""

    def __init__(self, layers: list[LoraLinear]) -> None:
        self.layers = layers
        self.misses = 0

    def product(self, layer: LoraLinear, x: Tensor) -> Tensor | None:
        """Return a layer's result, or None where PEFT has to compute it."""
        if (made := _waiting.take(self, layer, x)) is not None:
            return made
        if layer is not self.layers[0] or self.misses >= MISSES_ALLOWED or not _is_recorded(x):
            return None
        dtype = _dtype_of_rows(x)
        if (operands := _operands_of(self, x.device, dtype)) is None:
            return None
        bases = [_base_of(each.base_layer, x, dtype) for each in self.layers]
        ys = [base.y for base in bases]
        results = _LoraGroup.apply(x, dtype, operands, bases, *ys, *operands.a, *operands.b)  # type: ignore[no-untyped-call]
        _waiting.keep(self, x, results)
        return results[0]  # type: ignore[no-any-return]


class LoraForward(ModuleForward):
    """The `forward` of PEFT's LoRA layer, as a member of a group."""

    module: LoraLinear

    def __init__(self, layer: LoraLinear, group: LoraGroup) -> None:
        super().__init__(layer)
        self.group = group

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not args and not kwargs and (y := self.group.product(self.module, x)) is not None:
            return y
        return self.own(x, *args, **kwargs)  # type: ignore[no-any-return]


class _Waiting(threading.local):
    """The results of a group whose layers have not been called yet, in this thread."""

    group: LoraGroup | None = None
    x: "weakref.ref[Tensor]"
    version = -1
    results: dict[int, Tensor]

    def keep(self, group: LoraGroup, x: Tensor, results: Sequence[Tensor]) -> None:
        if self.group is not None:
            self.group.misses += 1
        self.group = None
        if len(results) > 1:
            self.group, self.x, self.version = group, weakref.ref(x), x._version
            self.results = {id(layer): y for layer, y in zip(group.layers[1:], results[1:], strict=True)}

    def take(self, group: LoraGroup, layer: LoraLinear, x: Tensor) -> Tensor | None:
        if self.group is not group or self.x() is not x or self.version != x._version:
            return None
        made = self.results.pop(id(layer), None)
        if not self.results:
            self.group, group.misses = None, 0
        return made


_waiting = _Waiting()


def _is_recorded(x: Tensor) -> bool:
    """Whether gradients are recorded, by torch itself."""
    return (
        torch.is_grad_enabled()
        and x.is_floating_point()
        and not is_watched()
        and not _functorch.peek_interpreter_stack()
    )


class _Prepared(threading.local):
    """The operands of all groups of a model, by device and dtype, while a forward pass of this thread lasts."""

    groups: list[LoraGroup] = []
    operands: dict[tuple[torch.device, torch.dtype], dict[LoraGroup, Operands]] | None = None


_prepared = _Prepared()


@contextmanager
def operands_in(groups: list[LoraGroup]) -> Iterator[None]:
    """Within a forward pass, prepare the operands of all groups together when the first is needed."""
    before = _prepared.groups, _prepared.operands
    _prepared.groups, _prepared.operands = groups, {}
    try:
        yield
    finally:
        _prepared.groups, _prepared.operands = before


def _operands_of(group: LoraGroup, device: torch.device, dtype: torch.dtype) -> Operands | None:
    if _prepared.operands is None:  # a layer that is computed again, for its gradients
        return _prepare([group], device, dtype).get(group)
    if (made := _prepared.operands.get((device, dtype))) is None:
        made = _prepared.operands[device, dtype] = _prepare(_prepared.groups, device, dtype)
    return made.get(group)


@torch.no_grad()
def _prepare(groups: list[LoraGroup], device: torch.device, dtype: torch.dtype) -> dict[LoraGroup, Operands]:
    """Return the operands of those groups that can be computed together."""
    matrices = {group: found for group in groups if (found := _matrices_of(group, device)) is not None}
    parameters: list[Any] = [
        p for found in matrices.values() for p in (*(one.a for one in found), *(one.b for one in found))
    ]
    if not parameters:
        return {}
    flat = torch.empty(sum(p.numel() for p in parameters), device=device, dtype=dtype)
    copies = torch._C._nn.unflatten_dense_tensors(flat, parameters)
    torch._foreach_copy_(copies, parameters)
    made, at, first = {}, 0, 0
    for group, found in matrices.items():
        a, b, count = [one.a for one in found], [one.b for one in found], len(found)
        values, a_RK = copies[at : at + 2 * count], copies[at]
        if count > 1:
            rank, width = sum(len(one) for one in a), a[0].shape[1]
            a_RK = flat[first : first + rank * width].view(rank, width)
        made[group] = Operands(a, b, found[0].scale, a_RK, values[count:])
        at += 2 * count
        first += sum(one.numel() for one in values)
    return made


def _matrices_of(group: LoraGroup, device: torch.device) -> list[LoraMatrices] | None:
    found: list[LoraMatrices] = []
    for layer in group.layers:
        adapter = _adapter_of(layer)
        if (
            adapter is None
            or not adapter.a.device == adapter.b.device == device
            or (found and adapter.scale != found[0].scale)
        ):
            return None
        found.append(adapter)
    return found


def _adapter_of(layer: LoraLinear) -> LoraMatrices | None:
    """Return the only adapter that acts at a layer, if it is LoRA and nothing else. Asks what holds these, since a module takes its time to say
    where they are."""
    if layer._disable_adapters or layer.merged_adapters:
        return None
    modules: Any = layer._modules
    downs = modules["lora_A"]._modules
    active = [name for name in layer.active_adapters if name in downs]
    if len(active) != 1:
        return None
    [name] = active
    down, up, dropout = downs[name], modules["lora_B"]._modules[name], modules["lora_dropout"]._modules[name]
    if name in layer.lora_variant or not _is_plain(down) or not _is_plain(up):
        return None
    if type(dropout) is not nn.Identity and (type(dropout) is not nn.Dropout or (dropout.training and dropout.p)):
        return None
    a, b = down._parameters["weight"], up._parameters["weight"]
    if type(a) is not nn.Parameter or type(b) is not nn.Parameter or not (a.requires_grad or b.requires_grad):
        return None
    return LoraMatrices(a, b, layer.scaling[name])


def _is_plain(linear: nn.Module) -> bool:
    """Whether a layer is nothing but a product."""
    return type(linear) is nn.Linear and linear._parameters["bias"] is None and not has_hooks(linear)


def _dtype_of_rows(x: Tensor) -> torch.dtype:
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype


def _base_of(layer: nn.Module, x: Tensor, dtype: torch.dtype) -> FrozenProduct:
    bias = layer._parameters.get("bias")
    if isinstance(layer, nn.Linear | Conv1D) and not (bias is not None and bias.requires_grad):
        matrix = None if has_hooks(layer) else _frozen_matrix(layer, x)
        if matrix is not None:
            return FrozenProduct(matrix, bias, None)
    y = layer(x).to(dtype)
    can_be_written = y.is_contiguous() and not y._is_view() and not (y.is_leaf and y.requires_grad)
    return FrozenProduct(None, None, y if can_be_written else y.clone(memory_format=torch.contiguous_format))


def _frozen_matrix(layer: nn.Module, x: Tensor) -> Tensor | None:
    """Return the matrix [N, K] that this process multiplies by, or None where a layer does something else."""
    weight: Any = layer._parameters.get("weight")
    if type(layer) is nn.Linear or type(layer) is Conv1D:
        matrix: Any = weight if type(weight) is nn.Parameter and not weight.requires_grad else None
    elif isinstance(layer, VirtLinear | VirtConv1D) and weight is not None and is_as_served(weight):
        mapped = weight.handle.session.mapped if weight.handle.is_frozen else None
        if mapped is None or weight.dtype != _dtype_of_rows(x):
            return None
        matrix = mapped.weight_for_local_product(weight.handle.index, weight.dtype, x, layer.training)
    else:
        return None
    return matrix.t() if matrix is not None and isinstance(layer, Conv1D) else matrix


class _LoraGroup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, operands: Operands, bases: list[FrozenProduct], *tensors: Any
    ) -> tuple[Tensor, ...]:
        a, b, scale, a_RK, b_NR = operands
        x_TK = _cast(x.reshape(-1, x.shape[-1]), dtype)
        low_TR = x_TK.new_empty(len(x_TK), len(a_RK))
        torch.addmm(low_TR, x_TK, a_RK.t(), beta=0, alpha=scale, out=low_TR)
        ranks = [each.shape[0] for each in a]
        rows, results = x_TK.view(x.shape), []
        for base, low, each in zip(bases, low_TR.split(ranks, 1), b_NR, strict=True):
            y = base.y
            if y is None:
                bias = None if base.bias is None else base.bias.to(dtype)
                y = F.linear(rows, _cast(base.matrix, dtype), bias)
            y.view(-1, y.shape[-1]).addmm_(low, each.t())
            results.append(y)
        ctx.mark_dirty(*(base.y for base in bases if base.y is not None))
        ctx.set_materialize_grads(False)
        ctx.matrices, ctx.ranks, ctx.scale = [base.matrix for base in bases], ranks, scale
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, [each.dtype for each in (*a, *b)])
        ctx.save_for_backward(x_TK, low_TR, a_RK, *b_NR)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gradients: symbiosis.unfuse(model) first")
        x_TK, low_TR, a_RK, *b_NR = ctx.saved_tensors
        count, (x_dtype, dtypes) = len(dys), ctx.dtypes
        needs_x, needs_a, needs_b = (
            ctx.needs_input_grad[0],
            ctx.needs_input_grad[4 + count : 4 + 2 * count],
            ctx.needs_input_grad[4 + 2 * count :],
        )
        m_TR = torch.empty_like(low_TR)
        dx_TK: Tensor | None = None
        m, low = m_TR.split(ctx.ranks, 1), low_TR.split(ctx.ranks, 1)
        db: list[Tensor | None] = [None] * count
        for i in reversed(range(count)):  # in autograd's order
            if (dy := dys[i]) is None:
                m[i].zero_()
                continue
            dy_TN = dy.reshape(-1, dy.shape[-1])
            torch.addmm(m[i], dy_TN, b_NR[i], beta=0, alpha=ctx.scale, out=m[i])
            if needs_b[i]:
                db[i] = _product(dy_TN.t(), low[i], dtypes[count + i])
            if needs_x and ctx.matrices[i] is not None:
                matrix = _cast(ctx.matrices[i], dy.dtype)
                dx_TK = dy_TN @ matrix if dx_TK is None else dx_TK.addmm_(dy_TN, matrix)
        da: Sequence[Tensor | None] = [None] * count
        if any(needs_a):
            da = [
                each.to(d)
                for each, d in zip(_product(m_TR.t(), x_TK, dtypes[0]).split(ctx.ranks), dtypes, strict=False)
            ]
        dx = None
        if needs_x:
            dx_TK = m_TR @ a_RK if dx_TK is None else dx_TK.addmm_(m_TR, a_RK)
            dx = dx_TK.view(ctx.shape).to(x_dtype)
        passed = [dy if matrix is None else None for dy, matrix in zip(dys, ctx.matrices, strict=True)]
        return dx, None, None, None, *passed, *da, *db


def _cast(tensor: Any, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _product(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x y` in another dtype, on a GPU with no rounding in between."""
    if x.dtype is dtype:
        return x @ y
    if x.is_cuda and dtype is torch.float32:
        return torch.mm(x, y, out_dtype=dtype)
    return (x @ y).to(dtype)
