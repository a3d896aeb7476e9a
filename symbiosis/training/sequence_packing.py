"""Sequences side by side in one pass, and the attention in which each sees only itself.

They are packed into one row of tokens, if the model's attention can be replaced; else they lie in a rectangle, each padded at its right end.
What follows a token does not change what a causal model makes of it, so the padding needs no mask.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from symbiosis.kernels.paged_attention import How
from symbiosis.kernels.row_invariant import attend_in_blocks, is_row_invariant

NAME = "symbiosis_packed"


class CannotPack(Exception):
    """This model's attention cannot be replaced, or does something else then."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """Keys and values in front of those of a sequence, by layer: [heads, length, size]."""

    length: int
    layers: Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class PackLayout:
    """Where the sequences of a pass lie: the shape [n, longest] of its tokens, and the first row of each if these are one axis. A sequence may have
    a prefix, if they are packed."""

    lengths: tuple[int, ...]
    packed: bool
    prefixes: tuple[Prefix | None, ...] = ()

    @property
    def width(self) -> int:
        return sum(self.lengths) if self.packed else max(self.lengths)

    @property
    def rows(self) -> int:
        return self.width if self.packed else self.width * len(self.lengths)

    @property
    def firsts(self) -> list[int]:
        if not self.packed:
            return [number * self.width for number in range(len(self.lengths))]
        return torch.tensor((0, *self.lengths[:-1])).cumsum(0).tolist()  # type: ignore[no-any-return]

    def inputs(self, sequences: Sequence[Tensor], device: torch.device) -> dict[str, Tensor]:
        """Return what the model is called with."""
        if not self.packed:
            return {"input_ids": nn.utils.rnn.pad_sequence(list(sequences), batch_first=True).to(device)}
        begins = [0 if prefix is None else prefix.length for _, prefix in self._each()]
        positions = torch.cat([torch.arange(b, b + length) for b, length in zip(begins, self.lengths, strict=True)])
        return {"input_ids": torch.cat(list(sequences))[None].to(device), "position_ids": positions[None].to(device)}

    def blocks(self) -> Iterator[tuple[int, int, int, Prefix | None]]:
        """Yield neighbours of one length and one prefix: the first row, how many sequences, and how long they are."""
        first = 0
        for (length, prefix), each in groupby(self._each()):
            count = len(list(each))
            yield first, count, length, prefix
            first += count * length

    def _each(self) -> Iterator[tuple[int, Prefix | None]]:
        return zip(self.lengths, self.prefixes or (None,) * len(self.lengths), strict=True)


@dataclass(frozen=True)
class TableLayout:
    """Sequences in one row of tokens, of which a table on the device says where each begins: int32 [sequences + 1]."""

    rows: int
    begins: Tensor
    longest: int
    packed: bool = True


Layout = PackLayout | TableLayout


class _LayoutOfThread(threading.local):
    layout: Layout | None = None


_now = _LayoutOfThread()


@contextmanager
def packed_as(layout: Layout) -> Iterator[None]:
    """In the block, models of this thread attend within the sequences of a layout."""
    before, _now.layout = _now.layout, layout
    try:
        yield
    finally:
        _now.layout = before


@torch.compiler.disable
def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    layout = _now.layout
    if layout is None:
        raise RuntimeError("this model is trained by symbiosis.training, and is called through it only")
    if attention_mask is not None or position_bias is not None:
        raise CannotPack("its attention is told by a tensor who sees whom")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise CannotPack("its attention looks ahead")
    if len(query) != 1 or query.shape[2] != layout.rows or key.shape[2] != layout.rows:
        raise CannotPack(f"its attention is over {tuple(query.shape)}, {tuple(key.shape)}")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(layout, TableLayout):
        if softcap is not None or s_aux is not None or not _is_for_flash(query, value):
            raise CannotPack("its attention is none that a table can be told to")
        return _attend_by_table(query[0], key[0], value[0], layout, scaling, sliding_window)[None], None
    parts = []
    for first, count, length, prefix in layout.blocks():
        q, k, v = (
            x[0, :, first : first + count * length].unflatten(1, (count, length)).transpose(0, 1)
            for x in (query, key, value)
        )
        if prefix is not None:
            layer: Any = module.layer_idx
            before = prefix.layers[layer]
            k, v = (torch.cat([p.expand(count, *p.shape), x], 2) for p, x in zip(before, (k, v), strict=True))  # type: ignore[arg-type]
        if is_row_invariant():
            made = _InBlocks.apply(q, k, v, How(scaling, sliding_window, softcap, s_aux))  # type: ignore[no-untyped-call]
        else:
            made = _attend(q, k, v, _window(length, sliding_window, q.device, k.shape[2]), scaling, softcap, s_aux)
        parts.append(made.transpose(1, 2).flatten(0, 1))  # [count * length, heads, size]
    return torch.cat(parts)[None], None


def _is_for_flash(query: Tensor, value: Tensor) -> bool:
    size = query.shape[-1]
    return query.dtype in (torch.bfloat16, torch.float16) and size == value.shape[-1] and size % 8 == 0 and size <= 256


def _attend_by_table(
    q: Tensor, k: Tensor, v: Tensor, layout: TableLayout, scaling: float, window: int | None
) -> Tensor:
    """Causal attention of [heads, rows, size]; the result is [rows, heads, size]."""
    begins, longest = layout.begins, layout.longest
    sees = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    rows_first = (x.transpose(0, 1) for x in (q, k, v))
    made: Tensor = torch.ops.aten._flash_attention_forward(
        *rows_first, begins, begins, longest, longest, 0.0, True, False, scale=scaling, **sees
    )[0]
    return made


def _window(length: int, window: int | None, device: torch.device, keys: int) -> Tensor | None:
    """Return who sees whom [length, keys], unless there are as many keys, and each sees all before it."""
    if (window is None or window >= keys) and keys == length:
        return None
    at = torch.arange(keys, device=device)
    here = at[keys - length :, None]
    return (at <= here) & (at > here - (window or keys))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:  # fmt: skip
    """Causal attention of [count, heads, length, size]."""
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) if shared > 1 else x for x in (k, v))
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scaling)
    length = q.shape[2]
    mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril() if mask is None else mask
    scores = q @ k.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return torch.softmax(scores.float(), -1).to(v.dtype) @ v
    sink = sinks.reshape(1, -1, 1, 1).expand(len(q), -1, length, 1).to(scores.dtype)
    return torch.softmax(torch.cat([scores, sink], -1).float(), -1)[..., :-1].to(v.dtype) @ v


class _InBlocks(torch.autograd.Function):
    """Attention whose sums are those of a sampler (`row_invariant.py`), with the gradients of the usual one."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        ctx.how = how
        ctx.save_for_backward(q, k, v)
        return attend_in_blocks(q, k, v, torch.zeros(len(q), dtype=torch.long), how).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        q, k, v = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        how: How = ctx.how
        with torch.enable_grad():
            mask = _window(q.shape[2], how.window, q.device, k.shape[2])
            made = _attend(q, k, v, mask, how.scaling, how.softcap, how.sinks)
        return *torch.autograd.grad(made, (q, k, v), slope), None


def _no_mask(*_: object, **__: object) -> None:
    """Make no mask: the layout and the windows of the layers say who sees whom."""


def register() -> None:
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)
