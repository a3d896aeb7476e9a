"""When servers are added and given back, and which requests move so that one can be: pure functions over a snapshot, for one model."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from symbiosis.cluster.placement import Fleet, PlacedServer, RoutingRequest, State

SPARE = 0.1  # of the servers at work: so many more are kept that are lightly loaded


class Moves(msgspec.Struct, frozen=True):
    """A server that is to become idle, and where each of its requests goes."""

    server: int
    requests: dict[int, int]  # by request: the server that takes it


class Change(msgspec.Struct, frozen=True):
    """How many servers are to be started, and which end."""

    start: int = 0
    release: tuple[int, ...] = ()
    why: str = ""


def consolidate(servers: Iterable[PlacedServer], requests: Mapping[int, Mapping[int, RoutingRequest]]) -> Moves | None:
    """Return the moves that empty the least busy server, if it is lightly loaded and the other busy ones have room for all that it runs.

    Args:
        requests: Of each server, by their numbers.

    >>> busy, light = PlacedServer(number=1, model="m", batch=8, running=5), PlacedServer(number=2, model="m", batch=8, running=1)
    >>> consolidate([busy, light], {2: {7: RoutingRequest(model="m")}})
    Moves(server=2, requests={7: 1})
    """
    working = [each for each in servers if each.state is State.READY and each.running]
    least = min(working, key=lambda each: (each.running, -each.number), default=None)
    if least is None or not least.is_light:
        return None
    others, moves = Fleet(each for each in working if each is not least), dict[int, int]()
    for request, wish in requests.get(least.number, {}).items():
        if (found := others.place(wish)) is None:
            return None
        others.put(found.holds(wish.sequences, wish.pages, wish.adapter))
        moves[request] = found.number
    return Moves(least.number, moves) if moves else None


def scale(
    servers: Sequence[PlacedServer], waiting: int, least: int, most: int, idle: Collection[int] | None = None
) -> Change:
    """Return what to start and what to release. Some lightly loaded servers are always kept, for what comes while others start.

    One that is lost answers again, or is started again in its place. So another one is started for it only if requests wait meanwhile.

    Args:
        waiting: Sequences that have no server.
        least, most: How many servers the model may have.
        idle: The servers that have been idle for so long that they may end; None: all that are idle.

    >>> scale([PlacedServer(number=1, model="m", batch=8, running=5)], 0, 1, 4)
    Change(start=1, release=(), why='0 are lightly loaded, and 1 should be')
    >>> scale([PlacedServer(number=n, model="m", batch=8) for n in (1, 2, 3)], 0, 1, 4).release
    (1, 2)
    """
    ready = [each for each in servers if each.state is State.READY]
    coming = [each for each in servers if each.state in (State.STARTING, State.LOST)]
    light = [each for each in ready if each.is_light]
    live = len(ready) + len(coming)
    spare = max(1, math.ceil(SPARE * sum(each.running > 0 for each in (*ready, *coming))))
    wanted = {
        f"{live} are there, and {least} are the least": least - live,
        f"{waiting} sequences wait": min(most - live, _for_waiting(waiting, ready, coming)),
        f"{len(light) + len(coming)} are lightly loaded, and {spare} should be": min(
            most - live, spare - len(light) - len(coming)
        ),
    }
    why, start = max(wanted.items(), key=lambda each: each[1])
    if start > 0 or waiting:
        return Change(start, why=why) if start > 0 else Change()
    ends = sorted(each.number for each in light if not each.running and (idle is None or each.number in idle))
    release = tuple(ends[: max(0, min(len(ready) - least, len(light) - spare))])
    told = f"it was idle, and {len(ready)} are ready, of which {len(light)} are lightly loaded"
    return Change(release=release, why=told) if release else Change()


def _for_waiting(waiting: int, ready: Sequence[PlacedServer], coming: Sequence[PlacedServer]) -> int:
    """Return how many more servers the sequences need that wait, beyond those that start."""
    starting = sum(each.batch for each in coming if each.state is State.STARTING)
    return math.ceil(max(0, waiting - starting) / max((each.batch for each in (*ready, *coming)), default=1))
