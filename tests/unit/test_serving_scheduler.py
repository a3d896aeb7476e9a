"""Continuous batching on plain data: whatever comes, goes and is evicted, everybody ends, and no page is lost."""

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symbiosis.serving.kv_cache.block_manager import BlockManager
from symbiosis.serving.kv_cache.page_pool import NoRoom, PagePool
from symbiosis.serving.lora.adapter import Adapter
from symbiosis.serving.request import Pooling, Request, Sampling, Token
from symbiosis.serving.scheduler import policy as policies
from symbiosis.serving.scheduler.scheduler import PREFETCHED, UNKNOWN, Scheduler, StepRules, Unsettled
from symbiosis.serving.scheduler.scheduler_output import BLOCK, SchedulerOutput, Sequence
from symbiosis.serving.speculation.speculation import Speculation, accepted

LAYERS = 2


class Here:
    """Adapters of one page or more in the same pool."""

    def __init__(self, blocks: BlockManager) -> None:
        self.pool, self.pages, self.pins = blocks.pool, dict[Adapter, list[int]](), dict[Adapter, int]()
        self.others_make_room = blocks.make_room
        self.fetched = 0

    def is_here(self, adapter: Adapter) -> bool:
        return adapter in self.pages

    def pages_of(self, adapter: Adapter) -> int:
        return adapter.bytes

    def fetch(self, adapter: Adapter) -> bool:
        if adapter not in self.pages:
            self.fetched += 1
            if not self.make_room(adapter.bytes) and not self.others_make_room(adapter.bytes):
                return False
            self.pages[adapter], self.pins[adapter] = self.pool.take(adapter.bytes), 0
        return True

    def prefetch(self, adapters: Iterable[Adapter]) -> int:
        for adapter in adapters:
            try:
                if adapter not in self.pages:
                    self.pages[adapter], self.pins[adapter] = self.pool.take(adapter.bytes), 0
            except NoRoom:
                break
        return 0

    def pin(self, adapter: Adapter) -> None:
        self.pins[adapter] += 1

    def unpin(self, adapter: Adapter) -> None:
        self.pins[adapter] -= 1
        assert self.pins[adapter] >= 0

    def make_room(self, pages: int) -> bool:
        for adapter in [each for each, pins in self.pins.items() if not pins]:
            if self.pool.free >= pages:
                break
            self.pool.give_back(self.pages.pop(adapter))
            del self.pins[adapter]
        return self.pool.free >= pages


ADAPTERS = [Adapter(name=f"a{n}", kind="LORA", bytes=1 + n, version=n + 1, virtual=n % 2 * 3) for n in range(4)]


def sequences(
    id: int, prompt: int, adapter: Adapter | None = None, completions: int = 1, **more: Any
) -> list[Sequence]:
    tokens = tuple(range(prompt))  # prompts are prefixes of each other
    request = Request(
        id=id, prompt=tokens, completions=completions, sampling=Sampling(max_tokens=more.pop("most", 4)), **more
    )
    virtual = [0] * (adapter.virtual if adapter else 0)
    return [Sequence(request, number, [*virtual, *tokens], adapter, float(id)) for number in range(completions)]


class OftenRight:
    """Drafts of which some are wrong."""

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        return {each: tuple(self._token(len(each.tokens) + n) for n in range(count)) for each, count in wanted.items()}

    def _token(self, place: int) -> int:
        return place if place % 5 else 0

    def forget(self, sequence: Sequence) -> None: ...


class KnownBlocks(BlockManager):
    """Names blocks by tokens that are known."""

    def keep(self, sequence: Sequence) -> None:
        chosen = sequence.tokens[sequence.brought : sequence.computed // BLOCK * BLOCK]
        assert UNKNOWN not in chosen, "it is on its way"
        super().keep(sequence)


class Server:
    """What an engine does with a scheduler, without a model: the next token is its position.

    Args:
        drafts: Up to so many tokens are drafted.
        ahead: Steps are launched while the ones before are under way.
        ends: Texts end before this position, too.
    """

    TICK_S = 1.0  # which a step takes

    def __init__(
        self,
        pages: int,
        rules: StepRules,
        ahead: bool = False,
        ends: int = 1 << 30,
        windows: tuple[int | None, ...] = (),
        drafts: int = 0,
    ) -> None:
        self.pool, self.rules, self.ahead, self.ends = PagePool(pages), rules, ahead, ends
        self.blocks = KnownBlocks(self.pool, LAYERS, windows=windows)
        self.flying: dict[Sequence, int] | None = None
        self.before: SchedulerOutput | None = None
        self.here = Here(self.blocks)
        speculation = Speculation(OftenRight(), drafts) if drafts else None
        self.scheduler = Scheduler(self.blocks, self.here, rules, speculation=speculation)
        self.now, self.ended = 0.0, set[tuple[int, int]]()

    def step(self) -> SchedulerOutput | None:
        self.now += self.TICK_S
        for late in self.scheduler.late(self.now):
            self.scheduler.drop(late.request.id)
            self.ended |= {(late.request.id, n) for n in range(late.request.completions)}
        try:
            step = self.scheduler.next_step(self.now, is_ahead=self.flying is not None)
        except Unsettled:
            self.settle()
            step = self.scheduler.next_step(self.now)
        launched = None if step is None else self.launch(step)
        self.settle()
        self.before, self.flying = step, launched
        if not self.ahead:
            self.settle()
        return step

    def launch(self, step: SchedulerOutput) -> dict[Sequence, int] | None:
        self.check(step)
        return self.scheduler.launched(step)

    def settle(self) -> None:
        flying, self.flying = self.flying, None
        if flying is None or self.before is None:
            return
        chosen = [Token(flying[each.sequence] + n) for each in self.before.segments for n in range(len(each.choices))]
        told = list(accepted(self.before, chosen))
        for segment, tokens in told:
            self.scheduler.choose(segment, flying[segment.sequence], [token.id for token in tokens if token])
        self.scheduler.advance(self.before, self.now)
        for segment, tokens in told:
            sequence = segment.sequence
            assert self.ahead or sequence not in self.scheduler.running or sequence.uncomputed == 1
            for place in [token.id for token in tokens if token]:
                produced = place + 1 - sequence.prompt_length
                is_over = produced >= sequence.request.sampling.max_tokens or place % self.ends == 0
                if sequence in self.scheduler.running and is_over:
                    assert sequence.tokens[sequence.brought : place + 1] == [*range(sequence.brought, place + 1)]
                    self.scheduler.finish(sequence)
                    self.ended.add((sequence.request.id, sequence.completion))

    def check(self, step: SchedulerOutput) -> None:
        rows = 0
        for segment in step.segments:
            sequence = segment.sequence
            assert segment.first == rows and segment.position == sequence.computed and segment.rows > 0
            assert len(sequence.blocks) * BLOCK >= segment.end
            drafts = len(segment.drafts)
            assert segment.chooses == (segment.end - drafts == len(sequence.tokens)) and (segment.chooses or not drafts)
            assert drafts < max(1, sequence.request.sampling.max_tokens - sequence.produced)
            assert sequence.adapter is None or self.here.pins[sequence.adapter] > 0
            rows += segment.rows
        self.check_counts()
        held = list(self.scheduler.running)
        assert {segment.sequence for segment in step.segments} <= set(held) and len(held) <= self.rules.max_batch
        if not self.rules.whole_prompts:
            rows = [segment.rows - len(segment.drafts) for segment in step.segments]
            assert sum(count for count in rows if count > 1) <= self.rules.prefill_tokens
        versions = {s.version for s in held} - {0}
        assert self.rules.adapters_in_batch is None or len(versions) <= self.rules.adapters_in_batch

    def check_counts(self) -> None:
        there = [*self.scheduler.waiting, *self.scheduler.running]
        there += [each for followers in self.scheduler._followers.values() for each in followers]
        assert self.scheduler._of_tenant == dict(Counter(each.tenant for each in there))
        assert Counter(each for many in self.scheduler._of_request.values() for each in many) == Counter(there)
        for id, many in self.scheduler._of_request.items():
            assert many and all(each.request.id == id for each in many)

    def check_all_is_given_back(self) -> None:
        self.check_counts()
        assert not self.scheduler.running and not self.scheduler.waiting and not self.scheduler._followers
        assert not any(self.here.pins.values())
        here = sum(map(len, self.here.pages.values()))
        assert self.blocks.spare() + here == self.pool.total


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 5),  # steps before it comes
        st.integers(1, 60),  # tokens of its prompt
        st.sampled_from([None, *ADAPTERS]),
        st.integers(1, 3),  # completions
        st.integers(1, 40),  # tokens of each
        st.one_of(st.none(), st.integers(0, 6)),  # steps after which it is cancelled
        st.sampled_from("ab"),
        st.sampled_from([None, 0]),
    ),
    min_size=1,
    max_size=12,
)
RULES = st.builds(
    StepRules,
    max_batch=st.integers(1, 6),
    adapters_in_batch=st.sampled_from([None, 1, 2]),
    prefill_tokens=st.sampled_from([1, 7, 64]),
    whole_prompts=st.booleans(),
    policy=st.sampled_from(["fcfs", "abort", "vtc"]),
    first_token_s=st.sampled_from([3.0, 50.0]),
    of_tenant=st.sampled_from([None, 1, 3]),
)


@settings(deadline=None, max_examples=150)
@given(ARRIVALS, RULES, st.integers(2 * 7 + 4, 60), st.booleans(), st.sampled_from([7, 1 << 30]))
def test_everybody_ends_and_everything_is_given_back(
    arrivals: list[Any], rules: StepRules, pages: int, ahead: bool, ends: int
) -> None:
    play(Server(pages, rules, ahead, ends), arrivals)


@settings(deadline=None, max_examples=100)
@given(ARRIVALS, RULES, st.integers(2 * 7 + 4, 60), st.integers(1, 8), st.sampled_from([(None, None), (8, 24)]))
def test_drafts_change_neither_who_ends_nor_what_is_given_back(
    arrivals: list[Any], rules: StepRules, pages: int, drafts: int, windows: tuple[int | None, ...]
) -> None:
    play(Server(pages, rules, drafts=drafts, windows=windows), arrivals)


@pytest.mark.parametrize(("decoding", "drafts"), [(1, 8), (4, 3), (8, 1), (16, 0)])
def test_the_more_decode_the_fewer_drafts_each_has(decoding: int, drafts: int) -> None:
    server = Server(4000, StepRules(), drafts=8)
    for id in range(decoding):
        server.scheduler.add(sequences(id, 20, most=100))
    server.step()  # the prompts
    step = server.step()
    assert step is not None and [len(segment.drafts) for segment in step.segments] == [drafts] * decoding


@pytest.mark.parametrize(("spare", "drafted"), [(2 * LAYERS, 8), (2 * LAYERS - 1, 0)])
def test_drafts_get_pages_that_no_sequence_needs_for_its_next_token(spare: int, drafted: int) -> None:
    """The block of the text is full: with a further one of its own for the drafts, one for each that runs has to be left."""
    server = Server(LAYERS + spare, StepRules(), drafts=8)
    (sequence,) = sequences(0, BLOCK - 1, most=40)
    server.scheduler.add([sequence])
    server.step()
    assert len(sequence.tokens) == BLOCK and server.blocks.spare() == spare
    step = server.step()
    assert step is not None and [len(segment.drafts) for segment in step.segments] == [drafted]


def test_the_base_is_none_of_the_adapters_of_a_batch() -> None:
    server = Server(400, StepRules(adapters_in_batch=1))
    for id, adapter in enumerate((None, ADAPTERS[0], ADAPTERS[2])):  # one after another
        server.scheduler.add(sequences(id, 5, adapter, most=40))
        server.step()
    assert [each.version for each in server.scheduler.running] == [0, ADAPTERS[0].version]


@settings(deadline=None, max_examples=100)
@given(ARRIVALS, RULES, st.integers(0, 12), st.booleans(), st.sampled_from([(8, 8), (None, 8), (8, 24)]))
def test_texts_longer_than_the_memory_end_if_their_windows_fit(
    arrivals: list[Any], rules: StepRules, more: int, ahead: bool, windows: tuple[int | None, ...]
) -> None:
    least = (
        BlockManager(PagePool(1), LAYERS, windows=windows).needed(
            3 + 60 + 40, None if rules.whole_prompts else rules.prefill_tokens
        )
        + 4
    )  # of an adapter
    play(Server(least + more, rules, ahead, windows=windows), arrivals)


def play(server: Server, arrivals: list[Any]) -> None:
    wanted: set[tuple[int, int]] = set()
    cancelled: dict[int, float] = {}
    came = 0.0
    for id, (after, prompt, adapter, completions, most, cancel, tenant, logprobs) in enumerate(arrivals):
        came += after
        while server.now < came:
            server.step()
            for request in [each for each, when in cancelled.items() if when <= server.now]:
                server.scheduler.drop(request)
                server.check_counts()
                del cancelled[request]
        many = sequences(id, prompt, adapter, completions, most=most, tenant=tenant, prompt_logprobs=logprobs)
        for each in many:
            each.arrived = server.now
        server.scheduler.add(many)
        if cancel is None:
            wanted |= {(id, number) for number in range(completions)}
        else:
            cancelled[id] = server.now + cancel
    for _ in range(20_000):
        for request in [each for each, when in cancelled.items() if when <= server.now]:
            server.scheduler.drop(request)
            del cancelled[request]
        if server.step() is None and not cancelled and not server.scheduler.waiting:
            break
    else:
        raise AssertionError("it does not come to an end")
    assert wanted <= server.ended
    server.check_all_is_given_back()


def test_long_prompts_come_in_pieces_beside_all_that_decode() -> None:
    server = Server(400, StepRules(prefill_tokens=32))
    server.scheduler.add(sequences(0, 5, most=100))
    server.step()
    server.scheduler.add(sequences(1, 100, most=5))
    for expected in (32, 32, 32):
        step = server.step()
        assert step is not None and [segment.rows for segment in step.segments] == [1, expected]
    step = server.step()
    assert step is not None and [(s.rows, s.chooses) for s in step.segments] == [(1, True), (4, True)]


def test_answers_under_way_go_on_beside_a_long_prompt() -> None:
    """However long it has been quiet. A step takes a second here, whatever is in it."""
    server = Server(8000, StepRules(prefill_tokens=512), ahead=True)
    server.scheduler.add(sequences(0, 5, most=100))
    server.step()
    server.scheduler.add(sequences(1, 4000, most=5))

    def of_the_long() -> int:
        step = server.step()
        assert step is not None
        return sum(segment.rows for segment in step.segments if segment.sequence.request.id == 1)

    pieces = [of_the_long() for _ in range(60)]
    assert max(pieces[5:]) == 32, "a tenth of a second would be less"
    while (0, 0) not in server.ended:
        of_the_long()
    assert max(of_the_long() for _ in range(5)) > 32, "nobody waits for the next token"


@pytest.mark.parametrize("policy", ["fcfs", "abort", "vtc"])
def test_priorities_order_the_requests_of_one_tenant_and_push_none_before_others(policy: Any) -> None:
    server = Server(400, StepRules(max_batch=1, policy=policy, first_token_s=1e9))
    for id, (tenant, priority) in enumerate([("a", 0), ("a", 5), ("b", 0), ("a", -1), ("b", -9), ("a", 0)]):
        server.scheduler.add(sequences(id, 20, most=1, tenant=tenant, priority=priority))
    order: list[int] = []
    while len(order) < 6:
        step = server.step()
        assert step is not None
        order += [segment.sequence.request.id for segment in step.segments if segment.chooses]
    newest_first = policy == "abort"  # more come than begin
    by_tenant = {"a": [3, 5, 0, 1] if newest_first else [3, 0, 5, 1], "b": [4, 2]}
    assert {name: [id for id in order if id in own] for name, own in by_tenant.items()} == by_tenant
    if policy == "fcfs":
        assert ["a" if id in by_tenant["a"] else "b" for id in order] == ["a", "a", "b", "a", "b", "a"]


def test_a_queue_is_put_in_order_only_while_one_in_it_or_in_the_batch_has_a_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ordered: list[int] = []
    by_priority = policies.by_priority
    monkeypatch.setattr(policies, "by_priority", lambda queue: by_priority(ordered.append(len(queue)) or queue))
    server = Server(400, StepRules(max_batch=1))
    for id, priority in enumerate([0, 5, 0]):
        server.scheduler.add(sequences(id, 20, most=1, priority=priority))
    assert ordered == [2, 3]
    while server.ended != {(0, 0), (1, 0), (2, 0)}:
        server.step()
    server.scheduler.add(sequences(3, 20, most=1, priority=-1))
    server.scheduler.drop(3)
    ordered.clear()
    for id in (4, 5):
        server.scheduler.add(sequences(id, 20, most=1))
    assert not ordered


def test_a_less_urgent_prompt_takes_no_place_of_a_more_urgent_one_of_its_tenant() -> None:
    for priority, first in ((1, 0), (0, 1)):
        server = Server(400, StepRules(max_batch=1, prefill_tokens=32))
        server.scheduler.add(sequences(0, 200, most=1, tenant="a"))
        server.step()
        server.scheduler.add(sequences(1, 20, most=1, tenant="a", priority=priority))
        while not server.ended:
            server.step()
        assert server.ended == {(first, 0)}


@pytest.mark.parametrize("logprobs", [None, 0], ids=["", "the prompt is scored"])
def test_completions_share_the_prompts_blocks(logprobs: bool) -> None:
    server = Server(400, StepRules())
    many = sequences(0, 70, completions=3, prompt_logprobs=logprobs)
    server.scheduler.add(many)
    first = server.step()
    assert first is not None and [segment.sequence for segment in first.segments] == [many[0]]
    then = server.step()
    assert then is not None and [segment.rows for segment in then.segments] == [1, 6, 6]
    assert many[0].blocks[:4] == many[1].blocks[:4] == many[2].blocks[:4]


def test_the_newest_is_evicted_and_says_the_same_afterwards() -> None:
    server = Server(LAYERS * 4, StepRules())
    old, new = sequences(0, 20, most=40)[0], sequences(1, 15, most=30)[0]
    server.scheduler.add([old])
    server.scheduler.add([new])
    while server.scheduler.counts.evictions == 0:
        server.step()
    assert new in server.scheduler.waiting and old in server.scheduler.running and not new.blocks
    while server.step():
        pass
    assert server.ended == {(0, 0), (1, 0)} and new.produced == 30
    server.check_all_is_given_back()


def test_cancelling_frees_everything_at_once() -> None:
    server = Server(200, StepRules(prefill_tokens=8))
    server.scheduler.add(sequences(0, 60, ADAPTERS[1], completions=3))
    server.scheduler.add(sequences(1, 60))
    server.step()
    server.scheduler.drop(0)
    server.scheduler.drop(1)
    server.check_all_is_given_back()
    assert server.step() is None


def test_a_text_whose_rows_are_all_under_way_has_none_in_the_next_step() -> None:
    """It decodes nothing: of a text of which a vector is made no token is chosen."""
    server = Server(400, StepRules())
    server.scheduler.add(sequences(0, 20, pooling=Pooling("mean")))
    server.scheduler.add(sequences(1, 20))
    step = server.scheduler.next_step(0.0)
    assert step is not None and [segment.rows for segment in step.segments] == [20, 20]
    server.scheduler.launched(step)
    following = server.scheduler.next_step(1.0, is_ahead=True)
    assert following is not None and [segment.sequence.request.id for segment in following.segments] == [1]


def test_segments_of_one_adapter_lie_beside_each_other() -> None:
    server = Server(400, StepRules())
    for id, adapter in enumerate([ADAPTERS[1], None, ADAPTERS[0], ADAPTERS[1], None]):
        server.scheduler.add(sequences(id, 5, adapter))
    step = server.step()
    assert step is not None and [s.sequence.version for s in step.segments] == [0, 0, 1, 2, 2]


def test_adapters_of_the_queue_are_brought_before_their_turn() -> None:
    server = Server(400, StepRules(max_batch=1))
    server.scheduler.add(sequences(0, 5, ADAPTERS[0]))
    server.scheduler.add(sequences(1, 5, ADAPTERS[1]))
    server.step()
    assert server.here.is_here(ADAPTERS[1]) and not server.here.pins[ADAPTERS[1]]


def test_an_adapter_is_not_brought_for_a_text_that_finds_no_room() -> None:
    server = Server(LAYERS * 8, StepRules())
    server.scheduler.add(sequences(0, 80, most=30))
    for id in range(1, 4):
        server.scheduler.add(sequences(id, 60, ADAPTERS[2 + id % 2], most=2))
    for _ in range(20):
        server.step()
    assert server.here.fetched == 0 and len(server.scheduler.waiting) == 3
    while server.step():
        pass
    assert len(server.ended) == 4


def test_early_abort_gives_up_what_cannot_be_in_time() -> None:
    server = Server(400, StepRules(max_batch=1, policy="abort", first_token_s=3.0))
    for id in range(3):
        (each,) = sequences(id, 5, most=10)
        each.arrived = 0.0
        server.scheduler.add([each])
    for _ in range(5):
        server.step()
    # More came than began, so that the newest went first; the others were late when it was done.
    assert server.ended == {(0, 0), (1, 0)} and [each.request.id for each in server.scheduler.running] == [2]


def going_on(id: int) -> list[Sequence]:
    """A stream that another server has begun."""
    (each,) = sequences(id, 5, most=10, chosen=((5, 6),))
    each.tokens.extend(each.request.chosen_of(0))
    return [each]


def test_streams_that_go_on_here_are_not_requests_that_come() -> None:
    server = Server(400, StepRules(max_batch=1, policy="abort", first_token_s=50.0))
    for id in range(3):
        server.scheduler.add(going_on(id))
    begun: list[int] = []
    while server.step():
        begun += [each.request.id for each in server.scheduler.running if each.request.id not in begun]
    assert begun == [0, 1, 2], "the server keeps up, so the oldest goes first"


def test_streams_that_go_on_here_do_not_hide_that_more_come_than_begin() -> None:
    server = Server(400, StepRules(max_batch=1, policy="abort", first_token_s=50.0))
    server.scheduler.add(going_on(0))
    for id in range(1, 4):
        server.scheduler.add(sequences(id, 5, most=10))
    server.step()
    assert [each.request.id for each in server.scheduler.running] == [3]


def test_slow_first_tokens_of_the_past_keep_no_request_from_beginning() -> None:
    server = Server(400, StepRules(max_batch=2, prefill_tokens=8, policy="abort", first_token_s=3.0))
    (slow,) = sequences(0, 80, most=1)
    server.scheduler.add([slow])
    while server.step():
        pass
    assert server.scheduler._takes.value > 3.0 and slow.produced == 1
    for id in range(1, 40):
        (quick,) = sequences(id, 5, most=2)
        quick.arrived = server.now
        server.scheduler.add([quick])
        while server.step():
            pass
        assert quick.produced == 2
    assert server.scheduler._takes.value < 3.0


def test_what_is_dropped_before_it_begins_is_forgotten() -> None:
    server = Server(400, StepRules(max_batch=2, policy="abort"))
    kept = []
    for id in range(5):
        (sequence,) = sequences(id, 5)
        server.scheduler.add([sequence])
        kept.append(weakref.ref(sequence))
        server.scheduler.drop(id)
    del sequence
    gc.collect()
    assert [each() for each in kept] == [None] * 5


def test_what_finds_no_room_is_given_up_as_soon_as_it_cannot_be_in_time() -> None:
    server = Server(400, StepRules(max_batch=1, prefill_tokens=8, policy="abort", first_token_s=6.0))
    (slow,) = sequences(0, 32, most=40)
    server.scheduler.add([slow])
    while not slow.produced:
        server.step()
    assert server.scheduler._takes.value == 3.0
    (other,) = sequences(1, 5)
    other.arrived = server.now
    server.scheduler.add([other])
    for waited in range(4):
        assert other in server.scheduler.waiting, waited
        server.step()
    assert other not in server.scheduler.waiting and not other.began and slow in server.scheduler.running


@pytest.mark.parametrize("policy", ["fcfs", "vtc"])
def test_tenants_get_alike_only_under_vtc(policy: Any) -> None:
    server = Server(4000, StepRules(max_batch=2, policy=policy))
    for id in range(20):
        server.scheduler.add(sequences(id, 10, tenant="many", most=4))
    for id in range(20, 24):
        server.scheduler.add(sequences(id, 10, tenant="few", most=4))
    while not {(id, 0) for id in range(20, 24)} <= server.ended:
        server.step()
    others = len([id for id, _ in server.ended if id < 20])
    assert others <= 6 if policy == "vtc" else others == 20


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        (40, {}),
        (40, {"chosen": ((5,),)}),
        (8, {"chosen": (tuple(range(32)),)}),
        (40, {"completions": 2, "ended": (0,)}),
        (8, {"completions": 2, "chosen": (tuple(range(32)),) * 2}),
    ],
)
def test_what_a_request_brings_costs_the_same_wherever_it_is_said_to_have_begun(prompt: int, told: Any) -> None:
    """Tokens of a stream that goes on here were free, and so was its prompt: who said so of each request had the others wait."""
    server = Server(8000, StepRules(max_batch=2, policy="vtc"))
    for id in range(40):
        most = 1 + len(told.get("chosen", ((),))[0])
        request = Request(id=id, prompt=(1,) * prompt, tenant="many", sampling=Sampling(max_tokens=most), **told)
        tokens = {number: [*request.prompt, *request.chosen_of(number)] for number in request.under_way}
        server.scheduler.add([Sequence(request, number, tokens[number], None, float(id)) for number in tokens])
    for id in range(40, 48):
        server.scheduler.add(sequences(id, 40, tenant="few", most=1))
    while not {(id, 0) for id in range(40, 48)} <= server.ended:
        server.step()
    assert len({id for id, _ in server.ended if id < 40}) <= 10


def test_the_adapter_that_is_brought_before_its_turn_is_the_next_one_of_the_policy() -> None:
    server = Server(4000, StepRules(max_batch=1, policy="vtc"))
    server.scheduler.add(sequences(0, 10, tenant="many", most=20))
    server.step()
    for id in range(1, 1 + PREFETCHED):
        server.scheduler.add(sequences(id, 10, ADAPTERS[0], tenant="many"))
    server.scheduler.add(sequences(9, 10, ADAPTERS[1], tenant="few"))
    server.step()
    assert server.scheduler.running[0].request.id == 0 and ADAPTERS[1] in server.here.pages


def of_tenant(tenant: str, ids: range) -> list[list[Sequence]]:
    return [sequences(id, 8, tenant=tenant, most=50) for id in ids]


def shares(server: Server) -> Counter[str]:
    return Counter(each.tenant for each in server.scheduler.running)


def test_who_is_alone_has_the_batch_and_gives_way_when_others_come() -> None:
    server = Server(400, StepRules(max_batch=8, of_tenant=4))
    for each in of_tenant("a", range(12)):
        server.scheduler.add(each)
    server.step()
    assert shares(server) == {"a": 8}
    server.scheduler.add(*of_tenant("b", range(20, 21)))
    server.step()
    assert shares(server) == {"a": 7, "b": 1}
    for each in of_tenant("b", range(21, 30)):
        server.scheduler.add(each)
    server.step()
    assert shares(server) == {"a": 4, "b": 4}
    assert sorted(each.request.id for each in server.scheduler.running) == [0, 1, 2, 3, 20, 21, 22, 23]
    while server.scheduler.waiting or server.scheduler.running:
        waiting = {each.tenant for each in server.scheduler.waiting}
        server.step()
        assert len(waiting) < 2 or max(shares(server).values(), default=0) <= 4
    assert len(server.ended) == 22
    server.check_all_is_given_back()


def test_memory_of_who_has_more_than_a_share_is_given_to_others() -> None:
    server = Server(8 * LAYERS + 2 * LAYERS, StepRules(max_batch=8, of_tenant=2))
    for each in of_tenant("a", range(4)):
        server.scheduler.add(each)
    server.step()
    before = shares(server)["a"]
    assert before > 2
    server.scheduler.add(sequences(20, 60, tenant="b", most=2))
    server.step()
    assert shares(server) == {"a": before - 1, "b": 1}


class Watched(Sequence):
    """A sequence that counts how often anything of it is looked at."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        Watched.looks += 1
        return super().__getattribute__(name)


def test_what_comes_and_goes_looks_at_few_of_those_that_wait() -> None:
    scheduler = Server(400, StepRules()).scheduler
    requests = [sequences(id, 1)[0].request for id in range(3000)]
    many = [Watched(each, 0, [0], None, float(each.id)) for each in requests]
    Watched.looks = 0
    for each in many:
        scheduler.add([each])
    assert Watched.looks < 300 * len(many)
    Watched.looks = 0
    for request in reversed(requests):
        scheduler.drop(request.id)
    assert not scheduler.waiting and Watched.looks < 300 * len(many)


class TimedServer(Server):
    """A server whose steps take as long as a model's: a part for its weights, and a part for each row. A step asks ten times whether it is
    given up. Requests come at their times, also while a step is computed."""

    TICK_S = 0.0
    WEIGHTS_S, ROW_S = 0.05, 0.001

    def __init__(self, rules: StepRules, pages: int = 40_000) -> None:
        super().__init__(pages, rules)
        self.coming: list[Sequence] = []
        self.first_token_s: dict[int, float] = {}

    def send(self, at: float, id: int, prompt: int, **more: Any) -> None:
        (each,) = sequences(id, prompt, prompt_logprobs=0, **{"most": 1, **more})
        each.arrived = at
        self.coming = sorted([*self.coming, each], key=lambda each: each.arrived)

    def launch(self, step: SchedulerOutput) -> dict[Sequence, int] | None:
        for _ in range(10):
            self.now += (self.WEIGHTS_S + self.ROW_S * step.rows) / 10
            came = [each.uncomputed for each in self.coming if each.arrived <= self.now]
            if came and self.scheduler.gives_way(step, self.now, min(came)):
                return None
        for segment in step.segments:
            if segment.chooses:
                self.first_token_s.setdefault(segment.sequence.request.id, self.now - segment.sequence.arrived)
        return super().launch(step)

    def run(self) -> dict[int, float]:
        """Return when each request had its first token."""
        while self.coming or self.scheduler.waiting or self.scheduler.running:
            while self.coming and self.coming[0].arrived <= self.now:
                self.scheduler.add([self.coming.pop(0)])
            if self.step() is None and self.coming:
                self.now = max(self.now, self.coming[0].arrived)
        return self.first_token_s


LONG = 2000
LOADS = {  # prompts: long ones that come first, and then short ones, each after so many seconds
    "four behind one": ([LONG], [(37, 0.0)] * 4),
    "one behind one": ([LONG], [(37, 0.0)]),
    "one behind eight": ([LONG] * 8, [(37, 0.0)]),
    "many behind one": ([4 * LONG], [(37, 0.0)] * 40),
    "one after another": ([4 * LONG], [(37, 0.3 * n) for n in range(10)]),
    "of several lengths": ([LONG] * 2, [(20, 0.0), (37, 0.1), (150, 0.15), (300, 0.2)]),
}


@pytest.mark.parametrize("policy", ["fcfs", "abort", "vtc"])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("after", [0.01, 0.2, 0.4, 0.75, 1.3])
def test_short_prompts_behind_long_ones_take_twice_as_long_as_alone_at_most(
    policy: Any, load: str, after: float
) -> None:
    longs, shorts = LOADS[load]

    def first_tokens(longs: list[int]) -> list[float]:
        server = TimedServer(StepRules(policy=policy, first_token_s=1000.0))
        for id in range(8):  # it has served others before
            server.send(10.0 * id, id, 100)
        for id, prompt in enumerate(longs, 8):
            server.send(100.0, id, prompt, tenant="long")
        for id, (prompt, at) in enumerate(shorts, 100):
            server.send(100.0 + after + at, id, prompt, tenant="short")
        found = server.run()
        return [found[100 + n] for n in range(len(shorts))]

    behind, alone = first_tokens(longs), first_tokens([])
    assert max(behind) <= 2 * max(alone) and sum(behind) <= 2 * sum(alone)


def test_a_long_prompt_alone_takes_as_long_as_before() -> None:
    server = TimedServer(StepRules())
    server.send(0.0, 0, LONG)
    server.send(100.0, 1, LONG)
    first, then = server.run().values()
    best = 4 * server.WEIGHTS_S + LONG * server.ROW_S
    assert then == pytest.approx(best) and first <= 1.05 * best


@pytest.mark.parametrize("prompt", [pytest.param(10, marks=pytest.mark.full), 37, 200, 500])
@pytest.mark.parametrize("policy", ["fcfs", "abort", "vtc"])
def test_a_long_prompt_ends_however_many_shorter_ones_come(policy: Any, prompt: int) -> None:
    """More come than can be served. Steps that are given up are counted."""
    server = TimedServer(StepRules(policy=policy, first_token_s=1000.0, max_batch=16))
    server.send(0.0, 0, LONG, tenant="long")
    each = prompt * server.ROW_S
    for id in range(1, 1 + int(40.0 / each)):
        server.send(id * each * 0.8, id, prompt, tenant="short")
    assert server.run()[0] < 16 * (LONG * server.ROW_S)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(2, 900), st.sampled_from("abc"), st.floats(0, 50)), min_size=1, max_size=12),
    st.sampled_from([1, 7, 64, 512]),
    st.integers(1, 512),
    st.booleans(),
    st.booleans(),
)
def test_rows_of_prompts_are_shared_out_within_bounds(
    prompts: list[tuple[int, str, float]], most: int, piece: int, fair: bool, whole: bool
) -> None:
    waiting = [sequences(id, length, tenant=tenant)[0] for id, (length, tenant, _) in enumerate(prompts)]
    for each, (_, _, owed) in zip(waiting, prompts, strict=True):
        each.owed = owed
    piece = min(piece, most)
    rows = policies.prompt_rows(waiting, most, piece, lambda each: each.tenant if fair else "", whole)
    assert sum(rows.values()) > 0 and all(0 <= count <= each.uncomputed for each, count in rows.items())
    assert sum(rows.values()) <= most or whole
    assert not whole or all(count in (0, each.uncomputed) for each, count in rows.items())


@pytest.mark.parametrize("policy", ["fcfs", "vtc"])
def test_what_is_computed_of_prompts_is_shared_out_only_under_vtc(policy: Any) -> None:
    server = Server(40_000, StepRules(max_batch=20, prefill_tokens=64, policy=policy))
    for id in range(10):
        server.scheduler.add(sequences(id, 500, tenant="many", most=1, prompt_logprobs=0))
    server.step()
    server.scheduler.add(sequences(10, 500, tenant="few", most=1, prompt_logprobs=0))
    steps = 0
    while (10, 0) not in server.ended:
        server.step()
        steps += 1
    assert steps <= 17 if policy == "vtc" else steps > 50
    while server.scheduler.running:
        server.step()
    assert len(server.ended) == 11
