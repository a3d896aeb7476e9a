"""The sites in a model where adapters act: before and after a layer's one product for all rows.

A site is a hook of the layer, so the model's structure, names and weights stay as they are. A layer gets hooks with the first request
whose adapter acts there, and keeps them; rows without an adapter are not touched.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.errors import AdapterError
from symbiosis.kernels.adapter_rows import FewAdapterRows, PlacedAdapter, Rows, adapt_rows_, before_rows
from symbiosis.kernels.row_invariant import is_row_invariant
from symbiosis.serving.lora.adapter_cache import AdapterCache
from symbiosis.serving.lora.adapter_kinds import LoadedAdapter
from symbiosis.serving.lora.peft_layers import run_layer
from symbiosis.serving.runner.model_runner import ModelRunner
from symbiosis.serving.scheduler.scheduler_output import ScheduledRequest, SchedulerOutput

Span = tuple[int, int, LoadedAdapter]  # consecutive rows of one adapter: the first, and how many


@dataclass(slots=True, frozen=True)
class AdapterRows:
    """The rows of one adapter in a step."""

    adapter: LoadedAdapter
    rows: Rows
    placed: dict[str, PlacedAdapter]

    def is_wide(self, dtype: torch.dtype) -> bool:
        """Whether the adapter's numbers are of another dtype than the rows."""
        first = next(iter(self.placed.values()), None)
        return first is not None and first.dtype not in (None, dtype)

    def acts_at(self, layer: str) -> bool:
        return layer in self.placed or layer in self.adapter.layers


@dataclass(slots=True, frozen=True)
class Shares:
    """Which rows that a layer sees belong to which adapter."""

    rows: int = 0
    groups: Sequence[AdapterRows] = ()
    few: FewAdapterRows | None = None  # computes them, if they are few

    def check(self, name: str, x: Tensor) -> None:
        """Refuse to run an adapter at a layer that was given other rows."""
        given = (x.shape[:-1] if x.is_floating_point() else x.shape).numel()
        if given != self.rows and (of := [group.adapter.name for group in self.groups if group.acts_at(name)]):
            raise AdapterError(f"{name} was given {given} rows of {self.rows}: the adapter {of[0]!r} cannot act there")

    def adapt_(self, name: str, y: Tensor, x: Tensor) -> None:
        """Add what is computed together for all adapters at this layer."""
        placed = [group.placed.get(name) for group in self.groups]
        if not any(placed):
            return
        y_TN, x_TK = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        if self.few is not None and y_TN.is_contiguous() and x_TK.is_contiguous() and x.dtype == y.dtype:
            self.few.adapt_(y_TN, x_TK, placed)
        else:
            pairs = zip(self.groups, placed, strict=True)
            adapt_rows_(y_TN, x_TK, [(group.rows, each) for group, each in pairs if each is not None])


class TargetLayers:
    """All sites of one served model."""

    def __init__(self, served: ModelRunner, residency: AdapterCache) -> None:
        self._served, self._residency = served, residency
        self._modules = dict(served.model.named_modules())
        self._runner = served.runner
        self._known: set[int] = set()  # versions
        self._before: set[str] = set()
        self._after: set[str] = set()
        self._all = self._kept = Shares()  # of all rows, and of those whose logits are kept
        self._virtual: list[ScheduledRequest] = []  # that begin with virtual tokens
        served.before.append(self.begin)

    def add(self, adapter: LoadedAdapter) -> None:
        """Make the sites of an adapter."""
        if adapter.version in self._known:
            return
        self._known.add(adapter.version)
        if adapter.packed is not None and self._runner is not None:
            self._runner.add(adapter)
            return
        for name, part in adapter.parts.items():
            if part.before is not None:
                self._put(name, self._before, nn.Module.register_forward_pre_hook, self._on_the_way_in)
            if part.down is not None or part.gain is not None or part.shift is not None:
                self._put(name, self._after, nn.Module.register_forward_hook, self._on_the_way_out)
        for name in adapter.layers:
            self._put(name, self._after, nn.Module.register_forward_hook, self._on_the_way_out)

    def begin(self, step: SchedulerOutput, kept: Tensor) -> None:
        """Tell the sites which rows of the step belong to which adapter, and which of them are those whose logits are kept."""
        spans: list[Span] = []
        self._virtual = []
        for segment in step.segments:
            adapter = segment.sequence.adapter
            if not isinstance(adapter, LoadedAdapter):
                continue
            if adapter.version not in self._known:
                self.add(adapter)
            spans.append((segment.first, segment.rows, adapter))
            if segment.position < adapter.virtual:
                self._virtual.append(segment)
        served = self._served
        served.embed, served.remember = (self._embed, self._remember) if self._virtual else (None, None)
        kept_spans = spans if not spans or len(kept) == step.rows else _spans_of(kept.tolist(), spans)
        if self._runner is not None:
            is_plain = not self._virtual and all(adapter.packed is not None for _, _, adapter in spans)
            self._runner.begin(is_plain, self._runs(spans), self._runs(kept_spans))
        self._all = self._shares(spans, step.rows) if spans else Shares(step.rows)
        if served.keeps_rows:
            self._kept = self._shares(kept_spans, len(kept)) if spans else Shares(len(kept))

    def _runs(self, spans: Sequence[Span]) -> list[tuple[int, int, Any]]:
        """Return the runs of rows of one adapter that the kernels compute: the first row, how many, and where the adapter lies."""
        runs: list[tuple[int, int, Any]] = []
        for first, rows, adapter in spans:
            if adapter.packed is None:
                continue
            book = self._residency.book(adapter)
            if runs and runs[-1][2] is book and runs[-1][0] + runs[-1][1] == first:
                runs[-1] = (runs[-1][0], runs[-1][1] + rows, book)
            else:
                runs.append((first, rows, book))
        return runs

    def _shares(self, spans: Sequence[Span], count: int) -> Shares:
        rows: dict[LoadedAdapter, list[int]] = {}
        for first, many, adapter in spans:
            if adapter.packed is None:
                rows.setdefault(adapter, []).extend(range(first, first + many))
        highest = max((adapter.rank for adapter in rows), default=0)
        numbers = list(rows.values())
        groups = [AdapterRows(adapter, _rows(of), self._placed(adapter)) for adapter, of in rows.items()]
        dtype = self._served.dtype
        fits = not is_row_invariant() and FewAdapterRows.fits(numbers, highest, dtype, self._served.device)
        few = FewAdapterRows(numbers) if fits and not any(group.is_wide(dtype) for group in groups) else None
        return Shares(count, groups, few)

    def _placed(self, adapter: LoadedAdapter) -> dict[str, PlacedAdapter]:
        return self._residency.placed(adapter) if adapter.parts else {}

    def _put(self, name: str, there: set[str], register: Callable[..., Any], act: Callable[..., Any]) -> None:
        if name in there:
            return
        there.add(name)
        module = self._modules[name]
        is_head = module is self._served.model.get_output_embeddings()  # type: ignore[operator]
        register(module, partial(act, name, is_head and self._served.keeps_rows))

    def _on_the_way_in(self, name: str, is_head: bool, module: nn.Module, args: tuple[Any, ...]) -> Any:
        shares = self._kept if is_head else self._all
        groups = [
            (group.rows, placed)
            for group in shares.groups
            if (placed := group.placed.get(name)) is not None and placed.before
        ]
        if not groups:
            return None
        x, *others = args
        shares.check(name, x)
        return (before_rows(x.view(-1, x.shape[-1]), groups).view(x.shape), *others)

    def _on_the_way_out(self, name: str, is_head: bool, module: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
        shares = self._kept if is_head else self._all
        shares.check(name, args[0])
        shares.adapt_(name, y, args[0])
        for group in shares.groups:
            if (layer := group.adapter.layers.get(name)) is not None:
                run_layer(layer, args[0], y, group.rows)

    def _embed(self, step: SchedulerOutput, ids: Tensor) -> Tensor | None:
        """Give virtual tokens the adapter's embeddings."""
        segments = [s for s in self._virtual if _loaded(s).prompt is not None]
        if not segments:
            return None
        rows: Tensor = self._served.model.get_input_embeddings()(ids).clone()  # type: ignore[operator]
        for segment in segments:
            prompt = _loaded(segment).prompt
            assert prompt is not None
            values = prompt[segment.position : segment.end]
            rows[0, segment.first : segment.first + len(values)] = values.to(rows)
        return rows

    def _remember(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Give virtual tokens the adapter's keys and values, [1, heads, rows, size], just before the layer keeps them."""
        for segment in self._virtual:
            if prefix := _loaded(segment).prefix:
                for there, ours in zip((key, value), prefix[layer], strict=True):
                    values = ours[segment.position : segment.end]
                    heads = values.view(len(values), there.shape[1], -1).transpose(0, 1)
                    there[0, :, segment.first : segment.first + len(values)] = heads.to(there)


def _loaded(segment: ScheduledRequest) -> LoadedAdapter:
    adapter = segment.sequence.adapter
    assert isinstance(adapter, LoadedAdapter)
    return adapter


def _spans_of(kept: Sequence[int], spans: Sequence[Span]) -> list[Span]:
    """Return which of the kept rows, by their places among these, are in which span. Spans come one after another."""
    firsts = [first for first, _, _ in spans]
    found: list[Span] = []
    for place, row in enumerate(kept):
        at = bisect_right(firsts, row) - 1
        if at >= 0 and row < firsts[at] + spans[at][1]:
            found.append((place, 1, spans[at][2]))
    return found


def _rows(numbers: list[int]) -> Rows:
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return slice(numbers[0], numbers[-1] + 1)
    return torch.tensor(numbers)
