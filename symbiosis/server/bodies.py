"""Reads the bodies of requests. Each must come at some pace, and only so many may be slow at a time."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from symbiosis.server.api_errors import ApiError
from symbiosis.server.request_record import this_request

BODY_S = 60.0  # the longest time for a body, besides what its bytes may take
SLOWEST = 16 << 10  # bytes per second
MOST, MOST_BYTES = 2048, 256 << 20  # bodies that are read at a time; honest clients may send a thousand at once


@dataclass
class OpenBody:
    """A body that is being read: whose it is, and how much of the memory it takes."""

    tenant: str
    bytes: int = 0


class Bodies:
    """The bodies that are being read. When there are too many, one of the tenant who has the most of them ends: the one that has taken longest.
    So clients that send at once never wait for slow ones, nor one tenant for another's."""

    def __init__(self, longest_s: float = BODY_S, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._longest_s, self._most, self._most_bytes = longest_s, most, most_bytes
        self._open: dict[asyncio.Timeout, OpenBody] = {}  # in the order of their coming

    async def read(self, request: Request, most: int, file: IO[bytes] | None = None) -> bytes:
        """Return the whole body, of at most so many bytes; nothing, if it is written to a file instead."""
        pieces = bytearray()
        take: Callable[[bytes], object] = pieces.extend if file is None else file.write
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and (len(length) > 18 or int(length) > most):
            raise _too_large(most)
        ends, received = asyncio.get_running_loop().time() + self._longest_s, 0
        try:
            async with asyncio.timeout_at(ends) as limit:
                if len(self._open) >= self._most:
                    self._end_one(Counter(each.tenant for each in self._open.values()))
                body = self._open[limit] = OpenBody(this_request().tenant)
                try:
                    async for piece in request.stream():
                        received += len(piece)
                        if received > most:
                            raise _too_large(most)
                        take(piece)
                        if limit in self._open:  # else it was chosen to end
                            body.bytes = len(pieces)
                            limit.reschedule(ends + received / SLOWEST)
                            if len(self._open) > 1 and sum(e.bytes for e in self._open.values()) > self._most_bytes:
                                self._end_one(self._bytes())
                finally:
                    self._open.pop(limit, None)
        except TimeoutError:
            raise ApiError(408, f"the body did not come in time: {received} bytes of it did") from None
        except ClientDisconnect:
            raise ApiError(400, "the body broke off", reason="client_left") from None
        return bytes(pieces)

    def _bytes(self) -> Counter[str]:
        """Return what the bodies take of the memory, by tenant."""
        taken = Counter[str]()
        for each in self._open.values():
            taken[each.tenant] += each.bytes
        return taken

    def _end_one(self, taken: Counter[str]) -> None:
        """End the oldest body of the tenant who has taken most."""
        (tenant, _), *_ = taken.most_common(1)
        oldest = next(limit for limit, each in self._open.items() if each.tenant == tenant)
        del self._open[oldest]
        if not oldest.expired():  # else it ends by itself
            oldest.reschedule(0.0)


async def until_hung_up(receive: Receive) -> None:
    """Wait until the client closes its connection. The whole body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes")
