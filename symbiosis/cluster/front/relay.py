"""A completion on its way to a server, and, when that is lost or drains, to the next one: with what it has told, and the same draws."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from symbiosis.cluster.front.progress import DONE, FAILED, Progress
from symbiosis.cluster.front.upstream import Lost, Upstream
from symbiosis.cluster.front.view import Flight, View
from symbiosis.cluster.placement import Wish
from symbiosis.serving.http.failures import ApiError

logger = logging.getLogger("symbiosis")

PATIENCE_S = 60.0  # without a new token, before a request fails
FAILURES = 3  # of servers that say that they failed: the request itself may be what they fail at
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]  # fmt: skip
KEPT = (b"content-type", b"retry-after", b"www-authenticate")  # of a server's headers
STALL_S = 120.0  # a reader that takes nothing for so long is hung up on


class Relay:
    """One completion, as an answer.

    Args:
        done: Called at the end with how many tokens came, whatever the end is.
    """

    def __init__(
        self, view: View, path: str, headers: dict[str, str], body: dict[str, Any], wish: Wish, choices: int,
        done: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._view, self._path, self._headers, self._body = view, path, headers, body
        self._flight, self._done = Flight(wish, self._move), done
        self._is_stream = body.get("stream") is True
        self._shows_comments = "continuation" in body
        if body.get("seed") is None:
            body["seed"] = secrets.randbits(53)  # so that another server draws the same
        self._progress = Progress.of(body, "messages" in body, choices)
        self._answer: Upstream | None = None
        self._has_begun = self._is_over = False
        self._failures = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work, watch = asyncio.current_task(), asyncio.create_task(_until_hung_up(receive))
        assert work is not None
        watch.add_done_callback(lambda _: None if watch.cancelled() or self._is_over else work.cancel())
        try:
            await self._run(send)
        except asyncio.CancelledError:
            if not watch.done() or watch.cancelled():
                raise
            work.uncancel()  # the reader has hung up
        finally:
            self._is_over = True
            watch.cancel()
            self._done(self._progress.count)

    async def _run(self, send: Send) -> None:
        """Go from server to server until all is answered."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            count = self._progress.count
            try:
                async with asyncio.timeout_at(deadline):
                    await self._view.place(self._flight)
            except TimeoutError:
                return await self._fail(ApiError(503, "no server has room: try again later", retry_s=5.0), send)
            try:
                return await self._at(self._flight.server, send)
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
        if self._flight.why == "refused" and await self._view.works(self._flight.server):
            self._failures += 1
            await asyncio.sleep(0.1)

    def _refuse(self, why: str) -> None:
        """Go elsewhere, unless servers that work have failed at it too often."""
        if self._failures < FAILURES - 1:
            self._flight.why = "refused"
            raise Lost(why)

    def _move(self, why: str) -> None:
        """The view takes the request off its server. One that is not a stream stays where it drains, because nothing of it is known."""
        if self._answer is not None and (self._is_stream or why == "lost"):
            self._flight.why = why
            self._answer.lose(why)

    async def _at(self, number: int, send: Send) -> None:
        """Have one server answer, or what is left to answer."""
        self._flight.why = "lost"  # if nobody says otherwise
        body = {**self._body, "continuation": self._progress.told} if self._is_stream else self._body
        try:
            headers = {"Content-Type": "application/json", **self._headers}
            url = self._view.url(number)
            self._answer = await Upstream.ask(url, "POST", self._path, headers, msgspec.json.encode(body))
            await self._answer.head()
            if self._answer.status == HTTPStatus.OK and self._is_stream:
                return await self._stream(self._answer, send)
            await self._whole(self._answer, send)
        finally:
            if self._answer is not None:
                self._answer.lose("nobody reads it")
            self._answer = None

    async def _whole(self, answer: Upstream, send: Send) -> None:
        """Hand over an answer that is no stream."""
        body = await answer.whole()
        if answer.status >= 500:
            self._refuse(f"status {answer.status}")
        if self._has_begun:
            await self._send(send, b"data: " + body + b"\n\n" + DONE + b"\n\n", more=False)
            return
        headers = [(name, value) for name, value in answer.headers.items() if name in KEPT]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await self._send(send, body, more=False)

    async def _stream(self, answer: Upstream, send: Send) -> None:
        """Hand over events as they come."""
        left = b""
        while piece := await answer.piece():
            *events, left = (left + piece).split(b"\n\n")
            out: list[bytes] = []
            is_over = False
            for event in events:
                told = self._progress.take(event)
                if told.startswith(FAILED):
                    await self._hand_over(out, send)
                    out = []
                    self._refuse("the server failed")
                is_over = is_over or told.startswith(DONE)
                out.append(event if self._shows_comments else told)
            await self._hand_over(out, send, more=not is_over)
            if is_over:
                return
        self._flight.why = "refused"
        raise Lost("the stream ended too early")

    async def _hand_over(self, events: list[bytes], send: Send, more: bool = True) -> None:
        if events or not more:
            if not self._has_begun:
                self._has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
            await self._send(send, b"\n\n".join(events) + b"\n\n", more)

    async def _fail(self, error: ApiError, send: Send) -> None:
        if not self._has_begun:
            raise error
        await self._send(send, b"data: " + msgspec.json.encode(error.body) + b"\n\n" + DONE + b"\n\n", more=False)

    async def _send(self, send: Send, body: bytes, more: bool = True) -> None:
        async with asyncio.timeout(STALL_S):
            await send({"type": "http.response.body", "body": body, "more_body": more})


async def _until_hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
