"""Calls of several GPU clients as one product: their rows are gathered, multiplied, scattered and answered by one CUDA graph.

There is one graph for each key, number of rows and number of sessions, these two rounded up; where the rows lie and which words
answer the sessions stands in a table (`kernels.rows`) that is filled in before each launch. Rows beyond those of the sessions
hold what was left there, and what they make goes nowhere.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from symbiosis.executor.batcher import Batch
from symbiosis.kernels import rows
from symbiosis.protocol import BY_ROWS, Call

if TYPE_CHECKING:
    from symbiosis.executor.engine import Work

GRAPHS_KEPT = 4096
ALIGNED = 16  # bytes of a row, so that copies are of whole words
FINE = 128  # from twice as many rows on, they are rounded up to a multiple of this, below to a power of two
Multiply = Callable[[Call, list[Tensor], list[Tensor]], object]


@dataclass(slots=True)
class Places:
    """Where one call's rows lie and its results go: addresses, and the bytes of a row there."""

    inputs: list[tuple[int, int]]
    outputs: list[tuple[int, int]]

    @property
    def aligned(self) -> bool:
        return not any(nbytes % ALIGNED for _, nbytes in (*self.inputs, *self.outputs))


@dataclass(slots=True)
class Recipe:
    """A product of so many rows of up to so many sessions, enqueued again and again."""

    call: Call
    x: list[Tensor]
    y: list[Tensor]
    sessions: int
    runs: int = 0
    graph: torch.cuda.CUDAGraph | None = None


class Joined:
    """On one GPU and stream."""

    def __init__(self, multiply: Multiply, pool: Any) -> None:
        self._multiply, self._pool = multiply, pool
        self._table, self._turn = rows.new_table()
        self._pages = [memoryview(page.numpy()).cast("B") for page in self._table]
        self._turns = 0
        self._recipes: OrderedDict[Hashable, Recipe] = OrderedDict()
        self._scratch = torch.empty(0, dtype=torch.uint8, device=self._turn.device)

    def takes(self, batch: Batch) -> bool:
        """Whether all of it comes from this GPU, and lies where copies can be made word by word."""
        works: list[Work] = [piece.item.work for piece in batch.slices]
        first = works[0].call
        if len(works) > rows.PLACES or first.op not in BY_ROWS or len(first.shape) != 2:
            return False
        whole = all(piece.start == 0 and piece.last for piece in batch.slices)
        return whole and all(work.prepared and work.peer.here and work.places.aligned for work in works)

    def run(self, batch: Batch) -> None:
        works: list[Work] = [piece.item.work for piece in batch.slices]
        counts = [work.call.shape[0] for work in works]
        recipe = self._recipe(batch.key, works[0], _rounded(sum(counts)), _power_of_two(len(works)))
        self._write(self._pages[self._turns % rows.PAGES], recipe, works, counts)
        if recipe.graph is None and recipe.runs:
            recipe.graph = self._captured(recipe)
        if recipe.graph is None:
            self._enqueue(recipe)
        else:
            recipe.graph.replay()
        recipe.runs += 1
        self._turns += 1

    def _write(self, page: memoryview, recipe: Recipe, works: "Sequence[Work]", counts: Sequence[int]) -> None:
        """This time's page of the table."""
        answers: list[int] = []
        copies_in: list[int] = []
        copies_out: list[int] = []
        x = [part.data_ptr() for part in recipe.x]
        y = [part.data_ptr() for part in recipe.y]
        for work, count in zip(works, counts, strict=True):
            answers += work.peer.answer()
            for part, (address, nbytes) in enumerate(work.places.inputs):
                copies_in += address, x[part], count * nbytes >> 3
                x[part] += count * nbytes
            for part, (address, nbytes) in enumerate(work.places.outputs):
                copies_out += y[part], address, count * nbytes >> 3
                y[part] += count * nbytes
        missing = recipe.sessions - len(works)
        _put(page, 0, answers, 2 * (rows.PLACES - len(works)))
        _put(page, rows.IN, copies_in, 3 * missing * len(x))
        _put(page, rows.OUT, copies_out, 3 * missing * len(y))

    def _enqueue(self, recipe: Recipe) -> None:
        nbytes_in, nbytes_out = (sum(part.nbytes for part in parts) for parts in (recipe.x, recipe.y))
        rows.copy_in(self._table, self._turn, recipe.sessions * len(recipe.x), nbytes_in)
        self._multiply(recipe.call, recipe.x, recipe.y)
        rows.copy_out(self._table, self._turn, recipe.sessions * len(recipe.y), nbytes_out)
        rows.answer(self._table, self._turn)

    def _captured(self, recipe: Recipe) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            self._enqueue(recipe)
        finally:
            graph.capture_end()
        return graph

    def _recipe(self, key: Hashable, work: "Work", count: int, sessions: int) -> Recipe:
        recipe = self._recipes.get((key, count, sessions))
        if recipe is None:
            recipe = self._recipes[key, count, sessions] = self._new_recipe(work, count, sessions)
            if len(self._recipes) > GRAPHS_KEPT:
                self._recipes.popitem(last=False)
        self._recipes.move_to_end((key, count, sessions))
        return recipe

    def _new_recipe(self, work: "Work", count: int, sessions: int) -> Recipe:
        """Its tensors share the memory of all recipes, because one runs after the other."""
        sizes = [count * nbytes for _, nbytes in (*work.places.inputs, *work.places.outputs)]
        if sum(map(_page, sizes)) > self._scratch.numel():  # older recipes keep what they have
            self._scratch = torch.empty(2 * sum(map(_page, sizes)), dtype=torch.uint8, device=self._turn.device)
        parts, start = [], 0
        for nbytes in sizes:
            parts.append(self._scratch[start : start + nbytes].view(work.out.dtype).view(count, -1))
            start += _page(nbytes)
        inputs = len(work.places.inputs)
        return Recipe(work.call, parts[:inputs], parts[inputs:], sessions)


def _put(page: memoryview, at: int, words: list[int], zeros: int) -> None:
    words += [0] * zeros
    Struct(f"{len(words)}q").pack_into(page, 8 * at, *words)


def _page(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _rounded(count: int) -> int:
    return max(8, _power_of_two(count)) if count <= 2 * FINE else -(-count // FINE) * FINE
