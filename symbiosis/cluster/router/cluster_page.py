"""What a front end shows of its cluster to people: the figures of all servers together, and, to administrators, each server and why requests went where."""

import asyncio
import time
from contextlib import suppress
from typing import Any

import msgspec

from symbiosis.cluster.placement import State
from symbiosis.cluster.router.server_registry import ANSWER_S, Seen, ServerRegistry, answer_of
from symbiosis.cluster.router.upstream import Lost
from symbiosis.server.ipc.engine_ipc import AdapterInfo
from symbiosis.serving.engine.engine_stats import EngineStats, Histogram

ASK_EVERY_S = 1.0  # however many pages are open


class _OfServer(msgspec.Struct):
    """What a server's page shows."""

    figures: EngineStats
    chat: bool = False
    kind: str = "text"
    adapters: list[AdapterInfo] = []


class ClusterPage:
    """The figures of a cluster. Servers are asked at most once a second."""

    def __init__(self, view: ServerRegistry) -> None:
        self._view, self._asked = view, -ASK_EVERY_S
        self._told: dict[str, Any] = {}
        self._turn = asyncio.Lock()

    async def figures(self, headers: dict[str, str], may_see_all: bool) -> dict[str, Any]:
        """Return what the page shows, in the form of a server's figures."""
        async with self._turn:
            if time.monotonic() - self._asked >= ASK_EVERY_S:
                self._told = await self._ask(headers)
                self._asked = time.monotonic()
        name = self._view.told.name
        return {**self._told, "cluster": self.cluster() if may_see_all else {"cluster": name}}

    async def _ask(self, headers: dict[str, str]) -> dict[str, Any]:
        ready = [seen for seen in self._view.seen.values() if seen.state is State.READY]
        found = [each for each in await asyncio.gather(*(_of_server(seen, headers) for seen in ready)) if each]
        adapters = {each.name: each for told in reversed(found) for each in told.adapters}
        figures = together(told.figures for told in found)
        figures.waiting += self._view.waiting.total()
        told = self._view.told
        names = [*told.aliases, *told.models]
        return {
            "model": names[0] if names else "", "names": [*names, *adapters], "chat": any(each.chat for each in found),
            "kind": found[0].kind if found else "text",
            "figures": figures, "adapters": list(adapters.values()),
        }  # fmt: skip

    def cluster(self) -> dict[str, Any]:
        """Tell of all processes and their load, of what waits, and of the last decisions of this front end."""
        view = self._view
        return {
            "cluster": view.told.name,
            "servers": [_load(seen) for seen in view.seen.values()],
            "waiting": view.waiting, "moved": view.moved, "aliases": view.told.aliases, "retiring": view.told.retiring,
            "members": view.told.members, "decisions": list(view.decisions),
        }  # fmt: skip


async def _of_server(seen: Seen, headers: dict[str, str]) -> _OfServer | None:
    with suppress(Lost, TimeoutError, msgspec.ValidationError):
        async with asyncio.timeout(ANSWER_S):
            return msgspec.convert(await answer_of(seen.member.url, "/figures", headers), _OfServer)
    return None


def together(several: Any) -> EngineStats:
    """Return the sums of figures.

    >>> one, other = EngineStats(steps=1), EngineStats(steps=2)
    >>> one.queue_s.observe(0.1), other.queue_s.observe(0.2)
    (None, None)
    >>> both = together([one, other])
    >>> both.steps, both.queue_s.count
    (3, 2)
    """
    found = EngineStats()
    for each in several:
        for name in found.__struct_fields__:
            mine, its = getattr(found, name), getattr(each, name)
            if isinstance(mine, Histogram):
                mine.counts = [one + other for one, other in zip(mine.counts, its.counts, strict=True)]
                mine.total += its.total
            elif isinstance(mine, dict):
                setattr(found, name, {key: mine.get(key, 0) + its.get(key, 0) for key in mine | its})
            elif isinstance(mine, int):
                setattr(found, name, mine + its)
    return found


def _load(seen: Seen) -> dict[str, Any]:
    server = seen.told()
    return {
        "name": seen.member.name, "state": seen.state, "model": server.model, "running": server.running, "batch": server.batch,
        "free_tokens": server.free, "tokens": seen.tokens,
    }  # fmt: skip
