"""LoRA of layers that share their input (q/k/v; gate/up), in one autograd node: for x [T, K], stacked A [R, K] and each layer's B [N, r]

    L = s x Aᵀ      y = x Wᵀ + L Bᵀ      M = s dy B      dB = dyᵀ L      dA = Mᵀ x      dx = Σ dy W + M A

All in the dtype of the rows; sums are float32, and so are gradients of float32 parameters. `+ L Bᵀ` and `+ M A` are added by the product itself.
"""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
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

    parameters: list[Tensor]  # each A, then each B
    copies: list[Tensor]
    ranks: list[int]
    scale: float
    a_RK: Tensor
    a_KR: Tensor
    b_NR: list[Tensor]
    b_RN: list[Tensor]

    @classmethod
    def of(cls, matrices: "list[LoraMatrices]", device: torch.device, dtype: torch.dtype) -> "Operands":
        """Return operands whose values have yet to be copied."""
        parameters = [one.a for one in matrices] + [one.b for one in matrices]
        flat = torch.empty(sum(p.numel() for p in parameters), device=device, dtype=dtype)
        copies = list(torch._C._nn.unflatten_dense_tensors(flat, list[Tensor](parameters)))
        ranks, width, b_NR = [len(one.a) for one in matrices], matrices[0].a.shape[1], copies[len(matrices) :]
        a_RK = flat[: sum(ranks) * width].view(-1, width)
        return cls([*parameters], copies, ranks, matrices[0].scale, a_RK, a_RK.t(), b_NR, [b.t() for b in b_NR])

    def are_of(self, matrices: "list[LoraMatrices]") -> bool:
        """Whether these are the parameters."""
        now = [one.a for one in matrices] + [one.b for one in matrices]
        return (
            len(now) == len(self.parameters) and all(map(is_, now, self.parameters)) and self.scale == matrices[0].scale
        )


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
        self.operands: dict[tuple[torch.device, torch.dtype], Operands] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers, "misses": 0, "operands": {}}

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
        results = _apply(x, dtype, operands, bases, *[base.y for base in bases], *operands.parameters)
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
    """Whether gradients are recorded, by torch itself. Of a forward pass it is known that nobody watches."""
    return torch.is_grad_enabled() and x.is_floating_point() and (_prepared.operands is not None or not is_watched())


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
    """Return the operands of those groups that can be computed together. They lie where they lay the last time."""
    made: dict[LoraGroup, Operands] = {}
    parameters: list[Tensor] = []
    copies: list[Tensor] = []
    for group in groups:
        if (matrices := _matrices_of(group, device)) is not None:
            operands = group.operands.get((device, dtype))
            if operands is None or not operands.are_of(matrices):
                operands = group.operands[device, dtype] = Operands.of(matrices, device, dtype)
            made[group] = operands
            parameters += operands.parameters
            copies += operands.copies
    if copies:
        torch._foreach_copy_(copies, parameters)
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
    parameters = layer._parameters
    bias = parameters.get("bias")
    if type(layer) is nn.Linear and bias is None and not has_hooks(layer):  # nearly always
        weight = parameters["weight"]
        if type(weight) is nn.Parameter and not weight.requires_grad:
            return FrozenProduct(weight, None, None)
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
        rows = x if x.dtype is dtype and x.is_contiguous() else x.to(dtype).contiguous()
        x_TK = rows.view(-1, x.shape[-1])
        low_TR = x_TK.new_empty(x_TK.shape[0], operands.a_RK.shape[0])
        torch.addmm(low_TR, x_TK, operands.a_KR, beta=0, alpha=operands.scale, out=low_TR)
        results, dirty = [], []
        for base, low, b_RN in zip(bases, _split(low_TR, operands.ranks), operands.b_RN, strict=True):
            y = base.y
            if y is None:
                bias = None if base.bias is None else base.bias.to(dtype)
                y = F.linear(rows, _cast(base.matrix, dtype), bias)
            else:
                dirty.append(y)
            y.view(-1, y.shape[-1]).addmm_(low, b_RN)
            results.append(y)
        if dirty:
            ctx.mark_dirty(*dirty)
        ctx.set_materialize_grads(False)
        ctx.matrices, ctx.operands, ctx.x = [base.matrix for base in bases], operands, (x.shape, x.dtype)
        ctx.save_for_backward(x_TK, low_TR)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gradients: symbiosis.unfuse(model) first")
        x_TK, low_TR = ctx.saved_tensors
        operands, (shape, x_dtype), count = ctx.operands, ctx.x, len(dys)
        dtypes = [parameter.dtype for parameter in operands.parameters]
        needs_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[4 + count :]
        m_TR = torch.empty_like(low_TR)
        dx_TK: Tensor | None = None
        m, low = _split(m_TR, operands.ranks), _split(low_TR, operands.ranks)
        db: list[Tensor | None] = [None] * count
        for i in reversed(range(count)):  # in autograd's order
            if (dy := dys[i]) is None:
                m[i].zero_()
                continue
            dy_TN = dy.reshape(-1, dy.shape[-1])
            torch.addmm(m[i], dy_TN, operands.b_NR[i], beta=0, alpha=operands.scale, out=m[i])
            if needs[count + i]:
                db[i] = _product(dy_TN.t(), low[i], dtypes[count + i])
            if needs_x and ctx.matrices[i] is not None:
                matrix = _cast(ctx.matrices[i], dy.dtype)
                dx_TK = dy_TN @ matrix if dx_TK is None else dx_TK.addmm_(dy_TN, matrix)
        da: Sequence[Tensor | None] = [None] * count
        if any(needs[:count]):
            da_RK = _product(m_TR.t(), x_TK, dtypes[0])
            da = [_cast(each, dtype) for each, dtype in zip(_split(da_RK, operands.ranks, 0), dtypes, strict=False)]
        dx = None
        if needs_x:
            dx_TK = m_TR @ operands.a_RK if dx_TK is None else dx_TK.addmm_(m_TR, operands.a_RK)
            dx = _cast(dx_TK.view(shape), x_dtype)
        passed = [dy if matrix is None else None for dy, matrix in zip(dys, ctx.matrices, strict=True)]
        return dx, None, None, None, *passed, *da, *db


_apply: Any = super(torch.autograd.Function, _LoraGroup).apply  # type: ignore[misc]  # transforms of torch.func never come here


def _split(matrix: Tensor, sizes: list[int], dim: int = 1) -> Sequence[Tensor]:
    return matrix.split(sizes, dim) if len(sizes) > 1 else (matrix,)


def _cast(tensor: Any, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _product(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x y` in another dtype, on a GPU with no rounding in between."""
    if x.dtype is dtype:
        return x @ y
    if x.is_cuda and dtype is torch.float32:
        return torch.mm(x, y, out_dtype=dtype)
    return (x @ y).to(dtype)
