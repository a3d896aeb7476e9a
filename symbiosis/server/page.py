"""The page at /. It needs nothing from other hosts, and no other host may show it."""

from functools import cache
from pathlib import Path

from starlette.responses import Response

import symbiosis

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
DEMO_MODEL = Path(symbiosis.__file__).with_name("demo_model")
HEADERS = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


def kind_of(folder: str, template: object) -> str:
    """Return what a model writes, by which the page has an example for it: "chat" if its template tells who says what, "code" for the demo
    model, which has seen Python only, else "text".

    >>> kind_of("some/model", "{{ message.role }}: {{ message.content }}"), kind_of("some/model", None)
    ('chat', 'text')
    """
    if "role" in str(template or ""):
        return "chat"
    return "code" if Path(folder) == DEMO_MODEL else "text"


@cache
def _text() -> bytes:
    return Path(__file__).with_name("page.html").read_bytes()


def response() -> Response:
    return Response(_text(), headers=HEADERS, media_type="text/html")
