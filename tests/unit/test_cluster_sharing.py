"""What tenants share: no room is closed by one to the others, whatever comes in which order."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.base.fair_share import FairShare, Lease
from symbiosis.base.key_lines import KeyLine
from symbiosis.cluster.placement import RoutingRequest
from symbiosis.cluster.router.app import make_app
from symbiosis.cluster.router.completion_fields import CompletionFields
from symbiosis.cluster.router.relay import Relay, no_room
from symbiosis.cluster.router.router_state import RouterState
from symbiosis.cluster.router.server_registry import MOST_WAITING, InFlight, Seen, ServerRegistry
from symbiosis.cluster.router.upstream import Lost
from symbiosis.protocol.cluster_state import Member, Told
from symbiosis.server.api_keys import Tenant
from symbiosis.server.ipc.tenant_threads import LARGE
from symbiosis.server.server_marks import mark_of, new_session_id
from symbiosis.server.sse import SseWriter
from tests.secret_files import write_secret
from tests.waits import until

KEYS = {name: {"Authorization": f"Bearer {name}-key-1"} for name in ("alice", "eve")}


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 1 << 12)), max_size=60))
def test_a_room_is_never_more_than_full_and_never_closed_to_who_has_nothing(asked: list[tuple[str, int]]) -> None:
    room, held = FairShare(1 << 12), dict.fromkeys("abcd", 0)
    for name, more in asked:
        if room.has(name, more):
            room.take(name, more)
            held[name] += more
        assert sum(held.values()) <= 1 << 12
        assert room.has("new", max(1, (1 << 12 >> len([1 for has in held.values() if has])) // 2))
    for name, has in held.items():
        room.give_back(name, has)
    assert room.has("a", 1 << 11) and not room.has("a", (1 << 11) + 1)


@pytest.fixture
def front(tmp_path: Path) -> RouterState:
    """A front end whose only server takes nothing yet: what is let in waits."""
    write_secret(tmp_path / "keys", "alice alice-key-1\neve eve-key-1\n")
    view = ServerRegistry("none", {"eve": 3000})
    member = Member(name="m-server-1", kind="server", model="m", number=1, batch=8, share=4, most=4096)
    view.told, view.seen = Told(name="none", url="", members=(member,)), {1: Seen(member)}
    return RouterState(view, str(tmp_path / "keys"))


RUN = f"{new_session_id('gone-server-1')}:train:0"


async def told(
    front: RouterState, name: str, path: str = "/v1/completions", within_s: float = 0.3, **body: Any
) -> tuple[int, str]:
    """What is answered within a moment; 0 if the request waits."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(front)), base_url="http://localhost") as http:
        usual = {"prompt": "a"} if path == "/v1/completions" else {}
        post = http.post(path, json={"model": "m", **usual, **body}, headers=KEYS[name])
        try:
            answer = await asyncio.wait_for(post, within_s)
        except TimeoutError:
            return 0, ""
        return answer.status_code, answer.text


@pytest.mark.parametrize(
    ("name", "body", "why"),
    [
        ("eve", {"prompt": ["a"] * 24, "n": 128}, "at most 3000 completions, and this would be 3072"),
        ("alice", {"prompt": ["a"] * 33, "n": 128}, "at most 4096 completions, and this would be 4224"),
    ],
)
def test_what_can_never_be_had_is_refused_at_once(
    front: RouterState, name: str, body: dict[str, Any], why: str
) -> None:
    status, text = asyncio.run(told(front, name, **body))
    assert status == 400 and why in text
    assert front.view.room.has("other", MOST_WAITING // 2), "nothing of it waits"


@pytest.mark.parametrize(
    ("path", "field", "what"),
    [
        ("/v1/completions", "prompt", "completions, and this would be 3001"),
        ("/v1/embeddings", "input", "texts, and this would be 3001: send fewer at once in input"),
    ],
)
def test_what_a_run_computes_is_of_all_that_its_key_may_have(
    front: RouterState, path: str, field: str, what: str
) -> None:
    front.view._marks = {mark_of("m-server-1"): 1}
    run = f"{new_session_id('m-server-1')}:train:0"
    status, text = asyncio.run(told(front, "eve", path, model=run, **{field: ["a"] * 3001}))
    assert status == 400 and f"at most 3000 {what}" in text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": RUN}),
        ("/v1/responses", {"model": RUN, "input": "a"}),
        ("/v1/embeddings", {"model": RUN, "input": "a"}),
        ("/generate", {"inputs": "a", "parameters": {"adapter_id": RUN}}),
    ],
)
def test_what_is_asked_of_a_run_goes_to_its_server(front: RouterState, path: str, body: dict[str, Any]) -> None:
    status, text = asyncio.run(told(front, "eve", path, 30, **body))
    assert status == 404 and "no model of this cluster trains" in text


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/embeddings", {"input": ["a"] * 3001}, "input"),
        ("/v1/rerank", {"query": "q", "documents": ["a"] * 3000}, "documents"),
        ("/v1/score", {"text_1": ["a"] * 1501, "text_2": ["a"] * 1500}, "text_1"),
    ],
)
def test_too_many_texts_are_called_so(front: RouterState, path: str, body: dict[str, Any], field: str) -> None:
    status, text = asyncio.run(told(front, "eve", path, 30, **body))
    error = msgspec.json.decode(text)["error"]
    assert (status, error["param"]) == (400, field)
    assert error["message"] == f"at most 3000 texts, and this would be 3001: send fewer at once in {field}"


def test_nobody_closes_the_waiting_room_to_others(front: RouterState) -> None:
    async def ask() -> None:
        many = [asyncio.create_task(told(front, "eve", prompt=["a"] * 16, n=64)) for _ in range(8)]
        await until(lambda: front.view.waiting.total() == 4 * 16 * 64)
        eve, alice = await told(front, "eve", n=64), await told(front, "alice", n=64)
        assert eve[0] == 503 and "too many requests wait" in eve[1] and alice[0] == 0, "alice's waits"
        assert sorted(status for status, _ in await asyncio.gather(*many)) == [0] * 4 + [503] * 4

    asyncio.run(ask())
    assert front.view.room.has("other", MOST_WAITING // 2), "those who have gone wait no more"


def test_a_decision_says_which_server_was_chosen(front: RouterState) -> None:
    view = front.view
    view.seen[1].member = msgspec.structs.replace(view.seen[1].member, state="ready")
    view._put(view.seen[1])
    asyncio.run(view.place(InFlight(RoutingRequest(model="m", tenant="eve"), print)))
    (decision,) = view.decisions
    assert (decision["server"], decision["tenant"], decision["why"]) == ("m-server-1", "eve", "new")


def test_who_waited_in_vain_is_told_why(front: RouterState) -> None:
    view = front.view
    assert str(no_room(view, "m")) == "no server of m is ready (1 starting): try again later"
    view.seen[1].member = msgspec.structs.replace(view.seen[1].member, state="ready")
    assert str(no_room(view, "m")) == "no server has room: try again later"
    assert str(no_room(view, "other")) == "no server of other is ready (it has none): try again later"


def test_who_has_all_that_it_may_have_waits_for_its_own_server_too(front: RouterState) -> None:
    view, seen = front.view, front.view.seen[1]
    first, second, third, others, small = (
        InFlight(RoutingRequest(model="m", sequences=count, tenant=name, server=1), print)
        for name, count in (("eve", 2999), ("eve", 2), ("eve", 1), ("alice", 2), ("eve", 0))
    )

    async def ask() -> None:
        view._put(seen)
        await view.place(first)
        waits = [asyncio.create_task(view.place(each)) for each in (second, third)]
        await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(view.place(others), view.place(small)), 5)
        assert view.waiting == {"m": 3} and not any(each.done() for each in waits), "nothing overtakes the second"
        view.leave(first)
        await asyncio.wait_for(asyncio.gather(*waits), 5)
        assert seen.flights == {second, third, others, small} and not view.decisions

    asyncio.run(ask())


def test_who_waits_for_a_server_of_its_own_is_told_when_that_is_gone(front: RouterState) -> None:
    view = front.view
    first, second = (
        InFlight(RoutingRequest(model="m", sequences=2000, tenant="eve", server=1), print) for _ in range(2)
    )

    async def ask() -> None:
        view._put(view.seen[1])
        await view.place(first)
        waits = asyncio.create_task(view.place(second))
        await asyncio.sleep(0)
        view._take(Told(name="none", url="", members=()))
        with pytest.raises(Lost):
            await asyncio.wait_for(waits, 5)

    asyncio.run(ask())


def test_what_waits_to_be_read_waits(front: RouterState) -> None:
    """A large body, while the threads that read such ones are taken."""
    free = threading.Event()
    taken = [front.threads.submit(name, free.wait) for name in "xy"]

    async def ask() -> None:
        asked = asyncio.create_task(told(front, "alice", within_s=60, prompt="a" * 2 * LARGE))
        await until(lambda: front.view.waiting == {"": 1})
        free.set()
        await until(lambda: front.view.waiting == {"m": 1})
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert not front.view.waiting

    try:
        asyncio.run(ask())
    finally:
        free.set()
    assert all(each.result() for each in taken)


def test_an_answer_that_is_held_counts_like_a_body() -> None:
    """A stream of events that is joined for a client, in a room that is too small for it."""
    event = b': 0 5 .\ndata: {"model":"m","choices":[{"index":0,"text":"%s"}]}' % (b"x" * 500)
    room, sent = FairShare(8000), list[Any]()
    held = Lease(room, "eve")
    relay = Relay(
        ServerRegistry("none", {}),
        "/",
        {},
        CompletionFields(b"{}"),
        RoutingRequest(model="m"),
        held,
        Tenant(KeyLine()).admit(1, 0.0),
    )

    class Answer:
        async def piece(self) -> bytes:
            return event + b"\n\n"

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        relay._answer = Answer()  # type: ignore[assignment]
        outlet = SseWriter(send, {})
        await asyncio.wait_for(relay._stream(relay._answer, outlet), 10)  # type: ignore[arg-type]

    begun = time.monotonic()
    with pytest.raises(Exception, match="too large together"):
        asyncio.run(run())
    assert relay._joined is not None and not sent and time.monotonic() - begun < 5
    assert 3000 < held.size <= 4000
    held.end()
    assert room.has("eve", 4000)
