"""What a request costs its key in a cluster: what servers did for it, and nothing if they refused it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.types import Message

from symbiosis.cluster.router import relay
from symbiosis.cluster.router.app import make_app
from symbiosis.cluster.router.router_state import RouterState
from symbiosis.cluster.router.server_registry import Seen, ServerRegistry
from symbiosis.protocol.cluster_state import Member, Told
from symbiosis.server.server_marks import mark_of, new_session_id
from tests.secret_files import write_secret
from tests.waits import until

KEY = {"Authorization": "Bearer anna-key-1"}
PER_S, PROMPT = 1000, 100  # tokens
HEAD = b"HTTP/1.1 %b\r\n\r\n"
STREAM = HEAD % b"200 OK" + b': 0 17 4 .\ndata: {"choices":[{"index":0,"text":"ab"}]}\n\n'

COUNTED = HEAD % b"102 Processing\r\nX-Symbiosis-Tokens: 300"
EVENTS = HEAD % b"200 OK\r\nContent-Type: text/event-stream"
EVENT = b'data: {"response":{"usage":{"total_tokens":0}}}\n\n'
RESPONSE = EVENTS + EVENT


RUN = f"{new_session_id('s')}:train:0"
RUN_STREAM = EVENTS + b'data: {"choices":[]}\n\n'
RUN_WHOLE = HEAD % b"102 Processing\r\nX-Symbiosis-Tokens: 7" + HEAD % b"200 OK" + b'{"usage":{"total_tokens":0}}'
COUNTED_STREAM, COUNTED_RESPONSE = COUNTED + STREAM, COUNTED + EVENTS + b": total_tokens 309\n\n" + EVENT
GOES_ON = (b"", COUNTED, STREAM, RESPONSE, RUN_STREAM, COUNTED_STREAM, COUNTED_RESPONSE)  # answers that do not end


@asynccontextmanager
async def front_before(
    answer: bytes, state: str, folder: Path, limits: str
) -> AsyncIterator[tuple[RouterState, asyncio.Event]]:
    """A front end for a server in this state that answers so, and whether that was asked."""
    write_secret(folder / "keys", f"anna anna-key-1 {limits}\n")
    front, reached = RouterState(ServerRegistry("none", {}), str(folder / "keys")), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
        reached.set()
        if answer in GOES_ON:
            writer.write(answer)
            await reader.read()
        else:
            head, _, body = answer.removeprefix(COUNTED).rpartition(b"\r\n\r\n")
            writer.write(COUNTED * answer.startswith(COUNTED))
            writer.write(b"%b\r\nContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        member = Member(name="s", kind="server", model="m", number=1, url=url, state=state, batch=8)
        front.view.told, front.view.seen = Told(name="none", url="", members=(member,)), {1: Seen(member)}
        front.view._marks = {mark_of("s"): 1}
        front.view._put(front.view.seen[1])
        yield front, reached


class Client:
    """One who asks, and hangs up when told to."""

    def __init__(self, front: RouterState, path: str, body: dict[str, Any]) -> None:
        self.status, self.got, self._left = 0, b"", asyncio.Event()
        self._body: bytes | None = msgspec.json.encode(body)
        headers = [(b"authorization", KEY["Authorization"].encode()), (b"host", b"localhost")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "scheme": "http",
        }
        scope |= {"headers": headers, "http_version": "1.1", "root_path": "", "server": ("localhost", 80), "client": None}  # fmt: skip
        self.answer = asyncio.create_task(make_app(front)(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if (body := self._body) is not None:
            self._body = None
            return {"type": "http.request", "body": body}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.status, self.got = message.get("status", self.status), self.got + message.get("body", b"")

    async def leave(self) -> None:
        self._left.set()
        await asyncio.wait_for(self.answer, 30)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for something, or for the answer's end."""
        await until(lambda: self.answer.done() or condition(), 30)


def charged(
    answer: bytes, state: str, folder: Path, path: str = "/v1/completions", stays: bool = False, **body: Any
) -> int:
    """Return what a request costs a key, if a server in this state answers it so. Its client leaves when nothing more would come."""

    async def ask() -> int:
        async with front_before(answer, state, folder, f"tokens_per_s={PER_S}") as (front, reached):
            asked = {"model": "m", "stream": True, **(body or {"prompt": "abcd" * PROMPT})}
            client = Client(front, path, asked)
            if state != "ready":
                await client.until(lambda: front.view.waiting and not stays)
            elif answer not in (b"", COUNTED):
                await client.until(lambda: client.got and answer in GOES_ON)
            else:
                await client.until(reached.is_set)
            if answer == COUNTED:
                spent = front.keys.tenant(KEY["Authorization"]).day
                await client.until(lambda: spent.reserved > 300)
            await client.leave()
            tenant = front.keys.tenant(KEY["Authorization"])
            assert not tenant.under_way and not tenant.day.reserved
            assert tenant.day.spent == round(tenant.tokens.owed + PER_S)
            return round(tenant.tokens.owed + PER_S)  # it began with what one second brings

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("answer", "state", "tokens"),
    [
        (HEAD % b"400 Bad Request" + b'{"error":{}}', "ready", 0),
        (b"", "starting", 0),
        (b"", "ready", PROMPT),
        (STREAM, "ready", PROMPT + 2),
        (STREAM + b"data: [DONE]\n\n", "ready", PROMPT + 2),
        (COUNTED, "ready", 300),
        (COUNTED_STREAM, "ready", 302),
        (COUNTED_STREAM + b"data: [DONE]\n\n", "ready", 302),
        (COUNTED + HEAD % b"400 Bad Request" + b'{"error":{}}', "ready", 0),
    ],
    ids=[
        "refused",
        "left while it waited",
        "left before the first token",
        "left later",
        "answered",
        "counted",
        "counted and left",
        "counted and answered",
        "counted and refused",
    ],
)
def test_a_prompt_costs_something_once_a_server_has_it(answer: bytes, state: str, tokens: int, tmp_path: Path) -> None:
    assert charged(answer, state, tmp_path) == tokens


@pytest.mark.parametrize(
    ("answer", "state", "least", "most"),
    [
        (HEAD % b"400 Bad Request" + b'{"error":{}}', "ready", 0, 0),
        (b"", "starting", 0, 0),
        (b"", "ready", PROMPT, PROMPT + 50),
        (RESPONSE, "ready", PROMPT, PROMPT + 50),
        (COUNTED, "ready", 300, 300),
        (COUNTED_RESPONSE, "ready", 309, 309),
        (COUNTED_RESPONSE + b": total_tokens 350\n\n" + EVENT, "ready", 350, 350),
    ],
    ids=[
        "refused",
        "left while it waited",
        "left before it was counted",
        "not counted",
        "left before the first token",
        "left later",
        "answered",
    ],
)
def test_a_response_costs_what_its_server_tells(
    answer: bytes, state: str, least: int, most: int, tmp_path: Path
) -> None:
    asked = {"input": "abcd" * PROMPT, "max_output_tokens": 50}
    assert least <= charged(answer, state, tmp_path, "/v1/responses", **asked) <= most


def test_what_finds_no_room_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "PATIENCE_S", 0.1)
    assert charged(b"", "starting", tmp_path, stays=True) == 0


@pytest.mark.parametrize(
    ("answer", "least", "most"),
    [
        (HEAD % b"400 Bad Request" + b'{"error":{}}', 0, 0),
        (RUN_STREAM, PROMPT, PROMPT),
        (RUN_STREAM + b": total_tokens 9\n\ndata: [DONE]\n\n", 9, 9),
        (RUN_WHOLE, 7, 7),
    ],
    ids=["refused", "left", "stream", "whole"],
)
def test_what_a_run_computes_costs_its_tokens(answer: bytes, least: int, most: int, tmp_path: Path) -> None:
    asked = {"model": RUN, "prompt": "abcd" * PROMPT, "max_tokens": 50}
    assert least <= charged(answer, "ready", tmp_path, **asked) <= most


@pytest.mark.parametrize("model", ["m", RUN], ids=["a model", "a run"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/generate", {"inputs": "a"}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
def test_a_key_has_as_many_requests_under_way_as_it_may(
    path: str, body: dict[str, Any], model: str, tmp_path: Path
) -> None:
    """By a model's name as by that of a run, which one server has."""

    async def ask() -> None:
        async with front_before(b"", "ready", tmp_path, "requests=1") as (front, _):
            asked = {"model": model, "parameters": {"adapter_id": model}, **body}
            first = Client(front, path, asked)
            await first.until(lambda: front.view.seen[1].flights)
            second = Client(front, path, asked)
            await second.until(lambda: False)
            await first.leave()
            assert second.status == 429 and b"may have 1 requests under way" in second.got
            third = Client(front, path, asked)
            await third.until(lambda: front.view.seen[1].flights)
            assert not third.answer.done(), third.got
            await third.leave()

    asyncio.run(ask())
