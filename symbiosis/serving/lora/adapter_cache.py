"""Decides which adapters lie on the device. Their rows share one memory with keys and values, page by page.

Rows are found one by one, so the pages of an adapter may lie anywhere. A row lies within one page; a row longer than a page is cut into
pieces. PEFT's layers need each tensor at once: small ones share pages, and a large one has pages that follow one another.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from symbiosis.kernels.adapter_rows import MatrixPiece, PlacedAdapter
from symbiosis.serving.kv_cache.page_pool import NoRoom
from symbiosis.serving.kv_cache.paged_memory import PagedMemory
from symbiosis.serving.lora.adapter_kinds import LoadedAdapter, Part

FIXED_BYTES = 1 << 16  # what a copy costs besides its bytes
ALIGNED = 64  # bytes
NAMES = ("down", "up", "before", "gain", "shift")


class RowRun(NamedTuple):
    """Rows of one matrix that follow one another in one page."""

    matrix: int
    row: int
    rows: int
    column: int
    width: int
    page: int  # of the adapter's
    offset: int  # in elements


def place(shapes: Iterable[tuple[int, int]], page: int) -> tuple[int, list[RowRun]]:
    """Return how many pages of this size the rows of these matrices take, and where each row lies.

    >>> place([(3, 4)], page=8)
    (2, [RowRun(matrix=0, row=0, rows=2, column=0, width=4, page=0, offset=0), RowRun(matrix=0, row=2, rows=1, column=0, width=4, page=1, offset=0)])
    """
    runs: list[RowRun] = []
    number, used = 0, 0
    for matrix, (rows, columns) in enumerate(shapes):
        for column in range(0, columns, page):
            width, row = min(page, columns - column), 0
            while row < rows:
                if used + width > page:
                    number, used = number + 1, 0
                count = min(rows - row, (page - used) // width)
                runs.append(RowRun(matrix, row, count, column, width, number, used))
                row, used = row + count, used + count * width
    return number + (used > 0), runs


class Put(NamedTuple):
    """Where a tensor of PEFT's layers lies."""

    first: int  # page of the adapter's
    pages: int
    offset: int  # in bytes


def put_whole(sizes: Sequence[int], page: int) -> tuple[int, list[Put]]:
    """Return how many pages of so many bytes tensors of these sizes take, and where each lies, one by one.

    >>> put_whole([64, 300, 100], page=256)
    (3, [Put(first=0, pages=1, offset=0), Put(first=1, pages=2, offset=0), Put(first=0, pages=1, offset=64)])
    """
    places: list[Put | None] = [None] * len(sizes)
    count = used = 0
    for number, size in enumerate(sizes):
        if size <= page:
            if used + size > page * count:
                count, used = count + 1, page * count
            places[number] = Put(count - 1, 1, used - page * (count - 1))
            used += -(-size // ALIGNED) * ALIGNED
    for number, size in enumerate(sizes):
        if size > page:
            places[number] = Put(count, -(-size // page), 0)
            count += -(-size // page)
    return count, [each for each in places if each is not None]


@dataclass(slots=True, eq=False)
class Resident:
    """An adapter that lies on the device."""

    pages: list[int]
    bytes: int
    placed: dict[str, PlacedAdapter]
    used: int  # the turn in which it was wanted last
    pins: int = 0
    is_unwanted: bool = False
    book: Any = None  # of one that a GPU's kernels compute
    adapter: LoadedAdapter | None = None  # of one that PEFT's layers compute


def to_evict(residents: Iterable[tuple[int, Resident]], pages: int, turn: int) -> list[int]:
    """Return which versions to evict to free so many pages: first those that have not been wanted for long and cost little to load
    again, for what they occupy. Return none if even all that are not pinned would not be enough."""
    loose = [(version, each) for version, each in residents if not each.pins]
    if sum(len(each.pages) for _, each in loose) < pages:
        return []

    def worth(pair: tuple[int, Resident]) -> float:
        each = pair[1]
        return (FIXED_BYTES + each.bytes) / (max(1, len(each.pages)) * (1 + turn - each.used))

    chosen, found = [], 0
    for version, each in sorted(loose, key=worth):
        if found >= pages:
            break
        if each.pages:
            chosen.append(version)
            found += len(each.pages)
    return chosen


def _none(pages: int) -> bool:
    return False


def _ignore(*_: object) -> None: ...


class PageFetcher(Protocol):
    """Copies what `LoadedAdapter.packed` holds to pages of the device, while other work goes on there."""

    def fetch(self, packed: Any, pages: list[int]) -> Any: ...
    def book_of(self, packed: Any) -> Any: ...


@dataclass(slots=True)
class AdapterCache:
    """The adapters on the device, by version.

    Args:
        arena: Whose pages they take.
        fetcher: Copies rows, on a GPU.
        others_make_room: Called for free pages if evicting adapters does not free enough. Returns whether there are enough then.
        on_put: Called with each adapter that is brought, and its pages.
        on_gone: Called with each version that is on the device no more.
    """

    arena: PagedMemory
    others_make_room: Callable[[int], bool] = _none
    fetcher: PageFetcher | None = None
    on_put: Callable[[LoadedAdapter, list[int]], None] = _ignore
    on_gone: Callable[[int], None] = _ignore
    evictions: int = 0
    fetches: int = 0
    _here: dict[int, Resident] = field(default_factory=dict)
    _turn: int = 0

    @property
    def count(self) -> int:
        return len(self._here)

    def is_here(self, adapter: LoadedAdapter) -> bool:
        resident = self._here.get(adapter.version)
        return resident is not None and (resident.book is None or resident.book.is_there())

    def book(self, adapter: LoadedAdapter) -> Any:
        """Return where a GPU's kernels find an adapter, or None if something else computes it."""
        return self._here[adapter.version].book

    def placed(self, adapter: LoadedAdapter) -> dict[str, PlacedAdapter]:
        """Return where an adapter's rows lie, by the names of layers."""
        return self._here[adapter.version].placed

    def pages_of(self, adapter: LoadedAdapter) -> int:
        if (resident := self._here.get(adapter.version)) is not None:
            return len(resident.pages)
        return adapter.pages

    def fetch(self, adapter: LoadedAdapter) -> bool:
        """Bring an adapter to the device. Return False if there is no room for it now."""
        self._turn += 1
        if (resident := self._here.get(adapter.version)) is not None:
            resident.used = self._turn
            return True
        count = adapter.pages
        evictable = sum(len(each.pages) for each in self._here.values() if not each.pins)
        if count > self.arena.pool.free + evictable and not self.others_make_room(count - evictable):
            return False
        self.make_room(count)
        self._put(adapter, count)
        return True

    def prefetch(self, adapters: Iterable[LoadedAdapter]) -> int:
        """Bring as many of these as find room without evicting anything, in this order. Return how many are on the device then."""
        here = 0
        for adapter in adapters:
            if adapter.version not in self._here:
                try:
                    self._put(adapter, adapter.pages)
                except NoRoom:
                    break
            here += 1
        return here

    def pin(self, adapter: LoadedAdapter) -> None:
        """Keep an adapter until it has been unpinned as often as pinned."""
        self._turn += 1
        resident = self._here[adapter.version]
        resident.pins, resident.used = resident.pins + 1, self._turn

    def unpin(self, adapter: LoadedAdapter) -> None:
        resident = self._here[adapter.version]
        assert resident.pins, f"{adapter.name} is not pinned"
        resident.pins -= 1
        if resident.is_unwanted:
            self.forget(adapter.version)

    def make_room(self, pages: int) -> bool:
        """Evict unpinned adapters until so many pages are free. If that cannot be, evict none."""
        missing = pages - self.arena.pool.free
        if missing <= 0:
            return True
        versions = to_evict(self._here.items(), missing, self._turn)
        for version in versions:
            self.forget(version)
        self.evictions += len(versions)
        return bool(versions)

    def forget(self, version: int) -> None:
        """Note that this version is not wanted any more, once nothing has it pinned."""
        if (resident := self._here.get(version)) is None:
            return
        resident.is_unwanted = True
        if not resident.pins:
            for own in resident.adapter.own if resident.adapter is not None else ():
                own.put(own.values)
            self.arena.pool.give_back(self._here.pop(version).pages)
            self.on_gone(version)

    def forget_all(self) -> None:
        """Let nothing be on the device that is not pinned."""
        for version in list(self._here):
            self.forget(version)

    def put_at(self, adapter: LoadedAdapter, pages: list[int]) -> None:
        """Put an adapter into these pages, which are its own from now on. If that fails, nothing is changed."""
        placed: dict[str, PlacedAdapter] = {}
        book = None
        if self.fetcher is not None and adapter.packed is not None:
            book = self.fetcher.fetch(adapter.packed, pages)
        else:
            runs = place(shapes_of(adapter.parts), self.arena.page_elements)[1]
            placed = _copy(adapter.parts, runs, pages, self.arena)
        self._here[adapter.version] = Resident(pages, adapter.bytes, placed, self._turn, book=book)

    def drop(self, version: int) -> None:
        """Forget a version whose pages somebody else gives back."""
        self._here.pop(version, None)

    def _put(self, adapter: LoadedAdapter, count: int) -> None:
        """Put an adapter into so many pages. Raises `NoRoom` if there are not so many."""
        if adapter.own:
            pages = self._put_whole(adapter)
            self._here[adapter.version] = Resident(pages, adapter.bytes, {}, self._turn, adapter=adapter)
            self.fetches += 1
            return
        if adapter.held is not None or (adapter.packed is not None and adapter.packed.is_held):
            book = None if self.fetcher is None or adapter.packed is None else self.fetcher.book_of(adapter.packed)
            self._here[adapter.version] = Resident([], adapter.bytes, adapter.held or {}, self._turn, book=book)
            return
        pages = self.arena.pool.take(count)
        self.fetches += 1
        try:
            self.put_at(adapter, pages)
        except BaseException:
            self.arena.pool.give_back(pages)
            raise
        self.on_put(adapter, pages)

    def _put_whole(self, adapter: LoadedAdapter) -> list[int]:
        """Put the tensors of PEFT's layers into pages, and return these. If no pages that follow one another are free for a large one, it
        lies elsewhere on the device, and as many pages stay empty: so all of it counts."""
        pool, arena = self.arena.pool, self.arena
        count, places = put_whole([own.values.nbytes for own in adapter.own], arena.page_bytes)
        if count > pool.free:
            raise NoRoom
        large = {put.first: run for put in places if put.pages > 1 and (run := pool.take_run(put.pages))}
        taken = {first + number: page for first, run in large.items() for number, page in enumerate(run)}
        taken |= zip([page for page in range(count) if page not in taken], pool.take(count - len(taken)), strict=True)
        memory = arena.flat.view(torch.uint8)
        try:
            for own, put in zip(adapter.own, places, strict=True):
                at, size = taken[put.first] * arena.page_bytes + put.offset, own.values.nbytes
                is_there = (put.pages == 1 or put.first in large) and at % own.values.itemsize == 0
                own.put(_copied(own.values, memory[at : at + size]) if is_there else own.values.to(memory.device))
        except BaseException:
            pool.give_back(taken.values())
            raise
        return list(taken.values())


def _copied(values: Tensor, memory: Tensor) -> Tensor:
    """Copy a tensor to memory of as many bytes, with the strides that it has if they leave no gaps."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
    there = memory.view(values.dtype)
    there = there.as_strided(values.shape, values.stride()) if span == values.numel() else there.view(values.shape)
    return there.copy_(values)


def shapes_of(parts: dict[str, Part]) -> list[tuple[int, int]]:
    return [(len(matrix), matrix.shape[1]) for part in parts.values() for matrix in part.tensors]


def _copy(
    parts: dict[str, Part], runs: Sequence[RowRun], pages: list[int], arena: PagedMemory
) -> dict[str, PlacedAdapter]:
    matrices = [matrix for part in parts.values() for matrix in part.tensors]
    pieces: list[list[MatrixPiece]] = [[] for _ in matrices]
    for run in _joined(runs, pages, arena.page_elements):
        values = arena.flat[run.offset : run.offset + run.rows * run.width].view(run.rows, run.width)
        values.copy_(matrices[run.matrix][run.row : run.row + run.rows, run.column : run.column + run.width])
        pieces[run.matrix].append(MatrixPiece(run.row, run.column, values))
    found = iter(pieces)
    placed = {}
    for layer, part in parts.items():
        words = {name: tuple(next(found)) for name in NAMES if getattr(part, name) is not None}
        placed[layer] = PlacedAdapter(rank=0 if part.down is None else len(part.down), **words)
    return placed


def _joined(runs: Sequence[RowRun], pages: list[int], page_elements: int) -> list[RowRun]:
    """Join runs of one matrix that follow one another, and count their offsets from the beginning of the memory."""
    joined: list[RowRun] = []
    for run in runs:
        run = run._replace(offset=pages[run.page] * page_elements + run.offset)
        last = joined[-1] if joined else None
        same = last is not None and (last.matrix, last.column) == (run.matrix, run.column)
        if last is not None and same and last.offset + last.rows * last.width == run.offset:
            joined[-1] = last._replace(rows=last.rows + run.rows)
        else:
            joined.append(run)
    return joined
