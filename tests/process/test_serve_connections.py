"""What clients without a key may send, and have a process of HTTP hold for them: sockets that no client library would open so."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from symbiosis.server.incoming import connections
from symbiosis.server.incoming.connections import HttpConnection, UnauthenticatedConnections, now_known
from symbiosis.server.observer import Observer

WAIT_S = 20.0
HELLO = b"GET /hello HTTP/1.1\r\n\r\n"
LARGE = 8 << 20  # bytes: more than the kernel holds of an answer for both ends


class Site:
    """A site of a few pages, with the connections and their clients in one event loop.

    `/waits` is answered when `go` is set, `/known` by then, too, to a client that has shown who it is; `/large` is large, and all else is "hello".
    """

    def __init__(self, port: int) -> None:
        self.port, self.asked, self.go = port, list[str](), asyncio.Event()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        self.asked.append(path)
        if path == "/known":
            now_known(scope)
        if path in ("/waits", "/known"):
            await self.go.wait()
        body = bytes(LARGE) if path == "/large" else b"hello"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def until_asked(self, *paths: str) -> None:
        while sorted(self.asked) != sorted(paths):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    listener = socket.create_server(("127.0.0.1", 0))
    made = Site(listener.getsockname()[1])
    config = uvicorn.Config(
        made.app, http=HttpConnection, interface="asgi3", ws="none", lifespan="off", log_config=None
    )
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]  # they are pytest's
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield made
    finally:
        made.go.set()
        server.should_exit = server.force_exit = True
        await serving


def at_a_site(test: Callable[[Site], Awaitable[None]]) -> None:
    """Run a test with a site, and end it if it takes too long."""

    async def run() -> None:
        async with asyncio.timeout(WAIT_S), site() as made:
            await test(made)

    asyncio.run(run())


async def ends(reader: asyncio.StreamReader) -> bytes:
    """Return what comes until the connection is closed, however."""
    found = b""
    try:
        while piece := await reader.read(1 << 16):
            found += piece
    except ConnectionError:
        pass
    return found


@pytest.fixture(autouse=True)
def strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpConnection, "strangers", UnauthenticatedConnections(4, 4))


def test_what_is_sent_before_the_answer_is_not_read() -> None:
    async def test(site: Site) -> None:
        reader, writer = await site.open()
        writer.write(b"GET /waits HTTP/1.1\r\n\r\n" + HELLO * 1000)
        await site.until_asked("/waits")
        writer.write(HELLO)
        await writer.drain()
        site.go.set()
        answer = await ends(reader)
        assert answer.count(b"HTTP/1.1 200") == 1 and answer.endswith(b"hello")
        assert site.asked == ["/waits"]

    at_a_site(test)


def test_who_sends_on_and_on_before_the_answer_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_EARLY", 100_000)

    async def test(site: Site) -> None:
        reader, writer = await site.open()
        writer.write(b"GET /waits HTTP/1.1\r\n\r\n" + HELLO * 10_000)
        assert await ends(reader) == b"" and not site.go.is_set()

    at_a_site(test)


def test_one_request_after_the_other_goes_over_one_connection() -> None:
    async def test(site: Site) -> None:
        reader, writer = await site.open()
        for _ in range(3):
            writer.write(b"POST /hello HTTP/1.1\r\ncontent-length: 90000\r\n\r\n" + bytes(90_000))
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
        writer.close()

    at_a_site(test)


ASKS_MORE = b"connection: upgrade\r\nupgrade: h2c\r\n"


@pytest.mark.parametrize("framing", [b"content-length: 24", b"transfer-encoding: chunked"])
def test_the_body_of_a_request_for_another_protocol_is_no_request(framing: bytes) -> None:
    async def test(site: Site) -> None:
        reader, writer = await site.open()
        writer.write(b"POST /hello HTTP/1.1\r\n" + ASKS_MORE + framing + b"\r\n\r\n")
        await asyncio.sleep(0.05)  # it is read by itself
        writer.write(HELLO)
        answer = await ends(reader)
        assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1 ") == 1 and not site.asked

    at_a_site(test)


def test_who_asks_for_another_protocol_goes_on_with_this_one() -> None:
    async def test(site: Site) -> None:
        reader, writer = await site.open()
        for _ in range(2):
            writer.write(b"GET /hello HTTP/1.1\r\n" + ASKS_MORE + b"\r\n")
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
        writer.write(b"GET /hello HTTP/1.1\r\n" + ASKS_MORE + b"\r\n" + HELLO)
        assert (await ends(reader)).count(b"HTTP/1.1 200") == 1

    at_a_site(test)


@pytest.mark.parametrize("framing", [b"content-length: 8388608", b"transfer-encoding: chunked"])
def test_a_client_that_is_answered_while_it_sends_gets_the_answer(framing: bytes) -> None:
    body = bytes(LARGE) if b"length" in framing else b"%x\r\n%b\r\n0\r\n\r\n" % (LARGE, bytes(LARGE))

    async def test(site: Site) -> None:
        reader, writer = await site.open()
        writer.write(b"POST /hello HTTP/1.1\r\nconnection: close\r\n" + framing + b"\r\n\r\n")
        await site.until_asked("/hello")
        await asyncio.sleep(0.05)  # it is answered
        writer.write(body + HELLO)
        await writer.drain()
        answer = await ends(reader)
        assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer and answer.endswith(b"hello")
        assert site.asked == ["/hello"]

    at_a_site(test)


def test_a_client_that_is_answered_does_not_send_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)

    async def test(site: Site) -> None:
        reader, writer = await site.open()
        writer.write(b"POST /hello HTTP/1.1\r\nconnection: close\r\ncontent-length: 8388608\r\n\r\n")
        assert (await ends(reader)).endswith(b"hello")
        with pytest.raises(ConnectionError):
            while True:
                writer.write(b"more")
                await writer.drain()
                await asyncio.sleep(0.05)

    at_a_site(test)


@pytest.mark.parametrize(
    "head", [b"a:\r\n" * 1000, b"a: " + b"x" * 100_000, b"a" * 100_000, b"a: " + b"x" * 40_000 + b"\r\n\r\n"]
)
def test_a_head_that_is_too_large_is_told_so(head: bytes) -> None:
    async def test(site: Site) -> None:
        reader, writer = await site.open()
        writer.write(b"GET /hello HTTP/1.1\r\n" + head)
        assert (await ends(reader)).startswith(b"HTTP/1.1 431 ")
        assert site.asked == []

    at_a_site(test)


CHUNKED = b"POST /waits HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n"


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (CHUNKED + b"0\r\nx: ", b"a" * 65536), (CHUNKED + b"0\r\n", b"a: b\r\n" * 10_000), (CHUNKED + b"0\r\n", b"a" * 65536),
        (CHUNKED + b"1;", b"a" * 65536), (CHUNKED + b"1;a=", b"a" * 65536), (b"", b"\r\n" * 32768),
    ],
)  # fmt: skip
def test_what_is_no_body_does_not_come_without_end(begin: bytes, more: bytes) -> None:
    async def test(site: Site) -> None:
        reader, writer = await site.open()
        writer.write(begin)
        await writer.drain()
        if begin:
            await site.until_asked("/waits")
        sent = 0
        with pytest.raises(ConnectionError):
            while True:
                writer.write(more)
                await writer.drain()
                sent += len(more)
                await asyncio.sleep(0)
                assert sent < 32 << 20

    at_a_site(test)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_lines_after_a_body_are_read_and_left_out(cut: int) -> None:
    body = b"%x\r\n%b\r\n" % (100_000, b"x" * 100_000) * 3 + b"0\r\nx-more: y\r\nx-other: " + b"z" * 9000 + b"\r\n\r\n"

    async def test(site: Site) -> None:
        reader, writer = await site.open()
        writer.write(b"POST /hello HTTP/1.1\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n")
        for begin in range(0, len(body), 32768 - cut):
            writer.write(body[begin : begin + 32768 - cut])
            await writer.drain()
            await asyncio.sleep(0.001)
        answer = await ends(reader)
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"hello")

    at_a_site(test)


def test_a_path_without_end_is_told_so() -> None:
    async def test(site: Site) -> None:
        reader, writer = await site.open()
        writer.write(b"GET /" + b"x" * 100_000)
        assert (await ends(reader)).startswith(b"HTTP/1.1 431 ")

    at_a_site(test)


def test_a_large_head_is_read() -> None:
    async def test(site: Site) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{site.port}") as client:
            headers = {f"x-{number}": "y" * 300 for number in range(90)}
            assert (await client.get("/hello", headers=headers)).text == "hello"

    at_a_site(test)


def test_an_answer_that_is_not_taken_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.1)
    monkeypatch.setattr(connections, "STALL_S", 0.4)
    monkeypatch.setattr(connections, "SLOWEST", 100 << 20)

    async def test(site: Site) -> None:
        reader, writer = await site.open()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /large HTTP/1.1\r\nconnection: close\r\n\r\n")
        await site.until_asked("/large")
        await asyncio.sleep(1.5)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert 0 < len(await ends(reader)) < LARGE

    at_a_site(test)


def test_a_slow_reader_gets_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.1)

    async def test(site: Site) -> None:
        reader, writer = await site.open()
        writer.write(b"GET /large HTTP/1.1\r\nconnection: close\r\n\r\n")
        await asyncio.sleep(1.0)
        assert len(await ends(reader)) > LARGE

    at_a_site(test)


def test_the_oldest_stranger_goes_and_who_is_known_stays() -> None:
    async def test(site: Site) -> None:
        friend, writer = await site.open()
        writer.write(b"GET /known HTTP/1.1\r\n\r\n")
        await site.until_asked("/known")
        opened = [await site.open() for _ in range(5)]
        told = await ends(opened[0][0])
        assert told.startswith(b"HTTP/1.1 503") and b"try again" in told
        for _, each in opened[1:]:
            each.write(HELLO)
        await site.until_asked("/known", *["/hello"] * 4)
        site.go.set()
        assert (await friend.readuntil(b"hello")).startswith(b"HTTP/1.1 200")

    at_a_site(test)


def test_a_stranger_who_does_not_take_its_answer_is_hung_up_on_at_once() -> None:
    async def test(site: Site) -> None:
        reader, writer = await site.open()
        writer.write(b"GET /large HTTP/1.1\r\n\r\n")
        await site.until_asked("/large")
        await asyncio.sleep(0.2)  # what it does not take lies in the server's memory
        opened = [await site.open() for _ in range(4)]
        assert len(await ends(reader)) < LARGE
        del opened

    at_a_site(test)


class Caller:
    """A connection from an address, as far as `UnauthenticatedConnections` asks."""

    def __init__(self, address: str) -> None:
        self.address, self.hung_up = address, False

    def turn_away(self) -> None:
        self.hung_up = True


def test_the_address_with_most_connections_gives_way() -> None:
    strangers, callers = UnauthenticatedConnections(5, 4), [Caller(address) for address in "abbb"]
    for each in [*callers, *(more := [Caller("c"), Caller("d"), Caller("b")])]:
        strangers.come(each)  # type: ignore[arg-type]
    assert [each.hung_up for each in [*callers, *more]] == [False, True, True, False, False, False, False]


@pytest.mark.parametrize(
    ("sent", "status", "reason"),
    [
        (b"no request\r\n\r\n", 400, "invalid_request"),
        (b"GET / HTTP/1.1\r\nX-Request-Id: mine\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431, "head_too_large"),
    ],
)
def test_what_is_refused_before_it_is_a_request_is_counted_too(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, status: int, reason: str
) -> None:
    observer = Observer()
    monkeypatch.setattr(HttpConnection, "observer", observer)

    async def ask() -> bytes:
        async with site() as there:
            reader, writer = await there.open()
            writer.write(sent)
            answer = await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()
            return answer

    head = asyncio.run(ask()).partition(b"\r\n\r\n")[0]
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert (b"x-request-id: mine" if b"mine" in sent else b"x-request-id: ") in head
    assert observer.refused == {(reason, status, "unauthenticated"): 1}
