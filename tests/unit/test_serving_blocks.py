"""Pages and blocks: none is lost, none is given twice, and a prefix is found by those alone who may have it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symbiosis.serving.kv_cache.block_manager import BlockManager
from symbiosis.serving.kv_cache.page_pool import NoRoom, PagePool
from symbiosis.serving.lora.adapter import Adapter
from symbiosis.serving.request import Request
from symbiosis.serving.scheduler.scheduler_output import BLOCK, Sequence

LAYERS = 2
ADAPTERS = [None, *(Adapter(name=name, kind="LORA", bytes=0, version=version) for version, name in enumerate("ab", 1))]


def sequence(tokens: list[int], adapter: Adapter | None = None, tenant: str = "") -> Sequence:
    return Sequence(Request(id=1, prompt=tuple(tokens), tenant=tenant), 0, list(tokens), adapter, 0.0)


def computed(blocks: BlockManager, one: Sequence) -> Sequence:
    """As after its prefill."""
    blocks.find(one)
    assert blocks.grow(one, len(one.tokens))
    one.computed = len(one.tokens)
    blocks.keep(one)
    return one


def test_pages_that_follow_one_another() -> None:
    pool = PagePool(8)
    pages = pool.take(8)
    pool.give_back([pages[0], pages[2], pages[3], pages[6]])
    assert pool.take_run(3) is None and pool.free == 4
    assert pool.take_run(2) == [2, 3] and pool.free == 2
    assert sorted(pool.take(2)) == [0, 6]
    with pytest.raises(NoRoom):
        pool.take(1)
    pool.give_back([2, 3])
    assert pool.take_run(2) == [2, 3], "given back, they are found again"


def test_a_run_of_pages_begins_at_the_first_that_is_free() -> None:
    pool = PagePool(4)
    assert pool.total == pool.free == 4 and pool.take_run(2) == [0, 1] and pool.free == 2
    assert pool.take(1) == [2] and pool.take_run(2) is None and pool.take_run(1) == [3] and pool.free == 0
    pool.give_back([2, 0, 1])
    assert pool.take_run(4) is None and pool.take(3) == [1, 0, 2], "what came back last goes first"


def test_a_pool_gives_what_it_has() -> None:
    pool = PagePool(4)
    pages = pool.take(3)
    with pytest.raises(NoRoom):
        pool.take(2)
    assert pool.free == 1
    pool.give_back(pages)
    assert sorted(pool.take(4)) == [0, 1, 2, 3]
    pool.give_back([0])
    with pytest.raises(AssertionError):
        pool.give_back([0])


def test_a_prefix_is_shared_and_one_token_is_left_to_compute() -> None:
    blocks = BlockManager(PagePool(100), LAYERS)
    first = computed(blocks, sequence(list(range(40))))
    second = sequence([*range(32), 7, 7, 7])
    assert blocks.find(second) == 32 and second.blocks == first.blocks[:2]
    third = sequence(list(range(32)))
    assert blocks.find(third) == 16
    assert blocks.find(sequence([9, *range(1, 40)])) == 0


def test_versions_share_nothing() -> None:
    blocks = BlockManager(PagePool(100), LAYERS)
    computed(blocks, sequence(list(range(40)), ADAPTERS[1]))
    for adapter, found in zip(ADAPTERS, (0, 32, 0), strict=True):
        assert blocks.find(sequence(list(range(40)), adapter)) == found
    blocks.forget(1)
    assert blocks.find(sequence(list(range(40)), ADAPTERS[1])) == 0


def test_what_is_unused_stays_until_its_room_is_needed() -> None:
    blocks = BlockManager(PagePool(4 * LAYERS), LAYERS)
    blocks.release(computed(blocks, sequence([1] * 32)))
    assert blocks.pool.free == 2 * LAYERS and blocks.spare() == 4 * LAYERS
    other = sequence([2] * 48)
    assert blocks.grow(other, 48) and blocks.pool.free == 0
    again = sequence([1] * 33)
    assert blocks.find(again) == BLOCK, "the end of a prefix is dropped before its beginning"
    blocks.release(again)
    assert not blocks.grow(other, 6 * BLOCK) and len(other.blocks) == 3
    assert blocks.find(sequence([1] * 33)) == BLOCK, "what did not fit dropped nothing"


def test_two_that_compute_the_same_at_once_keep_one_of_them() -> None:
    blocks = BlockManager(PagePool(20), LAYERS)
    one, two = sequence([3] * 20), sequence([3] * 20)
    for each in (one, two):
        assert blocks.find(each) == 0 and blocks.grow(each, 20)
    for each in (one, two):
        each.computed = 20
        blocks.keep(each)
    third = sequence([3] * 20)
    assert blocks.find(third) == 16 and third.blocks == one.blocks[:1]
    blocks.release(third)
    blocks.release(one)
    blocks.release(two)
    assert blocks.pool.free == 20 - LAYERS and blocks.spare() == 20


def held(one: Sequence) -> list[tuple[int, ...]]:
    return [block.pages for block in one.blocks]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (160, 10), (161, 11)])
def test_a_block_takes_a_page_of_each_layer(tokens: int, blocks: int) -> None:
    manager = BlockManager(PagePool(99), 3)
    assert manager.needed(tokens) == manager.needed(tokens, 7) == 3 * blocks
    one = sequence([1] * tokens)
    assert (
        manager.grow(one, tokens)
        and len(one.blocks) == blocks
        and manager.pool.free == manager.spare() == 99 - 3 * blocks
    )
    assert manager.grow(one, 1) and len(one.blocks) == max(1, blocks), "nothing is taken back"
    assert all(len(pages) == 3 for pages in held(one)) and len(
        {page for pages in held(one) for page in pages}
    ) == 3 * max(1, blocks)


@pytest.mark.parametrize(
    ("windows", "tokens", "piece", "pages"),
    [
        ((None, 8), 160, None, 20),
        ((None, 8), 160, 7, 10 + 2),  # of the window and the piece no block is whole: they lie in two
        ((None, 8), 160, 8, 10 + 3),
        ((None, 8), 160, 24, 10 + 4),
        ((None, 8), 160, 500, 10 + 10),
        ((None, 8), 32, 24, 2 + 2),
        ((8, 8), 160, 8, 3 + 3),
        ((8, 40), 160, 8, 3 + 5),
        ((8, None, 40, 8), 160, 8, 3 + 10 + 5 + 3),
    ],
)
def test_behind_windows_less_is_needed_at_once(
    windows: tuple[int | None, ...], tokens: int, piece: int | None, pages: int
) -> None:
    assert BlockManager(PagePool(1), len(windows), windows=windows).needed(tokens, piece) == pages


def test_as_few_unused_blocks_are_dropped_as_can_be() -> None:
    blocks = BlockManager(PagePool(10), LAYERS)
    for token in (1, 2, 3):
        blocks.release(computed(blocks, sequence([token] * 17)))
    assert (blocks.pool.free, blocks.spare()) == (4, 10), "a block of each stays, and none that is not full"
    assert blocks.make_room(4) and blocks.pool.free == 4
    assert not blocks.make_room(11) and blocks.pool.free == 4
    assert blocks.make_room(5) and blocks.pool.free == 6
    assert [blocks.find(sequence([token] * 17)) for token in (1, 2, 3)] == [0, 16, 16], "the oldest is gone"
    assert (blocks.pool.free, blocks.spare()) == (6, 6), "what is used again is not spare"
    assert not blocks.make_room(7) and blocks.make_room(6)


def test_what_was_found_goes_on_from_there() -> None:
    blocks = BlockManager(PagePool(100), LAYERS)
    first = computed(blocks, sequence([1] * 20))
    second = computed(blocks, sequence([*[1] * 16, *[2] * 20]))
    assert held(second)[0] == held(first)[0] and first.blocks[0].users == 2 and second.blocks[1].users == 1
    third = sequence([*[1] * 16, *[2] * 17])
    assert blocks.find(third) == third.computed == 32 and held(third) == held(second)[:2]
    first.tokens += [1] * 12
    assert blocks.grow(first, 32)
    first.computed = 31
    blocks.keep(first)
    assert blocks.find(sequence([1] * 33)) == 16, "a block is found once it is full"
    first.computed = 32
    blocks.keep(first)
    assert blocks.find(sequence([1] * 33)) == 32
    assert blocks.pool.free == 100 - 2 * 2 - 2 * 2
    for each in (first, second, third):
        blocks.release(each)
        assert (each.blocks, each.computed, each.behind) == ([], 0, {})


def test_without_sharing_nothing_is_found() -> None:
    blocks = BlockManager(PagePool(10), LAYERS, shares=False)
    blocks.release(computed(blocks, sequence([1] * 40)))
    assert blocks.pool.free == 10 and blocks.find(sequence([1] * 40)) == 0


def test_a_forgotten_version_keeps_no_room() -> None:
    blocks = BlockManager(PagePool(100), LAYERS)
    ended, running, base = (sequence([1] * 17, adapter) for adapter in (ADAPTERS[1], ADAPTERS[2], None))
    for each in (ended, running, base):
        computed(blocks, each)
    blocks.release(ended)
    assert (blocks.pool.free, blocks.spare()) == (100 - 5 * 2, 100 - 4 * 2)
    blocks.forget(1)
    assert blocks.pool.free == blocks.spare() == 100 - 4 * 2
    assert [blocks.find(sequence([1] * 17, adapter)) for adapter in ADAPTERS] == [16, 0, 16]
    blocks.forget(2)
    assert [blocks.find(sequence([1] * 17, adapter)) for adapter in ADAPTERS] == [16, 0, 0]
    blocks.forget(0)
    assert blocks.find(sequence([1] * 17)) == 0


@pytest.mark.parametrize(
    ("computed_", "gone"),
    [
        (22, [[], []]),
        (23, [[1], []]),  # the next token sees eight, itself included: the last row that it sees is the 16th
        (36, [[1], []]),
        (37, [[1, 2], []]),
        (39, [[1, 2], [1]]),
        (53, [[1, 2], [1, 2]]),
    ],
)
def test_what_lies_behind_a_window_is_given_back_as_soon_as_it_does(computed_: int, gone: list[list[int]]) -> None:
    blocks = BlockManager(PagePool(100), 3, windows=(None, 8, 22))
    one = computed(blocks, sequence([1] * 60))
    one.computed, pages = computed_, held(one)
    count = sum(map(len, gone))
    for _ in range(2):
        blocks.trim([one])
        assert [sorted(block.gone) for block in one.blocks[:2]] == gone and blocks.pool.free == 100 - 4 * 3 + count
    for block, before, layers in zip(one.blocks, pages, gone, strict=False):
        assert block.pages == tuple(0 if layer in layers else page for layer, page in enumerate(before))
    found = 0 if count else 48
    assert blocks.find(again := sequence([1] * 60)) == found, "a block without all its pages is not found"
    blocks.release(again)
    blocks.keep(one)
    assert blocks.find(again) == found, "nor named again"
    blocks.release(again)
    blocks.release(one)
    assert blocks.spare() == 100


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["come", "grow", "go", "forget", "trim"]),
        st.integers(0, 5),
        st.integers(1, 70),
        st.integers(0, 2),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(ACTIONS, st.integers(1, 40))
def test_no_page_is_lost_or_given_twice(actions: list[tuple[str, int, int, int]], pages: int) -> None:
    blocks = BlockManager(PagePool(pages), LAYERS, windows=(None, 8))
    under_way: list[Sequence] = []
    for what, which, tokens, adapter in actions:
        if what == "come":
            one = sequence([which % 2] * tokens, ADAPTERS[adapter])
            blocks.find(one)
            if blocks.grow(one, tokens):
                one.computed = tokens
                blocks.keep(one)
                under_way.append(one)
            else:
                blocks.release(one)
        elif what == "trim":
            blocks.trim(under_way[which:])
        elif what == "forget":
            blocks.forget(adapter)
        elif under_way:
            one = under_way[which % len(under_way)]
            if what == "go":
                under_way.remove(one)
                blocks.release(one)
            elif blocks.grow(one, len(one.tokens) + tokens):
                one.tokens.extend([which] * tokens)
                one.computed = len(one.tokens)
                blocks.keep(one)
        held = {id(block): block for one in under_way for block in one.blocks}
        pages_held = [
            page for block in held.values() for layer, page in enumerate(block.pages) if layer not in block.gone
        ]
        assert len(pages_held) == len(set(pages_held))
        assert blocks.spare() + len(pages_held) == pages
        for one in under_way:
            assert len(one.blocks) * BLOCK >= one.computed
            for number, block in enumerate(one.blocks):
                assert block.gone <= {1} and (not block.gone or (number + 1) * BLOCK <= one.computed - 7)
    for one in under_way:
        blocks.release(one)
    assert blocks.spare() == pages and blocks.make_room(pages - pages % LAYERS)


def test_tenants_share_nothing() -> None:
    blocks = BlockManager(PagePool(100), LAYERS)
    computed(blocks, sequence(list(range(40)), tenant="alice"))
    assert blocks.find(sequence(list(range(40)), tenant="bob")) == blocks.find(sequence(list(range(40)))) == 0
    assert blocks.find(sequence(list(range(40)), tenant="alice")) == 32


def test_pages_behind_a_window_are_given_back() -> None:
    blocks = BlockManager(PagePool(100), LAYERS, windows=(None, 8))
    one, other = computed(blocks, sequence(list(range(64)))), sequence([*range(16), *range(70)])
    computed(blocks, other)  # shares the first block
    free = blocks.pool.free
    blocks.trim([one])
    assert blocks.pool.free == free + 2  # of the second and third: the last is in the window
    assert [sorted(block.gone) for block in one.blocks] == [[], [1], [1], []]
    assert blocks.held_by([one]) == 1 + 1 + 2, "the first block is another's, too"
    again = sequence(list(range(64)))
    assert blocks.find(again) == 16
    blocks.trim([one])
    for each in (one, other, again):
        blocks.release(each)
    assert blocks.spare() == 100
