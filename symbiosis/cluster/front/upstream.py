"""One request to one server, over a connection of its own. What it answers is read as it comes."""

import asyncio
from typing import Any
from urllib.parse import urlsplit

import httptools

MOST_UNREAD = 1 << 20  # bytes; the server waits beyond that
CONNECT_S = 2.0


class Lost(Exception):
    """The server has not answered the whole request."""


class Upstream(asyncio.Protocol):
    """The answer to a request. Use `await Upstream.ask(...)`."""

    def __init__(self) -> None:
        self.status, self.headers = 0, dict[bytes, bytes]()
        self._parser = httptools.HttpResponseParser(self)
        self._body, self._news = bytearray(), asyncio.Event()
        self._is_whole = self._is_paused = False
        self._lost: str | None = None
        self._transport: Any = None

    @classmethod
    async def ask(cls, url: str, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> "Upstream":
        """Send a request, and return when the head of the answer is there."""
        parts = urlsplit(url)
        lines = {"Host": parts.netloc, "Connection": "close", "Content-Length": str(len(body)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        try:
            async with asyncio.timeout(CONNECT_S):
                loop = asyncio.get_running_loop()
                _, answer = await loop.create_connection(cls, str(parts.hostname), parts.port or 80)
        except OSError as error:  # which a timeout is, too
            raise Lost(f"{url} cannot be reached: {error}") from None
        answer._transport.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        return answer

    async def head(self) -> None:
        """Wait until the status and the headers are there."""
        while not self.status:
            await self._something_new()

    async def piece(self) -> bytes:
        """Return what has come since the last time; nothing at the end."""
        while not self._body and not self._is_whole:
            await self._something_new()
        found, self._body = bytes(self._body), bytearray()
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return found

    async def whole(self) -> bytes:
        found = b""
        while more := await self.piece():
            found += more
        return found

    def lose(self, why: str) -> None:
        """Give it up: whoever waits for it goes elsewhere."""
        if self._lost is None and not self._is_whole:
            self._lost = why
        if self._transport is not None:
            self._transport.abort()
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
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.lose(f"the answer is no HTTP: {error}")
        self._news.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.lose("the connection broke")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > MOST_UNREAD and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._is_whole = True
