"""Marks in ids. In a cluster an id tells which of its servers holds what it names: a session of who trains and all that belongs to it, or a response."""

import re
import secrets
from hashlib import sha256

ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
RESPONSE = re.compile(r"resp_([0-9a-f]{8})_")
MARK = 8  # digits that tell the server


def mark_of(server: str) -> str:
    """Return what the ids of a server's sessions begin with.

    >>> mark_of("demo-server-1")
    '491178ef'
    """
    return sha256(server.encode()).hexdigest()[:MARK]


def new_session_id(server: str | None) -> str:
    """Return an id that nobody can guess, of a session at this server; None: at the only one.

    >>> new_session_id("demo-server-1")[:8], len(new_session_id(None))
    ('491178ef', 32)
    """
    return secrets.token_hex(16) if server is None else mark_of(server) + secrets.token_hex(16)[MARK:]


def mark_in(text: str) -> str | None:
    """Return the mark of the first id in the name of a run, a sampler or a request, or in a path.

    >>> mark_in("tinker://491178ef000000000000000000000000:train:0/weights/last"), mark_in("demo")
    ('491178ef', None)
    """
    found = ID.search(text)
    return found[0][:MARK] if found else None


def response_id(server: str | None, request: str) -> str:
    """Return the id of the response to a request.

    >>> response_id(None, "1"), response_id("demo-server-1", "1")
    ('resp_1', 'resp_491178ef_1')
    """
    return f"resp_{request}" if server is None else f"resp_{mark_of(server)}_{request}"


def mark_in_response(id: str) -> str | None:
    """Return the mark in the id of a response.

    >>> mark_in_response("resp_491178ef_1"), mark_in_response("resp_1")
    ('491178ef', None)
    """
    found = RESPONSE.match(id)
    return found[1] if found else None
