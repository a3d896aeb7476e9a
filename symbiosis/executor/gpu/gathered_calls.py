"""Calls of several GPU clients as one product: one CUDA graph gathers their rows, multiplies, scatters the results and answers.

There is one graph for each key, number of rows and number of sessions, the last two rounded up. A table (`kernels.gpu.gather`) says
where the rows lie and which words answer the sessions; a page of it is filled in before each launch. The rows that rounding up adds
hold whatever was left there, and their results are copied nowhere.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from symbiosis.executor.call_kinds import DeviceCall, RowAddresses, addresses_of
from symbiosis.kernels.gpu import gather as rows
from symbiosis.kernels.gpu.graphs import GraphPool
from symbiosis.protocol import Call

GRAPHS_KEPT = 4096
PAGES_KEPT = 1 << 14
FINE = 128  # numbers of rows above twice this are rounded up to a multiple of it, smaller ones to a power of two
Multiply = Callable[[Call, list[Tensor], list[Tensor]], object]
_serial = attrgetter("serial")


@dataclass(slots=True)
class Recipe:
    """One product that is enqueued again and again: its inputs, its results, and for how many sessions it has room."""

    call: Call
    x: list[Tensor]
    y: list[Tensor]
    sessions: int
    runs: int = 0
    graph: torch.cuda.CUDAGraph | None = None


@dataclass(slots=True)
class Page:
    """The recipe for certain calls together, and the three pieces that its page of the table must hold."""

    recipe: Recipe
    answers: bytes
    copies_in: bytes
    copies_out: bytes


class Gatherer:
    """Runs calls together, on one stream of one GPU."""

    most = rows.PLACES  # calls in one product

    def __init__(self, multiply: Multiply, pool: GraphPool) -> None:
        self._multiply, self._pool = multiply, pool
        rows.load()
        self._table, self._turn = rows.new_table()
        self._memory = [memoryview(page.numpy()).cast("B") for page in self._table]
        self._turns = 0
        self._recipes: OrderedDict[Hashable, Recipe] = OrderedDict()
        self._pages: OrderedDict[tuple[int, ...], Page] = OrderedDict()
        self._scratch = torch.empty(0, dtype=torch.uint8, device=self._turn.device)

    def run(self, works: Sequence[DeviceCall]) -> None:
        """Run calls of one key, whose addresses are known."""
        if len(works) > self.most:
            raise ValueError(f"{len(works)} calls do not fit a page")
        works = sorted(works, key=_serial)
        numbers = tuple(map(_serial, works))
        page = self._pages.get(numbers) or self._new_page(numbers, works[0].plan.key, works)
        recipe, memory = page.recipe, self._memory[self._turns % rows.PAGES]
        memory[: len(page.answers)] = page.answers
        memory[8 * rows.IN : 8 * rows.IN + len(page.copies_in)] = page.copies_in
        memory[8 * rows.OUT : 8 * rows.OUT + len(page.copies_out)] = page.copies_out
        if recipe.graph is None and recipe.runs:
            recipe.graph = self._pool.captured(lambda: self._enqueue(recipe))
        if recipe.graph is None:
            self._enqueue(recipe)
        else:
            recipe.graph.replay()
        recipe.runs += 1
        self._turns += 1

    def _new_page(self, numbers: tuple[int, ...], key: Hashable, works: Sequence[DeviceCall]) -> Page:
        """Write a page: the sessions' rows follow one another in each part of the recipe's inputs and results."""
        places = list(map(addresses_of, works))
        recipe = self._recipe(key, works[0], rounded(sum(place.rows for place in places)), power_of_two(len(works)))
        answers = [word for place in places for word in place.answer]
        copies_in, copies_out = copies(places, recipe.x, recipe.y)
        missing = recipe.sessions - len(works)
        page = self._pages[numbers] = Page(
            recipe, _words(answers, 2 * (rows.PLACES - len(works))), _words(copies_in, 3 * missing * len(recipe.x)),
            _words(copies_out, 3 * missing * len(recipe.y)),
        )  # fmt: skip
        if len(self._pages) > PAGES_KEPT:
            self._pages.popitem(last=False)
        return page

    def _enqueue(self, recipe: Recipe) -> None:
        nbytes_in, nbytes_out = (sum(part.nbytes for part in parts) for parts in (recipe.x, recipe.y))
        rows.copy_in(self._table, self._turn, recipe.sessions * len(recipe.x), nbytes_in)
        self._multiply(recipe.call, recipe.x, recipe.y)
        rows.copy_out(self._table, self._turn, recipe.sessions * len(recipe.y), nbytes_out)
        rows.answer(self._table, self._turn)

    def _recipe(self, key: Hashable, work: DeviceCall, count: int, sessions: int) -> Recipe:
        recipe = self._recipes.get((key, count, sessions))
        if recipe is None:
            recipe = self._recipes[key, count, sessions] = self._new_recipe(work, count, sessions)
            if len(self._recipes) > GRAPHS_KEPT:
                self._recipes.popitem(last=False)
        self._recipes.move_to_end((key, count, sessions))
        return recipe

    def _new_recipe(self, work: DeviceCall, count: int, sessions: int) -> Recipe:
        """Make a recipe. All recipes share one memory, because one runs after the other."""
        if (needed := nbytes_of(work, count)) > self._scratch.numel():  # older recipes keep what they have
            self._scratch = torch.empty(2 * needed, dtype=torch.uint8, device=self._turn.device)
        return Recipe(work.call, *parts_in(self._scratch, work, count), sessions)


def nbytes_of(work: DeviceCall, count: int) -> int:
    """Return the bytes of the inputs and results of such a product of `count` rows."""
    places = addresses_of(work)
    return sum(_page(count * nbytes) for _, nbytes in (*places.inputs, *places.outputs))


def parts_in(scratch: Tensor, work: DeviceCall, count: int) -> tuple[list[Tensor], list[Tensor]]:
    """Cut the inputs and the results of such a product out of `scratch`."""
    parts, start, places = [], 0, addresses_of(work)
    for _, width in (*places.inputs, *places.outputs):
        parts.append(scratch[start : start + count * width].view(work.out.dtype).view(count, -1))
        start += _page(count * width)
    inputs = len(places.inputs)
    return parts[:inputs], parts[inputs:]


def copies(places: Sequence[RowAddresses], inputs: list[Tensor], outputs: list[Tensor]) -> tuple[list[int], list[int]]:
    """Return the copies before and after the product, as the table lists them. In each part the sessions' rows follow one another."""
    x, y = ([part.data_ptr() for part in parts] for parts in (inputs, outputs))
    before: list[int] = []
    after: list[int] = []
    for place in places:
        for part, (address, nbytes) in enumerate(place.inputs):
            before += address, x[part], place.rows * nbytes // 8
            x[part] += place.rows * nbytes
        for part, (address, nbytes) in enumerate(place.outputs):
            after += y[part], address, place.rows * nbytes // 8
            y[part] += place.rows * nbytes
    return before, after


def _words(words: list[int], zeros: int) -> bytes:
    return struct.pack(f"{len(words) + zeros}q", *words, *[0] * zeros)


def _page(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def rounded(count: int) -> int:
    return max(8, power_of_two(count)) if count <= 2 * FINE else -(-count // FINE) * FINE
