"""Who sends a request, by the key that it shows."""

from pathlib import Path

from starlette.requests import Request

from symbiosis.serving.http.incoming.connections import now_known
from symbiosis.serving.http.keys import Keys, Tenant


class Keyed:
    """What serves requests that show keys. A connection counts as a known client's from then on."""

    def __init__(self, api_keys: str | None) -> None:
        self.keys = Keys(Path(api_keys) if api_keys else None)

    def tenant(self, request: Request) -> Tenant:
        tenant = self.keys.tenant(request.headers.get("authorization"))
        now_known(request.scope)
        return tenant

    def asking(self, request: Request) -> Tenant:
        """Return who asks for a completion. Raises `ApiError` before the body is read if this tenant may have none now."""
        tenant = self.tenant(request)
        tenant.admit(1, self.keys.clock()).end()
        return tenant

    def administrator(self, request: Request) -> None:
        """Raise `ApiError` unless whoever sends this request may change what belongs to everybody."""
        self.keys.administrator(request.headers.get("authorization"))
        now_known(request.scope)
