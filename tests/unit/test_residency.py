"""Where the rows of adapters lie, and which adapter leaves when there is no room."""

import random

import pytest
import torch

from symbiosis.kernels.adapter_rows import PlacedAdapter
from symbiosis.serving.kv_cache.paged_memory import KvShape, PagedMemory
from symbiosis.serving.lora.adapter_cache import AdapterCache, Resident, RowRun, place, put_whole, to_evict
from symbiosis.serving.lora.adapter_kinds import LoadedAdapter, Part


def shapes_of(chance: random.Random) -> tuple[list[tuple[int, int]], int]:
    page = chance.choice([4, 7, 32, 100])
    return [(chance.randint(1, 20), chance.randint(1, 3 * page)) for _ in range(chance.randint(1, 6))], page


@pytest.mark.parametrize("seed", range(50))
def test_every_number_has_one_place(seed: int) -> None:
    shapes, page = shapes_of(random.Random(seed))
    pages, runs = place(shapes, page)
    taken: set[int] = set()
    found: dict[int, set[tuple[int, int]]] = {number: set() for number in range(len(shapes))}
    for run in runs:
        assert run.offset >= 0 and run.offset + run.rows * run.width <= page, "no run leaves its page"
        first = run.page * page + run.offset
        where = set(range(first, first + run.rows * run.width))
        assert not where & taken
        taken |= where
        numbers = {
            (row, column)
            for row in range(run.row, run.row + run.rows)
            for column in range(run.column, run.column + run.width)
        }
        assert not numbers & found[run.matrix]
        found[run.matrix] |= numbers
    assert max(taken) < pages * page
    assert {number: len(where) for number, where in found.items()} == {i: r * c for i, (r, c) in enumerate(shapes)}


@pytest.mark.parametrize("seed", range(20))
def test_only_rows_that_are_longer_than_a_page_are_cut(seed: int) -> None:
    shapes, page = shapes_of(random.Random(seed))
    for run in place(shapes, page)[1]:
        width = shapes[run.matrix][1]
        assert run.width == width if width <= page else run.width in (page, width % page)


@pytest.mark.parametrize("seed", range(50))
def test_a_whole_tensor_lies_in_one_page_or_in_pages_of_its_own(seed: int) -> None:
    chance = random.Random(seed)
    page = 64 * chance.randint(1, 20)
    sizes = [chance.randint(1, 3 * page) for _ in range(chance.randint(0, 20))]
    count, places = put_whole(sizes, page)
    taken: set[int] = set()
    for size, put in zip(sizes, places, strict=True):
        assert put.offset % 64 == 0 and put.offset + size <= put.pages * page, "no tensor leaves its pages"
        assert put.pages == 1 or size > page
        where = set(range(put.first * page + put.offset, put.first * page + put.offset + size))
        assert not where & taken
        taken |= where
    assert {at // page for at in taken} == set(range(count)), "no page is empty, and none is missing"


def test_nothing_takes_no_page() -> None:
    assert place([], 8) == (0, [])
    assert place([(1, 8)], 8) == (1, [RowRun(0, 0, 1, 0, 8, 0, 0)])


def resident(pages: int, used: int, size: int = 1000, pins: int = 0) -> Resident:
    return Resident(list(range(pages)), size, {}, used, pins)


def test_the_one_not_wanted_for_longest_leaves_first() -> None:
    assert to_evict([(1, resident(2, used=9)), (2, resident(2, used=1)), (3, resident(2, used=5))], 3, 10) == [2, 3]


def test_what_is_cheap_to_load_again_leaves_first() -> None:
    """Of two that give as many pages."""
    assert to_evict([(1, resident(4, 5, size=10**8)), (2, resident(4, 5, size=1000))], 1, 6) == [2]


def test_who_is_pinned_stays() -> None:
    assert to_evict([(1, resident(8, 0, pins=1)), (2, resident(2, 9))], 2, 10) == [2]
    assert to_evict([(1, resident(8, 0, pins=1)), (2, resident(2, 9))], 3, 10) == []


def adapter(version: int, rank: int, seed: int = 0) -> LoadedAdapter:
    generator = torch.Generator().manual_seed(seed + version)
    part = Part(
        down=torch.randn(rank, 24, generator=generator),
        up=torch.randn(rank, 100, generator=generator),
        gain=torch.randn(1, 100, generator=generator),
    )
    pages = place([(rank, 24), (rank, 100), (1, 100)], 64)[0]
    return LoadedAdapter(
        name=f"a{version}", kind="LORA", version=version, bytes=rank * 496 + 400, parts={"layer": part}, pages=pages
    )


def whole(placed: PlacedAdapter, name: str, rows: int, columns: int) -> torch.Tensor:
    matrix = torch.full((rows, columns), torch.nan)
    for row, column, values in getattr(placed, name):
        matrix[row : row + values.shape[0], column : column + values.shape[1]] = values
    return matrix


@pytest.mark.parametrize("seed", range(10))
def test_adapters_that_come_and_go_keep_their_values_and_their_pins(seed: int) -> None:
    """Beside others that take pages, too."""
    chance = random.Random(seed)
    arena = PagedMemory((KvShape(1, 2, 2),), 40 * 64 * 4)
    residency = AdapterCache(arena)
    adapters = [adapter(version, chance.randint(1, 9)) for version in range(1, 9)]
    pinned: list[LoadedAdapter] = []
    others = arena.pool.take(chance.randint(0, 10))
    for _ in range(200):
        one = chance.choice(adapters)
        if residency.fetch(one) and chance.random() < 0.3:
            residency.pin(one)
            pinned.append(one)
        if pinned and chance.random() < 0.3:
            residency.unpin(pinned.pop(chance.randrange(len(pinned))))
        if chance.random() < 0.2:
            arena.pool.give_back(others)
            residency.make_room(count := chance.randint(0, 20))
            others = arena.pool.take(min(count, arena.pool.free))
        assert all(residency.is_here(each) for each in pinned)
        held = sum(residency.pages_of(each) for each in adapters if residency.is_here(each))
        assert held + len(others) + arena.pool.free == arena.pool.total
        for each in adapters:
            if residency.is_here(each):
                part, placed = each.parts["layer"], residency.placed(each)["layer"]
                assert part.down is not None and part.up is not None and part.gain is not None
                for name, matrix in (("down", part.down), ("up", part.up), ("gain", part.gain)):
                    assert torch.equal(whole(placed, name, *matrix.shape), matrix)
    assert residency.evictions


def test_without_room_nothing_leaves() -> None:
    residency = AdapterCache(PagedMemory((KvShape(1, 2, 2),), 8 * 64 * 4))
    small, large = adapter(1, 1), adapter(2, 9)
    assert residency.fetch(small)
    assert residency.pages_of(large) > residency.arena.pool.total
    assert not residency.fetch(large)
    assert residency.is_here(small) and not residency.is_here(large)


def test_others_are_asked_for_what_eviction_does_not_give() -> None:
    arena = PagedMemory((KvShape(1, 2, 2),), 16 * 64 * 4)
    kept = arena.pool.take(8)
    asked: list[int] = []

    def make_room(pages: int) -> bool:
        asked.append(pages)
        while arena.pool.free < pages and kept:
            arena.pool.give_back([kept.pop()])
        return arena.pool.free >= pages

    residency = AdapterCache(arena, make_room)
    first, second = adapter(1, 2), adapter(2, 3)
    assert residency.fetch(first) and not asked
    assert residency.fetch(second) and asked
    assert residency.is_here(second)


def test_prefetch_evicts_nothing() -> None:
    residency = AdapterCache(PagedMemory((KvShape(1, 2, 2),), 12 * 64 * 4))
    adapters = [adapter(version, 2) for version in range(1, 9)]
    here = residency.prefetch(adapters)
    assert 0 < here < 8 and residency.prefetch(adapters) == here and not residency.evictions
    assert [residency.is_here(each) for each in adapters] == [True] * here + [False] * (8 - here)


@pytest.mark.parametrize("how", ["fetch", "prefetch"])
def test_a_copy_that_fails_gives_its_pages_back(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    residency = AdapterCache(PagedMemory((KvShape(1, 2, 2),), 12 * 64 * 4))
    free = residency.arena.pool.free

    def fails(*what: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("symbiosis.serving.lora.adapter_cache._copy", fails)
    one = adapter(1, rank=1)
    with pytest.raises(RuntimeError, match="out of memory"):
        residency.fetch(one) if how == "fetch" else residency.prefetch([one])
    assert residency.arena.pool.free == free and not residency.is_here(one)
