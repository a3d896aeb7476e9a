"""What a front end makes of its servers: who waits for one, and what each says of itself, whatever that is."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from symbiosis.base.logs import JsonLines, unwritten
from symbiosis.build import build
from symbiosis.cluster.placement import RoutingRequest
from symbiosis.cluster.router import server_registry
from symbiosis.cluster.router.cluster_page import together
from symbiosis.cluster.router.server_registry import InFlight, Seen, ServerRegistry
from symbiosis.protocol.cluster_state import Member, Told
from symbiosis.serving.engine.engine_stats import EngineStats, Histogram


def view_of(url: str = "") -> ServerRegistry:
    """A view of one server that takes up to eight sequences."""
    found = ServerRegistry("none", {})
    member = Member(name="m-server-1", kind="server", model="m", number=1, url=url, state="ready", batch=8)
    found.seen[1] = Seen(member)
    found._put(found.seen[1])
    return found


def flight(sequences: int = 1) -> InFlight:
    return InFlight(RoutingRequest(model="m", sequences=sequences), print)


def test_only_what_has_no_server_waits() -> None:
    """... so that no server is started for a request that has just been placed."""
    of_one = view_of()

    async def place() -> None:
        first = flight(6)
        await of_one.place(first)
        assert not of_one.waiting
        second = asyncio.create_task(of_one.place(flight(3)))
        await asyncio.sleep(0)
        assert of_one.waiting == {"m": 3}
        of_one.leave(first)
        assert not of_one.waiting
        await second
        third = asyncio.create_task(of_one.place(flight(8)))
        await asyncio.sleep(0)
        assert of_one.waiting == {"m": 8}
        third.cancel()
        await asyncio.wait([third])
        assert not of_one.waiting

    asyncio.run(place())


def test_who_gives_up_waiting_makes_room_for_those_behind_alone() -> None:
    of_one = view_of()

    async def place() -> None:
        first = flight(8)
        await of_one.place(first)
        gives_up, stays = (asyncio.create_task(of_one.place(flight(count))) for count in (2, 3))
        await asyncio.sleep(0)
        gives_up.cancel()
        await asyncio.wait([gives_up])
        assert of_one.waiting == {"m": 3}
        of_one.leave(first)
        await asyncio.wait_for(stays, 20)
        assert of_one.seen[1].mine == 3 and not of_one.waiting

    asyncio.run(place())


def test_what_placement_is_told_of_a_server() -> None:
    seen = view_of().seen[1]
    unasked = seen.told()
    assert min(unasked.free, unasked.pages, unasked.longest) > 10**15, "before it was asked, anything fits"
    for tenant, sequences in (("a", 2), ("b", 1), ("a", 3)):
        seen.flights.add(InFlight(RoutingRequest(model="m", tenant=tenant, sequences=sequences), print))
    seen.others, seen.room, seen.promised, seen.tokens = 4, 100, 30, 500
    told = seen.told()
    assert told.tenants == {"a": 5, "b": 1} and told.running == 6 + 4
    assert (told.free, told.pages, told.state) == (100 - 30, 500, "ready")


@pytest.mark.parametrize(
    ("state", "is_lost", "moved"),
    [("ready", False, []), ("ready", True, ["lost"]), ("draining", False, ["moved"]), ("lost", False, ["lost"])],
)
def test_what_a_server_had_goes_elsewhere_when_it_takes_nothing_any_more(
    state: str, is_lost: bool, moved: list[str]
) -> None:
    of_one, told = view_of(), list[str]()
    seen = of_one.seen[1]
    seen.flights.add(InFlight(RoutingRequest(model="m"), told.append))
    seen.member, seen.is_lost = msgspec.structs.replace(seen.member, state=state), is_lost
    of_one._put(seen)
    assert told == moved


def test_each_server_is_asked_how_it_is_until_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def ask(registry: ServerRegistry, seen: Seen) -> None:
        asked.append(seen.member.number)
        await asyncio.Event().wait()

    monkeypatch.setattr(ServerRegistry, "_ask", ask)
    one = Member(name="m-server-1", kind="server", model="m", number=1, url="http://one", state="ready", batch=8)
    other = msgspec.structs.replace(one, name="m-server-2", number=2)
    starting = msgspec.structs.replace(one, name="m-server-3", number=3, url="")

    async def look() -> None:
        registry = ServerRegistry("none", {})
        for _ in range(2):
            registry._take(Told(name="none", url="", members=(one, other, starting)))
            await asyncio.sleep(0)
        assert asked == [1, 2], "one that has no address yet is not asked"
        watch = registry.seen[2].watch
        registry._take(Told(name="none", url="", members=(one,)))
        await asyncio.sleep(0)
        assert watch is not None and watch.cancelled() and list(registry.seen) == [1]
        registry.seen[1].watch.cancel()

    asyncio.run(look())


SERVING = {"status": "serving", "requests": 3, "step_s": 0.5}
MEMORY = {"room": 5, "tokens": 9, "longest": 7}
WRONG = [
    b"[]", b"null", b"7", b"{", b"", b"\xff", b'"\xff"', b"[" * 9000 + b"]" * 9000,
    b'{"status": 1}', b'{"status": "serving", "requests": 1e999}',
    *(msgspec.json.encode({**SERVING, **MEMORY, "room": room}) for room in ("much", None, [], 1.5)),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: repr(wrong[:40]))
def test_a_server_that_says_nonsense_is_lost_until_it_says_how_it_is(
    wrong: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("ASK_EVERY_S", 0.001), ("LOST_S", 0.004)):
        monkeypatch.setattr(server_registry, name, seconds)
    says = [wrong]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(says[-1])
        writer.write(head + says[-1])
        writer.close()

    async def ask() -> Seen:
        async with asyncio.timeout(20), await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            of_one = view_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            watch = asyncio.create_task(of_one._ask(of_one.seen[1]))
            for is_lost in (True, False):
                while of_one.seen[1].is_lost != is_lost:
                    assert not watch.done(), "nobody asks it any more"
                    await asyncio.sleep(0)
                says.append(msgspec.json.encode({**SERVING, **MEMORY}))
            watch.cancel()
            return of_one.seen[1]

    seen = asyncio.run(ask())
    assert (seen.others, seen.room, seen.tokens, seen.longest) == (3, 5, 9, 7)


def test_what_a_server_leaves_out_of_its_memory_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    says = [SERVING, SERVING | MEMORY]

    async def answer_of(url: str, path: str) -> object:
        return says.pop()

    monkeypatch.setattr(server_registry, "answer_of", answer_of)
    of_one = view_of()
    for _ in range(2):
        assert asyncio.run(of_one._answers(of_one.seen[1]))
        assert (of_one.seen[1].room, of_one.seen[1].tokens, of_one.seen[1].longest) == (5, 9, 7)


def test_a_server_of_another_build_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    says = [SERVING | {"build": build()}, *[SERVING | {"build": "0.0.9+g\x1babc"}] * 2, SERVING]

    async def answer_of(url: str, path: str) -> object:
        return says.pop()

    monkeypatch.setattr(server_registry, "answer_of", answer_of)
    of_one = view_of()
    told = []
    for _ in range(4):
        assert asyncio.run(of_one._answers(of_one.seen[1]))
        told.append(len(caplog.records))
    assert told == [1, 2, 2, 2]
    assert "of another release" in caplog.messages[0]
    assert f"m-server-1 is symbiosis 0.0.9+g?abc, this front end {build()}" in caplog.messages[1]


def test_a_log_on_a_full_disk_holds_up_no_request(caplog: pytest.LogCaptureFixture) -> None:
    of_one = view_of()

    async def place() -> None:
        for _ in range(3):
            await of_one.place(flight())

    of_one._log = JsonLines(Path("/dev/full"), "decision")
    before = unwritten["decision"]
    asyncio.run(place())
    assert of_one.seen[1].mine == 3
    assert unwritten["decision"] - before == 3 and caplog.text.count("cannot write the decision log") == 1


def test_the_figures_of_a_cluster_are_the_sums_of_its_servers() -> None:
    """Of all that there are."""
    one, other = EngineStats(), EngineStats()
    for each, value in ((one, 3), (other, 4)):
        for name in each.__struct_fields__:
            if isinstance(getattr(each, name), int):
                setattr(each, name, value)
            elif isinstance(getattr(each, name), Histogram):
                getattr(each, name).observe(value)
    one.finished, other.finished = {"stop": 3, "abort": 1}, {"stop": 4, "length": 2}
    both = together([one, other])
    for name in set(both.__struct_fields__) - {"finished"}:
        found = getattr(both, name)
        assert (found.count, found.total) == (2, 7) if isinstance(found, Histogram) else found == 7, name
    assert both.finished == {"stop": 7, "abort": 1, "length": 2}
