"""Brings adapters to a GPU. An adapter is packed into pages of host memory once, and copied to pages of the arena when it is needed, with
the records by which kernels find its rows (`symbiosis/kernels/gpu/adapter_rows.py`)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symbiosis.kernels import file_rows, with_triton
from symbiosis.kernels.gpu.records import BEHIND, EXPAND_HEAD, IS_WIDE
from symbiosis.serving.kv_cache.paged_memory import PagedMemory
from symbiosis.serving.lora.adapter_cache import NAMES, RowRun, place, shapes_of
from symbiosis.serving.lora.adapter_files import AdapterWeights, in_each_thread, in_parallel
from symbiosis.serving.lora.adapter_kinds import Part, sources_of
from symbiosis.serving.lora.held import check_held, copy_pieces, scales_of
from symbiosis.serving.runner.shared_inputs import STAGES, Group

MOST_RUNS = 16  # most copies for one adapter; if it would take more,
STAGED_BYTES = 16 << 20  # so many bytes are copied at once, and put in their places on the device
MOST_LAYOUTS = 64  # most that are remembered


@dataclass(slots=True, frozen=True, eq=False)
class Layout:
    """Where an adapter's rows lie in its pages, how many pages have come by the end of each stage, and its records. Where
    `page_of` is not -1, a word of the records stands for an address: so many bytes from the beginning of that page of the adapter's.
    `begins` says where each record begins, by entry, and `head_begins` where those of the head do. `parts` tells shapes only, in the order
    of the groups."""

    parts: dict[str, Part]
    count: int
    runs: list[RowRun]
    run_table: Tensor  # the same, as `file_rows.put` takes them
    ends: list[int]
    words: Any
    page_of: Any
    begins: dict[int, int]
    head_begins: dict[int, int]


@dataclass(slots=True, frozen=True, eq=False)
class Packed:
    """The pages of one adapter in host memory; and where in its file they come from, if they can simply be read from there again. One that
    `is_held` has pages of its own on the device, where it is used."""

    layout: Layout
    pages: Tensor | None
    matrices: Tensor | None = None
    is_held: bool = False

    def without_numbers(self) -> "Packed | None":
        return None if self.matrices is None else replace(self, pages=None)


@dataclass(slots=True, eq=False)
class Book:
    """The records of an adapter that is on the device, or on its way there. `addresses` and `head_addresses` have the address of each, by
    entry; 0 where the adapter does nothing. `number` counts the adapters that are brought."""

    words: Tensor
    addresses: Any
    head_addresses: Any
    number: int = 0
    arrived: "torch.cuda.Event | None" = None
    # no other one was on its way before it, so that a step does not wait long for it on the device
    is_next: bool = True
    _in_use: list[Any] = field(default_factory=list)  # what is being copied, until it has arrived
    is_wide: bool = False  # float32, where rows are narrower
    held: Tensor | None = None  # its numbers, of one that is not in pages of the arena

    def is_there(self) -> bool:
        """Whether a step may use the adapter. Layer by layer, it waits on the device for what has not come yet."""
        return self.has_arrived() or self.is_next

    def has_arrived(self) -> bool:
        """Whether all of the adapter has arrived on the device."""
        if self.arrived is not None and self.arrived.query():
            self.arrived = None
            self._in_use.clear()
        return self.arrived is None


class Fetcher:
    """Packs adapters, and copies them to the device beside what is computed there, stage by stage in the order of the layers.

    `come` has on the device, for each stage, the number of the last adapter for which it has come.
    """

    def __init__(self, arena: PagedMemory, groups: Sequence[Group]) -> None:
        self._arena, self._groups = arena, groups
        self._is_gpu = arena.flat.is_cuda
        self._stream = torch.cuda.Stream(arena.flat.device) if self._is_gpu else None
        self.come = torch.zeros(STAGES, dtype=torch.int32, device=arena.flat.device)
        self._number = 0
        self._layouts: dict[Any, Layout] = {}
        self._gathers: dict[Any, tuple[Tensor, Tensor]] = {}
        self._last: Book | None = None
        self._counts = [1 + max([0, *(g.last_entry for g in groups if g.is_head == head)]) for head in (False, True)]

    def pack(self, parts: dict[str, Part], weights: AdapterWeights | None = None) -> Packed | None:
        """Pack an adapter, or return None if the kernels do not compute all of it. Any thread may call this.

        Args:
            weights: From which these parts come: simple ones are taken from their file at once.
        """
        if not self._computes(parts):
            return None
        parts = self._ordered(parts)
        layout, matrices = self._layout(parts), [matrix for part in parts.values() for matrix in part.tensors]
        pages = self._empty_pages(layout.count)
        contents = None if weights is None else weights.contents
        if weights is not None and contents is not None and (table := self._table(layout, parts, weights)) is not None:
            _put(contents, table, layout, pages)
            return Packed(layout, pages, table)

        def put(run: RowRun) -> None:
            to = pages[run.page, run.offset : run.offset + run.rows * run.width].view(run.rows, run.width)
            to.copy_(matrices[run.matrix][run.row : run.row + run.rows, run.column : run.column + run.width])

        in_parallel(put, layout.runs)
        return Packed(layout, pages)

    def hold(self, parts: dict[str, Part], scales: Mapping[str, float], dtype: torch.dtype) -> Packed | None:
        """Copy an adapter that is published to pages of its own on the device, or return None if the kernels do not compute all of it. Any
        thread may call this.

        Args:
            scales: By layer: what `up` is multiplied by.
        """
        if not self._computes(parts):
            return None
        parts, device = self._ordered(parts), self._arena.flat.device
        layout = self._layout(parts, dtype)
        matrices = [matrix.to(device) for part in parts.values() for matrix in part.tensors]
        page = self._page_of(dtype)
        pages = torch.zeros(layout.count, page, dtype=dtype, device=device)
        factors = scales_of(parts, scales)
        kernel = with_triton("gpu.gather_matrices") if self._is_gpu else None
        if (
            kernel is None
            or len({matrix.dtype for matrix in matrices}) > 1
            or matrices[0].dtype not in kernel.SUPPORTED
        ):
            copy_pieces(pages.view(-1), layout.runs, matrices, factors, page)
        else:
            kernel.gather(*self._pieces(layout, matrices, factors, page), pages, matrices[0])
        check_held(pages)
        return Packed(layout, pages, is_held=True)

    def _pieces(
        self, layout: Layout, matrices: Sequence[Tensor], factors: Sequence[float], page: int
    ) -> tuple[Tensor, Tensor]:
        """Return what `gather` is told. The parameters of a trainer stay where they are, so it mostly is what it was the last time."""
        key = id(layout), *((m.data_ptr(), *m.stride(), factor) for m, factor in zip(matrices, factors, strict=True))
        if (found := self._gathers.get(key)) is None:
            rows = []
            for run in layout.runs:
                matrix = matrices[run.matrix]
                row_stride, column_stride = matrix.stride()
                first = matrix.data_ptr() + (run.row * row_stride + run.column * column_stride) * matrix.itemsize
                rows.append((first, run.page * page + run.offset, run.rows, run.width, row_stride, column_stride))
            device = self._arena.flat.device
            scales = torch.tensor([factors[run.matrix] for run in layout.runs], dtype=torch.float32)
            found = torch.tensor(rows, dtype=torch.int64).to(device), scales.to(device)
            self._gathers[key] = found
            if len(self._gathers) > MOST_LAYOUTS:
                self._gathers.pop(list(self._gathers)[0], None)  # noqa: RUF015
        return found

    def book_of(self, packed: Packed) -> Book:
        """Return where the kernels find an adapter that is held. To be called by the engine's thread, whose stream then uses it."""
        assert packed.pages is not None
        layout, pages = packed.layout, packed.pages
        steps = layout.page_of * (pages.stride(0) * pages.itemsize)
        words = torch.from_numpy(np.where(layout.page_of >= 0, layout.words + pages.data_ptr() + steps, layout.words))
        if pages.is_cuda:
            pages.record_stream(torch.cuda.current_stream(pages.device))
            words = words.to(pages.device)
        is_wide = pages.dtype != self._arena.flat.dtype
        return self._book(words, layout, is_wide=is_wide, held=pages)

    def _computes(self, parts: dict[str, Part]) -> bool:
        """Whether the kernels compute all of an adapter."""
        names = {name for group in self._groups for name in group.names}
        return bool(parts) and all(name in names and part.before is None for name, part in parts.items())

    def _ordered(self, parts: dict[str, Part]) -> dict[str, Part]:
        return {name: parts[name] for group in self._groups for name in group.names if name in parts}

    def _page_of(self, dtype: torch.dtype) -> int:
        """Return how many numbers of this dtype a page holds."""
        return self._arena.page_elements * self._arena.flat.itemsize // dtype.itemsize

    def _table(self, layout: Layout, parts: dict[str, Part], weights: AdapterWeights) -> Tensor | None:
        """Return where the matrices lie in their file, or None if that cannot be told simply."""
        sources = sources_of(parts, weights)
        if sources is None or not file_rows.can_read(sources, self._arena.flat.dtype):
            return None
        counts = Counter(run.matrix for run in layout.runs)
        return file_rows.matrices(sources, [counts[number] for number in range(len(sources))])

    def read_again(self, packed: Packed, file: Path) -> Packed:
        """Read the numbers that `without_numbers` left in their file. Raises `OSError` if they are not there. Any thread may call this."""
        assert packed.matrices is not None
        pages = self._empty_pages(packed.layout.count)
        with file.open("rb", buffering=0) as opened:
            _put(opened.fileno(), packed.matrices, packed.layout, pages)
        return replace(packed, pages=pages)

    def _empty_pages(self, count: int) -> Tensor:
        return torch.empty(count, self._arena.page_elements, dtype=self._arena.flat.dtype, pin_memory=self._is_gpu)

    def _layout(self, parts: dict[str, Part], dtype: torch.dtype | None = None) -> "Layout":
        """Where everything lies. It is the same for all adapters of these ranks at these layers."""
        dtype = dtype or self._arena.flat.dtype
        key = (
            dtype,
            *(
                (name, *((what, *t.shape) for what in NAMES if (t := getattr(part, what)) is not None))
                for name, part in parts.items()
            ),
        )
        if (layout := self._layouts.get(key)) is None:
            page, size = self._page_of(dtype), dtype.itemsize
            count, runs = place(shapes_of(parts), page)
            flag = IS_WIDE if size > self._arena.flat.itemsize else 0
            records = _records(parts, runs, page, size, self._groups, flag)
            table = torch.tensor([(*run[1:5], run.page * page + run.offset) for run in runs], dtype=torch.int64)
            shapes = {name: part.to("meta") for name, part in parts.items()}
            layout = self._layouts[key] = Layout(shapes, count, runs, table, self._ends(parts, runs), *records)
            if len(self._layouts) > MOST_LAYOUTS:
                self._layouts.pop(list(self._layouts)[0], None)  # noqa: RUF015  other threads may add to it meanwhile
        return layout

    def _ends(self, parts: dict[str, Part], runs: list[RowRun]) -> list[int]:
        stage_of = {name: group.stage for group in self._groups for name in group.names}
        stages = [stage_of[name] for name, part in parts.items() for _ in part.tensors]
        ends = [0] * STAGES
        for run in runs:
            ends[stages[run.matrix]] = run.page + 1
        return list(accumulate(ends, max))

    def fetch(self, packed: Packed, pages: list[int]) -> Book:
        """Begin to copy it to these pages."""
        arena, pages = self._arena, sorted(pages)  # so that many are neighbours
        layout, of = packed.layout, packed.pages
        assert of is not None, "its numbers were let go"
        table, address = arena.flat.view(-1, arena.page_elements), arena.flat.data_ptr()
        numbers = np.array([*pages, 0], dtype=np.int64)[layout.page_of]  # -1 finds the 0, which is not used
        words = np.where(layout.page_of >= 0, layout.words + address + numbers * arena.page_bytes, layout.words)
        host = torch.from_numpy(words)
        if self._stream is None:
            _copy_pages(table, of, pages)
            return self._book(host, layout)
        self._number += 1
        is_next = self._last is None or self._last.has_arrived()
        self._stream.wait_stream(torch.cuda.current_stream(arena.flat.device))  # what lay there before may be in use
        with torch.cuda.stream(self._stream):
            pinned = host.pin_memory()
            there = pinned.to(arena.flat.device, non_blocking=True)
            for stage, (begin, end) in enumerate(zip([0, *layout.ends], layout.ends, strict=False)):
                _copy_pages(table, of[begin:end], pages[begin:end])
                self.come[stage : stage + 1].fill_(self._number)
            arrived = torch.cuda.Event()
            arrived.record()
        self._last = self._book(there, layout, self._number, arrived, is_next, [pinned, packed])
        return self._last

    def _book(self, words: Tensor, layout: Layout, *more: Any, **held: Any) -> Book:
        found = []
        for count, begins in zip(self._counts, (layout.begins, layout.head_begins), strict=True):
            addresses = np.zeros(count, dtype=np.int64)
            for entry, begin in begins.items():
                addresses[entry] = words.data_ptr() + 8 * begin
            found.append(addresses)
        return Book(words, found[0], found[1], *more, **held)


def _put(file: int | Tensor, table: Tensor, layout: Layout, pages: Tensor) -> None:
    """Put an adapter's matrices from its file into pages, by several threads."""
    taken = torch.zeros(1, dtype=torch.int64)
    in_each_thread(lambda: file_rows.put(file, table, layout.run_table, pages, taken))


def _copy_pages(table: Tensor, pages: Tensor, numbers: list[int]) -> None:
    """Copy pages to the pages with these numbers, which ascend. A copy costs the host time, too, so neighbours are copied together. If there
    are still many copies to make, many pages at a time are copied to other memory of the device, which puts them in their places."""
    if not numbers:
        return
    ends = [at for at in range(1, len(numbers)) if numbers[at] != numbers[at - 1] + 1]
    if len(ends) < MOST_RUNS:
        for first, end in zip([0, *ends], [*ends, len(numbers)], strict=True):
            table[numbers[first] : numbers[first] + end - first].copy_(pages[first:end], non_blocking=True)
        return
    where = torch.tensor(numbers)
    if table.is_cuda:
        where = where.pin_memory().to(table.device, non_blocking=True)
    each = max(1, STAGED_BYTES // pages[0].nbytes)
    for some, to in zip(pages.split(each), where.split(each), strict=True):
        table.index_copy_(0, to, some.to(table.device, non_blocking=True))


Where = tuple[int, int]  # a page of the adapter's, and bytes from its beginning


def _records(
    parts: dict[str, Part], runs: list[RowRun], page: int, size: int, groups: Sequence[Group], flag: int
) -> tuple[Any, ...]:
    """Return the words of an adapter's records, their pages, and where each record begins, by entry. `flag` is added to the first of each."""
    where = _addresses(parts, runs, page, size)
    words: list[Where] = []  # page -1: a number
    begins: dict[bool, dict[int, int]] = {False: {}, True: {}}
    for group in groups:
        ours = [parts.get(name) for name in group.names]
        if not any(ours):
            continue
        ranks = [0 if part is None or part.down is None else len(part.down) for part in ours]
        begins[group.is_head][group.entry] = len(words)
        words.append((-1, sum(ranks) + flag))
        for name in group.names:
            words += where.get((name, "down"), [])
        for member, (name, part) in enumerate(zip(group.names, ours, strict=True)):
            if part is None:
                continue
            begins[group.is_head][group.entry + 1 + member] = len(words)
            rows, gain, shift = (where.get((name, what), []) for what in ("up", "gain", "shift"))
            gain_at, shift_at = EXPAND_HEAD + len(rows), EXPAND_HEAD + len(rows) + len(gain)
            head = ranks[member] + flag, sum(ranks[:member]), gain_at if gain else 0, shift_at if shift else 0
            words += [*((-1, word) for word in head), *rows, *gain, *shift]
    words += [(-1, 0)] * BEHIND
    page_of, numbers = np.array(words, dtype=np.int64).T
    return numbers, page_of, begins[False], begins[True]


def _addresses(parts: dict[str, Part], runs: list[RowRun], page: int, size: int) -> dict[tuple[str, str], list[Where]]:
    """Return where the pieces of each matrix's rows lie, row by row, by its layer and name."""
    named = [
        (layer, name, m) for layer, part in parts.items() for name in NAMES if (m := getattr(part, name)) is not None
    ]
    tables = [[[(0, 0)] * -(-m.shape[1] // page) for _ in range(len(m))] for _, _, m in named]
    for run in runs:
        for number in range(run.rows):
            at = run.page, (run.offset + number * run.width) * size
            tables[run.matrix][run.row + number][run.column // page] = at
    found = zip(named, tables, strict=True)
    return {(layer, name): [at for row in table for at in row] for (layer, name, _), table in found}
