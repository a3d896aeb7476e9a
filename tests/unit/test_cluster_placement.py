"""Where requests go in a cluster, and when servers come and go: by properties that hold of every snapshot."""

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.cluster.placement import Fleet, PlacedServer, RoutingRequest, State, admit, is_vain, place
from symbiosis.cluster.scaling import Change, consolidate, scale

BATCH, PAGES = 8, 40


@st.composite
def snapshots(draw: st.DrawFn) -> list[PlacedServer]:
    servers = []
    for number in range(draw(st.integers(0, 7))):
        free, running = draw(st.integers(0, PAGES)), draw(st.integers(0, BATCH))
        of_x = draw(st.integers(0, running))
        servers.append(
            PlacedServer(
                number=number, model=draw(st.sampled_from("mn")), batch=draw(st.sampled_from((4, BATCH))),
                running=running, pages=PAGES, free=free, share=draw(st.sampled_from((0, 2, 4))),
                tenants={"x": of_x, "y": draw(st.integers(0, running - of_x))},
                adapters=frozenset(draw(st.sets(st.sampled_from("ab")))), state=draw(st.sampled_from(State)),
            )
        )  # fmt: skip
    return servers


WISHES = st.builds(
    RoutingRequest,
    model=st.sampled_from("mn"),
    sequences=st.integers(1, 5),
    pages=st.integers(0, PAGES),
    adapter=st.sampled_from((None, "a", "b")),
    tenant=st.sampled_from("xy"),
    failed_at=st.frozensets(st.integers(0, 6)),
)


@given(snapshots(), WISHES)
def test_a_request_goes_to_the_busiest_server_on_which_it_fits(
    servers: list[PlacedServer], wish: RoutingRequest
) -> None:
    found = place(servers, wish)
    ready = [s for s in servers if s.model == wish.model and s.state == "ready"]
    others = [s for s in ready if s.number not in wish.failed_at] or ready
    fitting = [s for s in others if s.fits(wish.sequences, wish.pages)]
    if found is None:
        assert not fitting
        return
    assert found in fitting
    home = [s for s in fitting if wish.adapter in s.adapters and not s.is_light]
    assert (found.running, found.number) == max((s.running, s.number) for s in home or fitting)


@given(snapshots(), st.lists(st.tuples(WISHES, st.booleans())), st.data())
def test_the_quick_way_is_the_plain_rule_while_servers_change(
    servers: list[PlacedServer], wishes: list[tuple[RoutingRequest, bool]], data: st.DataObject
) -> None:
    fleet = Fleet(servers)
    for wish, changes in wishes:
        found = fleet.place(wish)
        assert found == place(fleet.servers, wish)
        if found is not None:
            fleet.put(found.holds(wish.sequences, wish.pages, wish.adapter))
        if changes and servers:
            fleet.put(data.draw(st.sampled_from(servers)))
        elif servers:
            fleet.drop(data.draw(st.sampled_from(servers)).number)


@given(snapshots(), st.lists(WISHES, max_size=12), st.integers(0, 6))
def test_what_waits_is_served_in_its_order_within_all_limits(
    servers: list[PlacedServer], waiting: list[RoutingRequest], most: int
) -> None:
    fleet, running = Fleet(servers), Counter(x=1)
    placed = dict(admit(waiting, fleet, running, {"x": most}))
    counts, before = Counter(server.number for server in placed.values()), {s.number: s for s in servers}
    for number, count in counts.items():
        idle = count == 1 and not before[number].running
        assert fleet[number].free >= 0 or idle or before[number].share, "one that is idle takes anything"
    if any(wish.tenant == "x" for wish in (waiting[position] for position in placed)):
        assert running["x"] <= most
    for position, wish in enumerate(waiting):
        passed = [
            each
            for at, each in enumerate(waiting[:position])
            if at not in placed and (each.model, each.tenant) == (wish.model, wish.tenant)
        ]
        assert not (passed and position in placed), "a tenant's requests keep their order"
        if wish.tenant == "y" and not passed and position not in placed:
            assert fleet.place(wish) is None, "the first of those that wait has no room anywhere"


@given(snapshots(), st.lists(WISHES, max_size=8), WISHES)
def test_what_has_no_room_keeps_no_other_tenant_waiting(
    servers: list[PlacedServer], others: list[RoutingRequest], wish: RoutingRequest
) -> None:
    fleet = Fleet(servers)
    mine = msgspec.structs.replace(wish, tenant="z")
    stuck = [each for each in others if fleet.place(each) is None and fleet.crowd(each) is None]
    alone = [server for _, server in admit([mine], Fleet(servers), Counter(), {})]
    assert [server for _, server in admit([*stuck, mine], fleet, Counter(), {})] == alone


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 12), st.integers(0, 12), st.randoms())
def test_the_next_is_always_of_the_tenant_that_runs_least(x: int, y: int, of_x: int, of_y: int, shuffled: Any) -> None:
    waiting = [RoutingRequest(model="m", tenant="x")] * of_x + [RoutingRequest(model="m", tenant="y")] * of_y
    shuffled.shuffle(waiting)
    running = Counter(x=x, y=y)
    placed = admit(waiting, Fleet([PlacedServer(number=1, model="m", batch=BATCH)]), running, {})
    assert len(placed) == min(BATCH, len(waiting))
    waits = Counter(x=of_x + x, y=of_y + y) - running
    if waits["x"] and waits["y"]:
        assert abs(running["x"] - running["y"]) <= max(1, abs(x - y) - BATCH)


def test_a_full_batch_makes_room_for_who_has_less_than_its_share() -> None:
    full = PlacedServer(number=1, model="m", batch=BATCH, running=BATCH, share=4, tenants={"x": BATCH})
    waiting = [RoutingRequest(model="m", tenant="y")] * 9 + [RoutingRequest(model="m", tenant="x")]
    fleet = Fleet([full])
    assert [position for position, _ in admit(waiting, fleet, Counter(x=BATCH), {})] == [0, 1, 2, 3]
    assert admit([RoutingRequest(model="m", tenant="z")], fleet, Counter(), {}) == [], (
        "all have their shares, as at the server"
    )
    elsewhere = msgspec.structs.replace(full, tenants={})
    assert admit(waiting, Fleet([elsewhere]), Counter(), {}), "what others have sent there is taken for one tenant's"
    assert admit(waiting, Fleet([msgspec.structs.replace(full, share=0)]), Counter(), {}) == []


@pytest.mark.parametrize("large", [RoutingRequest(model="m", sequences=6), RoutingRequest(model="m", pages=PAGES)])
def test_what_is_large_goes_after_a_while_where_it_can_begin(large: RoutingRequest) -> None:
    servers = [PlacedServer(number=n, model="m", batch=BATCH, running=4 + n, pages=PAGES, free=9) for n in (1, 2)]
    assert admit([large], Fleet(servers), Counter(), {}) == []
    assert [server.number for _, server in admit([large], Fleet(servers), Counter(), {}, overdue={0})] == [1]
    full = [msgspec.structs.replace(server, running=BATCH) for server in servers]
    assert admit([large], Fleet(full), Counter(), {}, overdue={0}) == []


def test_what_no_server_could_hold_goes_to_one_at_once() -> None:
    full = [PlacedServer(number=n, model="m", batch=BATCH, running=BATCH + n, pages=PAGES, longest=30) for n in (1, 2)]
    assert is_vain(full, 31) and not is_vain(full, 30) and not is_vain([], 31)
    waiting = [RoutingRequest(model="m"), RoutingRequest(model="m", tenant="x", is_vain=True)]
    assert [(at, server.number) for at, server in admit(waiting, Fleet(full), Counter(), {})] == [(1, 1)]


@given(snapshots(), st.data())
def test_consolidation_empties_a_light_server_into_busy_ones(servers: list[PlacedServer], data: st.DataObject) -> None:
    requests = {
        s.number: {
            100 * s.number + n: RoutingRequest(model=s.model, pages=data.draw(st.integers(0, 9)))
            for n in range(s.running)
        }
        for s in servers
    }
    one = [s for s in servers if s.model == "m"]
    if (moves := consolidate(one, requests)) is None:
        return
    by_number, load = {s.number: s for s in one}, Counter(moves.requests.values())
    assert by_number[moves.server].is_light and moves.requests.keys() == requests[moves.server].keys()
    for number, count in load.items():
        target = by_number[number]
        pages = sum(requests[moves.server][r].pages for r, to in moves.requests.items() if to == number)
        assert target.running > 0 and target.state == "ready" and number != moves.server
        assert target.running + count <= target.batch and pages <= target.free


@given(snapshots(), st.integers(0, 30), st.integers(0, 4), st.integers(4, 9))
def test_scaling_keeps_its_bounds_and_something_light(
    servers: list[PlacedServer], waiting: int, least: int, most: int
) -> None:
    change = scale(servers, waiting, least, most)
    ready = [s for s in servers if s.state == "ready"]
    live = [s for s in servers if s.state in ("ready", "starting", "lost")]
    assert not (change.start and change.release) and change.start >= 0
    assert bool(change.why) == bool(change.start or change.release)
    assert len(live) + change.start <= max(most, len(live))
    if change.release:
        left = [s for s in ready if s.number not in change.release]
        gone = [s for s in ready if s.number in change.release]
        assert len(left) >= least and any(s.is_light for s in left) and not waiting
        assert len(gone) == len(change.release) and not any(s.running for s in gone)
    if not any(s.is_light or s.state != "ready" for s in live) and len(live) < most:
        assert change.start, "no lightly loaded server is left"
    if len(live) < least:
        assert change.start >= least - len(live)


@given(snapshots(), st.data(), st.integers(0, 4), st.integers(4, 9))
def test_one_that_is_silent_for_a_moment_costs_no_server(
    servers: list[PlacedServer], data: st.DataObject, least: int, most: int
) -> None:
    """Nothing waits, and enough are there: whichever is lost, none is started for it, and none ends when it answers again."""
    ready = [s for s in servers if s.state == "ready"]
    if not ready or scale(servers, 0, least, most) != Change():
        return
    lost = data.draw(st.sampled_from(ready))
    changed = [msgspec.structs.replace(s, state=State.LOST) if s is lost else s for s in servers]
    assert scale(changed, 0, least, most) == Change()


def test_what_is_ready_is_not_released_for_what_only_starts() -> None:
    states = (State.READY, State.READY, State.STARTING)
    servers = [PlacedServer(number=n, model="m", batch=BATCH, state=state) for n, state in enumerate(states)]
    assert scale(servers, 0, 2, 3, idle=[0, 1]) == Change()
    assert scale([servers[0], servers[2]], 0, 1, 2, idle=[0]) == Change()


def test_a_lost_server_is_replaced_at_once_only_for_what_waits() -> None:
    lost = PlacedServer(number=1, model="m", batch=BATCH, state=State.LOST)
    assert scale([lost], 0, 1, 3) == Change()
    assert scale([lost], 1, 1, 3) == Change(1, why="1 sequences wait")


def test_what_has_been_idle_for_a_moment_only_stays() -> None:
    servers = [PlacedServer(number=number, model="m", batch=BATCH) for number in range(4)]
    assert scale(servers, 0, 1, 4, idle=[]).release == ()
    assert scale(servers, 0, 1, 4, idle=[3]).release == (3,)
