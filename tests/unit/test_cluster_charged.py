"""What a request costs its key in a cluster: what servers did for it, and nothing if they refused it."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from symbiosis.cluster.router import relay
from symbiosis.cluster.router.app import make_app
from symbiosis.cluster.router.router_state import RouterState
from symbiosis.cluster.router.server_registry import Seen, ServerRegistry
from symbiosis.protocol.cluster_state import Member, Told
from tests.secret_files import write_secret

KEY = {"Authorization": "Bearer anna-key-1"}
PER_S, PROMPT = 1000, 100  # tokens
HEAD = b"HTTP/1.1 %b\r\nConnection: close\r\n\r\n"
STREAM = HEAD % b"200 OK" + b': 0 17 4 .\ndata: {"choices":[{"index":0,"text":"ab"}]}\n\n'

EVENT = b'event: response.completed\ndata: {"response":{"user":null,"usage":{"total_tokens":%b\n\n'
RESPONSE = HEAD % b"200 OK\r\nContent-Type: text/event-stream" + EVENT % b'0}},"tools":[{"total_tokens":0}}'


def charged(answer: bytes, state: str, folder: Path, path: str = "/v1/completions", **body: Any) -> int:
    """Return what a request costs a key, if a server in this state answers it so. Its client waits half a second."""
    keys = folder / "keys"
    write_secret(keys, f"anna anna-key-1 tokens_per_s={PER_S}\n")
    front = RouterState(ServerRegistry("none", {}), str(keys))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        if not answer or answer in (STREAM, RESPONSE):  # it goes on
            await reader.read()
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            member = Member(name="s", kind="server", model="m", number=1, url=url, state=state, batch=8)
            front.view.told, front.view.seen = Told(name="none", url="", members=(member,)), {1: Seen(member)}
            front.view._put(front.view.seen[1])
            asked = {"model": "m", "stream": True, **(body or {"prompt": "abcd" * PROMPT})}
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(make_app(front)), base_url="http://localhost"
            ) as http:
                await asyncio.wait([asyncio.create_task(http.post(path, json=asked, headers=KEY))], timeout=0.5)

    asyncio.run(ask())
    tenant = front.keys.tenant(KEY["Authorization"])
    assert not tenant.under_way
    return round(tenant.tokens.owed + PER_S)  # it began with what one second brings


@pytest.mark.parametrize(
    ("answer", "state", "tokens"),
    [
        (HEAD % b"400 Bad Request" + b'{"error":{}}', "ready", 0),
        (b"", "starting", 0),
        (b"", "ready", PROMPT),
        (STREAM, "ready", PROMPT + 2),
        (STREAM + b"data: [DONE]\n\n", "ready", PROMPT + 2),
    ],
    ids=["refused", "left while it waited", "left before the first token", "left later", "answered"],
)
def test_a_prompt_costs_something_once_a_server_has_it(answer: bytes, state: str, tokens: int, tmp_path: Path) -> None:
    assert charged(answer, state, tmp_path) == tokens


@pytest.mark.parametrize(
    ("answer", "state", "least", "most"),
    [
        (HEAD % b"400 Bad Request" + b'{"error":{}}', "ready", 0, 0),
        (b"", "starting", 0, 0),
        (b"", "ready", PROMPT + 50, PROMPT + 100),
        (RESPONSE, "ready", PROMPT + 50, PROMPT + 100),
        (RESPONSE + EVENT % b"7}}}", "ready", 7, 7),
    ],
    ids=["refused", "left while it waited", "left before the first token", "left later", "answered"],
)
def test_a_response_costs_what_was_reserved_unless_it_has_told_its_usage(
    answer: bytes, state: str, least: int, most: int, tmp_path: Path
) -> None:
    asked = {"input": "abcd" * PROMPT, "max_output_tokens": 50}
    assert least <= charged(answer, state, tmp_path, "/v1/responses", **asked) <= most


def test_what_finds_no_room_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "PATIENCE_S", 0.1)
    assert charged(b"", "starting", tmp_path) == 0
