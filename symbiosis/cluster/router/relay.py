"""A completion on its way to a server, and, when that is lost or drains, to the next one: with what it has told, and the same draws."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from symbiosis.base.fair_share import Lease
from symbiosis.cluster.placement import RoutingRequest, State
from symbiosis.cluster.router.bill import Bill
from symbiosis.cluster.router.completion_fields import CompletionFields
from symbiosis.cluster.router.joined_answer import JoinedAnswer
from symbiosis.cluster.router.progress import DONE, FAILED, Progress
from symbiosis.cluster.router.server_registry import InFlight, ServerRegistry
from symbiosis.cluster.router.upstream import Lost, Upstream
from symbiosis.server.api_errors import REASONS, ApiError, unknown_model
from symbiosis.server.api_keys import Admission
from symbiosis.server.bodies import until_hung_up
from symbiosis.server.openai_protocol import Continuation
from symbiosis.server.request_record import this_request
from symbiosis.server.serving_state import OTHER_BASE
from symbiosis.server.sse import EVENTS, JSON, Headers, SseWriter

logger = logging.getLogger("symbiosis")

PATIENCE_S = 60.0  # without a new token, before a request fails
FAILURES = 3  # of servers that say that they failed: the request itself may be what they fail at
KEPT = (
    b"content-type", b"retry-after", b"www-authenticate", b"x-should-retry", b"cache-control", b"x-accel-buffering", b"content-disposition",
    b"x-prompt-tokens", b"x-generated-tokens", b"x-total-tokens",
)  # of a server's headers  # fmt: skip
TOKEN_BYTES = 40  # that a token takes which a server may have to go on from
FAILED_HEADERS = [(b"content-type", b"application/json"), (b"x-should-retry", b"false")]


class _Error(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _Error = msgspec.field(default_factory=_Error)


class Relay:
    """One completion, as an answer. A server always gives it as a stream, which can go on elsewhere.

    Args:
        held: What it takes of the memory for what waits and runs; what it keeps of its answer is added.
        admission: What it was let in with. It ends with the request, which pays for its tokens once a server has let it in.
    """

    def __init__(
        self,
        view: ServerRegistry,
        path: str,
        headers: dict[str, str],
        asked: CompletionFields,
        wish: RoutingRequest,
        held: Lease,
        admission: Admission,
    ) -> None:
        self._view, self._path, self._headers, self._asked, self._held = view, path, headers, asked, held
        self._flight, self._record = InFlight(wish, self._move), this_request()
        self._bill = Bill(admission, asked.tokens, asked.most_tokens)
        id = f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{self._record.id}"
        self._progress = Progress(asked.continuation or Continuation(id, int(time.time())), asked.sequences)
        # The seed is given here, so that another server draws the same, and the model, because it may have been asked for by another name.
        self._more: dict[str, Any] = {"seed": secrets.randbits(53) if asked.seed is None else asked.seed}
        self._more |= {"model": wish.model} if wish.adapter is None else {}
        self._joined: JoinedAnswer | None = None  # to one who asked for no stream
        if asked.may_be_streamed:
            self._more |= {"stream": True, "stream_options": {"include_usage": True}}
            told = self._progress.told
            self._joined = JoinedAnswer(asked.is_chat, asked.sequences, told.id, told.created)
        self._goes_on = asked.is_stream or asked.may_be_streamed  # else a server says what is wrong with it
        self._answer: Upstream | None = None
        self._is_over = self._was_let_in = False
        self._failures = 0
        self._rest = b""  # the beginning of an event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work, watch = asyncio.current_task(), asyncio.create_task(until_hung_up(receive))
        assert work is not None
        watch.add_done_callback(lambda _: None if watch.cancelled() or self._is_over else work.cancel())
        try:
            await self._run(SseWriter(send, scope))
        except asyncio.CancelledError:
            if not watch.done() or watch.cancelled():
                raise
            work.uncancel()  # the reader has hung up
        finally:
            self._is_over = True
            watch.cancel()
            self._bill.end(self._was_let_in, self._progress.count)

    async def _run(self, writer: SseWriter) -> None:
        """Go from server to server until all is answered."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            count = self._progress.count
            try:
                async with asyncio.timeout_at(deadline):
                    await self._view.place(self._flight)
            except TimeoutError:
                return await self._fail(no_room(self._view, self._flight.wish.model), writer)
            try:
                return await self._at(self._flight.server, writer)
            except Lost as lost:
                await self._left(lost)
            finally:
                self._view.leave(self._flight)
            if self._progress.count > count:
                deadline = time.monotonic() + PATIENCE_S

    async def _left(self, lost: Lost) -> None:
        """Note that a server does not go on with it. If that server works, the request itself may be what it fails at."""
        self._view.moved[self._flight.why] += 1
        logger.info("a request leaves server %d: %s", self._flight.server, lost)
        if self._flight.why == "lost":
            self._view.suspect(self._flight.server)
        if self._flight.why == "failed" and await self._view.works(self._flight.server):
            self._failures += 1
            wish = self._flight.wish
            self._flight.wish = replace(wish, failed_at=wish.failed_at | {self._flight.server})
            await asyncio.sleep(0.1)

    def _refuse(self, why: str) -> None:
        """Go elsewhere, unless servers that work have failed at it too often."""
        if self._failures < FAILURES - 1:
            self._flight.why = "failed"
            raise Lost(why)

    def _move(self, why: str) -> None:
        """The view takes the request off its server."""
        if self._answer is not None:
            self._flight.why = why
            self._answer.lose(why)

    async def _at(self, number: int, writer: SseWriter) -> None:
        """Have one server answer, or what is left to answer."""
        self._flight.why = "lost"  # if nobody says otherwise
        server, told = self._view.member(number), self._progress.told
        if self._progress.count and server.fingerprint != told.base:
            return await self._fail(ApiError(503, OTHER_BASE, retry_s=1.0), writer)
        if self._asked.continuation is not None and told.base not in ("", server.fingerprint):
            return await self._fail(ApiError(409, OTHER_BASE, "continuation"), writer)
        told.base = server.fingerprint
        body = self._asked.body(**self._more, **({"continuation": self._progress.told} if self._goes_on else {}))
        try:
            headers = {"Content-Type": "application/json", **self._headers}
            self._answer = await Upstream.ask(server.url, "POST", self._path, headers, body, self._bill.count)
            await self._answer.head()
            self._was_let_in |= self._answer.status == HTTPStatus.OK
            if self._answer.status == HTTPStatus.OK and self._goes_on:
                return await self._stream(self._answer, writer)
            await self._whole(self._answer, writer)
        except asyncio.CancelledError:  # the server tells of its first token, and may be at the prompt
            self._was_let_in |= self._answer is not None and not self._answer.status
            raise
        finally:
            if self._answer is not None:
                self._answer.lose("nobody reads it")
            self._answer = None

    async def _whole(self, answer: Upstream, writer: SseWriter) -> None:
        """Hand over an answer that is no stream: an error."""
        body = await answer.whole()
        if answer.status >= 500:
            self._refuse(f"status {answer.status}")
        if answer.status == HTTPStatus.NOT_FOUND and self._flight.wish.adapter is not None:
            return await self._fail(unknown_model(self._flight.wish.adapter, self._view.told.names), writer)
        headers = [(name, value) for name, value in answer.headers.items() if name in KEPT]
        return await self._failed(writer, answer.status, headers, body)

    async def _stream(self, answer: Upstream, writer: SseWriter) -> None:
        """Hand over events as they come."""
        self._rest = b""
        while piece := await answer.piece():
            events = self._events(piece)
            if failed := [event for event in events if event.startswith(FAILED)]:
                await self._give(writer, events[: events.index(failed[0])])
                self._refuse("the server failed")
                return await self._failed(writer, 500, FAILED_HEADERS, failed[0].removeprefix(b"data: "))
            if self._joined is not None and not self._held.take(sum(map(len, events))):
                error = "the answers that wait to be whole are too large together: ask for a stream, or for less"
                return await self._fail(ApiError(503, error, retry_s=5.0, reason="share_of_key"), writer)
            self._record.is_whole = any(event.startswith(DONE) for event in events)
            await self._give(writer, events, more=not self._record.is_whole)
            if self._record.is_whole:
                return None
            answer.hand_over = partial(self._hand_over, answer, writer)
        self._flight.why = "failed"
        raise Lost("the stream ended too early")

    def _events(self, piece: bytes) -> list[bytes]:
        """Return the events that are whole now, without their comments unless the client goes on with them elsewhere itself; and count them."""
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        count = self._progress.count
        told = [self._progress.take(event) for event in events]
        self._record.tokens(self._progress.count - count)
        self._held.keep(TOKEN_BYTES * (self._progress.count - count))
        return told if self._asked.continuation is None else events

    async def _give(self, writer: SseWriter, events: list[bytes], more: bool = True) -> None:
        """Hand over events: to one who asked for no stream, all together at the end."""
        if self._joined is None:
            if events or not more:
                if not writer.has_begun:
                    await writer.start(EVENTS)
                await writer.take([event + b"\n\n" for event in events], more)
            return
        for event in events:
            if not event.startswith(DONE):
                self._joined.take(event)
        if not more:
            await writer.start(JSON)
            await writer.take(self._joined.pieces(), more=False)

    def _hand_over(self, answer: Upstream, writer: SseWriter) -> bool:
        """Hand over events at once, if that makes nobody wait and the stream goes on after them."""
        new = self._rest + answer.unread
        if self._joined is not None or not writer.has_begun or not writer.is_free or DONE in new or FAILED in new:
            return False
        if events := self._events(answer.read()):
            writer.put(b"".join([event + b"\n\n" for event in events]))
        return True

    async def _fail(self, error: ApiError, writer: SseWriter) -> None:
        if not writer.has_begun:
            raise error
        error.note()
        await self._failed(writer, error.status, [], msgspec.json.encode(error.body))

    async def _failed(self, writer: SseWriter, status: int, headers: Headers, body: bytes) -> None:
        """Answer with an error of a server's; in the middle of a stream it is an event."""
        with suppress(msgspec.MsgspecError):
            reason = REASONS.get(status, "other")
            self._record.refuse(status, reason, msgspec.json.decode(body, type=_ErrorBody).error.message)
        if writer.has_begun:
            await writer.take([b"data: ", body, b"\n\n", DONE, b"\n\n"], more=False)
        else:
            await writer.start(headers, status)
            await writer.take([body], more=False)


def no_room(view: ServerRegistry, model: str) -> ApiError:
    """Return the error for a request that has waited in vain: all servers of its model are full, or none is ready."""
    states = Counter(seen.state for seen in view.seen.values() if seen.member.model == model)
    told = ", ".join(f"{count} {state}" for state, count in states.items()) or "it has none"
    why = "no server has room" if states[State.READY] else f"no server of {model} is ready ({told})"
    return ApiError(503, f"{why}: try again later", retry_s=5.0, reason="no_server")
