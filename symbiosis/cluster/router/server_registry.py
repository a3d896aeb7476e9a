"""The servers as one front end sees them: what the cluster tells, what each server says of itself, and what this front end has sent there."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec

from symbiosis.base.fair_share import FairShare
from symbiosis.base.logs import JsonLines, request_id
from symbiosis.base.procs import parent_is_gone
from symbiosis.build import build
from symbiosis.cluster.placement import Fleet, PlacedServer, RoutingRequest, State, admit
from symbiosis.cluster.router.upstream import Lost, Upstream
from symbiosis.errors import ConfigError
from symbiosis.protocol.cluster_state import Member, Told, read_told, told_file
from symbiosis.server.server_marks import mark_of
from symbiosis.text import shown

logger = logging.getLogger("symbiosis")

MOST_WAITING = 8192  # sequences
LOOK_EVERY_S = 0.1  # at what the cluster tells
ASK_EVERY_S, ANSWER_S = 0.5, 2.0  # a server, and for how long
DECISIONS = 100  # that are remembered
MOST_ADAPTERS = 256  # that a server is known to have
OVERDUE_S = 1.0  # a request that has waited so long goes where it can begin
LOST_S = 3.0  # a server that says nothing for so long is taken for lost


@dataclass(eq=False)
class InFlight:
    """A request on its way. `move` is called when its server is not to have it any more."""

    wish: RoutingRequest
    move: Callable[[str], None]
    why: str = "new"  # or moved, lost: how it comes to look for a server
    since: float = field(default_factory=time.monotonic)
    server: int = 0
    request: str = field(default_factory=request_id.get)


@dataclass(eq=False)
class Seen:
    """One server: what the cluster and itself have said."""

    member: Member
    flights: set[InFlight] = field(default_factory=set)
    others: int = 0  # sequences of other front ends
    room: int = 1 << 62  # tokens, when it was last asked
    tokens: int = 1 << 62
    longest: int = 1 << 62  # tokens of a sequence
    promised: int = 0  # tokens since then
    silent_s: float = 0.0
    is_lost: bool = False
    is_ending: bool = False  # as itself says: it finishes what it has, and takes nothing new
    build: str | None = None  # once it has been asked
    watch: "asyncio.Task[None] | None" = None
    adapters: frozenset[str] = frozenset()
    sessions: int = 0  # of those who train there: as it said last, and what was begun there since

    @property
    def state(self) -> State:
        if self.is_lost:
            return State.LOST
        return State.DRAINING if self.is_ending else State(self.member.state)

    @property
    def mine(self) -> int:
        return sum(flight.wish.sequences for flight in self.flights)

    def told(self) -> PlacedServer:
        member, tenants = self.member, Counter[str]()
        for flight in self.flights:
            tenants[flight.wish.tenant] += flight.wish.sequences
        return PlacedServer(
            number=member.number, model=member.model, batch=member.batch, running=tenants.total() + self.others,
            pages=self.tokens, free=self.room - self.promised, longest=self.longest, adapters=self.adapters,
            state=self.state, share=member.share, tenants=tenants,
        )  # fmt: skip


class _Health(msgspec.Struct):
    """What a server says of itself. One that does not know its memory leaves out all of it."""

    status: str = ""
    requests: int = 0  # sequences
    room: int = 0  # tokens
    tokens: int = 0
    longest: int = 0
    build: str = ""
    clients: int = 0  # sessions of those who train


class ServerRegistry:
    """The servers, and the requests that wait for one of them.

    Args:
        limits: By tenant, how many sequences it may have in the whole cluster; what is beyond waits.
        log: For each decision a line that says why.
    """

    def __init__(self, cluster: str, limits: dict[str, int], log: JsonLines | None = None) -> None:
        self._file, self._stamp = told_file(cluster), (0, 0)
        self.limits, self._log = limits, log
        self.room = FairShare(MOST_WAITING)  # for what waits
        self.told = Told(name=cluster, url="")
        self.seen: dict[int, Seen] = {}
        self.moved = Counter[str]()  # by why
        self.decisions = deque[dict[str, Any]](maxlen=DECISIONS)
        self._fleet = Fleet()
        self._marks: dict[str, int] = {}  # of servers, by what ids tell of them
        self.unread = 0  # requests whose bodies are not read, so that nobody knows what they ask for
        self._waiting: list[tuple[InFlight, asyncio.Future[None]]] = []
        self._running = Counter[str]()  # sequences by tenant

    async def follow(self) -> None:
        """Keep up with what the cluster tells."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        """Take what the cluster tells, if that is new. A front end that has outlived its cluster has nothing to do with the next one."""
        if parent_is_gone.is_set():
            return
        with suppress(OSError):
            status = self._file.lstat()
            stamp = status.st_mtime_ns, status.st_ino  # a file that is replaced twice within 4 ms may have one time
            if stamp == self._stamp:
                return
            try:
                self._take(read_told(self.told.name))
            except ConfigError as error:
                logger.warning("this front end goes on with what it knew: %s", error)
            self._stamp = stamp

    def member(self, number: int) -> Member:
        """Return a server. Raises `Lost` if it is gone."""
        if (seen := self.seen.get(number)) is None:
            raise Lost("the server is gone")
        return seen.member

    def marked(self, mark: str | None) -> Seen | None:
        """Return the server that ids with this mark are of; None if there is none."""
        number = None if mark is None else self._marks.get(mark)
        return None if number is None else self.seen.get(number)

    @property
    def waiting(self) -> Counter[str]:
        """By model, how many sequences wait for a server; of no model, those whose model is not known yet."""
        found = Counter({"": self.unread} if self.unread else {})
        for flight, turn in self._waiting:
            if not turn.done():  # else it is placed, or given up
                found[flight.wish.model] += flight.wish.sequences
        return found

    def most(self, model: str) -> tuple[float, float]:
        """Return how many sequences of one request, and how many tokens of one sequence, some server of a model takes: as far as that is known."""
        servers = [seen for seen in self.seen.values() if seen.member.model == model]
        sequences = max((seen.member.most or inf for seen in servers), default=inf)
        return sequences, max((min(seen.tokens, seen.longest) for seen in servers), default=inf)

    async def place(self, flight: InFlight) -> None:
        """Wait until a server has room for a request, or the one that it names may take it, and count it there. Raises `Lost` if that one is gone."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((flight, turn))
        self.room.take(flight.wish.tenant, flight.wish.sequences)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(flight)
            raise
        finally:
            self.room.give_back(flight.wish.tenant, flight.wish.sequences)
            if not turn.done() or turn.cancelled():
                self._waiting = [each for each in self._waiting if each[0] is not flight]

    def leave(self, flight: InFlight) -> None:
        """The request is answered, or goes elsewhere."""
        self._running[flight.wish.tenant] -= flight.wish.sequences
        if (seen := self.seen.get(flight.server)) is not None:
            seen.flights.discard(flight)
            self._put(seen)
        self._admit()

    def suspect(self, number: int) -> None:
        """Place nothing on a server that did not answer, until it does again."""
        if (seen := self.seen.get(number)) is not None:
            self._lose(seen)

    def _take(self, told: Told) -> None:
        self.told = told
        servers = {member.number: member for member in told.of_kind("server")}
        self._marks = {mark_of(member.name): number for number, member in servers.items()}
        for number in self.seen.keys() - servers.keys():
            self._forget(number)
        for number, member in servers.items():
            if number in self.seen and self.seen[number].member.pid != member.pid:
                self._forget(number)
            if number not in self.seen:
                self.seen[number] = Seen(member)
            self._update(self.seen[number], member)
        self._admit()

    def _update(self, seen: Seen, member: Member) -> None:
        seen.member = member
        if seen.watch is None and member.url:
            # in a context of its own: what it logs is not about the request that may be looking now
            seen.watch = asyncio.create_task(self._ask(seen), context=Context())
        self._put(seen)

    def _forget(self, number: int) -> None:
        seen = self.seen.pop(number)
        self._fleet.drop(number)
        if seen.watch is not None:
            seen.watch.cancel()
        for flight in list(seen.flights):
            flight.move("lost")

    def _put(self, seen: Seen) -> None:
        """Let placement know of a server as it is now. If it is to take nothing any more, what it has goes elsewhere."""
        if seen.member.number in self.seen and self.seen[seen.member.number] is seen:
            self._fleet.put(seen.told())
        if seen.is_lost or seen.member.state in (State.DRAINING, State.LOST):
            for flight in list(seen.flights):
                flight.move("moved" if seen.state is State.DRAINING else "lost")

    def _lose(self, seen: Seen) -> None:
        if not seen.is_lost:
            logger.warning("%s does not answer: its requests go elsewhere", seen.member.name)
        seen.is_lost = True
        self._put(seen)

    async def _ask(self, seen: Seen) -> None:
        """Ask one server how it is, again and again."""
        while True:
            begun = time.monotonic()
            if not await self._answers(seen) and not seen.is_ending:
                # what is later than it could be, this process itself was late for
                seen.silent_s += min(time.monotonic() - begun, ANSWER_S) + ASK_EVERY_S
                if seen.silent_s > LOST_S and seen.member.state == State.READY:
                    self._lose(seen)
            await asyncio.sleep(ASK_EVERY_S)

    async def works(self, number: int) -> bool:
        """Ask a server that failed at something whether it takes requests. If it does not, it is taken for lost at once."""
        if (seen := self.seen.get(number)) is None:
            return False
        works = await self._answers(seen)
        if not works and not seen.is_ending:
            self._lose(seen)
        return works

    async def _answers(self, seen: Seen) -> bool:
        """Whether a server says that it takes requests. If so, that is taken over."""
        try:
            async with asyncio.timeout(ANSWER_S):
                health = msgspec.convert(await answer_of(seen.member.url, "/health"), _Health)
        except (Lost, TimeoutError, msgspec.ValidationError):
            seen.is_ending = False
            return False
        if seen.is_ending != (health.status == "ending"):
            seen.is_ending = not seen.is_ending
            self._put(seen)
        if health.status != "serving":
            return False
        if seen.build != health.build:
            seen.build = health.build
            self._compare(seen)
        seen.silent_s, seen.is_lost, seen.promised, seen.sessions = 0.0, False, 0, health.clients
        seen.others = max(0, health.requests - seen.mine)
        if health.tokens:
            seen.room, seen.tokens, seen.longest = health.room, health.tokens, health.longest
        self._put(seen)
        self._admit()
        return True

    def _compare(self, seen: Seen) -> None:
        """Warn of a server of another build: a request may need what only one of the two knows."""
        if seen.build != build():
            logger.warning(
                "%s is symbiosis %s, this front end %s: start the cluster again, with one release for all of it",
                seen.member.name,
                shown(seen.build or "") or "of another release",
                build(),
            )

    def _admit(self) -> None:
        """Place what has room now."""
        for flight, turn in self._waiting:
            if not turn.done() and flight.wish.server is not None and flight.wish.server not in self.seen:
                turn.set_exception(Lost("the server is gone"))
        self._waiting = [each for each in self._waiting if not each[1].done()]
        if not self._waiting:
            return
        wishes = [flight.wish for flight, _ in self._waiting]
        late = time.monotonic() - OVERDUE_S
        overdue = {position for position, (flight, _) in enumerate(self._waiting) if flight.since < late}
        for position, server in admit(wishes, self._fleet, self._running, self.limits, overdue):
            flight, turn = self._waiting[position]
            seen = self.seen[server.number]
            flight.server = server.number
            seen.flights.add(flight)
            seen.promised += flight.wish.pages
            if flight.wish.adapter is not None:
                known = seen.adapters if len(seen.adapters) < MOST_ADAPTERS else frozenset[str]()
                seen.adapters = known | {flight.wish.adapter}
            turn.set_result(None)
            if flight.wish.server is None:  # else nothing was decided
                self._say(flight, server)

    def _say(self, flight: InFlight, server: PlacedServer) -> None:
        """Note a decision, and why it was made."""
        wish = {
            name: value for name, value in msgspec.to_builtins(flight.wish).items() if name != "server"
        }  # it named none
        waited = round(time.monotonic() - flight.since, 4)
        load = f"{server.running} of {server.batch} with it"
        line = {
            "time": time.time(),
            "request": flight.request,
            "why": flight.why,
            "server": self.seen[server.number].member.name,
            "load": load,
        }
        self.decisions.append({**line, "waited_s": waited, **wish})
        if self._log is not None:
            self._log.write(self.decisions[-1])


async def answer_of(url: str, path: str, headers: dict[str, str] | None = None) -> Any:
    """Return what a server answers to a GET, from JSON."""
    _, body = await Upstream.fetch(url, path, headers)
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise Lost(f"{url}{path} is no JSON: {error}") from None
