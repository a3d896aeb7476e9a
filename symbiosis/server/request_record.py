"""One request of HTTP, as logs, figures and traces know it."""

import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.datastructures import Headers

from symbiosis.base.logs import request_id
from symbiosis.serving.request import Sampling

STRANGER = "unauthenticated"  # in the place of a tenant
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}")


@dataclass(eq=False)
class RequestRecord:
    """What is known of a request so far. Times are those of the host's monotonic clock."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    trace_headers: dict[str, str] = field(default_factory=dict)  # that go with what is asked of others for it
    tenant: str = STRANGER
    model: str = ""
    adapter: str = ""  # the name that is asked for: an adapter's, or the model's own
    choices: int = 1
    sampling: Sampling | None = None
    prompt_tokens: int = 0
    status: int = 0
    reason: str = ""  # why it was refused, or failed
    message: str = ""
    came: float = field(default_factory=time.monotonic)
    begun: float = 0.0  # its first step
    first: float = 0.0  # its first token
    last: float = 0.0
    count: int = 0  # tokens
    is_whole: bool = False  # all of its completions have finished

    def refuse(self, status: int, reason: str, message: str) -> None:
        """Note why it is not answered as it was asked."""
        self.reason, self.message = reason, message
        self.status = self.status or status

    def tokens(self, count: int, begun: float = 0.0) -> None:
        """Note that so many tokens have come."""
        if not count:
            return
        self.last, self.count = time.monotonic(), self.count + count
        self.begun = self.begun or begun
        self.first = self.first or self.last

    def vector(self, begun: float) -> None:
        """Note that the vector of a prompt has come."""
        self.last, self.begun = time.monotonic(), self.begun or begun


_record: ContextVar[RequestRecord | None] = ContextVar("record", default=None)


def this_request() -> RequestRecord:
    """Return the request that is being answered; outside of any, one of which nobody is told."""
    return _record.get() or RequestRecord()


def begin(headers: Headers) -> RequestRecord:
    """Return the record of a request with these headers, which is `this_request` until its task ends. Its id is the one of `X-Request-Id`,
    if that is one.

    >>> begin(Headers({"X-Request-Id": "abc-1"})).id, len(begin(Headers({"X-Request-Id": "a b"})).id)
    ('abc-1', 32)
    """
    record = RequestRecord()
    if ID.fullmatch(given := headers.get("x-request-id", "")):
        record.id = given
    if TRACEPARENT.fullmatch(parent := headers.get("traceparent", "")):
        record.trace_headers["traceparent"] = parent
        if TRACESTATE.fullmatch(state := headers.get("tracestate", "")):
            record.trace_headers["tracestate"] = state
    _record.set(record)
    request_id.set(record.id)
    return record
