"""What clients without a key may send, and have a process of HTTP hold for them: sockets that no client library would open so."""

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from symbiosis.server import connections
from symbiosis.server.connections import HttpConnection, server_of
from symbiosis.server.observer import Observer

WAIT_S = 20.0
HOST = b"host: 127.0.0.1\r\n"
HELLO = b"GET /hello HTTP/1.1\r\n" + HOST + b"\r\n"
LARGE = 8 << 20  # bytes: more than the kernel holds of an answer for both ends


class Site:
    """A site of a few pages, with the connections and their clients in one event loop.

    `/waits` is answered when `go` is set; `/large` is large, and all else is "hello".
    """

    def __init__(self, port: int) -> None:
        self.port, self.asked, self.go = port, list[str](), asyncio.Event()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        self.asked.append(path)
        if path == "/waits":
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
    server = server_of(made.app, Observer(), [listener], 1.0)
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


def test_what_is_sent_before_the_answer_waits_for_it() -> None:
    async def test(site: Site) -> None:
        reader, writer = await site.open()
        writer.write(b"GET /waits HTTP/1.1\r\nhost: a\r\n\r\n" + HELLO * 1000)
        await site.until_asked("/waits")
        await asyncio.sleep(0.05)
        assert site.asked == ["/waits"]
        site.go.set()
        for _ in range(1001):
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")

    at_a_site(test)


def test_of_what_is_sent_before_the_answer_little_is_read() -> None:
    async def test(site: Site) -> None:
        _, writer = await site.open()
        writer.write(b"GET /waits HTTP/1.1\r\nhost: a\r\n\r\n")
        await site.until_asked("/waits")
        with pytest.raises(TimeoutError):
            for _ in range(1000):
                writer.write(HELLO * 10_000)
                await asyncio.wait_for(writer.drain(), 1.0)
        writer.transport.abort()

    at_a_site(test)


def test_one_request_after_the_other_goes_over_one_connection() -> None:
    async def test(site: Site) -> None:
        reader, writer = await site.open()
        for _ in range(3):
            writer.write(b"POST /hello HTTP/1.1\r\nhost: a\r\ncontent-length: 90000\r\n\r\n" + bytes(90_000))
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
        writer.close()

    at_a_site(test)


ASKS_MORE = b"connection: upgrade\r\nupgrade: h2c\r\n"


@pytest.mark.parametrize("framing", [b"content-length: %d" % len(HELLO), b"transfer-encoding: chunked"])
def test_the_body_of_a_request_for_another_protocol_is_no_request(framing: bytes) -> None:
    async def test(site: Site) -> None:
        reader, writer = await site.open()
        writer.write(b"POST /hello HTTP/1.1\r\n" + HOST + ASKS_MORE + framing + b"\r\n\r\n")
        await asyncio.sleep(0.05)  # it is read by itself
        writer.write(HELLO + b"no request\r\n\r\n")
        assert (await ends(reader)).count(b"HTTP/1.1 200") <= 1 and site.asked == ["/hello"]

    at_a_site(test)


def test_who_asks_for_another_protocol_goes_on_with_this_one() -> None:
    async def test(site: Site) -> None:
        reader, writer = await site.open()
        for _ in range(2):
            writer.write(b"GET /hello HTTP/1.1\r\n" + HOST + ASKS_MORE + b"\r\n")
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
        writer.write(b"GET /hello HTTP/1.1\r\n" + HOST + ASKS_MORE + b"\r\n" + HELLO)
        for _ in range(2):
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")

    at_a_site(test)


@pytest.mark.parametrize("framing", [b"content-length: 8388608", b"transfer-encoding: chunked"])
def test_a_client_that_is_answered_while_it_sends_gets_the_answer(framing: bytes) -> None:
    body = bytes(LARGE) if b"length" in framing else b"%x\r\n%b\r\n0\r\n\r\n" % (LARGE, bytes(LARGE))

    async def test(site: Site) -> None:
        reader, writer = await site.open()
        writer.write(b"POST /hello HTTP/1.1\r\n" + HOST + framing + b"\r\n\r\n")
        await site.until_asked("/hello")
        await asyncio.sleep(0.05)  # it is answered
        writer.write(body + HELLO)
        await writer.drain()
        for _ in range(2):
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")

    at_a_site(test)


def test_a_client_that_is_answered_does_not_send_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 1)

    async def test(site: Site) -> None:
        reader, writer = await site.open()
        writer.write(b"POST /hello HTTP/1.1\r\nhost: a\r\ncontent-length: 8388608\r\n\r\n")
        await reader.readuntil(b"hello")
        with pytest.raises(ConnectionError):
            while True:
                writer.write(b"more")
                await writer.drain()
                await asyncio.sleep(0.05)

    at_a_site(test)


@pytest.mark.parametrize("head", [b"a:\r\n" * 20_000, b"a: " + b"x" * 100_000, b"a" * 100_000])
def test_a_head_that_is_too_large_is_told_so(head: bytes) -> None:
    async def test(site: Site) -> None:
        reader, writer = await site.open()
        writer.write(b"GET /hello HTTP/1.1\r\n" + head)
        assert (await ends(reader)).startswith(b"HTTP/1.1 431 ")
        assert site.asked == []

    at_a_site(test)


CHUNKED = b"POST /waits HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n"


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
        writer.write(b"POST /hello HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        for begin in range(0, len(body), 32768 - cut):
            writer.write(body[begin : begin + 32768 - cut])
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.write(HELLO)
        for _ in range(2):
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")

    at_a_site(test)


def test_a_path_without_end_is_told_so() -> None:
    async def test(site: Site) -> None:
        reader, writer = await site.open()
        writer.write(b"GET /" + b"x" * 100_000)
        assert (await ends(reader)).startswith(b"HTTP/1.1 431 ")

    at_a_site(test)


def head_of(size: int) -> bytes:
    begin = b"GET /hello HTTP/1.1\r\n" + HOST + b"x: "
    return begin + b"y" * (size - len(begin) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize("before", [b"", HELLO], ids=["alone", "behind another"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_head_may_be_so_large_and_no_larger(before: bytes, at_once: bool) -> None:
    async def answers(site: Site, size: int) -> bytes:
        reader, writer = await site.open()
        sent = before + head_of(size) + HELLO
        for begin in range(0, len(sent), len(sent) if at_once else 5000):
            writer.write(sent[begin : begin + (len(sent) if at_once else 5000)])
            await asyncio.sleep(0.01)
        writer.write_eof()
        return await ends(reader)

    async def test(site: Site) -> None:
        assert (await answers(site, connections.MOST_HEAD)).count(b"HTTP/1.1 200") == 2 + bool(before)
        told = await answers(site, connections.MOST_HEAD + 1)
        assert told.count(b"HTTP/1.1 200") == bool(before) and told.count(b"HTTP/1.1 431") == 1

    at_a_site(test)


def test_lines_after_a_body_have_the_same_bound_at_once() -> None:
    async def test(site: Site) -> None:
        reader, writer = await site.open()
        head = b"POST /waits HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
        writer.write(head + b"x: " + b"y" * 40_000 + b"\r\n\r\n" + HELLO)
        assert await ends(reader) == b""

    at_a_site(test)


def test_a_large_head_is_read() -> None:
    async def test(site: Site) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{site.port}") as client:
            headers = {f"x-{number}": "y" * 300 for number in range(90)}
            assert (await client.get("/hello", headers=headers)).text == "hello"

    at_a_site(test)


def test_an_answer_that_is_not_taken_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALL_S", 0.4)

    async def test(site: Site) -> None:
        reader, writer = await site.open()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /large HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        await site.until_asked("/large")
        await asyncio.sleep(2.5)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert 0 < len(await ends(reader)) < LARGE

    at_a_site(test)


def test_a_slow_reader_gets_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 1)

    async def test(site: Site) -> None:
        reader, writer = await site.open()
        writer.write(b"GET /large HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        await asyncio.sleep(1.0)
        assert len(await ends(reader)) > LARGE

    at_a_site(test)


def test_a_head_has_its_time_however_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 1)

    async def test(site: Site) -> None:
        (silent, _), (slow, writer) = await site.open(), await site.open()
        with pytest.raises(ConnectionError):
            for byte in HELLO:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.1)
        assert await ends(silent) == await ends(slow) == b"" and not site.asked

    at_a_site(test)


def test_the_oldest_connection_that_waits_gives_way_and_requests_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(site: Site) -> None:
        monkeypatch.setattr(HttpConnection, "most_waiting", 4)
        friend, writer = await site.open()
        writer.write(b"GET /waits HTTP/1.1\r\nhost: a\r\n\r\n")
        await site.until_asked("/waits")
        opened = [await site.open() for _ in range(5)]
        assert await ends(opened[0][0]) == b""
        for reader, each in opened[1:]:
            each.write(HELLO)
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
        site.go.set()
        assert (await friend.readuntil(b"hello")).startswith(b"HTTP/1.1 200")

    at_a_site(test)


@pytest.mark.parametrize(("limit", "most"), [(300, 150), (100_000, 4096), (resource.RLIM_INFINITY, 4096)])
def test_those_that_wait_get_half_of_the_descriptors_at_most(
    limit: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HttpConnection, "most_waiting", 4096)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, limit))
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: None)
    server_of(Site(0).app, Observer(), [], 1.0)
    assert HttpConnection.most_waiting == most


@pytest.mark.parametrize(
    ("sent", "status", "reason"),
    [
        (b"no request\r\n\r\n", 400, "invalid_request"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000, 431, "head_too_large"),
    ],
)
def test_what_is_refused_before_it_is_a_request_is_counted_too(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, status: int, reason: str
) -> None:
    observer = Observer()

    async def ask() -> bytes:
        async with site() as there:
            monkeypatch.setattr(HttpConnection, "observer", observer)
            reader, writer = await there.open()
            writer.write(sent)
            answer = await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()
            return answer

    head = asyncio.run(ask()).partition(b"\r\n\r\n")[0]
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"x-request-id: " in head
    assert observer.refused == {(reason, status, "unauthenticated"): 1}
