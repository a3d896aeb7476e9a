"""One request to one server. What it answers is read as it comes. Connections are used again: to make one takes longer than all else of a request."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httptools

from symbiosis.server.api_errors import SECRET_HEADER

MOST_UNREAD = 256 << 10  # bytes; the server waits beyond that
CONNECT_S = 2.0
IDLE_S = 2.0  # a connection that is idle for so long is not used again: servers close those that are for 20 s
MOST_IDLE = 64  # of a server


_ours: dict[str, str] = {}  # headers of each request


def show_to_servers(secret: str) -> None:
    """Have each request show that it comes from a front end of the cluster."""
    _ours[SECRET_HEADER] = secret


class Lost(Exception):
    """The server has not answered the whole request."""


class _Idle(asyncio.Protocol):
    """A connection that waits for its next request."""

    def __init__(self, url: str, transport: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.url, self.transport, self.since = url, transport, self.loop.time()
        _idle[url].append(self)

    @classmethod
    def taken(cls, url: str) -> Any:
        """Return the transport that was used last, None if there is none."""
        loop = asyncio.get_running_loop()
        while waiting := _idle.get(url):
            found = waiting.pop()
            if found.loop is loop and loop.time() - found.since < IDLE_S and not found.transport.is_closing():
                return found.transport
            found.transport.abort()
        return None

    def data_received(self, data: bytes) -> None:
        self.transport.abort()  # nobody has asked

    def connection_lost(self, error: Exception | None) -> None:
        if self in (waiting := _idle.get(self.url, [])):
            waiting.remove(self)
        if not waiting:
            _idle.pop(self.url, None)


_idle: defaultdict[str, list[_Idle]] = defaultdict(list)  # by server


class Upstream(asyncio.Protocol):
    """The answer to a request. Use `await Upstream.ask(...)`."""

    def __init__(self, url: str, request: bytes) -> None:
        self._url, self._request = url, request
        self._may_repeat = False  # over another connection: the server has closed this one before it has read anything
        self.status, self.headers = 0, dict[bytes, bytes]()
        self._parser = httptools.HttpResponseParser(self)
        self.unread, self._news = bytearray(), asyncio.Event()
        self.hand_over: Callable[[], bool] | None = None  # whether it has read what is unread
        self._is_whole = self._is_paused = self._may_be_kept = self._is_awaited = False
        self._lost: str | None = None
        self._transport: Any = None

    @classmethod
    async def ask(cls, url: str, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> "Upstream":
        """Send a request."""
        lines = {"Host": urlsplit(url).netloc, "Content-Length": str(len(body)), **_ours, **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        answer = cls(url, f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        if (transport := _Idle.taken(url)) is None:
            await answer._connect()
        else:
            answer._may_repeat, answer._transport = True, transport
            transport.set_protocol(answer)
        answer._transport.write(answer._request)
        return answer

    async def _connect(self) -> None:
        parts = urlsplit(self._url)
        try:
            async with asyncio.timeout(CONNECT_S):
                loop = asyncio.get_running_loop()
                await loop.create_connection(lambda: self, str(parts.hostname), parts.port or 80)
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

    async def whole(self) -> bytes:
        found = b""
        while more := await self.piece():
            found += more
        return found

    def lose(self, why: str) -> None:
        """Give it up: whoever waits for it goes elsewhere. If it is whole, its connection is used again."""
        self._may_repeat = False
        transport, self._transport = self._transport, None
        is_reusable = (
            self._is_whole and self._may_be_kept and not self._is_paused and len(_idle.get(self._url, ())) < MOST_IDLE
        )
        if is_reusable and transport is not None and not transport.is_closing():
            transport.set_protocol(_Idle(self._url, transport))
            return
        if transport is not None:
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
        self._may_repeat = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.lose(f"the answer is no HTTP: {error}")
        goes_on = self._is_awaited and not self._is_whole and self._lost is None
        if not (goes_on and self.hand_over is not None and self.unread and self.hand_over()):
            self._news.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._end("the connection broke")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.unread += body
        if len(self.unread) > MOST_UNREAD and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._is_whole, self._may_be_kept = True, self._parser.should_keep_alive()
