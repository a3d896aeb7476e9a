"""The calls of captured steps: the GPU answers a whole round of them by itself, of one client or of several who go together.

What a client captured, it calls again and again in the same order. So all of it is enqueued ahead, as one CUDA graph: for each
call what waits for the bells, the product, and the answers. A CPU only begins the round, when all who take part have
rung for it. If one of several dies in the midst of it, or takes too long, that graph answers nobody any more, and the others' rounds
go on from where they are, each by itself.
"""

import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from symbiosis.errors import CallError, Code
from symbiosis.executor.engine import HIGHEST, call_error
from symbiosis.executor.joined import Multiply, power_of_two, rounded
from symbiosis.executor.plan import Key
from symbiosis.executor.runs import ByKernels, ByStream, Few, Parts, Run, alone, load, rest, together
from symbiosis.kernels import rows
from symbiosis.protocol import Call
from symbiosis.transport.base import RoundWords, refuse
from symbiosis.transport.cuda_driver import new_stream

if TYPE_CHECKING:
    from symbiosis.executor.engine import Work

RUNS_KEPT = 32
LATE_AT_MOST = 16  # times that it makes a difference
END_S = 0.05  # between a round's last answer and its end, at most
DRAIN_S = 20.0  # that an executor which ends lets a client take for the rest of its round
_numbers = itertools.count()


class RoundKey(msgspec.Struct, frozen=True, cache_hash=True):
    """Rounds of one key can be answered together."""

    keys: tuple[Key, ...]


class Round:
    """What one client's captured step calls, in order. All calls have the same number of rows."""

    def __init__(self, key: RoundKey, works: "tuple[Work, ...]", words: RoundWords, large: bool) -> None:
        self.key, self.works, self.large = key, works, large
        self.bell, self.reply, self.error = words
        self.calls: tuple[Call, ...] = tuple(work.call for work in works)
        self.number, self.peer, self.rows = next(_numbers), works[0].peer, works[0].plan.rows
        self.goes_on, self.answered = False, 0  # whether somebody else began it, and the calls that were answered then
        self.left = 0  # of a large one: calls that are yet to be launched
        self.launched = self.calls  # ... and those that were last
        self.gone = False
        self.times_late = 0  # so often it kept others waiting
        self.alone_for = 0  # rounds, because of that
        self.alone: Run | None = None
        self._seconds: dict[int, float] = {}

    def is_behind(self, answered: int) -> bool:
        """Whether there are calls left when so many were answered: then it goes on from there."""
        self.goes_on = 0 <= answered < len(self.calls)  # more: it was let go
        self.answered = answered if self.goes_on else 0
        return self.goes_on

    def was_late(self) -> None:
        """Others do not wait for it again soon, and the more often it happens, the longer not."""
        self.times_late += 1
        self.alone_for = 1 << min(self.times_late, LATE_AT_MOST)

    def seconds(self, rows: int, estimate: Callable[[Call, int], float]) -> float:
        """What its products of so many rows take."""
        if rows not in self._seconds:
            self._seconds[rows] = sum(estimate(call, rows) for call in self.calls)
        return self._seconds[rows]


class Rounds:
    """On one GPU, which serves several programs at the same time."""

    def __init__(
        self,
        multiply: Multiply,
        few_rows: Few,
        parts: Parts,
        on_over: Callable[[Hashable, float], None],
        device: torch.device,
    ) -> None:
        """`few_rows`: what makes the product of a call and so many rows at once, if anything does; `parts`: what goes into a call's
        product, and comes out; `on_over` hears what rounds of a key take."""
        self._multiply, self._few_rows, self._parts, self._on_over = multiply, few_rows, parts, on_over
        self._device, self._streams = device, defaultdict[int, list[torch.cuda.Stream]](list)  # by priority
        self._bare: dict[int, torch.cuda.Stream] = {}  # ... for which there was no memory
        self._clients: defaultdict[int, set[Any]] = defaultdict(set)  # of whose rounds each priority has some
        self._give_up = math.inf  # when an executor that ends waits for nobody any more
        self._keys: dict[RoundKey, RoundKey] = {}
        self._runs: OrderedDict[Hashable, list[ByKernels]] = OrderedDict()
        self._running: list[Run] = []
        self._gone: list[tuple[Any, Callable[[], None]]] = []  # clients, and what to do when their rounds are over
        load(device)

    def new(self, works: "tuple[Work, ...]", words: RoundWords, most: float, large: bool) -> Round:
        """Raises `CallError` if these calls cannot be answered so, or one has `most` rows or more. `large`: nobody is to join them."""
        if not works or any(work.places is None or work.plan.rows >= most for work in works):
            raise CallError(
                Code.UNKNOWN_OP, "a round has calls of few rows, which a program on the executor's own GPU makes"
            )
        if len({work.plan.rows for work in works}) > 1:
            raise CallError(Code.UNKNOWN_OP, "the calls of a round have the same number of rows")
        key = RoundKey(tuple(work.plan.key for work in works))
        return Round(self._keys.setdefault(key, key), works, words, large)

    def make_room(self, round: Round) -> None:
        """Streams for all clients with such rounds, now: when all run at once, there may be no memory left for that. Raises `CallError`
        if there is none now."""
        priority = 0 if round.large else HIGHEST
        clients = self._clients[priority] | {round.peer}
        try:
            while len(self._streams[priority]) < len(clients):
                self._new_stream(priority)
        except Exception as error:  # whatever it is: the executor has other clients
            reason = f"there is no room for the captured steps of one more client: {type(error).__name__}"
            raise CallError(Code.RESOURCE, reason) from error
        self._clients[priority] = clients

    def __bool__(self) -> bool:
        """Whether something was begun of which nobody has seen the end."""
        return bool(self._running)

    def begin(self, rounds: list[Round]) -> None:
        """Answer these small ones of one key together; by itself, who is in the midst of one, or kept others waiting."""
        if len(rounds) > rows.PLACES:
            raise ValueError(f"{len(rounds)} rounds do not fit a page")
        if len(rounds) == 1:
            self._begin_alone(rounds[0])
            return
        fresh = sorted([r for r in rounds if not r.goes_on and not r.alone_for], key=lambda round: round.number)
        if len(fresh) > 1:
            self._begin(self._together(fresh), fresh, 0, len(fresh[0].calls))
        for round in [round for round in rounds if len(fresh) < 2 or round not in fresh]:
            self._go_on(round)

    def begin_large(self, round: Round, calls: int) -> None:
        """Answer the next `calls` of it, from its beginning if none is left. Nobody waits for that."""
        if round.goes_on:
            self._begin_alone(round)
            return
        run = round.alone
        if run is None or not round.left:
            run, round.left = self._alone(round), len(round.calls)
        first = len(round.calls) - round.left
        last = min(first + calls, len(round.calls))
        round.left, round.launched = len(round.calls) - last, round.calls[first:last]
        self._begin(run, [round], first, last)

    def drain(self) -> None:
        """From now on nothing is begun again for who was not answered to the end: it goes on at the executor that comes next."""
        self._give_up = perf_counter() + DRAIN_S

    @property
    def draining(self) -> bool:
        return self._give_up < math.inf

    def look(self) -> None:
        """See what is over. Who was not answered to the end goes on alone."""
        if perf_counter() > self._give_up:
            self._give_up_waiting()
        for run in [run for run in self._running if run.over]:
            self._running.remove(run)
            rounds, run.rounds = run.rounds, []
            if run.replayed and not run.late and not rounds[0].large:
                self._on_over(rounds[0].key, perf_counter() - run.begun)
            for round in [round for round in rounds if run.late and not round.gone and not self.draining]:
                answered = int(round.reply.item())
                if round.is_behind(answered):
                    if not run.stopped and int(round.bell.item()) == answered:
                        round.was_late()
                    self._go_on(round)
        for run in self._running:
            if run.stopped:
                run.stop()
        for peer, then in [(peer, then) for peer, then in self._gone if not self._runs_for(peer)]:
            self._gone.remove((peer, then))
            then()

    def _give_up_waiting(self) -> None:
        """What was computed for those who are not answered to the end is void: their memory may hold anything."""
        for run in self._running:
            late = [] if run.over or run.stopped else [round for round in run.rounds if not round.gone]
            run.stop()
            for round in late:
                round.gone = True
                refuse(round.peer, 0, CallError(Code.DRAINING, "the executor ended in the midst of a captured step"))

    def leave(self, peer: Any, then: Callable[[], None]) -> None:
        """A client is gone: what was begun for it ends. `then`: when nothing uses its memory any more."""
        for clients in self._clients.values():
            clients.discard(peer)
        for run in [run for run in self._running if not run.over]:
            theirs = [round for round in run.rounds if round.peer is peer]
            for round in theirs:
                round.gone, round.left = True, 0
            if theirs:
                run.stop()
        if self._runs_for(peer):
            self._gone.append((peer, then))
        else:
            then()

    def forget(self, round: Round) -> None:
        """It does not come again; raises `CallError` if it is under way."""
        self._see_the_end([run for run in self._running if round in run.rounds])

    def _see_the_end(self, runs: list[Run]) -> None:
        """The last answers are out, or their client would not have called: so this is near."""
        give_up, now = perf_counter() + END_S, 0.0
        while not all(run.over for run in runs):
            if now > give_up:  # before we looked: this thread may have slept
                raise CallError(Code.BAD_FRAME, "a round is under way, and has to be over first")
            now = perf_counter()

    def _runs_for(self, peer: Any) -> bool:
        return any(not run.over and any(round.peer is peer for round in run.rounds) for run in self._running)

    def _go_on(self, round: Round) -> None:
        """By itself. A failure is its client's alone."""
        try:
            self._begin_alone(round)
        except Exception as error:  # whatever it is: the executor has other clients
            refuse(round.peer, 0, call_error(error))

    def _begin_alone(self, round: Round) -> None:
        goes_on, first, round.goes_on, round.answered = round.goes_on, round.answered, False, 0
        run = rest(self._device, round, self._multiply) if goes_on else self._alone(round)
        if not goes_on:
            round.alone_for = max(0, round.alone_for - 1)
        self._begin(run, [round], first, len(round.calls))

    def _alone(self, round: Round) -> Run:
        """What answers it by itself. It does not run."""
        if round.alone is None:
            if round.large:
                round.alone = ByStream(self._device, round, self._multiply, self._parts)
            else:
                round.alone = alone(self._device, round, self._multiply, self._parts)
        if round.alone in self._running:
            self._see_the_end([round.alone])
            self._running.remove(round.alone)
        return round.alone

    def _begin(self, run: Run, rounds: list[Round], first: int, last: int) -> None:
        """On a stream where no other one waits for its clients."""
        goes_on = run in self._running
        stream = run.stream if goes_on else self._free_stream(run)
        if not goes_on:
            self._running.append(run)
        try:
            run.begin(rounds, stream, first, last)
        except BaseException:
            run.stop()
            if run.over:
                self._running.remove(run)
            raise

    def _free_stream(self, run: Run) -> torch.cuda.Stream:
        """One for which it has a graph, if there is one."""
        streams, used = self._streams[run.priority], {other.stream for other in self._running}
        free = [stream for stream in streams if stream not in used] or [self._new_stream(run.priority)]
        return max(free, key=lambda stream: run.graphs_on(stream))

    def _new_stream(self, priority: int) -> torch.cuda.Stream:
        """With the memory that cuBLAS wants for each."""
        if priority not in self._bare:
            self._bare[priority] = new_stream(self._device, priority)
        with torch.cuda.stream(self._bare[priority]):
            torch.cuda.current_blas_handle()
        stream = self._bare.pop(priority)
        self._streams[priority].append(stream)
        return stream

    def _together(self, rounds: list[Round]) -> ByKernels:
        """One that does not run yet, for so many."""
        count, sessions = rounded(sum(round.rows for round in rounds)), power_of_two(len(rounds))
        key = rounds[0].key, count, sessions
        runs = self._runs.setdefault(key, [])
        self._runs.move_to_end(key)
        run = next((run for run in runs if run not in self._running), None)
        if run is None:
            run = together(self._device, rounds[0], self._multiply, self._few_rows, count, sessions)
            runs.append(run)
            if len(self._runs) > RUNS_KEPT:
                self._runs.popitem(last=False)
        return run
