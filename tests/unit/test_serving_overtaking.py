"""A short prompt runs in the place, and in the pages, of long ones that have told nothing: in how many steps, and how often one gives way."""

from typing import Any

import pytest

from symbiosis.serving.lora.adapter import Adapter
from symbiosis.serving.request import Request, Sampling
from symbiosis.serving.scheduler import policy as policies
from symbiosis.serving.scheduler.scheduler import StepRules
from symbiosis.serving.scheduler.scheduler_output import BLOCK, Sequence
from tests.unit.test_serving_scheduler import ADAPTERS, LAYERS, Server

POLICIES = pytest.mark.parametrize("policy", ["fcfs", "abort", "vtc"])
LONG, SHORT = 200, 10  # tokens


def prompt(
    id: int, length: int, tenant: str = "", most: int = 1, adapter: Adapter | None = None, **more: Any
) -> Sequence:
    """A completion whose prompt is a prefix of no other's."""
    tokens = tuple(range(1000 * id, 1000 * id + length))
    request = Request(id=id, prompt=tokens, tenant=tenant, sampling=Sampling(max_tokens=most), **more)
    return Sequence(request, 0, [*[0] * (adapter.virtual if adapter else 0), *tokens], adapter, float(id))


def server_of(pages_of: int, **rules: Any) -> Server:
    """A server with pages for so many blocks of each layer. What comes has had 1,000 seconds for its first token."""
    return Server(pages_of * LAYERS, StepRules(**{"prefill_tokens": 32, "first_token_s": 1000.0, **rules}))


def add(server: Server, *sequences: Sequence) -> None:
    for each in sequences:
        server.scheduler.add([each])


def steps_until_told(server: Server, sequence: Sequence) -> int:
    steps = 0
    while not sequence.produced:
        assert server.step() is not None
        steps += 1
    return steps


def rows_until_all_is_told(server: Server) -> int:
    rows = 0
    while step := server.step():
        rows += step.rows
    server.check_all_is_given_back()
    return rows


@POLICIES
def test_where_long_prompts_have_all_places(policy: Any) -> None:
    server = server_of(1000, max_batch=4, policy=policy)
    longs = [prompt(id, LONG) for id in range(4)]
    add(server, *longs)
    server.step()
    assert server.scheduler.running == longs
    short = prompt(9, SHORT)
    add(server, short)
    assert steps_until_told(server, short) == 1
    assert server.scheduler.waiting == [longs[3]] and longs[3].overtaken == 1
    assert rows_until_all_is_told(server) == 4 * LONG - 32 - 2, "nothing of a long prompt was computed twice"
    assert server.scheduler.counts.evictions == 1


@POLICIES
def test_where_long_prompts_have_all_pages(policy: Any) -> None:
    blocks = LONG // BLOCK + 1
    server = server_of(2 * blocks + 2, policy=policy)
    longs = [prompt(id, LONG) for id in range(2)]
    add(server, *longs)
    server.step()
    assert server.scheduler.running == longs and server.blocks.spare() == 2 * LAYERS
    short = prompt(9, SHORT)
    add(server, short)
    assert steps_until_told(server, short) == 1 and server.scheduler.waiting == [longs[1]]
    assert rows_until_all_is_told(server) == 2 * LONG - 32 - 2


@POLICIES
def test_one_long_prompt_that_has_all_pages_finds_what_it_had_computed(policy: Any) -> None:
    server = server_of(LONG // BLOCK + 1, policy=policy)
    long = prompt(0, LONG)
    add(server, long)
    for _ in range(4):
        server.step()
    assert long.computed == 4 * 32
    short = prompt(9, SHORT, most=3)
    add(server, short)
    assert steps_until_told(server, short) == 1 and server.scheduler.waiting == [long] and not long.blocks
    for _ in range(2):
        server.step()
    assert not server.scheduler.running
    server.step()
    assert long.computed == 5 * 32, "it goes on where it was"
    rows_until_all_is_told(server)


def test_where_pages_of_a_prompt_were_needed_these_are_computed_again() -> None:
    server = server_of(LONG // BLOCK + 1)
    long = prompt(0, LONG)
    add(server, long)
    for _ in range(6):
        server.step()
    assert long.computed == 6 * 32 and server.blocks.spare() == 0
    short = prompt(9, 40)  # of three blocks; one was not computed yet
    long.computed = 120  # as if it had come earlier: else less is left of the long one than the short one has
    add(server, short)
    server.step()
    assert short in server.scheduler.running or short.produced
    while not long.began or long in server.scheduler.waiting:
        server.step()
    assert long.cached == 0 and rows_until_all_is_told(server) <= LONG


@POLICIES
@pytest.mark.parametrize("tenants", [2, 64])
def test_where_tenants_have_all_places(policy: Any, tenants: int) -> None:
    """Under vtc each has so few rows of a step that none of them would hold a short prompt."""
    server = server_of(10_000, max_batch=64, policy=policy, of_tenant=32, prefill_tokens=512)
    longs = [prompt(id, 2 * LONG, tenant=f"t{id % tenants}") for id in range(64)]
    add(server, *longs)
    server.step()
    assert len(server.scheduler.running) == 64
    others, mine = prompt(100, SHORT, tenant="new"), prompt(101, SHORT, tenant="t0")
    add(server, others, mine)
    assert steps_until_told(server, others) == 1 and mine.produced == 1
    rows_until_all_is_told(server)


def test_where_a_tenant_has_all_its_places_its_own_prompts_give_way() -> None:
    server = server_of(10_000, max_batch=8, of_tenant=4)
    add(
        server,
        *(prompt(id, LONG, tenant="ab"[id % 2]) for id in range(8)),
        prompt(8, LONG, tenant="a"),
        prompt(9, LONG, tenant="b"),
    )
    server.step()
    short = prompt(100, SHORT, tenant="a")
    add(server, short)
    assert steps_until_told(server, short) == 1
    assert [each.request.id for each in server.scheduler.waiting] == [6, 8, 9]


@POLICIES
def test_how_often_a_long_prompt_gives_way(policy: Any) -> None:
    """Two short ones come in each step. One of them runs in the place of the second long one, until this has given way so often."""
    server = server_of(2000, max_batch=3, policy=policy)
    longs = [prompt(id, 40 * LONG) for id in range(2)]
    add(server, *longs)
    server.step()
    told = []
    for step in range(policies.MOST_OVERTAKEN + 3):
        add(server, *(shorts := [prompt(10 + 2 * step + n, SHORT) for n in range(2)]))
        server.step()
        told.append(sum(each.produced for each in shorts))
    then = [1, 1, 1] if policy == "abort" else [1, 0, 0]
    assert told == [2] * policies.MOST_OVERTAKEN + then, "then they take turns in the third place, by the policy"
    assert server.scheduler.running[:2] == longs and server.scheduler.counts.evictions == policies.MOST_OVERTAKEN


@pytest.mark.parametrize(("more", "passes"), [(1, True), (0, False)])
def test_how_often_one_that_waits_is_passed_by(more: int, passes: bool) -> None:
    server = server_of(1000, max_batch=2)
    add(server, *(longs := [prompt(id, LONG) for id in range(3)]))
    server.step()
    assert server.scheduler.waiting == longs[2:]
    longs[2].overtaken = policies.MOST_OVERTAKEN - more
    add(server, short := prompt(9, SHORT))
    server.step()
    assert short.produced == passes and longs[2].overtaken == policies.MOST_OVERTAKEN


@POLICIES
def test_a_long_prompt_that_needs_all_pages_ends_however_many_short_ones_come(policy: Any) -> None:
    server = server_of(LONG // BLOCK + 1, max_batch=8, policy=policy)
    long = prompt(0, LONG)
    add(server, long)
    server.step()
    steps = 0
    while not long.produced:
        add(server, prompt(10 + steps, SHORT, most=3))
        assert server.step() is not None
        steps += 1
    assert long.overtaken == policies.MOST_OVERTAKEN
    assert steps == policies.MOST_OVERTAKEN + 2 + -(-(LONG - 32) // 32), (
        "those that run end, and then it has the pages to its end"
    )


def test_what_gives_way_is_not_too_late_for_its_deadline() -> None:
    server = server_of(1000, max_batch=2, policy="abort", first_token_s=3.0)
    longs = [prompt(id, LONG) for id in range(2)]
    add(server, *longs)
    server.step()
    short = prompt(9, SHORT, most=20)
    short.arrived = server.now
    add(server, short)
    for _ in range(5):
        server.step()
    assert longs[1] in server.scheduler.waiting and server.now > longs[1].arrived + 3.0
    rows_until_all_is_told(server)
    assert longs[1].produced == 1


@pytest.mark.parametrize(
    ("more", "before", "short"),
    [
        ({"most": 9}, 7, SHORT),  # it has told a token
        ({"prompt_logprobs": 0}, 2, SHORT),  # what it has computed would be lost
        ({}, 2, (LONG - 2 * 32) // 2 + 1),  # it is not twice as long as the other
        ({}, 2, SHORT),
    ],
)
def test_who_keeps_its_place(more: dict[str, Any], before: int, short: int) -> None:
    server = server_of(1000, max_batch=1)
    long, other = prompt(0, LONG, **more), prompt(9, short)
    add(server, long)
    for _ in range(before):
        server.step()
    add(server, other)
    server.step()
    assert (server.scheduler.running == [long]) == bool(more or short > SHORT)


def test_the_first_of_several_keeps_its_place() -> None:
    server = server_of(1000, max_batch=2)
    longs, shorts = [prompt(id, LONG) for id in range(2)], [prompt(id, SHORT, most=9) for id in range(8, 11)]
    add(server, *longs)
    server.step()
    add(server, *shorts)
    server.step()
    assert server.scheduler.running == [longs[0], shorts[0]] and shorts[0].produced == 1


def test_nobody_gives_way_in_vain() -> None:
    """The short prompt's adapter takes more pages than would come free."""
    server = server_of(2 * (LONG // BLOCK + 1) + 2)
    longs = [prompt(id, LONG) for id in range(2)]
    add(server, *longs)
    server.step()
    large = Adapter(name="large", kind="LORA", bytes=(LONG // BLOCK + 4) * LAYERS, version=9)
    add(server, prompt(9, SHORT, adapter=large))
    server.step()
    assert server.scheduler.running == longs
    small = prompt(10, SHORT, adapter=ADAPTERS[0])
    add(server, small)
    server.step()
    assert small.produced == 1 and server.scheduler.counts.evictions == 1


def test_an_answer_under_way_is_not_recomputed_for_a_prompt_while_a_step_is_under_way() -> None:
    server = Server(1000, StepRules(max_batch=2, prefill_tokens=32), ahead=True)
    longs = [prompt(id, LONG, most=5) for id in range(2)]
    add(server, *longs)
    server.step()
    short = prompt(9, SHORT, most=5)
    add(server, short)
    server.step()
    assert short in server.scheduler.running and longs[1] in server.scheduler.waiting
    rows_until_all_is_told(server)
    assert server.ended == {(0, 0), (1, 0), (9, 0)}
