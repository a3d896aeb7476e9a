"""The other end of the link: the engine's methods, as coroutines of the process that speaks HTTP."""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import msgspec

from symbiosis.base.fair_share import FairShare
from symbiosis.base.logs import about_request, request_id
from symbiosis.base.pulse import SILENT_S, Pulse
from symbiosis.build import build
from symbiosis.server.api_errors import ApiError, failed
from symbiosis.server.ipc.engine_ipc import (
    LENGTH,
    Answer,
    Ask,
    AskTraining,
    Cancel,
    Drain,
    EngineBeat,
    EngineReady,
    ReceivedOutput,
    ReceivedOutputs,
    Refused,
    StopCompletion,
    Submit,
    ToEngine,
    framed,
    from_engine,
)
from symbiosis.server.tinker.tinker_messages import AnyAsked
from symbiosis.serving.request import Request

logger = logging.getLogger("symbiosis")
OTHER_BUILD = "the engine is symbiosis %s, and this process, which speaks HTTP for it, %s: start the server again"
Result = TypeVar("Result")
OnOutput = Callable[[ReceivedOutput | ApiError], None]


@dataclass(slots=True)
class OpenRequest:
    """A request that the engine has not ended."""

    request: Request
    take: OnOutput | None  # None: it was cancelled
    completions: int
    left: int  # of them, those that have not finished


class EngineClient(asyncio.Protocol):
    """One engine, asked through one connection. Use `await EngineClient.connect(...)`."""

    welcome: EngineReady

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.drained, self.ended = asyncio.Event(), loop.create_future()
        self._is_ready: asyncio.Future[None] = loop.create_future()
        self._transport: asyncio.Transport
        self._unread = bytearray()  # the beginning of a message
        self.at_pause = list[Callable[[], None]]()  # called once, when all outputs that lie there are handed out
        self._pulse, self.step_s, self.is_silent = Pulse(), 0.0, False
        self.room = self.tokens = self.sessions = 0
        self.ids = count(1)  # of requests and questions
        self.requests: dict[
            int, OpenRequest
        ] = {}  # that the engine has not ended, also those that nobody wants any more
        self.places = FairShare(sys.maxsize)  # what tenants have of it: completions of those requests
        self._asked: dict[int, asyncio.Future[Answer]] = {}

    @classmethod
    async def connect(cls, link: socket.socket) -> "EngineClient":
        """Connect, and wait until the engine is ready. Raises `EOFError` if it ends before."""
        _, remote = await asyncio.get_running_loop().create_unix_connection(cls, sock=link)
        await remote._is_ready
        return remote

    @property
    def is_there(self) -> bool:
        return not self.ended.done()

    @property
    def completions(self) -> int:
        """Completions of those requests that have not finished."""
        return sum(asked.left for asked in self.requests.values())

    def submit(self, request: Request, on_output: OnOutput) -> None:
        """Begin a request. `on_output` is called with what comes, or once with an error."""
        if self.ended.done():
            raise gone()
        if self.drained.is_set():
            raise ApiError(503, "the server is ending: ask another one", retry_s=10.0, reason="ending")
        self._tell(Submit(request))
        completions = len(request.under_way)
        self.requests[request.id] = OpenRequest(request, on_output, completions, completions)
        self.places.take(request.tenant, completions)

    def cancel(self, id: int) -> None:
        """End a request: nothing of it is handed out any more."""
        asked = self.requests.get(id)
        if asked is not None and asked.take is not None:
            asked.take = None
            self._tell(Cancel(id))

    def stop(self, id: int, completion: int) -> None:
        """End a completion whose text has come to a stop string."""
        self._tell(StopCompletion(id, completion))

    async def ask(self, kind: type[Result], method: str, *arguments: str, tenant: str = "") -> Result:
        """Call one of the engine's other methods (`engine_server.METHODS`). What it returns is read as this kind."""
        return await self._answer(kind, lambda number: Ask(number, method, arguments, request_id.get(), tenant))

    async def ask_training(self, kind: type[Result], tenant: str, asked: AnyAsked) -> Result:
        """Ask the training service. What it answers is read as this kind."""
        return await self._answer(kind, lambda number: AskTraining(number, tenant, asked, request_id.get()))

    async def _answer(self, kind: type[Result], question: Callable[[int], Ask | AskTraining]) -> Result:
        if self.ended.done():
            raise gone()
        number = next(self.ids)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._tell(question(number))
            told = await answer
        finally:
            del self._asked[number]
        if told.error:
            raise ApiError(told.status, told.error)
        return msgspec.msgpack.decode(told.result, type=kind)

    def _tell(self, message: ToEngine) -> None:
        """Send a message. If the engine has ended, nothing is sent, and `connection_lost` is called."""
        try:
            frame = framed(message)
        except (OverflowError, RecursionError) as error:
            raise ApiError(
                400, f"the request has a number of more than 64 bits, or is nested too deeply: {error}"
            ) from None
        if not self._transport.is_closing():
            self._transport.write(frame)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take all messages that have come. What they bring is handed on together afterwards: a process that is behind makes fewer, larger
        pieces of it."""
        self._pulse.beat()
        self._unread += data
        at, there = 0, len(self._unread)
        while there - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._unread, at)
            if there - at - LENGTH.size < length:
                break
            at += LENGTH.size + length
            match from_engine.decode(self._unread[at - length : at]):
                case ReceivedOutputs(outputs):
                    for output in outputs:
                        self._give(output)
                case Answer(number=number) as told:
                    answer = self._asked.get(number)
                    if answer is not None and not answer.done():
                        answer.set_result(told)
                case EngineBeat(step_s, room, tokens, sessions):
                    self.step_s, self.room, self.tokens, self.sessions = step_s, room, tokens, sessions
                case Refused(id, error, status, param):
                    asked = self._over(id)
                    if asked is not None and asked.take is not None:
                        asked.take(ApiError(status, error, param))
                case Drain():
                    self.drained.set()
                case EngineReady() as welcome:
                    self.welcome = welcome
                    if welcome.build != build():
                        logger.warning(OTHER_BUILD, welcome.build or "another release", build())
                    self._is_ready.set_result(None)
        del self._unread[:at]
        calls, self.at_pause = self.at_pause, []
        for call in calls:
            call()

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)
        if not self._is_ready.done():
            self._is_ready.set_exception(EOFError("the engine ended before it was ready"))
        for asked in [self._over(id) for id in list(self.requests)]:
            if asked is not None and asked.take is not None:
                asked.take(gone())
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(gone())

    def beat(self) -> bool:
        """Tell the engine's process that this one runs, and return whether that one does. To be called at least every second."""
        self._tell(EngineBeat())
        self.is_silent = self._pulse.look() > SILENT_S / 3
        return not self._pulse.seems_lost()

    def _give(self, output: ReceivedOutput) -> None:
        if (asked := self.requests.get(output.request)) is None:
            return
        asked.left -= output.finish is not None
        if not asked.left:
            self._over(output.request)
        if (take := asked.take) is None:
            return
        try:
            take(output)
        except Exception as error:  # a mistake of ours, which ends this request and no other
            with about_request(asked.request.external_id):
                logger.error("an output could not be taken", exc_info=error)
            self.cancel(output.request)
            take(failed(error))

    def _over(self, id: int) -> OpenRequest | None:
        """Forget a request that the engine has ended."""
        asked = self.requests.pop(id, None)
        if asked is not None:
            self.places.give_back(asked.request.tenant, asked.completions)
        return asked

    def close(self) -> None:
        self._transport.close()


def gone() -> ApiError:
    return ApiError(503, "the engine has ended", reason="engine_gone")
