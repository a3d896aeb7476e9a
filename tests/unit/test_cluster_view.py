"""What a front end makes of its servers: who waits for one, and what each says of itself, whatever that is."""

import asyncio

from symbiosis.cluster.front.view import Flight, Seen, View
from symbiosis.cluster.placement import Wish
from symbiosis.clusters import Member


def view_of(url: str = "") -> View:
    """A view of one server that takes up to eight sequences."""
    view = View("none", {})
    member = Member(name="m-server-1", kind="server", model="m", number=1, url=url, state="ready", batch=8)
    view.seen[1] = Seen(member)
    view._put(view.seen[1])
    return view


def flight(sequences: int = 1) -> Flight:
    return Flight(Wish(model="m", sequences=sequences), print)


def test_only_what_has_no_server_waits() -> None:
    """... so that no server is started for a request that has just been placed."""
    view = view_of()

    async def place() -> None:
        first = flight(6)
        await view.place(first)
        assert not view.waiting
        second = asyncio.create_task(view.place(flight(3)))
        await asyncio.sleep(0)
        assert view.waiting == {"m": 3}
        view.leave(first)
        assert not view.waiting
        await second
        third = asyncio.create_task(view.place(flight(8)))
        await asyncio.sleep(0)
        assert view.waiting == {"m": 8}
        third.cancel()
        await asyncio.wait([third])
        assert not view.waiting

    asyncio.run(place())
