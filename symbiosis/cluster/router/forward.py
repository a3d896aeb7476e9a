"""A request whose answer is handed on as it comes: by the one server that holds what it is about, or by one that has room. No other goes on with it."""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple

from starlette.types import Receive, Scope, Send

from symbiosis.cluster.placement import RoutingRequest, State
from symbiosis.cluster.router.relay import KEPT, PATIENCE_S, no_room
from symbiosis.cluster.router.server_registry import InFlight, ServerRegistry
from symbiosis.cluster.router.upstream import Lost, Upstream
from symbiosis.server.api_errors import ApiError
from symbiosis.server.bodies import until_hung_up
from symbiosis.server.long_reply import COUNTED
from symbiosis.server.sse import SseWriter, in_pieces

logger = logging.getLogger("symbiosis")

AWAY = "the server that has this does not answer now: ask again, it is being started"
EVENTS = b"text/event-stream"
STREAMS = (EVENTS, b"application/octet-stream")  # which are handed on piece by piece
WHOLE = 1 << 20  # bytes: what is longer is handed on piece by piece, too


class ForwardedRequest(NamedTuple):
    """What a server is asked."""

    method: str
    target: str  # path and query
    headers: dict[str, str]
    body: bytes


class Forward:
    """The answer of a server to a request.

    Args:
        done: Called at the end of the answer, with whether a server took the request.
        count: Called as often as the server tells how many tokens it takes.
    """

    def __init__(
        self,
        view: ServerRegistry,
        sent: ForwardedRequest,
        wish: RoutingRequest,
        done: Callable[[bool], object],
        count: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._view, self._sent, self._done, self._count = view, sent, done, count
        self._flight = InFlight(wish, self._move)
        self._answer: Upstream | None = None
        self._was_let_in = False
        self._rest = b""  # what may be the beginning of a comment
        self._is_within = False  # whether an event has begun before it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.create_task(self._run(SseWriter(send, scope), scope))
        left = asyncio.create_task(until_hung_up(receive))
        try:
            await asyncio.wait({answering, left}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            left.cancel()
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            self._done(self._was_let_in)

    def _move(self, why: str) -> None:
        """The server is gone; or it is to take nothing new, and finishes this."""
        if self._answer is not None and why == "lost":
            self._answer.lose(why)

    async def _run(self, writer: SseWriter, scope: Scope) -> None:
        await self._place()
        try:
            await self._hand_on(writer, self._view.member(self._flight.server).url)
        except Lost as lost:
            logger.info("server %d does not answer a request: %s", self._flight.server, lost)
            if not writer.has_begun:
                raise _away() from None
            scope["state"]["connection"].transport.abort()  # its reader sees that it is not whole
        finally:
            if self._answer is not None:
                self._answer.lose("nobody reads it")
            self._view.leave(self._flight)

    async def _place(self) -> None:
        number = self._flight.wish.server
        seen = None if number is None else self._view.seen.get(number)
        if seen is not None and seen.state is not State.READY:
            raise _away()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._view.place(self._flight)
        except TimeoutError:
            raise no_room(self._view, self._flight.wish.model) from None
        except Lost:
            raise _away() from None

    async def _hand_on(self, writer: SseWriter, url: str) -> None:
        sent = self._sent
        answer = self._answer = await Upstream.ask(url, sent.method, sent.target, sent.headers, sent.body, self._count)
        try:
            await answer.head()
        except asyncio.CancelledError:  # the server may be at the prompt
            self._was_let_in = not answer.status
            raise
        self._was_let_in = answer.status == HTTPStatus.OK
        headers = [(name, value) for name, value in answer.headers.items() if name in KEPT]
        media = answer.headers.get(b"content-type", b"").partition(b";")[0]
        first = b"" if media in STREAMS else await answer.whole(WHOLE)  # before anything is said
        await writer.start(headers, answer.status)
        await writer.take(in_pieces(first))
        while piece := await answer.piece():
            await writer.take(self._counted(piece) if media == EVENTS else [piece])
        await writer.take([self._rest], more=False)

    def _counted(self, piece: bytes) -> list[bytes]:
        """Return a piece of a stream of events, without the comments by which the server tells what they take."""
        *ended, last = (self._rest + piece).split(b"\n\n")
        told = list[bytes]()
        for event in ended:
            if not self._is_within and event.startswith(COUNTED):
                self._count(int(event.removeprefix(COUNTED)))
            else:
                told.append(event + b"\n\n")
            self._is_within = False
        if not self._is_within and last.startswith(COUNTED[: len(last)]):
            self._rest = last
            return told
        self._is_within, goes = True, last.removesuffix(b"\n")
        self._rest = last[len(goes) :]
        return [*told, goes]


def _away() -> ApiError:
    return ApiError(503, AWAY, retry_s=1.0, reason="no_server")
