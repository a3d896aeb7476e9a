"""Where requests go in a cluster, and when servers come and go: by properties that hold of every snapshot."""

import sys
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.cluster.placement import Fleet, PlacedServer, RoutingRequest, State, admit, place, version_of
from symbiosis.cluster.scaling import Change, Moves, consolidate, scale

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
    server=st.sampled_from((None, None, 2, 5)),
)


@given(snapshots(), WISHES)
def test_a_request_goes_to_the_busiest_server_on_which_it_fits(
    servers: list[PlacedServer], wish: RoutingRequest
) -> None:
    found = place(servers, wish)
    if wish.server is not None:
        assert found == next((s for s in servers if s.number == wish.server), None)
        return
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
        is_named = any(waiting[position].server == number for position in placed)
        assert fleet[number].free >= 0 or idle or before[number].share or is_named, "one that is idle takes anything"
    if any(wish.tenant == "x" for wish in (waiting[position] for position in placed)):
        assert running["x"] <= most
    for position, wish in enumerate(waiting):
        passed = [each for at, each in enumerate(waiting[:position]) if at not in placed and each.queue == wish.queue]
        assert not (passed and position in placed), "a tenant's requests keep their order"
        if wish.tenant == "y" and not passed and position not in placed:
            assert fleet.place(wish) is None, "the first of those that wait has no room anywhere"


def test_what_is_more_than_a_tenant_may_have_now_is_overtaken_by_nothing_of_it() -> None:
    fleet = Fleet([server(1), server(2, model="n")])
    waiting = [wish(tenant="x", sequences=3), wish(tenant="x", model="n"), wish(tenant="x", server=2), wish(tenant="y")]
    assert [at for at, _ in admit(waiting, fleet, Counter(x=2), {"x": 4})] == [3]
    assert sorted(at for at, _ in admit(waiting, fleet, Counter(x=0), {"x": 4})) == [0, 1, 3]
    nothing = wish(tenant="x", server=2, sequences=0)
    assert [at for at, _ in admit([waiting[0], nothing], fleet, Counter(x=2), {"x": 4})] == [1]


def test_a_named_server_is_asked_whatever_it_says() -> None:
    full = server(3, running=BATCH, state=State.DRAINING)
    assert [
        number for _, number in admit([wish(server=3), wish(server=4)], Fleet([full, server(1)]), Counter(), {})
    ] == [full.holds(1, 0)]


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
    waiting = [RoutingRequest(model="m"), RoutingRequest(model="m", tenant="x", is_vain=True)]
    assert [(at, server.number) for at, server in admit(waiting, Fleet(full), Counter(), {})] == [(1, 1)]


def server(number: int = 1, running: int = 0, **options: Any) -> PlacedServer:
    return PlacedServer(**{"number": number, "model": "m", "batch": BATCH, "running": running, **options})


def wish(**options: Any) -> RoutingRequest:
    return RoutingRequest(**{"model": "m", **options})


def test_a_server_says_what_it_has_room_for() -> None:
    idle = PlacedServer(number=1, model="m", batch=8)
    nothing = {"running": 0, "pages": 0, "free": 0, "longest": sys.maxsize, "share": 0}
    assert idle == server(**nothing, tenants={}, adapters=frozenset(), state=State.READY)
    assert wish() == wish(sequences=1, pages=0, adapter=None, tenant="", is_vain=False, failed_at=frozenset())
    assert [server(running=n).is_light for n in (0, 1, 2, 3)] == [True, True, False, False], "a quarter is not light"
    assert idle.fits(99, 99), "one that is idle takes anything"
    busy = server(running=5, free=3)
    assert [busy.fits(n, 3) for n in (3, 4)] == [busy.fits(3, n) for n in (3, 4)] == [True, False]
    held = busy.holds(2, 1, "a", "x")
    assert held == server(running=7, free=2, adapters=frozenset("a")), "tenants are counted only where there are shares"
    assert held.holds(1, 0, "a") == server(running=8, free=2, adapters=frozenset("a"))
    shared = server(running=5, share=4, tenants={"x": 3, "y": 1})
    assert shared.holds(2, 0, None, "x") == server(running=7, share=4, tenants={"x": 5, "y": 1})
    assert shared.holds(-1, -3, None, "z") == server(running=4, free=3, share=4, tenants={"x": 3, "y": 1, "z": -1})


@pytest.mark.parametrize(
    ("running", "share", "tenants", "kept"),
    [
        (8, 0, {"x": 8}, 8),
        (8, 4, {"x": 8}, 4),
        (8, 4, {"x": 5, "y": 1}, 4 + 1 + 2),
        (8, 4, {"x": 2}, 2 + 4),
        (8, 4, {"x": 4, "y": 4}, 8),
        (9, 4, {"x": 4, "y": 4, "z": 1}, 9),
        (10, 4, {"x": 6, "y": 4}, 8),
        (10, 4, {"x": 7, "y": 3}, 7),
        (3, 4, {}, 3),
    ],
)
def test_those_beyond_a_tenants_share_give_way(running: int, share: int, tenants: dict[str, int], kept: int) -> None:
    one = server(running=running, share=share, tenants=tenants)
    assert one.may_give_way == (kept < min(running, BATCH))


def test_versions_get_what_they_are_to() -> None:
    shares = {"old": 3, "new": 1, "none": 0, "rare": 4}
    draws = {0.0: "old", 0.374: "old", 0.375: "new", 0.49: "new", 0.5: "rare", 0.999: "rare"}
    assert {draw: version_of(shares, draw) for draw in draws} == draws


def test_an_adapter_is_looked_for_on_the_busiest_servers() -> None:
    for at, found in ((16, 16), (17, 32)):
        servers = [server(n, n, batch=64, adapters=frozenset("a" if n == 33 - at else "")) for n in range(1, 33)]
        expected = 33 - at if at == 16 else found
        assert Fleet(servers).place(wish(adapter="a")) == place(servers, wish(adapter="a")) == servers[expected - 1]
    light = [server(1, 15, batch=64, adapters=frozenset("a")), server(2, 20, batch=64)]
    assert Fleet(light).place(wish(adapter="a")) == light[1], "a server that is lightly loaded is to become idle"
    assert Fleet([light[0], server(2)]).place(wish()) == light[0]


def test_where_it_failed_a_request_goes_last() -> None:
    servers = [server(1, 3), server(2, 4), server(3, 8)]
    for failed_at, found in (({2}, 1), ({1}, 2), ({1, 2}, None), ({1, 2, 3}, 2)):
        asked = wish(failed_at=frozenset(failed_at))
        assert place(servers, asked) == Fleet(servers).place(asked) == (servers[found - 1] if found else None)


def test_a_fleet_knows_its_servers() -> None:
    fleet = Fleet([server(1, 3), server(2, state=State.LOST)])
    assert 1 in fleet and 2 in fleet and 3 not in fleet and fleet[1].running == 3
    fleet.put(server(1, 4))
    fleet.drop(2)
    fleet.drop(9)
    assert fleet.servers == [server(1, 4)]
    fleet.drop(1)
    assert fleet.servers == [] and fleet.place(wish()) is None


def test_what_is_too_full_is_not_even_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    fits = PlacedServer.fits
    monkeypatch.setattr(
        PlacedServer, "fits", lambda self, *needs: bool(asked.append(self.number)) or fits(self, *needs)
    )
    fleet = Fleet([*(server(n, BATCH) for n in range(3, 100)), server(1, 6), server(2, 7)])
    assert fleet.place(wish(sequences=2)) == server(1, 6) and asked == [1]
    assert fleet.place(wish(sequences=9)) is None and asked == [1]
    fleet.put(server(100, 1))
    assert fleet.place(wish(sequences=8)) is None and asked == [1]
    fleet.put(server(101))
    assert fleet.place(wish(sequences=9)) == server(101), "which takes anything"


def test_what_does_not_fit_crowds_where_it_may() -> None:
    full = {"share": 4, "batch": BATCH}
    fleet = Fleet([
        server(1, 8, tenants={"x": 8}, **full), server(2, 9, tenants={"x": 9}, **full), server(3, 8, tenants={"x": 4, "y": 4}, **full),
        server(4, 7), server(5, 8, tenants={"x": 8}, model="n", **full),
    ])  # fmt: skip
    assert fleet.crowd(wish(tenant="y")) == fleet[1], "the least busy one where others give way"
    assert fleet.crowd(wish(tenant="y", failed_at=frozenset({1}))) == fleet[2]
    assert fleet.crowd(wish(tenant="y", failed_at=frozenset({1, 2, 3, 4}))) == fleet[1], "all have failed at it"
    assert fleet.crowd(wish(tenant="x")) is None
    assert fleet.crowd(wish(tenant="x"), is_overdue=True) == fleet[4]
    assert fleet.crowd(wish(tenant="x", failed_at=frozenset({4})), is_overdue=True) is None
    assert fleet.crowd(wish(is_vain=True, failed_at=frozenset({4}))) == fleet[1]
    fleet.put(server(1, 8, tenants={"x": 5, "y": 3}, **full))
    assert fleet.crowd(wish(tenant="y")) == fleet[1], "three are fewer than four"
    fleet.put(server(1, 9, tenants={"x": 5, "y": 4}, **full))
    assert fleet.crowd(wish(tenant="y")) == fleet[2]
    fleet.drop(2)
    assert fleet.crowd(wish(tenant="y")) is None
    assert Fleet().crowd(wish(is_vain=True)) is None
    for share, of_y, found in ((3, 3, False), (3, 2, True), (1, 0, True)):
        one = server(1, 8, share=share, tenants={"x": 8 - of_y, **({"y": of_y} if of_y else {})})
        assert Fleet([one]).crowd(wish(tenant="y")) == (one if found else None)


def test_who_may_have_so_many_has_so_many() -> None:
    waiting = [wish(tenant="x", sequences=2), wish(tenant="x"), wish(tenant="y", sequences=3), wish(tenant="x")]
    fleet, running = Fleet([server(1, batch=16, free=9)]), Counter(x=1)
    placed = admit(waiting, fleet, running, {"x": 4})
    assert [position for position, _ in placed] == [2, 0, 1], "y runs nothing; then x, up to four"
    assert [each.running for _, each in placed] == [3, 5, 6] and running == {"x": 4, "y": 3}
    assert fleet[1].running == 6
    assert admit([wish(tenant="x")], fleet, running, {"x": 5}) == [(0, fleet[1])] and running["x"] == 5


LIGHT = {1: 1, 2: 6, 3: 3}  # running, by server


@pytest.mark.parametrize(
    ("running", "of_least", "moves"),
    [
        (LIGHT, [wish()], Moves(1, {10: 2})),
        (LIGHT, [wish(), wish(), wish()], Moves(1, {10: 2, 11: 2, 12: 3})),
        (LIGHT, [wish(sequences=6)], None),
        (LIGHT, [wish(pages=9), wish(pages=2)], Moves(1, {10: 2, 11: 3})),
        (LIGHT, [wish(pages=11)], None),
        (LIGHT, [], None),
        ({1: 2, 2: 6}, [wish()], None),  # a quarter of its batch
        ({1: 1}, [wish()], None),
        ({0: 1, 1: 1, 2: 5}, [wish()], Moves(1, {10: 2})),  # of two, the higher number
        ({1: 1, 4: 0}, [wish()], None),  # nothing moves to one that is idle
    ],
)
def test_the_least_busy_server_is_emptied(
    running: dict[int, int], of_least: list[RoutingRequest], moves: Moves | None
) -> None:
    servers = [server(number, count, free=10) for number, count in running.items()]
    ending = [server(7, 1, free=10, state=State.DRAINING), server(8, 2, free=10, state=State.LOST)]
    assert consolidate([*servers, *ending], {1: dict(enumerate(of_least, 10))}) == moves


def counted(light: int = 0, idle: int = 0, busy: int = 0, starting: int = 0, lost: int = 0) -> list[PlacedServer]:
    kinds = [*[(1, State.READY)] * light, *[(0, State.READY)] * idle, *[(8, State.READY)] * busy]
    kinds += [*[(0, State.STARTING)] * starting, *[(3, State.LOST)] * lost]
    return [server(number, running, state=state) for number, (running, state) in enumerate(kinds)]


@pytest.mark.parametrize(
    ("servers", "waiting", "least", "most", "start", "release", "why"),
    [
        (counted(), 0, 2, 4, 2, (), "0 are there, and 2 are the least"),
        (counted(), 0, 0, 4, 1, (), "0 are lightly loaded, and 1 should be"),
        (counted(), 0, 0, 0, 0, (), ""),
        (counted(busy=2), 0, 1, 4, 1, (), "0 are lightly loaded, and 1 should be"),
        (counted(busy=2, light=1), 0, 1, 4, 0, (), ""),
        (counted(busy=10), 0, 1, 20, 1, (), "0 are lightly loaded, and 1 should be"),
        (counted(busy=11), 0, 1, 20, 2, (), "0 are lightly loaded, and 2 should be"),
        (counted(busy=10, lost=1), 0, 1, 20, 1, (), "1 are lightly loaded, and 2 should be"),
        (counted(busy=11), 0, 1, 12, 1, (), "0 are lightly loaded, and 2 should be"),
        (counted(busy=8, idle=1), 9, 1, 20, 2, (), "9 sequences wait"),
        (counted(busy=8, idle=1), 8, 1, 20, 1, (), "8 sequences wait"),
        (counted(busy=1, starting=1), 8, 1, 20, 0, (), ""),
        (counted(busy=1, starting=1), 9, 1, 20, 1, (), "9 sequences wait"),
        (counted(busy=1, lost=1), 8, 1, 20, 1, (), "8 sequences wait"),
        (counted(busy=1, lost=1), 8, 1, 2, 0, (), ""),
        (counted(), 3, 0, 9, 3, (), "3 sequences wait"),
        (counted(idle=4), 1, 0, 4, 0, (), ""),
        (counted(idle=4), 0, 0, 4, 0, (0, 1, 2), "it was idle, and 4 are ready, of which 4 are lightly loaded"),
        (counted(idle=4), 0, 2, 4, 0, (0, 1), "it was idle, and 4 are ready, of which 4 are lightly loaded"),
        (counted(light=1, idle=2), 0, 0, 4, 0, (1, 2), "it was idle, and 3 are ready, of which 3 are lightly loaded"),
        (counted(idle=2, starting=1), 0, 2, 4, 0, (), ""),
        (counted(idle=1, starting=1), 0, 1, 2, 0, (), ""),
        (counted(light=1, idle=1, busy=10), 0, 0, 20, 0, (), ""),
        (counted(lost=1), 0, 1, 3, 0, (), ""),
        (counted(lost=1), 1, 1, 3, 1, (), "1 sequences wait"),
        (counted(idle=3, busy=11), 0, 2, 20, 0, (0,), "it was idle, and 14 are ready, of which 3 are lightly loaded"),
        (counted(idle=10, busy=10), 0, 2, 30, 0, tuple(range(9)), "it was idle, and 20 are ready, of which 10 are lightly loaded"),
    ],
)  # fmt: skip
def test_what_is_started_and_what_ends(
    servers: list[PlacedServer], waiting: int, least: int, most: int, start: int, release: tuple[int, ...], why: str
) -> None:
    assert scale(servers, waiting, least, most) == Change(start, release, why)
    assert Change() == Change(0, (), "")


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


def test_what_has_been_idle_for_a_moment_only_stays() -> None:
    servers = [PlacedServer(number=number, model="m", batch=BATCH) for number in range(4)]
    assert scale(servers, 0, 1, 4, idle=[]).release == ()
    assert scale(servers, 0, 1, 4, idle=[3]).release == (3,)
