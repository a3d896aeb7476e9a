"""A completion on its way to a server, and, when that is lost or drains, to the next one: with what it has told, and the same draws."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from symbiosis.cluster.placement import RoutingRequest
from symbiosis.cluster.router.completion_fields import CompletionFields
from symbiosis.cluster.router.event_forms import Events, Form, Joined
from symbiosis.cluster.router.joined_answer import JoinedAnswer
from symbiosis.cluster.router.progress import DONE, FAILED, Progress
from symbiosis.cluster.router.server_registry import InFlight, ServerRegistry
from symbiosis.cluster.router.upstream import Lost, Upstream
from symbiosis.server.api_errors import REASONS, ApiError, unknown_model
from symbiosis.server.bodies import until_hung_up
from symbiosis.server.fair_share import Lease
from symbiosis.server.request_record import this_request
from symbiosis.server.serving_state import OTHER_BASE
from symbiosis.server.sse import SseWriter

logger = logging.getLogger("symbiosis")

PATIENCE_S = 60.0  # without a new token, before a request fails
FAILURES = 3  # of servers that say that they failed: the request itself may be what they fail at
KEPT = (b"content-type", b"retry-after", b"www-authenticate", b"x-should-retry")  # of a server's headers
TOKEN_BYTES = 40  # that a token takes which a server may have to go on from
FAILED_HEADERS = [(b"content-type", b"application/json"), (b"x-should-retry", b"false")]


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _Error = msgspec.field(default_factory=_Error)


class _Counted(msgspec.Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)


class Relay:
    """One completion, as an answer. A server always gives it as a stream, which can go on elsewhere.

    Args:
        held: What it takes of the memory for what waits and runs; what it keeps of its answer is added.
        done: Called at the end, whatever it is, with whether a server let it in, and how many tokens came.
    """

    def __init__(
        self,
        view: ServerRegistry,
        path: str,
        headers: dict[str, str],
        asked: CompletionFields,
        wish: RoutingRequest,
        held: Lease,
        done: Callable[[bool, int], None],
    ) -> None:
        self._view, self._path, self._headers, self._asked, self._held = view, path, headers, asked, held
        self._flight, self._done = InFlight(wish, self._move), done
        self._progress = Progress.of(asked)
        # The seed is given here, so that another server draws the same, and the model, because it may have been asked for by another name.
        self._more: dict[str, Any] = {"seed": secrets.randbits(53) if asked.seed is None else asked.seed}
        self._more |= {"model": wish.model} if wish.adapter is None else {}
        self._form: Form = Events(asked.continuation is not None)
        if asked.may_be_streamed:
            self._more |= {"stream": True, "stream_options": {"include_usage": True}}
            told = self._progress.told
            self._form = Joined(JoinedAnswer(asked.is_chat, asked.sequences, told.id, told.created))
        self._goes_on = asked.is_stream or asked.may_be_streamed  # else a server says what is wrong with it
        self._answer: Upstream | None = None
        self._is_over = self._was_let_in = False
        self._failures = 0
        self._record = this_request()
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
            self._held.end()
            self._done(self._was_let_in, self._progress.count)

    async def _run(self, outlet: SseWriter) -> None:
        """Go from server to server until all is answered."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            count = self._progress.count
            try:
                async with asyncio.timeout_at(deadline):
                    await self._view.place(self._flight)
            except TimeoutError:
                error = ApiError(503, "no server has room: try again later", retry_s=5.0, reason="no_server")
                return await self._fail(error, outlet)
            try:
                return await self._at(self._flight.server, outlet)
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

    async def _at(self, number: int, outlet: SseWriter) -> None:
        """Have one server answer, or what is left to answer."""
        self._flight.why = "lost"  # if nobody says otherwise
        base, told = self._view.base(number), self._progress.told
        if self._progress.count and base != told.base:
            return await self._fail(ApiError(503, OTHER_BASE, retry_s=1.0), outlet)
        if self._asked.continuation is not None and told.base not in ("", base):
            return await self._fail(ApiError(409, OTHER_BASE, "continuation"), outlet)
        told.base = base
        body = self._asked.body(**self._more, **({"continuation": self._progress.told} if self._goes_on else {}))
        try:
            headers = {"Content-Type": "application/json", **self._headers}
            url = self._view.url(number)
            self._answer = await Upstream.ask(url, "POST", self._path, headers, body)
            await self._answer.head()
            self._was_let_in |= self._answer.status == HTTPStatus.OK
            if self._answer.status == HTTPStatus.OK and self._goes_on:
                return await self._stream(self._answer, outlet)
            await self._whole(self._answer, outlet)
        except asyncio.CancelledError:  # the server tells of its first token, and may be at the prompt
            self._was_let_in |= self._answer is not None and not self._answer.status
            raise
        finally:
            if self._answer is not None:
                self._answer.lose("nobody reads it")
            self._answer = None

    async def _whole(self, answer: Upstream, outlet: SseWriter) -> None:
        """Hand over an answer that is no stream."""
        body = await answer.whole()
        if answer.status >= 500:
            self._refuse(f"status {answer.status}")
        if answer.status == HTTPStatus.NOT_FOUND and self._flight.wish.adapter is not None:
            return await self._fail(unknown_model(self._flight.wish.adapter, self._view.told.names), outlet)
        if answer.status == HTTPStatus.OK:
            self._progress.count += _tokens(body)
            self._record.end()
        else:
            self._note(answer.status, body)
        headers = [(name, value) for name, value in answer.headers.items() if name in KEPT]
        return await self._form.refused(outlet, answer.status, headers, body)

    async def _stream(self, answer: Upstream, outlet: SseWriter) -> None:
        """Hand over events as they come."""
        self._rest = b""
        while piece := await answer.piece():
            count = self._progress.count
            out: list[tuple[bytes, bytes]] = []
            for event, told in self._events(piece):
                if told.startswith(FAILED):
                    await self._form.give(outlet, out)
                    out = []
                    self._refuse("the server failed")
                    self._note(500, told.removeprefix(b"data: "))
                    return await self._form.refused(outlet, 500, FAILED_HEADERS, told.removeprefix(b"data: "))
                out.append((event, told))
            is_over = any(told.startswith(DONE) for _, told in out)
            if not self._counted(out, self._progress.count - count):
                error = "the answers that wait to be whole are too large together: ask for a stream, or for less"
                return await self._fail(ApiError(503, error, retry_s=5.0, reason="share_of_key"), outlet)
            if is_over:
                self._record.end()
            await self._form.give(outlet, out, more=not is_over)
            if is_over:
                return None
            answer.hand_over = partial(self._hand_over, answer, outlet)
        self._flight.why = "failed"
        raise Lost("the stream ended too early")

    def _events(self, piece: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the events that are whole now, as they came and without their comments."""
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        for event in events:
            yield event, self._progress.take(event)

    def _hand_over(self, answer: Upstream, outlet: SseWriter) -> bool:
        """Hand over events at once, if that makes nobody wait and the stream goes on after them."""
        if not self._form.may_put(outlet):
            return False
        new = self._rest + answer.unread
        if DONE in new or FAILED in new:
            return False
        count = self._progress.count
        events = list(self._events(answer.read()))
        self._counted(events, self._progress.count - count)
        self._form.put(outlet, events)
        return True

    def _counted(self, events: list[tuple[bytes, bytes]], tokens: int) -> bool:
        """Count the tokens of these events, and what is kept of them. Return whether it may be kept: a stream keeps only its tokens, and always may."""
        self._record.tokens(tokens)
        if self._form.keeps_events:
            return self._held.take(TOKEN_BYTES * tokens + sum(len(told) for _, told in events))
        self._held.keep(TOKEN_BYTES * tokens)
        return True

    async def _fail(self, error: ApiError, outlet: SseWriter) -> None:
        if not self._form.has_begun:
            raise error
        error.note()
        await self._form.refused(outlet, error.status, [], msgspec.json.encode(error.body))

    def _note(self, status: int, body: bytes) -> None:
        """Note with what error a server has answered."""
        with suppress(msgspec.MsgspecError):
            self._record.refuse(
                status, REASONS.get(status, "other"), msgspec.json.decode(body, type=_ErrorBody).error.message
            )


def _tokens(answer: bytes) -> int:
    """Return how many tokens a whole answer has."""
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(answer, type=_Counted).usage.completion_tokens
    return 0
