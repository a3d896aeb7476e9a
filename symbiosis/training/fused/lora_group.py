"""LoRA of layers that share their input (q/k/v; gate/up), in one autograd node: for x [T, K], stacked A [R, K] and each layer's B [N, r]

    L = s x Aᵀ      y = x Wᵀ + L Bᵀ      M = s dy B      dB = dyᵀ L      dA = Mᵀ x      dx = Σ dy W + M A

All in the dtype of the rows; sums are float32, and so are gradients of float32 parameters. `+ L Bᵀ` and `+ M A` are added by the product itself.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch._C import _functorch
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from symbiosis.client.layers.virt_layer import VirtConv1D, VirtLinear, is_as_served
from symbiosis.training.fused.module_forward import ModuleForward, is_watched

MISSES_ALLOWED = 3  # so often may layers of a group not be called, until they are computed one by one


class LoraMatrices(NamedTuple):
    """What acts at one layer."""

    a: nn.Parameter  # [r, K]
    b: nn.Parameter  # [N, r]
    scale: float


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
        adapters = []
        for each in self.layers:
            if (adapter := _adapter_of(each)) is None or adapter.a.device != x.device:
                return None
            adapters.append(adapter)
        if len({adapter.scale for adapter in adapters}) > 1:
            return None
        dtype = _dtype_of_rows(x)
        bases = [_base_of(each.base_layer, x, dtype) for each in self.layers]
        ys = [base.y for base in bases]
        lows = [adapter.a for adapter in adapters], [adapter.b for adapter in adapters]
        results = _LoraGroup.apply(x, dtype, adapters[0].scale, bases, *ys, *lows[0], *lows[1])  # type: ignore[no-untyped-call]
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
            self.group = None
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


def _adapter_of(layer: LoraLinear) -> LoraMatrices | None:
    """Return the only adapter that acts at a layer, if it is LoRA and nothing else."""
    if layer.disable_adapters or layer.merged_adapters:
        return None
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1:
        return None
    [name] = active
    a, b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    if name in layer.lora_variant or not _is_plain(a) or not _is_plain(b) or a.weight.device != b.weight.device:
        return None
    if not isinstance(dropout, nn.Identity) and (type(dropout) is not nn.Dropout or (dropout.training and dropout.p)):
        return None
    if not (a.weight.requires_grad or b.weight.requires_grad):
        return None
    return LoraMatrices(a.weight, b.weight, layer.scaling[name])  # type: ignore[arg-type]


def _is_plain(linear: nn.Module) -> bool:
    """Whether a layer is nothing but a product."""
    return (
        type(linear) is nn.Linear
        and linear.bias is None
        and not (linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks)
        and "forward" not in vars(linear)
    )


def _dtype_of_rows(x: Tensor) -> torch.dtype:
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype


def _base_of(layer: nn.Module, x: Tensor, dtype: torch.dtype) -> FrozenProduct:
    bias = layer._parameters.get("bias")
    if isinstance(layer, nn.Linear | Conv1D) and not (bias is not None and bias.requires_grad):
        matrix = None if _has_hooks(layer) else _frozen_matrix(layer, x)
        if matrix is not None:
            return FrozenProduct(matrix, bias, None)
    y = layer(x).to(dtype)
    can_be_written = y.is_contiguous() and not y._is_view() and not (y.is_leaf and y.requires_grad)
    return FrozenProduct(None, None, y if can_be_written else y.clone(memory_format=torch.contiguous_format))


def _has_hooks(layer: nn.Module) -> bool:
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return bool(hooks) or "forward" in vars(layer)


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
        ctx: Any, x: Tensor, dtype: torch.dtype, scale: float, bases: list[FrozenProduct], *tensors: Any
    ) -> tuple[Tensor, ...]:
        count = len(bases)
        a, b = tensors[count : 2 * count], tensors[2 * count :]
        x_TK = x.reshape(-1, x.shape[-1]).to(dtype)
        a_RK = _cast(torch.cat(a) if count > 1 else a[0], dtype)
        b_NR = [_cast(each, dtype) for each in b]
        low_TR = x_TK.new_empty(len(x_TK), len(a_RK))
        torch.addmm(low_TR, x_TK, a_RK.t(), beta=0, alpha=scale, out=low_TR)
        ranks = [each.shape[0] for each in a]
        results = []
        for base, low, each in zip(bases, low_TR.split(ranks, 1), b_NR, strict=True):
            y = base.y
            if y is None:
                bias = None if base.bias is None else base.bias.to(dtype)
                y = F.linear(x_TK.view(x.shape), _cast(base.matrix, dtype), bias)
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
