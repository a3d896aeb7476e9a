"""Sends an answer to its reader. One that takes nothing for long is hung up on by the kernel (`connections.STALL_S`)."""

import asyncio
from collections.abc import Iterable, Iterator

from starlette.types import Receive, Scope, Send

from symbiosis.server.connections import COUNT, HttpConnection

PIECE = 1 << 16  # bytes that are sent at once
Headers = list[tuple[bytes, bytes]]
EVENTS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]  # fmt: skip
JSON: Headers = [(b"content-type", b"application/json")]


class SseWriter:
    """Where an answer goes. A piece that nobody has to wait for is `put`: it need not pass through all layers of the application."""

    def __init__(self, send: Send, scope: Scope) -> None:
        self._send, self._is_sending, self.has_begun = send, False, False
        self._connection: HttpConnection | None = scope.get("state", {}).get("connection")
        self.counts = any(name == COUNT for name, _ in scope.get("headers", ()))  # for a front end, which asks so

    async def start(self, headers: Headers, status: int = 200) -> None:
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def count(self, tokens: int) -> None:
        """Tell a front end how many tokens an answer takes by now that has not begun."""
        if self.counts and self._connection is not None and not self.has_begun:
            self._connection.send_count(tokens)

    async def take(self, pieces: Iterable[bytes], more: bool = True) -> None:
        """Send pieces, many small ones at once. Large ones are made when those before are sent, and others run between them."""
        self._is_sending = True
        held, size = list[bytes](), 0
        for piece in pieces:
            held.append(piece)
            size += len(piece)
            if size > PIECE:
                await self._send({"type": "http.response.body", "body": b"".join(held), "more_body": True})
                await asyncio.sleep(0)
                held, size = [], 0
        if held or not more:
            await self._send({"type": "http.response.body", "body": b"".join(held), "more_body": more})
        self._is_sending = False

    @property
    def is_free(self) -> bool:
        """Whether a piece can be put now: those before are on their way, and their reader takes them."""
        return self._connection is not None and not self._is_sending and self._connection.takes_pieces

    def put(self, body: bytes) -> None:
        """Send a piece at once, if the writer is free."""
        assert self._connection is not None
        self._connection.send_piece(body)


class StoredReply:
    """An answer of JSON that lies here already. Of what its reader does not take there is no copy, but for a piece."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = SseWriter(send, scope)
        await writer.start([*JSON, (b"content-length", b"%d" % len(self._body))])
        await writer.take(in_pieces(self._body), more=False)


def in_pieces(body: bytes) -> Iterator[bytes]:
    """Yield what is large piece by piece.

    >>> [len(piece) for piece in in_pieces(bytes(PIECE + 1))]
    [65536, 1]
    """
    return (body[at : at + PIECE] for at in range(0, len(body), PIECE))
