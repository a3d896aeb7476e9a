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
from symbiosis.server.long_reply import TOTAL
from symbiosis.server.sse import SseWriter, in_pieces

logger = logging.getLogger("symbiosis")

AWAY = "the server that has this does not answer now: ask again, it is being started"
STREAMS = (b"text/event-stream", b"application/octet-stream")  # which are handed on piece by piece
WHOLE = 1 << 20  # bytes: what is longer is handed on piece by piece, too
TAIL = 1 << 10  # bytes: they hold the usage of an answer, which is its last field


class ForwardedRequest(NamedTuple):
    """What a server is asked."""

    method: str
    target: str  # path and query
    headers: dict[str, str]
    body: bytes


class AnswerEnd(NamedTuple):
    """What is known of an answer at its end."""

    tail: bytes  # of a stream up to the end of an event
    tokens: int | None = None  # that it took, as its headers say


class Forward:
    """The answer of a server to a request.

    Args:
        done: Called at the end of the answer. None: no server took the request.
    """

    def __init__(
        self,
        view: ServerRegistry,
        sent: ForwardedRequest,
        wish: RoutingRequest,
        done: Callable[[AnswerEnd | None], object],
    ) -> None:
        self._view, self._sent, self._done = view, sent, done
        self._flight = InFlight(wish, self._move)
        self._answer: Upstream | None = None
        self._tail, self._was_let_in = b"", False
        self._tokens: int | None = None

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
            self._done(AnswerEnd(self._tail, self._tokens) if self._was_let_in else None)

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
        answer = self._answer = await Upstream.ask(url, sent.method, sent.target, sent.headers, sent.body)
        try:
            await answer.head()
        except asyncio.CancelledError:  # the server may be at the prompt
            self._was_let_in = not answer.status
            raise
        self._was_let_in = answer.status == HTTPStatus.OK
        self._tokens = int(told) if (told := answer.headers.get(TOTAL)) else None
        headers = [(name, value) for name, value in answer.headers.items() if name in KEPT]
        is_stream = answer.headers.get(b"content-type", b"").partition(b";")[0] in STREAMS
        first = b"" if is_stream else await answer.whole(WHOLE)  # before anything is said
        await writer.start(headers, answer.status)
        last = first[-TAIL:]
        try:
            await writer.take(in_pieces(first))
            while piece := await answer.piece():
                last = (last + piece[-TAIL:])[-TAIL:]
                await writer.take([piece])
        finally:
            self._tail = b"".join(last.rpartition(b"\n\n")[:2]) if is_stream else last
        await writer.take([], more=False)


def _away() -> ApiError:
    return ApiError(503, AWAY, retry_s=1.0, reason="no_server")
