"""One request to one server. What it answers is read as it comes. Connections are used again: to make one takes longer than all else of a request."""

import asyncio
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httptools
import msgspec

from symbiosis.server.api_app import SECRET_HEADER
from symbiosis.server.api_errors import ApiError
from symbiosis.server.connections import COUNT

MOST_UNREAD = 256 << 10  # bytes; the server waits beyond that
CONNECT_S = 2.0
IDLE_S = 2.0  # a connection that is idle for so long is not used again: servers close those that are for 20 s
MOST_IDLE = 64  # of a server
CONTROLS = re.compile(
    r"[\x00-\x08\x0a-\x1f\x7f]"
)  # with which a header would go on as another one, or as another request
SPLITS = re.compile(r"[\x00-\x20\x7f]")  # ... and a path

_ours: dict[str, str] = {COUNT.decode(): "?"}  # headers of each request


def show_to_servers(secret: str) -> None:
    """Have each request show that it comes from a front end of the cluster."""
    _ours[SECRET_HEADER] = secret


class Lost(Exception):
    """The server has not answered the whole request."""


class Upstream(asyncio.Protocol):
    """The answer to a request. Use `await Upstream.ask(...)`. When it is read, its connection waits for the next one."""

    idle: ClassVar[defaultdict[str, list["Upstream"]]] = defaultdict(list)  # whose connections wait, by server

    def __init__(self, url: str, request: bytes, count: Callable[[int], object] | None = None) -> None:
        self._url, self._request, self._count = url, request, count
        self._may_repeat = False  # over another connection: the server has closed this one before it has read anything
        self.status, self.headers = 0, dict[bytes, bytes]()
        self._parser = httptools.HttpResponseParser(self)
        self.unread, self._news = bytearray(), asyncio.Event()
        self.hand_over: Callable[[], bool] | None = None  # whether it has read what is unread
        self._is_whole = self._is_paused = self._may_be_kept = self._is_awaited = False
        self._idle_since = 0.0
        self._lost: str | None = None
        self._loop: asyncio.AbstractEventLoop
        self._transport: Any = None

    @classmethod
    async def ask(
        cls, url: str, method: str, path: str, headers: dict[str, str], body: bytes = b"", count: Callable[[int], object] | None = None
    ) -> "Upstream":  # fmt: skip
        """Send a request. Raises `ApiError` if the path or a header would end where it is not to. `count` gets how many tokens the answer takes, as
        often as the server tells that before its head."""
        lines = {"Host": urlsplit(url).netloc, "Content-Length": str(len(body)), **_ours, **headers}
        if SPLITS.search(path) or any(CONTROLS.search(word) for line in lines.items() for word in line):
            raise ApiError(400, "the address or a header has characters that it may not have")
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        answer = cls(url, f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body, count)
        answer._loop, waiting = asyncio.get_running_loop(), cls.idle[url]
        while waiting and answer._transport is None:  # the one that was used last
            last = waiting.pop()
            is_new = last._loop is answer._loop and answer._loop.time() - last._idle_since < IDLE_S
            if is_new and not last._transport.is_closing():
                answer._may_repeat, answer._transport = True, last._transport
                answer._transport.set_protocol(answer)
            elif not last._loop.is_closed():
                last._transport.abort()
        if answer._transport is None:
            await answer._connect()
        answer._transport.write(answer._request)
        return answer

    @classmethod
    async def fetch(
        cls, url: str, path: str, headers: dict[str, str] | None = None, body: bytes = b"", method: str = "GET"
    ) -> tuple[int, bytes]:
        """Return the status and the whole body of an answer."""
        answer = await cls.ask(url, method, path, headers or {}, body)
        try:
            await answer.head()
            return answer.status, await answer.whole()
        finally:
            answer.lose("it is read")

    async def _connect(self) -> None:
        parts = urlsplit(self._url)
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._loop.create_connection(lambda: self, str(parts.hostname), parts.port or 80)
        except OSError as error:  # which a timeout is, too
            raise Lost(f"{self._url} cannot be reached: {error}") from None

    async def head(self) -> None:
        """Wait until the status and the headers are there."""
        while not self.status:
            try:
                await self._something_new()
            except Lost:
                if not self._may_repeat:
                    raise
                self._may_repeat, self._lost = False, None
                await self._connect()
                if self._lost is None:  # else it was given up meanwhile
                    self._transport.write(self._request)

    async def piece(self) -> bytes:
        """Return what has come since the last time; nothing at the end.

        While a task waits here, what comes is given to `hand_over`, if there is one, which is cheaper than to wake the task.
        """
        self._is_awaited = True
        try:
            while not self.unread and not self._is_whole:
                await self._something_new()
        finally:
            self._is_awaited = False
        return self.read()

    def read(self) -> bytes:
        """Return what is unread."""
        found = bytes(self.unread)
        self.unread.clear()
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return found

    async def whole(self, most: int = sys.maxsize) -> bytes:
        """Return what is left of the answer; of a longer one so many bytes, and what has come with them."""
        found = bytearray()
        while len(found) < most and (more := await self.piece()):
            found += more
        return bytes(found)

    def lose(self, why: str) -> None:
        """Give it up: whoever waits for it goes elsewhere. If it is whole, its connection is used again."""
        if self._idle_since:
            return
        self._may_repeat = False
        transport, self._transport = self._transport, None
        if transport is not None:
            waiting, may_be_kept = self.idle[self._url], self._is_whole and self._may_be_kept and not self._is_paused
            if may_be_kept and len(waiting) < MOST_IDLE and not transport.is_closing():
                self._transport, self._idle_since = transport, self._loop.time()
                waiting.append(self)
                return
            transport.abort()
        self._end(why)

    def _end(self, why: str) -> None:
        if self._lost is None and not self._is_whole:
            self._lost = why
        self._news.set()

    async def _something_new(self) -> None:
        if self._lost is not None:
            raise Lost(self._lost)
        self._news.clear()
        await self._news.wait()

    # ------------------------------------------------------------------ what asyncio and the parser call

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._idle_since:
            self._transport.abort()  # nobody has asked
            return
        self._may_repeat = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.lose(f"the answer is no HTTP: {error}")
        goes_on = self._is_awaited and not self._is_whole and self._lost is None
        if not (goes_on and self.hand_over is not None and self.unread and self.hand_over()):
            self._news.set()

    def connection_lost(self, error: Exception | None) -> None:
        if self._idle_since and self in (waiting := self.idle[self._url]):
            waiting.remove(self)
            if not waiting:
                del self.idle[self._url]
        self._end("the connection broke")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= HTTPStatus.OK:
            self.status = status
            return
        told, self.headers = self.headers.get(COUNT), {}
        if told and self._count is not None:
            self._count(int(told))

    def on_body(self, body: bytes) -> None:
        self.unread += body
        if len(self.unread) > MOST_UNREAD and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.status:  # else it goes on: only what it takes was told
            self._is_whole, self._may_be_kept = True, self._parser.should_keep_alive()


def message_of(body: bytes) -> str:
    """Return what an answer says that is wrong.

    >>> message_of(b'{"error": {"message": "there is no such run"}}'), message_of(b"")
    ('there is no such run', 'the server does not say why')
    """
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, LookupError, TypeError):
        return "the server does not say why"
