"""A server of a cluster takes requests from front ends only: they hold the cluster's limits, which whoever asks a server would pass by."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from symbiosis.server.api_errors import ApiError

HEADER = "X-Symbiosis-Cluster"  # with which a front end shows the cluster's secret
OPEN = ("/health", "/metrics", "/version")  # for probes and Prometheus
REFUSED = "this server is one of a cluster, and takes requests from its front ends only: ask the cluster's address, which `symbiosis cluster status` shows"


def behind_front_ends(app: ASGIApp, secret: str) -> ASGIApp:
    """Return an app that answers whoever knows the secret, and probes. Without a secret it answers everybody."""
    if not secret:
        return app

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        shown = Headers(scope=scope).get(HEADER, "")
        if scope["path"] in OPEN or hmac.compare_digest(shown.encode(), secret.encode()):
            await app(scope, receive, send)
        else:
            await ApiError(403, REFUSED, code="forbidden", reason="not_a_front_end").response()(scope, receive, send)

    return guarded
