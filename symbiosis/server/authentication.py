"""Who sends a request, by the key that it shows."""

from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request

from symbiosis.base.hosts import Hosts
from symbiosis.server.api_errors import ApiError
from symbiosis.server.api_keys import Keys, Tenant
from symbiosis.server.request_record import this_request


class Authentication:
    """What serves requests that show keys.

    Args:
        host: Where it listens.
        allowed_hosts: Names by which it is asked for. By default, any where keys are needed, which no page of another site knows; else those
            of this host.
        processes: How many keep the limits of keys together.
    """

    def __init__(
        self, api_keys: str | None, host: str = "127.0.0.1", allowed_hosts: Sequence[str] = (), processes: int = 1
    ) -> None:
        self.keys = Keys(Path(api_keys) if api_keys else None, processes=processes)
        self.hosts = Hosts(host, allowed_hosts or ("*" if api_keys else ()))

    def tenant(self, request: Request) -> Tenant:
        if not self.keys.are_needed and is_of_another_site(request.headers):  # a page cannot know a key
            message = "a web page of another site may not use a server without API keys"
            raise ApiError(403, message, code="forbidden", reason="foreign_page")
        tenant = self.keys.tenant(request.headers.get("authorization"))
        this_request().tenant = tenant.name
        return tenant

    def asking(self, request: Request) -> Tenant:
        """Return who asks for a completion. Raises `ApiError` before the body is read if this tenant may have none now."""
        tenant = self.tenant(request)
        tenant.check(1, self.keys.clock())
        return tenant

    def administrator(self, request: Request) -> None:
        """Raise `ApiError` unless whoever sends this request may change what belongs to everybody."""
        self.tenant(request)
        self.keys.administrator(request.headers.get("authorization"))


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
