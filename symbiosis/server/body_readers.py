"""Routes that take a body: who sends it is asked first, then it is read as what the route says that it takes."""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp

from symbiosis.server.api_keys import Tenant
from symbiosis.server.openai_protocol import DrawnBody, read
from symbiosis.server.serving_state import ServingState

Kind = TypeVar("Kind")
Route = Callable[[ServingState, Request], Awaitable[ASGIApp]]
Handler = Callable[[ServingState, Request, Tenant, Kind, int], Awaitable[ASGIApp]]


def takes(kind: type[Kind], of_administrators: bool = False) -> Callable[[Handler[Kind]], Route]:
    """Make a route of a handler, which is called with who sends a request, its body as this kind, and how many bytes that has.

    Args:
        of_administrators: Whether only they may send it. Theirs are not counted against a key's limits.
    """

    def decorated(handler: Handler[Kind]) -> Route:
        @wraps(handler)
        async def route(front: ServingState, request: Request) -> ASGIApp:
            tenant = front.administrator(request) if of_administrators else front.payer(request)
            data = await front.bodies.read(request, front.options.max_body_bytes)
            body = read(kind, data)
            if isinstance(body, DrawnBody) and not body.model:
                body.model = front.options.model
            return await handler(front, request, tenant, body, len(data))

        setattr(route, "body", kind)
        return route

    return decorated


def body_of(route: Any) -> type[Any] | None:
    """Return the kind of body that a route takes."""
    return getattr(route, "body", None)
