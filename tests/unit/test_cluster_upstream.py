"""Requests of a front end to a server: a connection is used again, and one that the server has closed meanwhile loses nothing."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from symbiosis.cluster.router.upstream import Lost, Upstream
from symbiosis.server.api_errors import ApiError

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Answers each request by what `answer` says for its number, among all; None: it hangs up. It counts its connections."""

    def __init__(self, answer: Callable[[int], bytes | None]) -> None:
        self._answer, self.connections, self.requests = answer, 0, 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                self.requests += 1
                if (answer := self._answer(self.requests)) is None:
                    break
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


def run(server: Server, ask: Callable[[str], Coroutine[Any, Any, None]]) -> None:
    async def together() -> None:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        async with asyncio.timeout(20), listening:
            await ask(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")

    asyncio.run(together())


async def once(url: str) -> bytes:
    answer = await Upstream.ask(url, "GET", "/", {})
    try:
        await answer.head()
        return await answer.whole()
    finally:
        answer.lose("it is read")


def test_a_connection_is_used_again() -> None:
    async def ask(url: str) -> None:
        for _ in range(3):
            assert await once(url) == b"ok"

    server = Server(lambda number: ANSWER)
    run(server, ask)
    assert (server.connections, server.requests) == (1, 3)


def test_a_connection_that_the_server_closes_when_it_is_used_again_loses_nothing() -> None:
    async def ask(url: str) -> None:
        assert [await once(url) for _ in "ab"] == [b"ok", b"ok"]

    server = Server(lambda number: None if number == 2 else ANSWER)
    run(server, ask)
    assert (server.connections, server.requests) == (2, 3)


@pytest.mark.parametrize(
    "answer", [None, ANSWER[:-1], b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"]
)
def test_what_breaks_off_is_lost_and_not_used_again(answer: bytes | None) -> None:
    async def ask(url: str) -> None:
        for _ in "ab":
            try:
                assert await asyncio.wait_for(once(url), 0.5) == b"ok"
            except (Lost, TimeoutError):
                assert answer is None or not answer.endswith(b"ok")

    server = Server(lambda number: answer)
    run(server, ask)
    assert (server.connections, server.requests) == (2, 2)


def test_one_that_is_given_up_is_not_asked_again() -> None:
    async def ask(url: str) -> None:
        assert await once(url) == b"ok"
        answer = await Upstream.ask(url, "GET", "/", {})
        asyncio.get_running_loop().call_later(0.1, answer.lose, "it is frozen")
        with pytest.raises(Lost, match="frozen"):
            await answer.head()

    server = Server(lambda number: b"" if number == 2 else ANSWER)
    run(server, ask)
    assert server.requests == 2


def test_one_that_is_given_up_while_it_connects_again_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = Upstream._connect

    async def given_up(self: Upstream) -> None:
        await connect(self)
        if self._request in asked:
            self.lose("it drains")
        asked.append(self._request)

    async def ask(url: str) -> None:
        assert await once(url) == b"ok"
        with pytest.raises(Lost, match="drains"):
            await once(url)

    asked: list[bytes] = []
    monkeypatch.setattr(Upstream, "_connect", given_up)
    server = Server(lambda number: None if number == 2 else ANSWER)
    run(server, ask)
    assert server.requests == 2


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/x\r\nAuthorization: Bearer root", {}),
        ("/x HTTP/1.1\n\nGET /y", {}),
        ("/x\0", {}),
        ("/x", {"X-Url": "http://host/\r\n\r\nGET /y HTTP/1.1"}),
        ("/x", {"X\n": "y"}),
    ],
)
def test_what_is_asked_cannot_end_early(path: str, headers: dict[str, str]) -> None:
    """Else the rest of it would be the beginning of whoever's request comes next over that connection."""
    server = Server(lambda number: ANSWER)

    async def ask(url: str) -> None:
        with pytest.raises(ApiError, match="may not have"):
            await Upstream.fetch(url, path, headers)

    run(server, ask)
    assert not server.requests
