"""The engine's end of the link to the process that speaks HTTP. Whatever that process does, the engine never waits for it."""

import logging
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec

from symbiosis.base.logs import Tracebacks, about_request
from symbiosis.base.pulse import BEAT_S, Pulse
from symbiosis.errors import AdapterError, Busy, ConfigError, SymbiosisError, UnknownAdapter
from symbiosis.server.ipc.engine_ipc import (
    LENGTH,
    AdapterInfo,
    Answer,
    Ask,
    AskTraining,
    Cancel,
    Drain,
    EngineBeat,
    EngineReady,
    FromEngine,
    Outputs,
    Refused,
    StopCompletion,
    Submit,
    encoder,
    framed,
    to_engine,
)
from symbiosis.server.ipc.tenant_threads import TenantThreads
from symbiosis.server.tinker.tinker_messages import AnyAsked, CountSessions, TinkerRefusal
from symbiosis.serving.engine.engine_stats import EngineStats
from symbiosis.serving.request import Output, Request
from symbiosis.text import LONGEST, shown

if TYPE_CHECKING:  # it imports torch
    from symbiosis.serving import Engine

logger = logging.getLogger("symbiosis")
tracebacks = Tracebacks()

# but for those of HTTP: "see GET /v1/models", "ask POST /classify"
PATH = re.compile(r"(?<![\w./])(?<!GET )(?<!POST )(?:local://)?/(?!v1/)[^\s'\",;()]+")
MOST_UNREAD = 500_000  # outputs
MOST_REFUSED = 4096  # adapters whose refusals are logged once; beyond so many, they are logged again
# which the other process may call, and what is told of their results
METHODS: dict[str, Any] = {
    "add": AdapterInfo, "remove": None, "check_adapter": None, "adapters": list[AdapterInfo], "adapter_names": list[str],
    "figures": EngineStats, "classes_of": int,
}  # fmt: skip
MAY_WAIT = ("add", "remove")  # ... and which of them wait until an adapter is read
OF_TENANTS = ("classes_of",)  # ... or may read one for any tenant


class EngineServer:
    """Serves one process at the other end of `connection` until it hangs up. What that process has asked for and not got is cancelled then.

    Args:
        training: Answers what a tenant asks of the training service, or returns a future of the answer.
    """

    def __init__(
        self, engine: "Engine", connection: socket.socket, welcome: EngineReady, training: Callable[[str, AnyAsked], Any] | None = None
    ) -> None:  # fmt: skip
        self._engine, self._connection, self._training = engine, connection, training
        self._unsent: SimpleQueue[FromEngine | None] = SimpleQueue()
        self._told: list[Output] = []  # of the present step
        self._put = self._sent = 0  # outputs
        self._pulse, self.is_lost = Pulse(), False  # lost: the other process hangs
        self._closing = threading.Event()
        self._open: dict[int, int] = {}  # requests under way: completions that have not finished
        self._submissions: dict[int, Future[None]] = {}
        self._refused: dict[str | None, str] = {}  # by adapter: why, as it was logged
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="serve-ask")
        # for what reads an adapter, or waits until it is read: others do not wait for it
        self._adding = ThreadPoolExecutor(2, thread_name_prefix="serve-add")
        self._loading = TenantThreads(4, "serve-load")
        self._lanes = TenantThreads(4, "serve-schema")
        self._of_training = TenantThreads(4, "serve-train")
        self._unsent.put(welcome)
        engine.on_pause(self._on_pause)
        self._threads = [
            threading.Thread(target=run, name=f"serve-{run.__name__.strip('_')}", daemon=True)
            for run in (self._read, self._write, self._beat)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def under_way(self) -> int:
        """Requests that have come and not ended."""
        return len(self._open)

    def drain(self) -> None:
        """Let the other process finish what it has begun, and end."""
        self._unsent.put(Drain())

    def close(self) -> None:
        self._closing.set()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._unsent.put(None)
        for thread in self._threads:
            thread.join()
        for pool in (self._pool, self._adding):
            pool.shutdown(cancel_futures=True)
        for lanes in (self._loading, self._lanes, self._of_training):
            lanes.close()
        self._connection.close()

    def _read(self) -> None:
        try:
            with self._connection.makefile("rb") as stream:
                while head := stream.read(LENGTH.size):
                    message = to_engine.decode(stream.read(*LENGTH.unpack(head)))
                    self._pulse.beat()
                    match message:
                        case Submit(request):
                            self._begin(request)
                        case Cancel(id):
                            self._cancel(id)
                        case StopCompletion(id, completion):
                            self._engine.stop(id, completion)
                        case AskTraining():
                            self._of_training.submit(message.tenant, partial(self._answer_of_training, message))
                        case Ask(method=method, tenant=tenant) if method in OF_TENANTS:
                            self._loading.submit(tenant, partial(self._answer, message))
                        case Ask(method=method):
                            (self._adding if method in MAY_WAIT else self._pool).submit(self._answer, message)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            logger.debug("the link to the HTTP process broke: %s", error)
        finally:
            for id in list(self._open):
                self._cancel(id)
            self._unsent.put(None)

    def _begin(self, request: Request) -> None:
        """Submit a request. What has to be read or prepared for it is done in another thread, because the next message does not wait."""
        self._open[request.id] = len(request.under_way)
        guide, adapter = request.sampling.guide, request.adapter
        if adapter is not None and not self._engine.has_loaded(adapter):
            begun = self._loading.submit(request.tenant, lambda: self._submit(request))
        elif guide is not None:
            begun = self._lanes.submit(request.tenant, lambda: self._submit(request))
        elif adapter is not None:
            begun = self._pool.submit(self._submit, request)
        else:
            self._submit(request)
            return
        self._submissions[request.id] = begun
        begun.add_done_callback(lambda _: self._submissions.pop(request.id, None))

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S):
            sessions = self._training("", CountSessions()) if self._training is not None else 0
            self._unsent.put(EngineBeat(self._engine.step_s, *self._engine.room, sessions))
            self.is_lost = self._pulse.seems_lost()

    def _submit(self, request: Request) -> None:
        with about_request(request.external_id):
            try:
                self._engine.submit(request, self._told.append)
                self._refused.pop(request.adapter, None)
            except Exception as error:
                self._open.pop(request.id, None)
                message, status = _said(error)
                if isinstance(error, AdapterError) and not isinstance(error, UnknownAdapter):
                    self._log_refusal(request.adapter, str(error))
                    status = (
                        HTTPStatus.INTERNAL_SERVER_ERROR
                    )  # what lies in the server's folder is not the client's fault
                self._unsent.put(Refused(request.id, message, status, getattr(error, "param", None)))

    def _log_refusal(self, adapter: str | None, why: str) -> None:
        """Log why an adapter is refused, once until it is served or refused for another reason."""
        if self._refused.get(adapter) != why:
            if len(self._refused) >= MOST_REFUSED:
                self._refused.clear()
            self._refused[adapter] = why
            logger.warning("%s", why)

    def _on_pause(self) -> None:
        """Send what a step has told as one message, in the engine's thread."""
        if not self._told:
            return
        told = self._told.copy()
        self._told.clear()
        for number, output in enumerate(told):
            if output.finish is not None and output.request in self._open:
                self._open[output.request] -= 1
                if not self._open[output.request]:
                    del self._open[output.request]
            if output.error is not None:
                told[number] = msgspec.structs.replace(output, error=without_paths(output.error))
        self._put += len(told)
        self._unsent.put(Outputs(told))
        if self._put - self._sent > MOST_UNREAD:  # the other process does not read any more
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _cancel(self, id: int) -> None:
        """Cancel a request; if it is still being submitted, as soon as it is. One that waits for a thread is not begun."""
        submission = self._submissions.get(id)
        if submission is None:
            self._engine.cancel(id)
        elif submission.cancel():
            self._open.pop(id, None)
            self._unsent.put(Refused(id, "the request was cancelled", HTTPStatus.SERVICE_UNAVAILABLE))
        else:
            submission.add_done_callback(lambda _: self._engine.cancel(id))

    def _answer(self, ask: Ask) -> None:
        with about_request(ask.request_id):
            try:
                if ask.method not in METHODS:
                    raise ConfigError(f"the engine has no method {ask.method!r} for others")
                result = getattr(self._engine, ask.method)(*ask.arguments)
                told = None if result is None else msgspec.convert(result, METHODS[ask.method], from_attributes=True)
                answer = Answer(ask.number, msgspec.Raw(encoder.encode(told)))
            except Exception as error:
                message, status = _said(error)
                answer = Answer(ask.number, error=message, status=status)
        self._unsent.put(answer)

    def _answer_of_training(self, message: AskTraining) -> None:
        """Answer when what is asked for is there. No thread waits for it."""
        with about_request(message.request_id):
            try:
                if self._training is None:
                    raise ConfigError("this server was started without --train")
                result = self._training(message.tenant, message.asked)
            except Exception as error:
                text, status = _said(error)
                self._unsent.put(Answer(message.number, error=text, status=status))
                return
        if isinstance(result, Future):
            result.add_done_callback(lambda done: self._unsent.put(_answer_with(message.number, done.result())))
        else:
            self._unsent.put(_answer_with(message.number, result))

    def _write(self) -> None:
        """Write what is to be sent."""
        try:
            while (message := self._unsent.get()) is not None:
                self._connection.sendall(framed(message))
                self._sent += len(message.outputs) if isinstance(message, Outputs) else 0
        except OSError as error:
            logger.debug("the link to the HTTP process broke: %s", error)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


def _answer_with(number: int, result: object) -> Answer:
    return Answer(number, msgspec.Raw(encoder.encode(result)))


def without_paths(text: str) -> str:
    """Return a message, cut, without the paths of this host, for people who must not know them.

    >>> without_paths("no executor at local:///run/user/0/executor.sock any more: see GET /v1/models")
    'no executor at ... any more: see GET /v1/models'
    """
    return PATH.sub("...", text[:LONGEST])


def _said(error: Exception) -> tuple[str, int]:
    """Return what a client is told of an error, and the status of HTTP."""
    if isinstance(error, TinkerRefusal):
        return str(error), error.status
    if isinstance(error, Busy):
        return str(error), HTTPStatus.SERVICE_UNAVAILABLE
    if isinstance(error, SymbiosisError):
        status = HTTPStatus.NOT_FOUND if isinstance(error, UnknownAdapter) else HTTPStatus.BAD_REQUEST
        return without_paths(str(error)), status
    logger.error("a request failed: %s: %s", type(error).__name__, shown(str(error)), exc_info=tracebacks.of(error))
    return f"the server failed: {type(error).__name__}. Its log says more", HTTPStatus.INTERNAL_SERVER_ERROR
