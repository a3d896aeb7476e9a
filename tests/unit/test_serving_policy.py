"""Who runs next: nobody starves, limits hold, tenants get alike, and deadlines decide who is dropped."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symbiosis.serving.scheduler import policy
from symbiosis.serving.scheduler.policy import StepBatch


@dataclass(eq=False)
class Waiting:
    arrived: float
    version: int = 0
    tenant: str = ""
    brought: int = 1
    pages: int = 1
    has_begun: bool = False
    overtaken: int = 0
    steps: int = 1
    priority: int = 0


WAITING = st.builds(
    Waiting,
    arrived=st.just(0.0),
    version=st.integers(0, 5),
    tenant=st.sampled_from("abc"),
    brought=st.integers(1, 50),
    pages=st.integers(1, 10),
    steps=st.integers(1, 4),
)


def run(queue: list[Waiting], stream: list[Waiting], kind: str, most_versions: int, of_tenant: int | None) -> int:
    """Steps until all of `queue` have ended, while one of `stream` comes in each step; all have 10 pages together."""
    running: list[Waiting] = []
    waiting, wanted = list(queue), set(queue)
    counters: Counter[str] = Counter()
    for step in range(10_000):
        if not wanted:
            return step
        if stream:
            waiting.append(stream[step % len(stream)].__class__(**vars(stream[step % len(stream)])))

        def start(each: Waiting) -> bool:
            if sum(r.pages for r in running) + each.pages > 10:
                return False
            running.append(each)
            counters[each.tenant] += each.brought
            return True

        versions = {r.version for r in running} - {0}
        batch = StepBatch(len(running), 4, versions, most_versions, Counter(r.tenant for r in running), of_tenant)
        order = policy.by_fairness(waiting, counters) if kind == "vtc" else iter(waiting)
        joined = policy.admit(order, batch, start)
        waiting = [each for each in waiting if each not in joined]
        assert len(running) <= 4
        assert len({r.version for r in running} - {0}) <= most_versions
        assert of_tenant is None or all(n <= of_tenant for n in Counter(r.tenant for r in running).values())
        for each in list(running):
            each.steps -= 1
            if each.steps == 0:
                running.remove(each)
                wanted.discard(each)
    raise AssertionError("somebody starves")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(WAITING, min_size=1, max_size=8),
    st.lists(WAITING, max_size=3),
    st.sampled_from(["fcfs", "vtc"]),
    st.integers(1, 3),
    st.sampled_from([None, 1, 2]),
)
def test_nobody_starves(
    queue: list[Waiting], stream: list[Waiting], kind: str, most_versions: int, of_tenant: int | None
) -> None:
    copies = [Waiting(**vars(each)) for each in queue]
    if kind == "vtc":
        stream = []  # a tenant who asks for more than the server has waits for its own requests only
    run(copies, stream, kind, most_versions, of_tenant)


def test_a_rare_adapter_is_passed_by_only_so_often() -> None:
    rare = Waiting(0.0, version=9)
    batch = StepBatch(1, 1000, {1}, most_versions=1)
    crowd = [Waiting(1.0, version=1) for _ in range(2 * policy.MOST_OVERTAKEN)]
    joined = policy.admit([rare, *crowd], batch, lambda each: True)
    assert joined == crowd[: policy.MOST_OVERTAKEN] and rare.overtaken == len(joined)
    assert policy.admit([rare, *crowd], batch, lambda each: True) == []
    assert policy.admit([rare, *crowd], StepBatch(0, 1000, most_versions=1), lambda each: True) == [rare]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, policy.MOST_OVERTAKEN), st.booleans(), st.sampled_from("ab")), max_size=200),
    st.integers(0, 128),
    st.sampled_from([None, 1, 20]),
)
def test_nobody_is_passed_by_more_often_or_beside_more_others_than_is_said(
    waiting: list[tuple[int, bool, str]], most: int, of_tenant: int | None
) -> None:
    """Each has been passed by so often already, and fits or not."""
    order = [Waiting(0.0, tenant=tenant, pages=1 if fits else 9, overtaken=before) for before, fits, tenant in waiting]
    batch = StepBatch(0, most, most_of_tenant=of_tenant)
    joined = policy.admit(order, batch, lambda each: each.pages < 5)
    assert all(each.overtaken <= policy.MOST_OVERTAKEN for each in order)
    assert sum(each.overtaken > before for each, (before, *_) in zip(order, waiting, strict=True)) <= policy.LOOKAHEAD
    places = [order.index(each) for each in joined]
    for each, (before, *_) in zip(order, waiting, strict=True):
        behind = sum(place > order.index(each) for place in places)
        assert each in joined or each.overtaken - before in (0, behind)


def test_so_many_are_passed_by_to_find_one_that_fits() -> None:
    for many in (policy.LOOKAHEAD, policy.LOOKAHEAD + 1):
        large, small = [Waiting(0.0, pages=9) for _ in range(many)], Waiting(1.0)
        joined = policy.admit([*large, small], StepBatch(0, 8), lambda each: each.pages < 5)
        assert joined == ([small] if many == policy.LOOKAHEAD else [])


def test_what_fits_goes_before_what_does_not() -> None:
    large, small = Waiting(0.0, pages=9), Waiting(1.0, pages=1)
    assert policy.admit([large, small], StepBatch(0, 8), lambda each: each.pages < 5) == [small]
    assert (large.overtaken, small.overtaken) == (1, 0)


def test_a_tenants_limit_holds_up_only_the_tenant() -> None:
    mine = [Waiting(0.0, tenant="a") for _ in range(200)]
    other = Waiting(1.0, tenant="b")
    joined = policy.admit([*mine, other], StepBatch(0, 8, most_of_tenant=2), lambda each: True)
    assert joined == [*mine[:2], other]
    assert not any(each.overtaken for each in mine)


def test_a_tenant_that_is_not_known_has_got_nothing() -> None:
    known, new = Waiting(0.0, tenant="a"), Waiting(1.0, tenant="b")
    assert list(policy.by_fairness([known, new], {"a": 0.5})) == [new, known]


@settings(deadline=None)
@given(st.lists(WAITING, max_size=30), st.dictionaries(st.sampled_from("abc"), st.floats(0, 100)))
def test_fair_order_is_a_permutation_that_keeps_each_tenants_own(
    waiting: list[Waiting], counters: dict[str, float]
) -> None:
    order = list(policy.by_fairness(waiting, counters))
    assert sorted(map(id, order)) == sorted(map(id, waiting))
    for tenant in "abc":
        assert [w for w in order if w.tenant == tenant] == [w for w in waiting if w.tenant == tenant]


def test_tenants_get_the_same_whoever_asks_for_more() -> None:
    """Two tenants, one with ten times the requests; the counters stay within one request of each other while both wait."""
    waiting = [Waiting(0.0, tenant="a", brought=3) for _ in range(100)]
    waiting += [Waiting(0.0, tenant="b", brought=7) for _ in range(10)]
    got: Counter[str] = Counter()
    for each in policy.by_fairness(waiting, {}):
        if got["b"] == 70:
            break
        got[each.tenant] += each.brought
        assert abs(got["a"] - got["b"]) <= 7


def test_only_what_has_not_begun_and_cannot_be_in_time_is_aborted() -> None:
    early, late, begun = Waiting(0.0), Waiting(5.0), Waiting(0.0, has_begun=True)
    waiting = [early, begun, late]
    assert policy.too_late(waiting, now=6.0, first_token_s=6.0, takes_s=0.5) == [early]
    assert policy.too_late(waiting, now=6.0, first_token_s=6.0, takes_s=0.0) == []


def test_abort_keeps_more_of_its_promises_than_first_come_first_served() -> None:
    """Two requests come for each that can be served."""

    def in_time(abort: bool) -> int:
        waiting: list[Waiting] = []
        kept = 0
        for now in range(200):
            waiting += [Waiting(float(now)), Waiting(float(now))]
            if abort:
                late = policy.too_late(waiting, float(now), 6.0, 1.0)
                waiting = [each for each in waiting if each not in late]
            order = list(policy.by_deadline(waiting, 2.0, 1.0)) if abort else waiting
            served = order[0]
            waiting.remove(served)
            kept += now + 1.0 - served.arrived <= 6.0
        return kept

    assert in_time(abort=True) == 200
    assert in_time(abort=False) < 20


def test_the_newest_is_evicted_so_that_the_first_ends() -> None:
    running = [Waiting(3.0), Waiting(1.0), Waiting(3.0), Waiting(2.0)]
    assert policy.newest(running) is running[2]
    while len(running) > 1:
        running.remove(policy.newest(running))
    assert running[0].arrived == 1.0


FULL = StepBatch(3, 8, {4, 5}, 2, Counter(a=2, b=1), 2)


def test_a_batch_takes_what_its_limits_allow() -> None:
    versions_and_tenants = [(0, "b"), (4, "b"), (6, "b"), (0, "a"), (4, "c"), (6, "c")]
    assert [FULL.may_take(*each) for each in versions_and_tenants] == [True, True, False, False, True, False]
    assert StepBatch(0, 8, most_of_tenant=1).may_take(0, "a") and not StepBatch(0, 8, most_of_tenant=0).may_take(0, "a")
    assert StepBatch(2, 8, {1, 2}).may_take(3, "a"), "without a limit"
    assert [len(policy.admit([Waiting(0.0)], StepBatch(count, 8), lambda each: True)) for count in (7, 8, 9)] == [
        1,
        0,
        0,
    ]


def test_a_batch_counts_what_joins() -> None:
    batch = StepBatch(3, 8, {4, 5}, None, Counter(a=2, b=1))
    joined = [Waiting(0.0, version=5, tenant="b"), Waiting(1.0, tenant="c"), Waiting(2.0, version=6, tenant="a")]
    assert policy.admit(joined, batch, lambda each: True) == joined
    assert batch == StepBatch(6, 8, {4, 5, 6}, None, Counter(a=3, b=2, c=1))


def test_a_batch_is_filled_and_no_more() -> None:
    order = [Waiting(float(n), version=n % 3, tenant="ab"[n % 2]) for n in range(8)]
    joined = policy.admit(order, StepBatch(2, 6, {2}, 2, Counter(a=1, b=1), 3), lambda each: each.arrived != 3)
    # the third version does not come while two are there, and a tenant has three at most
    assert [each.arrived for each in joined] == [0.0, 1.0, 2.0, 5.0]
    assert [each.overtaken for each in order] == [0, 0, 0, 1, 0, 0, 0, 0], (
        "who is at its tenant's limit is not passed by"
    )


def test_so_many_give_way_as_others_may_claim() -> None:
    running = [Waiting(float(n), tenant="aaabbc"[n]) for n in (3, 0, 4, 1, 2, 5)]

    def gone(waiting: str, most: int | None) -> list[float]:
        return [
            each.arrived for each in policy.giving_way(running, [Waiting(9.0, tenant=one) for one in waiting], most)
        ]

    assert gone("dd", None) == gone("", 1) == gone("dd", 3) == gone("ab", 2) == []
    assert gone("d", 2) == gone("cc", 2) == gone("c", 2) == [2.0], "the newest of who has more than two"
    assert gone("ddd", 2) == [2.0], "and no more than is beyond the limit"
    assert gone("d", 1) == [4.0] and gone("dd", 1) == [4.0], "one tenant may have one"
    assert gone("def", 1) == [4.0, 2.0, 1.0] and gone("defg", 1) == [4.0, 2.0, 1.0]
    assert gone("c", 1) == []


def test_who_has_got_least_is_next() -> None:
    a, b, c, d, e = (
        Waiting(0.0, tenant=tenant, brought=brought) for tenant, brought in zip("aabbc", (5, 1, 2, 9, 1), strict=True)
    )
    assert list(policy.by_fairness([a, b, c, d, e], {"a": 0.0, "b": 3.0, "c": 5.5})) == [a, c, b, d, e]
    assert list(policy.by_fairness([c, a, b], {})) == [c, a, b], "of two that have got alike, who came first"
    assert policy.lifted({"a": 50.0, "b": 70.0, "c": 3.0}, "c", ["b", "a", "c"]) == 50.0
    assert policy.lifted({"a": 5.0}, "b", ["x"]) == policy.lifted({}, "b", []) == 0.0
    assert (policy.INPUT_COST, policy.OUTPUT_COST) == (1.0, 2.0), "as the paper has them"


def test_rows_are_shared_alike() -> None:
    assert policy.shared({"a": 1000, "b": 10, "c": 1000}, 100) == {"a": 45, "b": 10, "c": 45}
    assert policy.shared({"a": 3, "b": 1, "c": 2}, 2) == {"a": 1, "b": 1, "c": 0}
    assert policy.shared({"a": 3, "b": 7}, 5) == {"a": 3, "b": 2} and policy.shared({"a": 3, "b": 7}, 11) == {
        "a": 3,
        "b": 7,
    }
    assert policy.shared({"a": 3}, 0) == policy.shared({"a": 0}, 3) == {"a": 0} and policy.shared({}, 3) == {}
    assert policy.shared({"a": 1, "b": 1}, 1) == {"a": 1, "b": 0}


def test_deadlines_hold_to_the_moment() -> None:
    on_time, late = Waiting(1.0), Waiting(0.5)
    assert policy.too_late([on_time, late], now=5.0, first_token_s=6.0, takes_s=2.0) == [late]
    for arrivals, begun, order in (
        (1.0, 1.0, [late, on_time]),
        (1.1, 1.0, [on_time, late]),
        (1.0, 1.1, [late, on_time]),
    ):
        assert list(policy.by_deadline([late, on_time], arrivals, begun)) == order


def test_rates_and_means_forget() -> None:
    once = policy.Rate(5.0).after(10.0)
    assert once == policy.Rate(5.0, 0.2, 10.0) and policy.Rate(5.0, 3.0).at(99.0) == 3.0
    assert once.at(15.0) == pytest.approx(0.2 / math.e) and once.at(10.0) == 0.2
    assert once.after(15.0, events=2) == policy.Rate(5.0, pytest.approx(0.2 / math.e + 0.4), 15.0)
    mean = policy.Mean().after(2.0)
    assert (policy.Mean().value, mean.value, mean.after(3.0).value) == (0.0, 2.0, pytest.approx(2.1))


@dataclass(eq=False)
class Prompt:
    uncomputed: int
    whose: str = ""
    owed: float = 0.0


@pytest.mark.parametrize(
    ("prompts", "most", "piece", "rows"),
    [
        ([100], 512, 128, [100]),
        ([64], 64, 32, [64]),
        ([65], 512, 32, [32]),  # no longer short, and longer than a piece
        ([200], 512, 128, [128]),
        ([60, 4], 64, 32, [60, 4]),
        ([500, 40], 512, 32, [8, 40]),  # a fifth of those that end
        ([75, 40, 35], 512, 32, [75, 40, 35]),
        ([76, 40, 35], 512, 32, [15, 40, 35]),  # it would make the step more than twice as long
        ([300, 200], 512, 120, [20, 100]),  # a sixth
        ([(300, "a"), (200, "b")], 512, 100, [50, 50]),
        ([(300, "a"), (200, "a"), (90, "b")], 512, 60, [8, 22, 30]),
        (
            [(60, "a"), (60, "a"), (60, "b")],
            100,
            32,
            [60, 12, 12],
        ),  # the first short one of a tenant, and two fifths for others
        ([(40, "a"), (500, "b", 30.0), (500, "c")], 60, 32, [40, 20, 0]),  # what was saved up, as far as there is room
        ([(500, "a"), (500, "b"), (500, "c"), (40, "c")], 512, 32, [5, 5, 5, 40]),  # two fifths, however many tenants
        ([(60, "a"), (30, "a"), (60, "b"), (30, "b")], 512, 32, [60, 30, 60, 30]),
        (
            [(100, "a"), (105, "a"), (500, "b")],
            300,
            110,
            [100, 20, 20],
        ),  # its first has taken what the tenant's second needs
        ([(900, "a"), (70, "a"), (70, "b")], 100, 80, [11, 29, 40]),  # each is longer than its tenant's share
        ([], 512, 32, []),
    ],
)
def test_rows_of_prompts(prompts: list[Any], most: int, piece: int, rows: list[int]) -> None:
    made = [Prompt(*each) if isinstance(each, tuple) else Prompt(each) for each in prompts]
    found = policy.prompt_rows(made, most, piece, lambda prompt: prompt.whose)
    assert [found.get(each, 0) for each in made] == rows


@pytest.mark.parametrize(
    ("prompts", "rows", "owed"),
    [
        ([(40, 0.0), (100, 0.0)], [40, 0], [0.0, 8.0]),
        ([(40, 0.0), (100, 91.9)], [40, 0], [0.0, 99.9]),
        ([(40, 0.0), (100, 92.0)], [40, 100], [0.0, 0.0]),
        ([(300, 0.0), (200, 0.0)], [0, 200], [20.0, 0.0]),
        ([(300, 280.0), (200, 0.0)], [300, 0], [0.0, 0.0]),
    ],
)
def test_prompts_in_one_piece_save_up(prompts: list[tuple[int, float]], rows: list[int], owed: list[float]) -> None:
    made = [Prompt(count, "", saved) for count, saved in prompts]
    found = policy.prompt_rows(made, 512, 120 if rows[0] != 40 else 32, lambda prompt: prompt.whose, whole=True)
    assert [found.get(each, 0) for each in made] == rows and [each.owed for each in made] == pytest.approx(owed)


def test_parts_of_rows_are_saved() -> None:
    long, shorts = Prompt(500), [Prompt(4) for _ in range(3)]
    given = [policy.prompt_rows([long, short], 512, 32, lambda prompt: prompt.whose)[long] for short in shorts]
    assert given == [0, 1, 1] and long.owed == pytest.approx(0.4), "0.8 of a row each time"


@dataclass(eq=False)
class Running:
    uncomputed: int
    overtaken: int = 0
    may_wait_again: bool = True


def test_prompts_twice_as_long_give_way_the_newest_first() -> None:
    running = [
        Running(500),
        Running(20),
        Running(19),
        Running(90, 31),
        Running(90, 32),
        Running(90, 0, False),
        Running(40),
    ]
    assert policy.longer(running, 10) == [running[6], running[3], running[1]], "but for the first of several"
    assert policy.longer(running, 21) == [running[3]]
    assert policy.longer(running[:1], 250) == running[:1] and policy.longer(running[:1], 251) == []
    assert policy.longer(running[:2], 10) == [running[1]] and policy.longer([], 1) == []
