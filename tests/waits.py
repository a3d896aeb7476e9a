"""Waiting for what other tasks of a test do."""

import asyncio
from collections.abc import Callable


async def until(check: Callable[[], object], seconds: float = 60.0) -> None:
    """Until it holds."""
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.01)
