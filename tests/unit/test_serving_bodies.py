"""Bodies that come slowly, in part or not at all: each has its time, and too many of them cost the slowest."""

import asyncio
import io
import time
from collections.abc import Callable
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.requests import Request

from symbiosis.server.api_errors import ApiError
from symbiosis.server.bodies import Bodies
from symbiosis.server.request_record import begin


def request(*pieces: bytes, every_s: float = 0.0, ends: bool = True) -> Request:
    left = list(pieces)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(every_s if left or ends else 3600)
        piece = left.pop(0) if left else b""
        return {"type": "http.request", "body": piece, "more_body": bool(left) or not ends}

    return Request({"type": "http", "headers": []}, receive)


def run(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_body_in_pieces() -> None:
    async def test() -> None:
        assert await Bodies().read(request(b"ab", b"", b"c"), 3) == b"abc"
        with pytest.raises(ApiError, match="larger than 2 bytes"):
            await Bodies().read(request(b"ab", b"c"), 2)

    run(test)


def test_who_sends_a_byte_now_and_then_is_not_waited_for() -> None:
    async def test() -> None:
        with pytest.raises(ApiError, match=r"did not come in time: \d+ bytes") as error:
            await Bodies(longest_s=0.3).read(request(*[b"x"] * 10_000, every_s=0.02), 1 << 20)
        assert error.value.status == 408

    run(test)


def test_bytes_that_come_have_time() -> None:
    async def test() -> None:
        slow = request(*[b"x" * (1 << 13)] * 8, every_s=0.1)
        assert len(await Bodies(longest_s=0.3).read(slow, 1 << 20)) == 1 << 16

    run(test)


def test_a_thousand_that_are_sent_at_once_are_all_read() -> None:
    async def test() -> None:
        bodies = Bodies()
        sent = [asyncio.create_task(bodies.read(request(b"quick", every_s=0.1), 100)) for _ in range(1000)]
        assert await asyncio.gather(*sent) == [b"quick"] * 1000

    run(test)


@pytest.mark.parametrize("bounds", [{"most": 3}, {"most_bytes": 12}])
def test_too_many_cost_the_slowest(bounds: dict[str, int]) -> None:
    async def test() -> None:
        bodies = Bodies(**bounds)
        slow = []
        for _ in range(3):
            slow.append(asyncio.create_task(bodies.read(request(b"abc", ends=False), 100)))
            await asyncio.sleep(0.01)
        assert not any(task.done() for task in slow)
        assert await bodies.read(request(b"quick"), 100) == b"quick"
        with pytest.raises(ApiError, match="3 bytes of it"):
            await slow[0]
        assert not slow[1].done() and not slow[2].done()
        for task in slow[1:]:
            task.cancel()

    run(test)


@pytest.mark.parametrize("bounds", [{"most": 4}, {"most_bytes": 16}])
def test_too_many_of_one_key_cost_no_other_key(bounds: dict[str, int]) -> None:
    """Anna's has come first, and is slow."""

    async def test() -> None:
        bodies = Bodies(**bounds)

        async def sent(tenant: str) -> bytes:
            begin(Headers()).tenant = tenant
            return await bodies.read(request(b"abcd", ends=False), 100)

        anna = asyncio.create_task(sent("anna"))
        await asyncio.sleep(0.01)
        bob = []
        for _ in range(12):
            bob.append(asyncio.create_task(sent("bob")))
            await asyncio.sleep(0.01)
        assert not anna.done() and [task.done() for task in bob] == [True] * 9 + [False] * 3
        for task in (anna, *bob):
            task.cancel()
        await asyncio.gather(*bob, return_exceptions=True)

    run(test)


def test_who_comes_while_the_oldest_runs_out_of_time_is_read() -> None:
    async def test() -> None:
        bodies, loop = Bodies(longest_s=0.2, most=1), asyncio.get_running_loop()
        slow = asyncio.create_task(bodies.read(request(ends=False), 100))
        await asyncio.sleep(0.01)
        ends, came = next(iter(bodies._open)).when(), list[asyncio.Task[bytes]]()
        assert ends is not None
        loop.call_at(ends - 0.01, lambda: came.append(asyncio.create_task(bodies.read(request(b"quick"), 100))))
        loop.call_at(ends - 0.05, lambda: time.sleep(0.1))  # others' requests take this long
        with pytest.raises(ApiError, match="did not come in time"):
            await slow
        assert await came[0] == b"quick"

    run(test)


def test_what_goes_to_the_disk_takes_none_of_the_memory() -> None:
    async def test() -> None:
        bodies, file = Bodies(most_bytes=12), io.BytesIO()
        sent = [asyncio.create_task(bodies.read(request(b"x" * 10, ends=False), 100, file)) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert len(file.getvalue()) == 30 and not any(task.done() for task in sent)
        for task in sent:
            task.cancel()

    run(test)
