"""What a front end makes of a server's events for the client: events again, or one answer."""

import asyncio
from collections.abc import Iterable

from starlette.types import Send

from symbiosis.cluster.front.progress import DONE
from symbiosis.cluster.front.whole import Whole
from symbiosis.serving.http.incoming.connections import STALL_S

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]  # fmt: skip
JSON = [(b"content-type", b"application/json")]
PIECE = 1 << 16  # bytes that are sent at once
Headers = list[tuple[bytes, bytes]]


class Outlet:
    """Where the answer to one request goes."""

    keeps_events = False  # until all have come

    def __init__(self) -> None:
        self.has_begun = False

    async def give(self, send: Send, events: list[tuple[bytes, bytes]], more: bool = True) -> None:
        """Hand over events, each as it came and without its comment."""
        raise NotImplementedError

    async def refused(self, send: Send, status: int, headers: Headers, body: bytes) -> None:
        """Answer with an error."""
        await self._start(send, status, headers)
        await _send(send, body, more=False)

    async def _start(self, send: Send, status: int, headers: Headers) -> None:
        if not self.has_begun:
            self.has_begun = True
            await send({"type": "http.response.start", "status": status, "headers": headers})


class Events(Outlet):
    """A stream.

    Args:
        shows_comments: For a client that goes on with it elsewhere itself.
    """

    def __init__(self, shows_comments: bool) -> None:
        super().__init__()
        self._shows_comments = shows_comments

    async def give(self, send: Send, events: list[tuple[bytes, bytes]], more: bool = True) -> None:
        if events or not more:
            await self._start(send, 200, EVENTS)
            shown = [event if self._shows_comments else told for event, told in events]
            await _send(send, b"\n\n".join(shown) + b"\n\n", more)

    async def refused(self, send: Send, status: int, headers: Headers, body: bytes) -> None:
        """Answer with an error; in the middle of a stream it is an event."""
        if self.has_begun:
            await _send(send, b"data: " + body + b"\n\n" + DONE + b"\n\n", more=False)
        else:
            await super().refused(send, status, headers, body)


class Joined(Outlet):
    """One answer, when all of it is there."""

    keeps_events = True

    def __init__(self, whole: Whole) -> None:
        super().__init__()
        self._whole = whole

    async def give(self, send: Send, events: list[tuple[bytes, bytes]], more: bool = True) -> None:
        for _, told in events:
            if not told.startswith(DONE):
                self._whole.take(told)
        if not more:
            await self._start(send, 200, JSON)
            await _send_all(send, self._whole.pieces())


async def _send_all(send: Send, pieces: Iterable[bytes]) -> None:
    """Send the whole of an answer. Others run between large pieces, each of which is made when those before are sent."""
    held = b""
    for piece in pieces:
        held += piece
        if len(held) > PIECE:
            await _send(send, held)
            await asyncio.sleep(0)
            held = b""
    await _send(send, held, more=False)


async def _send(send: Send, body: bytes, more: bool = True) -> None:
    async with asyncio.timeout(STALL_S):
        await send({"type": "http.response.body", "body": body, "more_body": more})
