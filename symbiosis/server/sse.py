"""Sends an answer to its reader, who is hung up on when it takes nothing for long."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from starlette.types import Scope, Send

from symbiosis.server.incoming.connections import STALL_S, HttpConnection, connection_of

LOOKS = 8  # in that time
PIECE = 1 << 16  # bytes that are sent at once
Headers = list[tuple[bytes, bytes]]
EVENTS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]  # fmt: skip
JSON: Headers = [(b"content-type", b"application/json")]


class SseWriter:
    """Where an answer goes: to one client, which is hung up on when it takes nothing for `STALL_S`: `limit`, within which all is sent, ends then.

    A timer for each piece that is sent would cost more than to make it. So one looks now and then at when the piece under way was begun.
    A piece that nobody has to wait for need not pass through all layers of the application, either: it is `put`.

    Args:
        connection: The client's, if it is known.
    """

    def __init__(self, send: Send, limit: asyncio.Timeout, connection: HttpConnection | None = None) -> None:
        self._send, self._limit, self._connection = send, limit, connection
        self._loop = asyncio.get_running_loop()
        self._began: float | None = None  # to send what has not been taken yet
        self._look()

    async def start(self, headers: Headers, status: int = 200) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def take(self, body: bytes, more: bool = True) -> None:
        self._began = self._loop.time()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._began = None

    @property
    def is_free(self) -> bool:
        """Whether a piece can be put now: those before are on their way, and their reader takes them."""
        return self._connection is not None and self._began is None and self._connection.takes_pieces

    def put(self, body: bytes) -> None:
        """Send a piece at once, if the outlet is free."""
        assert self._connection is not None
        self._connection.send_piece(body)

    async def take_all(self, pieces: Iterable[bytes], more: bool = True) -> None:
        """Send pieces, many small ones at once. Large ones are made when those before are sent, and others run between them."""
        held, size = list[bytes](), 0
        for piece in pieces:
            held.append(piece)
            size += len(piece)
            if size > PIECE:
                await self.take(b"".join(held))
                await asyncio.sleep(0)
                held, size = [], 0
        if held or not more:
            await self.take(b"".join(held), more)

    def _look(self) -> None:
        now = self._loop.time()
        if self._began is not None and now - self._began >= STALL_S:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_later(STALL_S / LOOKS, self._look)

    def close(self) -> None:
        self._timer.cancel()


@asynccontextmanager
async def outlet_to(send: Send, scope: Scope | None = None) -> AsyncIterator[SseWriter]:
    """Yield the outlet for one answer. Raises `TimeoutError` out of the block if its reader takes nothing for long."""
    async with asyncio.timeout(None) as limit:
        outlet = SseWriter(send, limit, connection_of(scope) if scope else None)
        try:
            yield outlet
        finally:
            outlet.close()
