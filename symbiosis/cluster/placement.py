"""Where a request goes: Punica's rule, over a snapshot of the servers, and what is fair among tenants.

A request goes to the busiest server on which it fits, by the sequences and the memory that the server has. So busy servers stay busy, and
idle ones can be given back. Among servers that are equally busy the highest number decides. What fits nowhere waits: first come, first
served, for each tenant and model. Of several tenants whose requests wait, the one that runs least is next (`admit`).

Nobody's request keeps those of another tenant waiting, and a large one does not wait for ever for room that small ones take:

* A server makes room for a tenant that has less than its share of the batch, while others have more than theirs. So the request goes there
  although the batch is full, and the server itself lets others give way.
* A request that has waited for long goes where one sequence can begin: the server lets its others begin as there is room.
* One that no server could ever hold goes to a server at once, which says what is wrong with it.
* One that a single server alone can answer goes there, however full that is: it waits only for what its tenant may have in the whole cluster.

A request at which a server has failed goes to another one, if there is any: the server may lack memory, and still say that it works.
"""

import sys
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from heapq import heapify, heappop, heappush
from itertools import accumulate, islice
from operator import attrgetter

import msgspec

LIGHT = 0.25  # of its batch: a server that runs less is lightly loaded
RANK = attrgetter("running", "number")  # of servers: the busiest one is the highest
NEAR = 16  # of the busiest servers with room: so many are asked whether an adapter is resident


class State(StrEnum):
    """Whether a server takes requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # it is to end: its requests go elsewhere
    LOST = "lost"
    OTHER_BASE = "other-base"  # it finishes what it has: its model has another base now, or will have


class PlacedServer(msgspec.Struct, frozen=True, kw_only=True):
    """One server at one moment."""

    number: int
    model: str
    batch: int  # most sequences of a step
    running: int = 0  # sequences, those included that wait there
    pages: int = 0  # of memory
    free: int = 0  # ... that nothing needs
    longest: int = sys.maxsize  # pages that a sequence may need
    share: int = 0  # of its batch, that one tenant keeps while others wait; 0: all of it
    # sequences of each, as far as they are known; all others are taken for one tenant's
    tenants: Mapping[str, int] = {}
    adapters: frozenset[str] = frozenset()  # resident
    state: State = State.READY

    @property
    def is_light(self) -> bool:
        return self.running < LIGHT * self.batch

    @property
    def may_give_way(self) -> bool:
        """Whether its batch has place for others because some give way: those beyond their tenants' shares.

        >>> PlacedServer(number=1, model="m", batch=8, running=8, share=4, tenants={"a": 7}).may_give_way
        True
        """
        others = self.running - sum(self.tenants.values())
        kept = sum(min(count, self.share) for count in (others, *self.tenants.values()))
        return bool(self.share) and kept < min(self.running, self.batch)

    def fits(self, sequences: int, pages: int) -> bool:
        """Whether it has room for so much more. One that is idle takes anything: it says itself what is too much for it."""
        return not self.running or (pages <= self.free and self.running + sequences <= self.batch)

    def holds(self, sequences: int, pages: int, adapter: str | None = None, tenant: str = "") -> "PlacedServer":
        """Return it with so much more on it; with less, if the numbers are negative."""
        adapters = self.adapters if adapter is None or adapter in self.adapters else self.adapters | {adapter}
        tenants = {**self.tenants, tenant: self.tenants.get(tenant, 0) + sequences} if self.share else self.tenants
        return msgspec.structs.replace(
            self, running=self.running + sequences, free=self.free - pages, adapters=adapters, tenants=tenants
        )


class RoutingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a request needs of a server."""

    model: str
    sequences: int = 1
    pages: int = 0
    adapter: str | None = None
    tenant: str = ""
    is_vain: bool = False  # no server could do it
    failed_at: frozenset[int] = frozenset()  # servers that have said that they cannot; others come first
    server: int | None = None  # the only one that can answer it

    @property
    def queue(self) -> tuple[str, str, int | None, bool]:
        """In which it keeps its place among those that wait."""
        return self.model, self.tenant, self.server, self.sequences > 0


def version_of(shares: Mapping[str, float], draw: float) -> str:
    """Return which of several versions of a model gets a request, by a number in [0, 1).

    >>> [version_of({"old": 3, "new": 1}, draw) for draw in (0.0, 0.74, 0.76)]
    ['old', 'old', 'new']
    """
    upto = list(accumulate(shares.values()))
    return list(shares)[bisect_right(upto, draw * upto[-1])]


def place(servers: Iterable[PlacedServer], wish: RoutingRequest) -> PlacedServer | None:
    """Return the server for a request; None if it has to wait. This is the rule in plain words; `Fleet.place` finds the same one quickly.

    Among the busiest ones that have room, one where the adapter is resident comes first, unless it is lightly loaded: such a server is to
    become idle.

    >>> busy, idle = PlacedServer(number=1, model="m", batch=8, running=5), PlacedServer(number=2, model="m", batch=8)
    >>> place([busy, idle], RoutingRequest(model="m")).number, place([busy, idle], RoutingRequest(model="m", sequences=4)).number
    (1, 2)
    """
    if wish.server is not None:
        return next((each for each in servers if each.number == wish.server), None)
    ready = [each for each in servers if each.model == wish.model and each.state is State.READY]
    others = [each for each in ready if each.number not in wish.failed_at] or ready
    fitting = sorted((each for each in others if each.fits(wish.sequences, wish.pages)), key=RANK, reverse=True)
    return _preferred(fitting, wish.adapter) if wish.adapter else next(iter(fitting), None)


def _preferred(fitting: Iterable[PlacedServer], adapter: str) -> PlacedServer | None:
    """Return the one to take of servers on which a request with an adapter fits, the busiest first."""
    busiest = None
    for server in islice(fitting, NEAR):
        busiest = busiest or server
        if adapter in server.adapters and not server.is_light:
            return server
    return busiest


class Fleet:
    """Servers in the order in which Punica's rule asks them, so that a decision among a thousand takes microseconds.

    >>> fleet = Fleet([PlacedServer(number=1, model="m", batch=8, running=5), PlacedServer(number=2, model="m", batch=8)])
    >>> fleet.place(RoutingRequest(model="m")).number
    1
    """

    def __init__(self, servers: Iterable[PlacedServer] = ()) -> None:
        self._servers: dict[int, PlacedServer] = {}
        self._order: dict[str, list[tuple[int, int]]] = {}  # by model: the rank of each server that takes requests
        self._most: Counter[str] = Counter()  # by model: the largest batch
        self._giving: dict[str, set[int]] = {}  # by model: servers where some would give way
        for server in servers:
            self.put(server)

    def __getitem__(self, number: int) -> PlacedServer:
        return self._servers[number]

    def __contains__(self, number: int) -> bool:
        return number in self._servers

    @property
    def servers(self) -> Sequence[PlacedServer]:
        return list(self._servers.values())

    def put(self, server: PlacedServer) -> None:
        """Add a server, or take over how it is now."""
        self.drop(server.number)
        self._servers[server.number] = server
        self._most[server.model] = max(self._most[server.model], server.batch)
        if server.state is State.READY:
            insort(self._order.setdefault(server.model, []), RANK(server))
            if server.share and server.may_give_way:
                self._giving.setdefault(server.model, set()).add(server.number)

    def drop(self, number: int) -> None:
        if (server := self._servers.pop(number, None)) is None:
            return
        if server.state is State.READY:
            order = self._order[server.model]
            del order[bisect_left(order, RANK(server))]
            self._giving.get(server.model, set()).discard(number)

    def place(self, wish: RoutingRequest) -> PlacedServer | None:
        """Return the server for a request; None if it has to wait."""
        if wish.server is not None:
            return self._servers.get(wish.server)
        fitting = self._with_room(wish)
        return _preferred(fitting, wish.adapter) if wish.adapter else next(fitting, None)

    def crowd(self, wish: RoutingRequest, is_overdue: bool = False) -> PlacedServer | None:
        """Return the server that is to take a request although it does not fit: the least busy one where something of it can begin."""
        if wish.server is not None:
            return None
        if wish.is_vain:
            return self._least_busy(wish)
        avoided = self._avoided(wish)
        giving = [self._servers[number] for number in self._giving.get(wish.model, ()) if number not in avoided]
        found = min((each for each in giving if each.tenants.get(wish.tenant, 0) < each.share), key=RANK, default=None)
        if found is None and is_overdue:
            least = self._least_busy(wish)
            found = least if least is not None and least.running < least.batch else None
        return found

    def _least_busy(self, wish: RoutingRequest) -> PlacedServer | None:
        avoided = self._avoided(wish)
        numbers = (number for _, number in self._order.get(wish.model, ()) if number not in avoided)
        return self._servers[number] if (number := next(numbers, None)) is not None else None

    def _avoided(self, wish: RoutingRequest) -> frozenset[int]:
        """Return the servers that a request does not go to again: those that failed at it, if there are others."""
        if any(number not in wish.failed_at for _, number in self._order.get(wish.model, ())):
            return wish.failed_at
        return frozenset()

    def _with_room(self, wish: RoutingRequest) -> Iterator[PlacedServer]:
        """Yield the servers on which a request fits, the busiest first."""
        order, avoided = self._order.get(wish.model, []), wish.failed_at and self._avoided(wish)
        fullest = max(0, self._most[wish.model] - wish.sequences)  # what is fuller has no room in any batch
        for place in range(bisect_right(order, (fullest, sys.maxsize)) - 1, -1, -1):
            server = self._servers[order[place][1]]
            if server.fits(wish.sequences, wish.pages) and server.number not in avoided:
                yield server


def admit(
    waiting: Iterable[RoutingRequest],
    fleet: Fleet,
    running: Counter[str],
    limits: Mapping[str, int],
    overdue: Container[int] = (),
) -> list[tuple[int, PlacedServer]]:
    """Return which of the requests that wait go where now, by their position. The fleet has them then.

    The next request is always of the tenant that runs least; of several such tenants, the one that came first. A tenant's requests for a model
    keep their order: what does not fit is not overtaken by them, so that it gets its turn. Those of other tenants pass it by. What is more than its
    tenant may have now is overtaken by nothing of that tenant, whatever model or server that is for.

    Args:
        running: Sequences of each tenant in the whole cluster; what is placed is added.
        limits: By tenant, how many it may have.
        overdue: The positions of requests that have waited for long.
    """
    wishes, queues = list(waiting), dict[tuple[str, str, int | None, bool], deque[int]]()
    for position, wish in enumerate(wishes):
        queues.setdefault(wish.queue, deque()).append(position)
    heap = [(running[wishes[queue[0]].tenant], queue[0], queue) for queue in queues.values()]
    heapify(heap)
    placed: list[tuple[int, PlacedServer]] = []
    full = set[str]()  # tenants that may have no more now
    while heap:
        has, position, queue = heappop(heap)
        wish = wishes[position]
        if has == running[wish.tenant]:
            if wish.sequences and running[wish.tenant] + wish.sequences > limits.get(wish.tenant, sys.maxsize):
                full.add(wish.tenant)
            if wish.sequences and wish.tenant in full:
                continue
            if (server := _next(wish, fleet, running, position in overdue)) is None:
                continue
            placed.append((position, server))
            queue.popleft()
        if queue:
            heappush(heap, (running[wish.tenant], queue[0], queue))
    return placed


def _next(wish: RoutingRequest, fleet: Fleet, running: Counter[str], is_overdue: bool) -> PlacedServer | None:
    """Place a request, if it can be."""
    if (server := fleet.place(wish) or fleet.crowd(wish, is_overdue)) is None:
        return None
    running[wish.tenant] += wish.sequences
    server = server.holds(wish.sequences, wish.pages, wish.adapter, wish.tenant)
    fleet.put(server)
    return server
