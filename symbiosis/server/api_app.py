"""The app of a server, and of a front end: its routes, who may ask at all, and what they share."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from symbiosis import __version__
from symbiosis.base.hosts import Hosts
from symbiosis.build import build
from symbiosis.server import page
from symbiosis.server.api_errors import ApiError, failed, wrong
from symbiosis.server.api_keys import Keys, Tenant
from symbiosis.server.bodies import Bodies, until_hung_up
from symbiosis.server.cors import Cors
from symbiosis.server.ipc.tenant_threads import LARGE, MANY_CHOICES, TenantThreads
from symbiosis.server.observer import Observer
from symbiosis.server.request_record import begin, this_request
from symbiosis.server.tracing import Tracing

Made = TypeVar("Made")
State = TypeVar("State", bound="ApiState")
UNKNOWN_HOST = (
    "this server is not known as {!r}: ask for it by its address, or start it with --allowed-hosts and that name"
)
SECRET_HEADER = "X-Symbiosis-Cluster"  # with which a front end shows the cluster's secret
URL_HEADER = "X-Symbiosis-Url"  # with which it tells what it was asked for
OPEN = ("/health", "/ping", "/metrics", "/version", "/openapi.json")  # for probes and Prometheus
FOR_FRONT_ENDS = "this server is one of a cluster, and takes requests from its front ends only: ask the cluster's address, which `symbiosis cluster status` shows"
ID_HEADER = b"x-request-id"


class ApiState:
    """What routes share.

    Args:
        host: Where it listens.
        allowed_hosts: Names by which it is asked for. By default, any where keys are needed, which no page of another site knows; else those
            of this host.
        processes: How many keep the limits of keys together.

    Attributes:
        cors: The pages of other sites that may use it.
        root_path: What a proxy in front puts before each path.
    """

    cors = Cors()
    root_path = ""

    def __init__(
        self, api_keys: str | None, host: str = "127.0.0.1", allowed_hosts: Sequence[str] = (), tracing: Tracing | None = None,
        processes: int = 1, threads: int = 4,
    ) -> None:  # fmt: skip
        self.keys = Keys(Path(api_keys) if api_keys else None, processes=processes)
        self.hosts = Hosts(host, allowed_hosts or ("*" if api_keys else ()))
        self.bodies, self.observer = Bodies(), Observer(tracing)
        self.threads = TenantThreads(threads, "http-made")

    def tenant(self, request: Request, authorization: str | None = None) -> Tenant:
        """Return who sends a request, by its header, or by an authorization that is known otherwise."""
        if self.keys.are_needed:
            tenant = self.keys.tenant(authorization or request.headers.get("authorization"))
        elif is_of_another_site(request.headers) and not self.cors.allows(request.headers.get("origin")):
            # a page cannot know a key
            message = "a web page of another site may not use a server without API keys"
            raise ApiError(403, message, code="forbidden", reason="foreign_page")
        else:
            tenant = self.keys.nobody
        this_request().tenant = tenant.name
        return tenant

    def payer(self, request: Request) -> Tenant:
        """Return who sends a request that computes something. Raises `ApiError` if the key may have nothing more now."""
        tenant = self.tenant(request)
        if tenant.is_limited:
            tenant.check(1, self.keys.clock())
        return tenant

    def trainer(self, request: Request) -> Tenant:
        """Return who sends a request of Tinker's API, by the key in X-API-Key."""
        key = request.headers.get("x-api-key")
        return self.tenant(request, f"Bearer {key}" if key else None)

    def administrator(self, request: Request) -> Tenant:
        """Return who sends a request. Raises `ApiError` unless they may add, replace and remove adapters, which belong to everybody."""
        if not (tenant := self.tenant(request)).line.may_change_adapters:
            message = "this key may not change adapters: `admin` in its line of the server's keys allows it"
            raise ApiError(403, message, code="forbidden", reason="not_administrator")
        return tenant

    async def made(self, request: Request, tenant: Tenant, size: int, choices: int, make: Callable[[], Made]) -> Made:
        """Return what `make` makes of a body of so many bytes and choices. Of a large one it is made in a thread, so that nobody waits for it,
        and only if the client still does."""
        if size <= LARGE and choices <= MANY_CHOICES:
            return make()
        result: asyncio.Future[Made] = asyncio.wrap_future(self.threads.submit(tenant.name, make))
        left = asyncio.create_task(until_hung_up(request.receive))
        either: set[asyncio.Future[Any]] = {result, left}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                raise ApiError(400, "the client has hung up", reason="client_left")
            return result.result()
        finally:
            result.cancel()
            left.cancel()


class Api:
    """An app with a table of methods, paths and handlers, each of which gets what they share. It answers only who asks for it by a name that is
    known, and, where there is a secret, only front ends of the cluster that has it, which hold the cluster's limits, and probes. Each request
    has a record, which is written at its end."""

    def __init__(
        self, state: State, table: Iterable[tuple[str, str, Callable[[State, Request], Awaitable[ASGIApp]]]], secret: str = ""
    ) -> None:  # fmt: skip
        self._hosts, self._observer, self._secret = state.hosts, state.observer, secret.encode()
        routes = [Route(path, partial(handler, state), methods=[method]) for method, path, handler in table]
        unknown = partial(_unknown_path, state)
        handlers: dict[Any, Any] = {ApiError: _answered, HTTPException: unknown, Exception: _failed}
        self._app: ASGIApp = Starlette(routes=routes, exception_handlers=handlers)
        self._root = state.root_path
        if (cors := state.cors).origins:
            self._app = CORSMiddleware(
                self._app, cors.origins, cors.methods, cors.headers, cors.credentials, expose_headers=[ID_HEADER.decode()]
            )  # fmt: skip
        # which are few: what is asked for is not
        self._paths: dict[Any, str] = {route.endpoint: route.path for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._root and f"{scope['path']}/".startswith(f"{self._root}/"):
            scope["path"] = scope["path"][len(self._root) :] or "/"
        headers, observer = Headers(scope=scope), self._observer
        app: ASGIApp = self._app
        record = begin(headers)
        tracing = observer.tracing if scope["path"].startswith("/v1/") else None
        span = tracing.begin(record, scope) if tracing is not None else None

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (ID_HEADER, record.id.encode())]
                observer.answered[self._paths.get(scope.get("endpoint"), "other"), record.status] += 1
            await send(message)

        if unknown := [each for each in headers.getlist("host") if not self._hosts.has(each)]:
            app = wrong(UNKNOWN_HOST.format(unknown[0][:100]), "host", reason="unknown_host").response()
        elif (
            self._secret
            and scope["path"] not in OPEN
            and not hmac.compare_digest(headers.get(SECRET_HEADER, "").encode(), self._secret)
        ):
            app = ApiError(403, FOR_FRONT_ENDS, code="forbidden", reason="not_a_front_end").response()
        try:
            await app(scope, receive, told)
        finally:
            path = self._paths.get(scope.get("endpoint"), "other")
            observer.end(record, path, span, client=(scope.get("client") or [""])[0])


def json_response(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def version(state: ApiState, request: Request) -> ASGIApp:
    return json_response({"version": __version__, "build": build()})


async def shown_page(state: ApiState, request: Request) -> ASGIApp:
    return page.response()


def is_of_another_site(headers: Headers) -> bool:
    """Whether a browser says that a page of another site has made it send this. Other programs say nothing of that kind.

    >>> is_of_another_site(Headers({"host": "127.0.0.1:8000", "origin": "https://example.org"}))
    True
    >>> is_of_another_site(Headers({"host": "127.0.0.1:8000", "origin": "http://["}))
    True
    """
    if site := headers.get("sec-fetch-site"):
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")


def _answered(request: Request, error: ApiError) -> Response:
    return error.response()


async def _unknown_path(state: ApiState, request: Request, error: HTTPException) -> Response:
    """Answer everybody alike, but note who asks."""
    with suppress(ApiError):
        state.trainer(request)
    what = "no such path" if error.status_code == 404 else error.detail
    reason = "no_such_path" if error.status_code == 404 else ""
    told = ApiError(error.status_code, f"{request.method} {request.url.path}: {what}", reason=reason).response()
    if error.status_code == 405:
        told.headers["Allow"] = ", ".join(sorted(_methods_of(request)))
    return told


def _methods_of(request: Request) -> set[str]:
    """Return the methods that a path is there for."""
    routes = [each for each in request.app.routes if each.matches(request.scope)[0] is not Match.NONE]
    return {method for route in routes for method in route.methods}


def _failed(request: Request, error: Exception) -> Response:
    return failed(error).response()
