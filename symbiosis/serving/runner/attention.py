"""Attention over pages, behind transformers' attention interface: each segment's rows look at their own sequence only.

What a step reads and writes is worked out once for all layers (`Lookup`). A layer then takes few operations: its rows are written, the rows
of all decoding sequences are computed together, and each longer segment is computed by itself.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from symbiosis.kernels.paged_attention import How, PageLayout, SeenTokens, attend, attend_within, compiled
from symbiosis.kernels.row_invariant import attend_in_blocks, is_row_invariant, whole_blocks
from symbiosis.serving.kv_cache.paged_memory import PagedMemory
from symbiosis.serving.scheduler.scheduler_output import BLOCK, Block, ScheduledRequest, SchedulerOutput, Sequence

NAME = "symbiosis_paged"
FEW = 16  # rows of a sequence: the kernel of a CPU reads its pages as they lie; for more they are gathered first
Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, How], Tensor]


class ThisPass(threading.local):
    """How the forward pass of this thread attends, for which windows it asked for masks, and what says whether it is given up."""

    attend: Attend | None = None
    windows: frozenset[int] = frozenset()
    gives_way: Callable[[], bool] | None = None


this_pass = ThisPass()


@contextmanager
def forward_pass(attend: Attend | None = None, gives_way: Callable[[], bool] | None = None) -> Iterator[None]:
    """In the block, models of this thread attend by `attend(module, q, k, v, how)`, and modules that have `ask` as a hook ask whether the pass
    is given up. Each of q, k and v is [1, heads, rows, size]; the result is [1, rows, heads, size]."""
    this_pass.attend, this_pass.windows, this_pass.gives_way = attend, frozenset(), gives_way
    try:
        yield
    finally:
        this_pass.attend = this_pass.gives_way = None


def masked_windows() -> frozenset[int]:
    """Return beyond how many tokens this thread's last pass meant to mask."""
    return this_pass.windows


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.compiler.is_compiling():  # which is to look no further: `symbiosis/serving/runner/compiled_layers.py`
        words = scaling, sliding_window, softcap, s_aux
        return torch.ops.symbiosis.paged_attention(query, key, value, module.symbiosis_layer, *words), None
    if this_pass.attend is None:
        raise RuntimeError("this model is served by symbiosis.serving, and is called through it only")
    return this_pass.attend(module, query, key, value, How(scaling, sliding_window, softcap, s_aux)), None


def _no_mask(*_: object, local_size: int | None = None, **__: object) -> None:
    """Make no mask: the step, and the windows of the layers, say which rows look at which."""
    if local_size is not None:
        this_pass.windows |= {local_size}


def register() -> None:
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _no_mask)


class Tables:
    """The page numbers of sequences, kept from step to step, because a sequence mostly only adds to its blocks."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Sequence, tuple[list[Block], Tensor]] = WeakKeyDictionary()

    def of(self, sequence: Sequence) -> Tensor:
        """Return a sequence's page numbers, int32 [layers, blocks]."""
        blocks, pages = self._known.get(sequence, ([], None))
        if pages is not None and blocks == sequence.blocks:
            return pages
        same = len(blocks) if blocks == sequence.blocks[: len(blocks)] else 0
        new = torch.tensor([block.pages for block in sequence.blocks[same:]], dtype=torch.int32).T
        pages = torch.cat([pages, new], dim=1) if pages is not None and same else new
        self._known[sequence] = list(sequence.blocks), pages
        return pages

    def joint(self, sequences: list[Sequence]) -> Tensor:
        """Return the page numbers of several sequences, int32 [layers, sequences, blocks]. Where a shorter sequence has no more pages,
        it has page 0."""
        each = [self.of(sequence) for sequence in sequences]
        joint = torch.zeros(len(each[0]), len(each), max(pages.shape[1] for pages in each), dtype=torch.int32)
        for number, pages in enumerate(each):
            joint[:, number, : pages.shape[1]] = pages
        return joint


class Together:
    """Segments with equally many rows, which are computed at once: at which pages they look, and which of the step's rows they are."""

    def __init__(self, arena: PagedMemory, tables: Tensor, segments: list[ScheduledRequest]) -> None:
        self._arena, self._tables, self._rows = arena, tables.contiguous(), segments[0].rows
        device = arena.flat.device
        self._which = torch.cat([torch.arange(s.first, s.first + s.rows) for s in segments]).to(device)
        self._firsts = torch.tensor([segment.first for segment in segments])
        self._ends = torch.tensor([segment.end for segment in segments])
        self._ends_of_rows = torch.cat([torch.arange(s.position + 1, s.end + 1) for s in segments])
        self._in_blocks, longest = is_row_invariant(), int(self._ends.max())
        self._longest = whole_blocks(longest) if self._in_blocks else longest
        self._masks: dict[int | None, Tensor] = {}

    def look(self, layer: int, query: Tensor, how: How, result: Tensor) -> None:
        """Attend: from the step's queries, [heads, rows, size], into the step's results, [rows, heads, size]."""
        few = self._rows <= FEW and query.device.type == "cpu" and not self._in_blocks
        kernel = compiled(query.dtype) if few else None
        if kernel is None:
            self._gather_and_look(layer, query, how, result)
            return
        of, flat = self._arena.layers[layer], self._arena.flat
        pages = PageLayout(of.heads, of.key, of.value, BLOCK, self._arena.page_elements, self._arena.values_at(layer))
        seen = SeenTokens(self._firsts, self._ends_of_rows, self._longest, self._rows)
        kernel.attend(flat, pages, self._tables[layer], seen, how, query, result)

    def _gather_and_look(self, layer: int, query: Tensor, how: How, result: Tensor) -> None:
        of, (key_rows, value_rows), count = self._arena.layers[layer], self._seen, len(self._ends)
        keys = self._arena.keys[layer].index_select(0, key_rows[layer])
        values = self._arena.values[layer].index_select(0, value_rows[layer])
        q = query.index_select(1, self._which).view(query.shape[0], count, self._rows, -1).transpose(0, 1)
        k = keys.view(count, self._longest, of.heads, of.key).transpose(1, 2)
        v = values.view(count, self._longest, of.heads, of.value).transpose(1, 2)
        if self._in_blocks:
            y = attend_in_blocks(q, k, v, self._ends - self._rows, how).to(query.dtype)
        else:
            y = attend(q, k, v, self._mask(how.window), how)
        result.index_copy_(0, self._which, y.transpose(1, 2).flatten(0, 1))

    @cached_property
    def _seen(self) -> tuple[Tensor, Tensor]:
        """Return the rows of keys and of values, [layers, sequences * longest]. Where a sequence has no token, or one behind the window,
        whose page may be another's by now, its own last row is repeated: nothing of another one's is read, not even to be masked."""
        windows = torch.tensor([layer.window or self._longest + 1 for layer in self._arena.layers]).view(-1, 1, 1)
        tokens, ends = torch.arange(self._longest).view(1, 1, -1), self._ends.view(1, -1, 1)
        tokens = tokens.where((tokens < ends) & (tokens > ends - self._rows - windows), ends - 1)
        pages = self._tables.gather(2, tokens // BLOCK)
        return self._arena.rows(pages.flatten(1), (tokens % BLOCK).flatten(1))

    def _mask(self, window: int | None) -> Tensor:
        """Return the mask, [sequences, 1, rows, longest]."""
        if (mask := self._masks.get(window)) is None:
            rows = (self._ends.unsqueeze(1) - self._rows + torch.arange(self._rows)).unsqueeze(-1)
            keys = torch.arange(self._longest)
            mask = keys <= rows
            if window is not None:
                mask &= keys > rows - window
            mask = self._masks[window] = mask.unsqueeze(1).to(self._which.device)
        return mask


class Lookup:
    """What one step writes and reads, in all layers."""

    def __init__(
        self,
        arena: PagedMemory,
        step: SchedulerOutput,
        tables: Tables,
        remember: Callable[[int, Tensor, Tensor], None] | None = None,
    ) -> None:
        self._arena, self._remember, segments = arena, remember, step.segments
        joint = tables.joint([segment.sequence for segment in segments])
        of_row = torch.repeat_interleave(torch.tensor([segment.rows for segment in segments]))
        positions = torch.cat([torch.arange(segment.position, segment.end) for segment in segments])
        pages, inside = joint[:, of_row, positions // BLOCK], positions % BLOCK
        self._written_keys, self._written_values = arena.rows(pages, inside)
        single = [number for number, segment in enumerate(segments) if segment.rows == 1]
        self._single = Together(arena, joint[:, single], [segments[number] for number in single]) if single else None
        windows = [layer.window for layer in arena.layers if layer.window is not None]
        self._longer: list[
            tuple[ScheduledRequest, Together | None]
        ] = []  # none: all that its rows see is in this very step
        for number, segment in enumerate(segments):
            if segment.rows > 1:
                looks = segment.position or any(window < segment.rows for window in windows)
                together = Together(arena, joint[:, number : number + 1], [segment]) if looks else None
                self._longer.append((segment, together))

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Attend in one layer. Each of q, k and v is [1, heads, rows, size]; the result is [1, rows, heads, size]."""
        layer = module.layer_idx
        assert isinstance(layer, int)
        if self._remember is not None:
            self._remember(layer, key, value)
        kernel = compiled(key.dtype) if key.device.type == "cpu" else None
        for memory, new, where in (
            (self._arena.keys[layer], key[0], self._written_keys[layer]),
            (self._arena.values[layer], value[0], self._written_values[layer]),
        ):
            if kernel is None:
                memory.index_copy_(0, where, new.transpose(0, 1).flatten(1))
            else:
                kernel.store(new, where, memory)
        result = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
        if self._single is not None:
            self._single.look(layer, query[0], how, result[0])
        for segment, together in self._longer:
            rows = slice(segment.first, segment.first + segment.rows)
            if together is not None and (segment.position or (how.window is not None and how.window < segment.rows)):
                together.look(layer, query[0], how, result[0])
            else:
                own = query[:, :, rows], key[:, :, rows], value[:, :, rows]
                y = (
                    attend_in_blocks(*own, torch.zeros(1, dtype=torch.long), how)
                    if is_row_invariant()
                    else attend_within(*own, how)
                )
                result[:, rows] = y.transpose(1, 2)
        return result


register()
