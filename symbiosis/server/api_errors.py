"""Errors in the form that OpenAI's clients read."""

import errno
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import Response

from symbiosis.server.request_record import this_request
from symbiosis.text import FEW_LETTERS, LONGEST

logger = logging.getLogger("symbiosis")

REASONS = {  # in logs and figures, unless whoever raises it knows better
    400: "invalid_request", 401: "unknown_key", 403: "forbidden", 404: "not_found", 405: "no_such_method", 408: "body_too_slow", 413: "body_too_large",
    429: "too_many_requests", 431: "head_too_large", 500: "failed", 503: "unavailable", 507: "disk_full",
}  # fmt: skip
KINDS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


LASTING = (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.INSUFFICIENT_STORAGE)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ApiError(Exception):
    """An error that ends a request with this status. `reason` is one of few words, for logs and figures. What is told is cut: it may have words of the
    request.

    >>> ApiError(404, "there is no model 'x'", code="model_not_found").body["error"]["type"]
    'not_found_error'
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_s: float = 0.0,
        reason: str = "",
    ) -> None:  # fmt: skip
        message, param = message[:LONGEST], param and param[:FEW_LETTERS]
        super().__init__(message)
        self.status, self.retry_s = HTTPStatus(status), retry_s
        self.reason = reason or REASONS.get(status, "other")
        kind = KINDS.get(self.status, "server_error" if status >= 500 else "invalid_request_error")
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def note(self) -> None:
        """Note it with the request that is being answered."""
        this_request().refuse(self.status, self.reason, str(self))

    def response(self) -> Response:
        self.note()
        headers = {"retry-after": str(max(1, round(self.retry_s)))} if self.retry_s else {}
        if self.status is HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        if self.status in LASTING:  # an adapter or the server is at fault, and will be
            headers["x-should-retry"] = "false"
        return Response(msgspec.json.encode(self.body), self.status, headers, "application/json")


def wrong(message: str, param: str | None = None, code: str | None = None, reason: str = "") -> ApiError:
    """Return the error that says what is wrong with what a client sent."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param, code, reason=reason)


def busy(message: str, reason: str, retry_s: float = 1.0) -> ApiError:
    """Return the error that tells a client to come again."""
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"{message}: try again later", retry_s=retry_s, reason=reason)


def too_many_at_once(field: str, most: float, count: int, who: str = "") -> ApiError:
    """Return the error for more completions (`n`), or more texts in another field, than there may be, at all or of one key (`who`).

    >>> str(too_many_at_once("n", 3, 4)), str(too_many_at_once("input", 3, 4, " of one key"))
    ('at most 3 completions, and this would be 4', 'at most 3 texts of one key, and this would be 4: send fewer at once in input')
    """
    if field == "n":
        return wrong(f"at most {most} completions{who}, and this would be {count}", field)
    return wrong(f"at most {most} texts{who}, and this would be {count}: send fewer at once in {field}", field)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return an error of the engine's with the field's name in the request, with which its message begins.

    >>> str(renamed(wrong("prompt is empty", "prompt"), {"prompt": "messages"}))
    'messages is empty'
    """
    told = error.body["error"]
    if (name := names.get(told["param"])) is None:
        return error
    message = name + told["message"].removeprefix(told["param"])
    return ApiError(error.status, message, name, told["code"], reason=error.reason)


@contextmanager
def in_terms_of(names: Mapping[str, str]) -> Iterator[None]:
    """Tell what is wrong with a request by the names that its fields have there, where it is answered as another form of it.

    >>> with in_terms_of({"messages": "input"}):
    ...     raise wrong("messages is empty", "messages")
    Traceback (most recent call last):
    symbiosis.server.api_errors.ApiError: input is empty
    """
    try:
        yield
    except ApiError as error:
        told = error.body["error"]
        message = re.sub(rf"\b(?:{'|'.join(names)})\b", lambda found: names[found[0]], told["message"])
        param = names.get(told["param"], told["param"])
        raise ApiError(error.status, message, param, told["code"], error.retry_s, error.reason) from None


@contextmanager
def storing(what: str, folder: Path) -> Iterator[None]:
    """Tell a client that there is no room for what it sends: `what` is full. Where that lies is for the log alone."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        logger.error("no room in %s for what a client sends: %s", folder, error.strerror)
        raise ApiError(
            507, f"{what} is full ({error.strerror}): nothing was changed. Whoever runs the server has to make room"
        ) from None


def failed(error: Exception) -> ApiError:
    """Return what a client is told of a mistake of ours."""
    return ApiError(500, f"the server failed: {type(error).__name__}. Its log says more of request {this_request().id}")


def unknown_model(name: str, models: Iterable[str]) -> ApiError:
    """Return the error for a name that nothing has. `models` are those that may be told here: bases, and names for several.

    >>> str(unknown_model("demp", ["demo", "chat"]))
    "there is no model 'demp': there are 'demo', 'chat' and adapters, which GET /v1/models lists"
    """
    known = ", ".join(map(repr, models))
    there = f"there are {known} and adapters, which GET /v1/models lists" if known else "none is served yet"
    message = f"there is no model {name[:100]!r}: {there}"
    return ApiError(HTTPStatus.NOT_FOUND, message, "model", "model_not_found", reason="no_such_model")
