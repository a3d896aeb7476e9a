"""Reads the bodies of requests. Each must come at some pace, and only so many may be slow at a time."""

import asyncio
from collections.abc import Callable

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from symbiosis.server.api_errors import ApiError

BODY_S = 60.0  # the longest time for a body, besides what its bytes may take
SLOWEST = 16 << 10  # bytes per second
MOST, MOST_BYTES = 2048, 256 << 20  # bodies that are read at a time; honest clients may send a thousand at once


class Bodies:
    """The bodies that are being read. When there are too many, the one that has taken longest is ended, so that clients that send at
    once never wait for slow ones."""

    def __init__(self, longest_s: float = BODY_S, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._longest_s, self._most, self._most_bytes = longest_s, most, most_bytes
        self._open: dict[asyncio.Timeout, int] = {}  # bytes that they take of the memory, in the order of their coming

    async def read(self, request: Request, most: int) -> bytes:
        """Return the whole body, of at most so many bytes."""
        pieces = bytearray()
        await self.pieces(request, most, pieces.extend, in_memory=True)
        return bytes(pieces)

    async def pieces(
        self, request: Request, most: int, take: Callable[[bytes], object], in_memory: bool = False
    ) -> None:
        """Call `take` with each piece that comes, up to `most` bytes in all."""
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and (len(length) > 18 or int(length) > most):
            raise _too_large(most)
        ends, received = asyncio.get_running_loop().time() + self._longest_s, 0
        try:
            async with asyncio.timeout_at(ends) as limit:
                if len(self._open) >= self._most:
                    self._end_oldest()
                self._open[limit] = 0
                try:
                    async for piece in request.stream():
                        received += len(piece)
                        if received > most:
                            raise _too_large(most)
                        take(piece)
                        if limit in self._open:  # else it was chosen to end
                            self._open[limit] = received * in_memory
                            limit.reschedule(ends + received / SLOWEST)
                            if len(self._open) > 1 and sum(self._open.values()) > self._most_bytes:
                                self._end_oldest()
                finally:
                    self._open.pop(limit, None)
        except TimeoutError:
            raise ApiError(408, f"the body did not come in time: {received} bytes of it did") from None
        except ClientDisconnect:
            raise ApiError(400, "the body broke off", reason="client_left") from None

    def _end_oldest(self) -> None:
        oldest = next(iter(self._open))
        del self._open[oldest]
        if not oldest.expired():  # else it ends by itself
            oldest.reschedule(0.0)


async def until_hung_up(receive: Receive) -> None:
    """Wait until the client closes its connection. The whole body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes")
