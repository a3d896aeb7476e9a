"""The figures of the server's scheduling, one by one: what a step holds, what is counted, and when there is room to the page."""

from typing import Any

import pytest

from symbiosis.serving.kv_cache.block_manager import BlockManager
from symbiosis.serving.kv_cache.page_pool import PagePool
from symbiosis.serving.lora.adapter import Adapter
from symbiosis.serving.request import Request, Sampling
from symbiosis.serving.scheduler import policy
from symbiosis.serving.scheduler.pace import Pace
from symbiosis.serving.scheduler.scheduler import PREFETCHED, Scheduler, StepRules, Unsettled
from symbiosis.serving.scheduler.scheduler_output import BLOCK, SchedulerOutput, Sequence
from tests.unit.test_serving_scheduler import ADAPTERS, LAYERS, Server, going_on, sequences


def told(step: SchedulerOutput | None) -> list[tuple[int, int, int, int, bool]]:
    """The segments of a step: request, first row, rows, position, and whether it chooses."""
    segments = () if step is None else step.segments
    return [(each.sequence.request.id, each.first, each.rows, each.position, each.chooses) for each in segments]


def server_with(*added: list[Sequence], pages: int = 400, **rules: Any) -> Server:
    server = Server(pages, StepRules(**rules))
    for each in added:
        server.scheduler.add(each)
    return server


def running(server: Server) -> list[int]:
    return [each.request.id for each in server.scheduler.running]


def waiting(server: Server) -> list[int]:
    return [each.request.id for each in server.scheduler.waiting]


def test_rules_that_nobody_has_changed() -> None:
    assert StepRules() == StepRules(64, None, 512, False, "fcfs", 6.0, None)
    rules = (StepRules(whole_prompts=True), StepRules(prefill_tokens=9))
    assert [Scheduler(BlockManager(PagePool(1), 1), rules=each).piece for each in rules] == [None, 9]
    assert (BLOCK, PREFETCHED, policy.LOOKAHEAD, policy.MOST_OVERTAKEN) == (16, 4, 64, 32)
    counts = Scheduler(BlockManager(PagePool(1), 1)).counts
    assert (counts.evictions, counts.asked, counts.found) == (0, 0, 0)


def test_what_a_step_holds() -> None:
    server = server_with(sequences(0, 40, most=3), prefill_tokens=32)
    assert told(server.step()) == [(0, 0, 32, 0, False)]
    assert told(server.step()) == [(0, 0, 8, 32, True)]
    server.scheduler.add(sequences(1, 3, ADAPTERS[1], most=2))
    server.scheduler.add(sequences(2, 5, most=1))
    step = server.step()
    assert told(step) == [(0, 0, 1, 40, True), (2, 1, 5, 0, True), (1, 6, 6, 0, True)], (
        "by adapter; three tokens are virtual"
    )
    assert step is not None and (step.rows, step.began) == (12, 3.0)
    assert [each.end for each in step.segments] == [41, 5, 6]
    step = server.step()
    assert told(step) == [(0, 0, 1, 41, True), (1, 1, 1, 6, True)]
    assert server.step() is None and server.ended == {(0, 0), (1, 0), (2, 0)}


def test_no_step_has_more_rows_of_prompts_than_it_may() -> None:
    server = server_with(sequences(0, 16), sequences(1, 16), sequences(2, 16), prefill_tokens=32)
    assert sum(rows for _, _, rows, _, _ in told(server.step())) <= 32
    whole = server_with(sequences(0, 100), whole_prompts=True, prefill_tokens=32)
    assert told(whole.step()) == [(0, 0, 100, 0, True)]


def test_prompts_and_what_is_found_of_them_are_counted() -> None:
    server = server_with(sequences(0, 40, most=1, completions=2))
    while server.step():
        pass
    assert (server.scheduler.counts.asked, server.scheduler.counts.found) == (80, 32)
    (again,) = sequences(1, 40, most=1)
    server.scheduler.add([again])
    server.step()
    assert (server.scheduler.counts.asked, server.scheduler.counts.found, again.cached, again.began) == (
        120,
        64,
        32,
        4.0,
    )
    server.scheduler.add(sequences(2, 40, most=1, prompt_logprobs=0))
    server.step()
    assert (server.scheduler.counts.asked, server.scheduler.counts.found) == (160, 64), "scores need all of it computed"


def test_a_tenant_pays_for_prompts_once_and_for_tokens_twice_as_much() -> None:
    requests = sequences(0, 10, most=3, completions=2, tenant="x"), sequences(1, 7, most=1, tenant="y")
    server = server_with(*requests, policy="vtc")
    while server.step():
        pass
    counters = server.scheduler._counters
    assert counters == {"x": 10 + 2 * 6, "y": 7 + 2 * 1}
    server.scheduler.add(sequences(2, 5, most=9, tenant="x"))
    server.scheduler.add(sequences(3, 5, most=1, tenant="y"))
    assert counters == {"x": 22, "y": 22}, "who comes back has saved nothing up"
    server.step()
    assert counters == {"x": 22 + 5 + 2, "y": 22 + 5 + 2}
    server.scheduler.add(sequences(4, 5, tenant="x"))
    assert counters["x"] == 29, "who is there stays as it is"


@pytest.mark.parametrize(("pages", "begins"), [(8, True), (7, False)])
def test_a_sequence_begins_when_there_is_room_for_all_its_tokens(pages: int, begins: bool) -> None:
    server = server_with(sequences(0, 4 * BLOCK), pages=pages)
    server.step()
    assert running(server) == ([0] if begins else []) and server.pool.free == (pages - 8 if begins else pages)


def test_all_its_pages_are_taken_when_it_begins() -> None:
    server = server_with(sequences(0, 4 * BLOCK), pages=8, prefill_tokens=32)
    assert told(server.step()) == [(0, 0, 32, 0, False)] and server.pool.free == 0
    alone = Scheduler(BlockManager(PagePool(7), LAYERS), rules=StepRules())
    alone.add(sequences(0, 4 * BLOCK))
    assert alone.next_step(1.0) is None and len(alone.waiting) == 1, "nor is there anything that could make room"


@pytest.mark.parametrize(("pages", "both"), [(6, True), (5, False)])
def test_those_that_run_keep_a_block_each(pages: int, both: bool) -> None:
    server = server_with(sequences(0, 5, most=40), sequences(1, 7, most=40), pages=pages)
    server.step()
    assert running(server) == ([0, 1] if both else [0]), "two blocks, and one more for the first, of two pages each"


@pytest.mark.parametrize(("pages", "begins"), [(8, True), (7, False)])
def test_an_adapter_needs_room_besides(pages: int, begins: bool) -> None:
    """Two pages of tokens, six of the adapter."""
    large = Adapter(name="large", kind="LORA", bytes=6, version=9)
    server = server_with(sequences(0, 5, large), pages=pages)
    server.step()
    assert (running(server), server.here.fetched) == (([0], 1) if begins else ([], 0))
    assert server.here.pins == {large: int(begins)}, "brought before its turn, it is pinned by nobody"
    if begins:
        server.scheduler.drop(0)
        assert server.here.pins == {large: 0} and server.pool.free == 2


def test_what_nobody_uses_makes_room() -> None:
    """An adapter, and blocks that could be found again."""
    server = server_with(sequences(0, 2 * BLOCK, ADAPTERS[2], most=1), pages=9)
    while server.step():
        pass
    assert server.here.pages.keys() == {ADAPTERS[2]} and server.pool.free == 9 - 3 - 4 and server.blocks.spare() == 6
    server.scheduler.add(sequences(1, 3 * BLOCK, most=1))
    server.step()
    assert server.here.pages.keys() == {ADAPTERS[2]}, "six pages were spare"
    while server.step():
        pass
    server.scheduler.add(sequences(2, 4 * BLOCK, most=1))
    server.step()
    assert server.here.pages == {} and running(server) == [] and server.ended >= {(2, 0)}


@pytest.mark.parametrize(("pages", "begins"), [(10, True), (9, False)])
def test_a_text_longer_than_the_memory_needs_what_its_windows_show_at_once(pages: int, begins: bool) -> None:
    """Ten blocks of two layers, both of which see eight tokens; 32 are computed at a time."""
    server = Server(pages, StepRules(prefill_tokens=32), windows=(8, 8))
    needed = server.blocks.needed(160, 32)
    assert needed == 2 * ((8 + 32) // BLOCK + 2) == 8
    server.scheduler.add(sequences(0, 160, most=1))
    server.step()
    assert running(server) == [0] and server.pool.free == pages - 4, "two blocks of it"
    whole = server_with(sequences(0, 160, most=1), pages=19, whole_prompts=True)
    whole.step()
    assert running(whole) == [], "computed at once, it needs them all"
    small = Server(7, StepRules(prefill_tokens=32), windows=(8, 8))
    small.scheduler.add(sequences(0, 160, most=1))
    small.step()
    assert running(small) == []


def test_a_long_text_goes_on_from_what_was_found() -> None:
    server = Server(12, StepRules(prefill_tokens=32), windows=(8, 8))
    server.scheduler.add(sequences(0, 3 * BLOCK, most=1))
    while server.step():
        pass
    server.scheduler.add(sequences(1, 160, most=1))
    server.step()
    assert running(server) == [1] and server.scheduler.running[0].cached == 48
    assert server.pool.free == 12 - 6 - 4, "48 tokens were found, and there is room for 32 more"


def test_as_many_adapters_make_room_as_must() -> None:
    small = [Adapter(name=f"s{n}", kind="LORA", bytes=3, version=30 + n) for n in range(2)]
    server = server_with(*(sequences(n, 5, small[n], most=1) for n in range(2)), pages=10)
    while server.step():
        pass
    assert list(server.here.pages) == small and server.pool.free == 4
    server.scheduler.add(sequences(2, 2 * BLOCK + 1, most=9))
    server.step()
    assert running(server) == [2] and list(server.here.pages) == small[1:] and server.pool.free == 1


def test_a_prompt_of_two_tokens_is_one() -> None:
    server = server_with(sequences(0, 2, most=2), sequences(1, 1, most=2))
    assert told(server.step()) == [(0, 0, 2, 0, True), (1, 2, 1, 0, True)]


def test_nothing_is_computed_of_who_has_all_its_tokens() -> None:
    """The last one is on its way."""
    server = Server(400, StepRules(), ahead=True)
    server.scheduler.add(sequences(0, 5, most=2))
    server.scheduler.add(sequences(1, 5, most=3))
    steps = [told(server.step()) for _ in range(4)]
    assert [[id for id, *_ in step] for step in steps] == [[0, 1], [0, 1], [1], []]


def test_a_prompt_disturbs_those_under_way() -> None:
    server = server_with(sequences(1, 5, most=9))
    disturbed = [server.scheduler._pace._disturbed]
    server.step()
    for id, prompt in ((2, 300), (3, 5), (4, 5)):
        server.scheduler.add(sequences(id, prompt, most=9))
        disturbed.append(server.scheduler._pace._disturbed)
        server.step()
    assert disturbed == [None, None, 3.0, 4.0], "by those that come while a prompt is computed"
    waits = server_with(sequences(0, 5), max_batch=0)
    waits.scheduler.add(sequences(1, 5))
    assert waits.scheduler._pace._disturbed == 1.0, "or waits"
    for left, at in ((1, None), (2, 1.0)):
        one = server_with(sequences(0, 40), prefill_tokens=40 - left)
        one.step()
        assert one.scheduler.running[0].uncomputed == left
        one.scheduler.add(sequences(1, 5))
        assert one.scheduler._pace._disturbed == at, "of which more than a token is left"


def test_a_step_gives_way_to_what_can_take_the_place_of_long_prompts() -> None:
    server = server_with(sequences(0, 200), sequences(1, 210), prefill_tokens=32, max_batch=2)
    server.step()
    assert running(server) == [0, 1] and server.before is not None
    server.scheduler._pace = Pace(512)
    server.scheduler._pace.computed(100, 1.0)
    step = SchedulerOutput(server.before.segments, began=10.0)
    object.__setattr__(step.segments[-1], "rows", 400)
    assert server.scheduler.gives_way(step, 10.5, coming=20)
    server.pool.take(server.pool.free)
    assert server.scheduler.gives_way(step, 10.5, coming=20), "the second's pages come free"
    assert not server.scheduler.gives_way(step, 10.5, coming=300)


def test_the_newest_gives_up_its_blocks_and_waits_in_its_turn() -> None:
    server = server_with(sequences(0, 15, most=40), sequences(1, 14, most=40), sequences(2, 13, most=40), pages=8)
    server.step()
    assert (running(server), waiting(server), server.scheduler.counts.evictions) == ([0, 1], [2], 0)
    server.step()
    assert server.scheduler.running[0].blocks and running(server) == [0, 1]
    while not server.scheduler.counts.evictions:
        server.step()
    assert running(server) == [0] and waiting(server) == [1, 2]
    (evicted, _) = server.scheduler.waiting
    assert (evicted.blocks, evicted.computed, len(evicted.tokens)) == ([], 0, evicted.prompt_length + evicted.produced)
    begun = evicted.began
    while server.step():
        pass
    assert evicted.began == begun == 1.0 and server.ended == {(0, 0), (1, 0), (2, 0)}
    assert server.scheduler.counts.asked == 15 + 14 + 13, "a prompt counts once"


def test_nobody_gives_way_while_a_step_is_under_way() -> None:
    server = server_with(sequences(0, 15, most=40), sequences(1, 15, most=40), pages=6)
    server.step()
    assert running(server) == [0, 1]
    server.step()
    assert server.blocks.spare() == 6 - 2 * 4 + 2 or server.scheduler.counts.evictions <= 1
    full = server_with(sequences(0, 15, most=90), sequences(1, 15, most=90), pages=8)
    for _ in range(17):
        full.step()
    assert full.blocks.spare() == 0 and running(full) == [0, 1]
    for each in full.scheduler.running:
        each.tokens.extend(range(BLOCK - (len(each.tokens) - 1) % BLOCK))
        each.computed = len(each.tokens) - 1
    with pytest.raises(Unsettled):
        full.scheduler.next_step(99.0, is_ahead=True)
    assert running(full) == [0, 1] and full.scheduler.counts.evictions == 0
    full.scheduler.next_step(99.0)
    assert running(full) == [0] and full.scheduler.counts.evictions == 1


def test_a_batch_has_so_many_sequences_and_so_many_of_a_tenant_while_others_wait() -> None:
    server = server_with(*(sequences(id, 5, most=9, tenant="x") for id in range(4)), max_batch=3, of_tenant=2)
    server.step()
    assert (running(server), waiting(server)) == ([0, 1, 2], [3]), "alone it has them all"
    server.scheduler.add(sequences(4, 5, most=9, tenant="y"))
    server.step()
    assert (running(server), waiting(server), server.scheduler.counts.evictions) == ([0, 1, 4], [2, 3], 1)


def test_so_many_adapters_of_the_queue_are_brought() -> None:
    adapters = [Adapter(name=f"b{n}", kind="LORA", bytes=1, version=20 + n) for n in range(8)]
    added = [sequences(id, 5, each, most=9) for id, each in enumerate([None, *adapters])]
    server = server_with(*added, max_batch=1)
    server.step()
    assert running(server) == [0] and list(server.here.pages) == adapters[:PREFETCHED]


def test_what_comes_and_goes_is_noticed() -> None:
    server = server_with(
        sequences(0, 5, most=9), sequences(1, 5, most=9, completions=3), sequences(2, 5, most=9), max_batch=1
    )
    server.step()
    assert server.scheduler._of_tenant == {"": 5} and len(server.scheduler._of_request) == 3
    server.scheduler.drop(1)
    server.scheduler.drop(1)
    assert waiting(server) == [2] and server.scheduler._of_tenant == {"": 2} and not server.scheduler._followers
    server.scheduler.drop(0)
    assert running(server) == []
    assert told(server.step()) == [(2, 0, 5, 0, True)]
    (stranger,) = sequences(7, 5)
    server.scheduler.finish(stranger)
    assert running(server) == [2]


def test_who_waits_is_looked_at_when_something_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, admit = [], policy.admit
    monkeypatch.setattr(policy, "admit", lambda *given: looks.append(1) or admit(*given))
    server = server_with(sequences(0, 5, most=9), sequences(1, 5, most=9), max_batch=1)
    server.step()
    first = len(looks)
    for _ in range(4):
        server.step()
    assert len(looks) == first > 0
    server.scheduler.drop(0)
    server.step()
    assert len(looks) > first and running(server) == [1]


def test_who_is_passed_by_is_counted() -> None:
    server = server_with(*(sequences(id, 200) for id in range(3)), max_batch=2, prefill_tokens=32)
    server.step()
    kept, gives_way, passed = *server.scheduler.running, *server.scheduler.waiting
    server.scheduler.add(sequences(3, 5))
    server.step()
    assert running(server) == [0, 3] and server.scheduler.counts.evictions == 1
    assert [each.overtaken for each in (kept, gives_way, passed)] == [0, 1, 1]


@pytest.mark.parametrize(("bytes", "gives_way"), [(24, True), (25, False)])
def test_a_long_prompt_gives_way_if_its_pages_suffice(bytes: int, gives_way: bool) -> None:
    """It has 26, and two are spare; the other needs two, the one that stays two, and the rest is for the adapter."""
    server = server_with(sequences(0, 200), [prompt_of(1, 200)], pages=54, prefill_tokens=32)
    server.step()
    assert running(server) == [0, 1] and server.blocks.spare() == 2
    server.scheduler.add([prompt_of(2, 5, Adapter(name="large", kind="LORA", bytes=bytes, version=9))])
    server.step()
    assert server.scheduler.counts.evictions == gives_way and (2 in running(server)) == gives_way


def prompt_of(id: int, length: int, adapter: Adapter | None = None) -> Sequence:
    """One that begins like no other."""
    request = Request(id=id, prompt=tuple(range(1000 * id, 1000 * id + length)), sampling=Sampling(max_tokens=4))
    return Sequence(request, 0, list(request.prompt), adapter, float(id))


def test_completions_follow_once_their_prompt_is_computed() -> None:
    server = server_with(sequences(0, 40, completions=3, most=2), prefill_tokens=32)
    server.step()
    assert (running(server), waiting(server)) == ([0], [])
    server.step()
    assert (running(server), waiting(server)) == ([0], [0, 0])
    assert told(server.step()) == [(0, 0, 1, 40, True), (0, 1, 8, 32, True), (0, 9, 8, 32, True)]


@pytest.mark.parametrize(
    ("more", "spare", "gives_way"),
    [(0, 4, True), (1, 4, False), (0, 3, False)],
    ids=["there is room", "the batch is full", "there are no pages"],
)
def test_a_step_gives_way_only_to_what_can_join(more: int, spare: int, gives_way: bool) -> None:
    server = server_with(*(sequences(id, 5, most=9) for id in range(2 + more)), max_batch=3, pages=100)
    server.step()
    step = server.before
    assert step is not None and len(server.scheduler.running) == 2 + more
    server.pool.take(server.pool.free - spare)
    server.scheduler._pace = Pace(512)
    server.scheduler._pace.computed(100, 1.0)
    large = SchedulerOutput(step.segments[:1], began=10.0)
    object.__setattr__(large.segments[0], "rows", 400)
    assert server.scheduler.gives_way(large, 10.5, coming=2 * BLOCK) is gives_way


def test_how_long_first_tokens_take_is_learned_from_those_that_begin_here() -> None:
    server = server_with(sequences(0, 40, most=3, completions=2), prefill_tokens=32)
    while server.step():
        pass
    takes = server.scheduler._takes
    assert takes.is_known and takes.value == 1.0, "it joined in the first step, and chose in the second"
    server.scheduler.add(sequences(1, 5, most=1))
    while server.step():
        pass
    assert server.scheduler._takes.value == pytest.approx(0.9), "at once"


def test_what_comes_and_what_begins_is_counted_for_deadlines() -> None:
    requests = sequences(0, 5, most=9), going_on(1), sequences(2, 5, completions=3)
    server = server_with(*requests, policy="abort", first_token_s=5.0)
    one = policy.Rate(5.0).after(0.0)
    assert server.scheduler._arrivals == one.after(2.0) and server.scheduler._begun == policy.Rate(5.0)
    server.step()
    assert server.scheduler._begun == policy.Rate(5.0).after(1.0).after(1.0)
    while server.step():
        pass
    assert server.scheduler._begun.since == 1.0, "completions of a request begin with it"


@pytest.mark.parametrize(("now", "late"), [(5.0, []), (5.5, [0]), (6.0, [0]), (6.5, [0, 1])])
def test_those_that_found_no_room_are_late_by_what_first_tokens_take(now: float, late: list[int]) -> None:
    server = server_with(sequences(9, 5, most=90), max_batch=1, policy="abort", first_token_s=6.0)
    server.step()
    tried, untried = sequences(0, 5)[0], sequences(1, 5)[0]
    tried.arrived = untried.arrived = 0.0
    server.scheduler.add([tried])
    server.scheduler.next_step(0.5)
    server.scheduler.add([untried])
    server.scheduler._takes = policy.Mean(1.0, True)
    assert [each.request.id for each in server.scheduler.late(now)] == late
    fcfs = server_with(sequences(0, 5), max_batch=0)
    assert fcfs.scheduler.late(999.0) == []


def test_the_pace_is_learned_from_steps_with_prompts() -> None:
    (one,) = sequences(0, 300, most=3)
    scheduler = Scheduler(BlockManager(PagePool(99), 1), rules=StepRules(prefill_tokens=256))
    scheduler.add([one])

    def step(begins: float, ends: float, rows: int) -> float:
        found = scheduler.next_step(begins)
        assert found is not None and found.rows == rows
        scheduler.launched(found)
        scheduler.advance(found, ends)
        return scheduler._pace._rows_per_s.value

    assert step(0.0, 2.0, 128) == 64.0, "of what is not known half as much is computed"
    assert step(3.5, 4.5, 172) == pytest.approx(64.0 + (172 - 64) / 10)
    assert step(4.5, 5.5, 1) == pytest.approx(74.8), "steps that only decode say nothing"
    scheduler.add(sequences(1, 20))
    assert step(5.0, 6.5, 1 + 4) == pytest.approx(74.8 + (5 - 74.8) / 10), "it was launched while the one before ran"


@pytest.mark.parametrize(
    ("rows", "now", "coming", "gives_way"),
    [
        (400, 10.0, 40, True),
        (400, 10.0, 799, True),  # four seconds, of which all are left
        (400, 10.0, 800, False),
        (400, 13.75, 40, True),
        (400, 13.8, 40, False),
        (32, 10.0, 1, False),
        (513, 10.0, 40, False),
    ],
)
def test_a_step_gives_way_if_others_would_wait_longer_than_half_of_what_they_take(
    rows: int, now: float, coming: int, gives_way: bool
) -> None:
    pace = Pace(512)
    assert not pace.gives_way(rows, 10.0, now, coming), "of which nothing is known"
    pace.computed(100, 1.0)
    pace.computed(7, 0.0)
    assert pace.gives_way(rows, 10.0, now, coming) is gives_way


def test_a_piece_beside_who_is_told_tokens_takes_a_tenth_of_a_second() -> None:
    pace = Pace(512)
    pace.computed(2000, 1.0)
    assert [pace.piece(9.0, beside) for beside in (False, True)] == [512, 200]
    pace.disturbed(8.95)
    assert [pace.piece(at, beside=True) for at in (9.0, 9.5)] == [100, 200]
    fast = Pace(512)
    fast.computed(50_000, 1.0)
    assert fast.piece(9.0, beside=True) == 512


def test_a_piece_takes_as_long_as_it_was_quiet() -> None:
    assert (Pace(512).piece(0.0), Pace(100).piece(0.0), Pace(20).piece(0.0)) == (128, 100, 20)
    pace = Pace(512)
    pace.computed(100, 1.0)
    assert pace.piece(0.0) == 512
    pace.disturbed(10.0)
    assert [pace.piece(at) for at in (9.0, 10.0, 10.25, 10.5, 12.0, 15.5, 70.0)] == [32, 32, 32, 50, 200, 512, 512]
    assert [pace.piece(at, beside=True) for at in (10.0, 70.0)] == [32, 32]
    small = Pace(20)
    small.computed(1, 1.0)
    small.disturbed(0.0)
    assert small.piece(0.0) == 20
