"""The page at /. It needs nothing from other hosts, and no other host may show it."""

from functools import cache
from pathlib import Path

from starlette.responses import Response

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


@cache
def _text() -> bytes:
    return Path(__file__).with_name("page.html").read_bytes()


def response() -> Response:
    return Response(_text(), headers=HEADERS, media_type="text/html")
