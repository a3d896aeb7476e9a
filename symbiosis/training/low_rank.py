"""LoRA of several runs at layers that are given the same rows, by segments of rows.

    y += s (x Aᵀ) Bᵀ        dB += s gᵀ (x Aᵀ)        dA += s (g B)ᵀ x        dx += s (g B) A

Products are made in the dtype of the rows, as PEFT's layers make them under autocast. Gradients are added to those of the runs' parameters, in their
dtype, in the backward pass itself: no node and no tensor for each matrix of each run. On a GPU a few kernels do so for all segments
(`symbiosis/kernels/gpu/trained_rows.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from symbiosis.kernels import with_triton
from symbiosis.kernels.row_invariant import add_low_rank_, is_row_invariant
from symbiosis.serving.runner.compiled_layers import SharedInput, places, take_from
from symbiosis.serving.runner.shared_inputs import width_of


class LowRank(NamedTuple):
    """One adapter's matrices at one layer."""

    a: nn.Parameter  # [R, K]
    b: nn.Parameter  # [N, R]
    scale: float


class LowRankSegment(NamedTuple):
    """Rows of one run, and its matrices by the names of layers."""

    rows: slice
    matrices: dict[str, LowRank]


@dataclass
class ActingRuns:
    """Which adapters act on which rows of the pass under way: told by tables on the device, or one by one."""

    anchor: Tensor  # requires a gradient, so that the first layer has a backward pass, too
    segments: Sequence[LowRankSegment] = ()
    tables: Any = None
    groups: frozenset[int] = frozenset()  # of layers, where any of them acts


class SharedRows(SharedInput):
    """Linear layers that are given the same rows (q, k and v; gate and up): the base's products of all of them, and what adapters add. When the first
    is called, all are computed; the others take theirs when they are called."""

    def __init__(self, number: int, names: Sequence[str], modules: Sequence[nn.Module], acting: ActingRuns) -> None:
        super().__init__(self._made, [width_of(module) for module in modules])
        self.group, self.names, self._acting = number, list(names), acting
        self._bases = [module.forward for module in modules]
        plain: list[Any] = [m for m in modules if type(m) is nn.Linear and m.bias is None and "forward" not in vars(m)]
        self._weights = [module.weight for module in plain]
        self._low: Tensor | None = None  # what the rows of the pass were shrunk to, for its gradient
        if len(plain) == len(modules):
            take_from(self, modules)
            return
        for member, module in enumerate(modules):
            module.forward = torch.compiler.disable(partial(self.take, member))  # type: ignore[method-assign]

    def _made(self, x: Tensor) -> list[Tensor]:
        if self.group not in self._acting.groups:
            return self.base_products(x)
        recorded = torch.is_grad_enabled()
        return list(_Adapted.apply(x, self._acting.anchor.to(x.device), self, recorded))  # type: ignore[no-untyped-call]

    def traced(self, x: Tensor) -> list[Tensor]:
        """Return the products as a compiler sees them: an op, whose gradient is another."""
        return _trained_products(x, self.number, self.widths)

    def products_of_pass(self, x: Tensor) -> list[Tensor]:
        """Return the products, and keep what `gradient_of_pass` needs of the adapters."""
        ys = self.base_products(x)
        if self.group in self._acting.groups:
            self._low = self.adapt_([y.view(-1, y.shape[-1]) for y in ys], x.reshape(-1, x.shape[-1]))
        return ys

    def gradient_of_pass(self, x: Tensor, dys: Sequence[Tensor]) -> Tensor:
        """Return the gradient of the rows, and add to those of the adapters."""
        dx = self.gradient_of_rows(x, (), dys)
        if self.group in self._acting.groups:
            low, self._low = self._low, None
            flat = [dy.reshape(-1, dy.shape[-1]).contiguous() for dy in dys]
            self.gradients_(dx.view(-1, dx.shape[-1]), flat, x.reshape(-1, x.shape[-1]), low)
        return dx

    def base_products(self, x: Tensor) -> list[Tensor]:
        return [base(x) for base in self._bases]

    def gradient_of_rows(self, x: Tensor, ys: Sequence[Tensor], dys: Sequence[Tensor]) -> Tensor:
        """Return the gradient of the rows by the base's products."""
        if len(self._weights) < len(self.names):
            return torch.autograd.grad(ys, x, dys)[0]
        first, *others = zip(dys, self._weights, strict=True)
        dx = (first[0] @ first[1]).view(-1, x.shape[-1])
        for dy, weight in others:
            dx.addmm_(dy.reshape(-1, dy.shape[-1]), weight)
        return dx.view(x.shape)

    def adapt_(self, ys: Sequence[Tensor], x_TK: Tensor) -> Any:
        """Add to the products what the adapters make of the rows. Returns what the gradients need."""
        if self._acting.tables is not None:
            return _kernels().adapt_(ys, x_TK, self._acting.tables, self.group)
        lows = []
        for y_TN, name in zip(ys, self.names, strict=True):
            for rows, (a, b, scale) in self._of(name):
                if is_row_invariant():
                    lows.append(add_low_rank_(y_TN[rows], x_TK[rows], a, (b * scale).t()))
                    continue
                low_TR = x_TK[rows] @ a.to(x_TK.dtype).t()
                y_TN[rows] += (low_TR @ b.to(x_TK.dtype).t()) * scale
                lows.append(low_TR)
        return lows

    def gradients_(self, dx_TK: Tensor | None, dys: Sequence[Tensor], x_TK: Tensor, kept: Any) -> None:
        """Add to the gradients of the adapters, and of the rows."""
        if self._acting.tables is not None:
            _kernels().gradients_(dx_TK, dys, x_TK, kept, self._acting.tables, self.group)
            return
        lows = iter(kept)
        for dy_TN, name in zip(dys, self.names, strict=True):
            for rows, (a, b, scale) in self._of(name):
                g_TN = dy_TN[rows] * scale
                dlow_TR = g_TN @ b.to(g_TN.dtype)
                gradient_of(b).add_(g_TN.t() @ next(lows))
                gradient_of(a).add_(dlow_TR.t() @ x_TK[rows])
                if dx_TK is not None:
                    dx_TK[rows] += dlow_TR @ a.to(g_TN.dtype)

    def _of(self, name: str) -> list[tuple[slice, LowRank]]:
        return [(rows, matrices[name]) for rows, matrices in self._acting.segments if name in matrices]


class _Adapted(torch.autograd.Function):
    """The products of layers that share their rows, with adapters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layers: SharedRows, recorded: bool) -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(recorded):
            leaf = x.detach().requires_grad_(recorded)
            made = layers.base_products(leaf)
        # in the memory of what was recorded: a linear layer does not look at it again
        ys = [y.detach().contiguous() for y in made]
        x_TK = leaf.detach().reshape(-1, x.shape[-1]).contiguous()
        kept = layers.adapt_([y.view(-1, y.shape[-1]) for y in ys], x_TK)
        ctx.layers, ctx.leaf, ctx.made, ctx.kept = layers, leaf, made, kept
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        layers, leaf = ctx.layers, ctx.leaf
        dx = layers.gradient_of_rows(leaf, ctx.made, dys) if ctx.needs_input_grad[0] else None
        flat = None if dx is None else dx.view(-1, dx.shape[-1])
        x_TK = leaf.detach().reshape(-1, leaf.shape[-1]).contiguous()
        layers.gradients_(flat, [dy.reshape(-1, dy.shape[-1]).contiguous() for dy in dys], x_TK, ctx.kept)
        return dx, None, None, None


@torch.library.custom_op("symbiosis::trained_products", mutates_args=())
def _trained_products(x: Tensor, place: Tensor, widths: list[int]) -> list[Tensor]:
    return _place(place).products_of_pass(x)


@_trained_products.register_fake
def _shapes_of_products(x: Tensor, place: Tensor, widths: list[int]) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], width) for width in widths]


@torch.library.custom_op("symbiosis::trained_gradient", mutates_args=())
def _trained_gradient(x: Tensor, dys: list[Tensor], place: Tensor) -> Tensor:
    return _place(place).gradient_of_pass(x, dys)


@_trained_gradient.register_fake
def _shape_of_gradient(x: Tensor, dys: list[Tensor], place: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs[:2])


def _differentiate(ctx: Any, dys: list[Tensor]) -> tuple[Tensor, None, None]:
    x, place = ctx.saved_tensors
    return _trained_gradient(x, dys, place), None, None


_trained_products.register_autograd(_differentiate, setup_context=_remember)


def _place(number: Tensor) -> SharedRows:
    place = places[int(number)]
    assert isinstance(place, SharedRows)
    return place


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return what a parameter's gradient is added to."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _kernels() -> Any:
    return with_triton("gpu.trained_rows")
