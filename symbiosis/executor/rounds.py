"""The calls of captured steps: the GPU answers a whole round of them by itself, of one client or of several who go together.

What a client captured, it calls again and again in the same order. So all of it is enqueued ahead, as one CUDA graph: for each
call a kernel that waits for the bells, the product, and the answers. A CPU only begins the round, when all who take part have
rung for it. If one of them dies in the midst of it, or takes too long, that graph answers nobody any more, and the others' rounds
go on from where they are, each by itself.
"""

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from symbiosis.errors import CallError, Code
from symbiosis.executor.engine import HIGHEST, call_error
from symbiosis.executor.joined import Multiply, copies, nbytes_of, parts_in, power_of_two, rounded
from symbiosis.executor.log import log
from symbiosis.executor.plan import Key
from symbiosis.kernels import rounds as kernel
from symbiosis.kernels import rows
from symbiosis.kernels.graphs import captured
from symbiosis.protocol import Call, Op
from symbiosis.transport.base import refuse
from symbiosis.transport.cuda_driver import new_stream
from symbiosis.transport.line import ROUND_BELL, ROUND_REPLY

if TYPE_CHECKING:
    from symbiosis.executor.engine import Work

Parts = Callable[["Work", Op], list[Tensor]]
LATE_S = 1.0  # that a client may take to make the next call of its round
TABLES_KEPT, RUNS_KEPT = 64, 32
_numbers = itertools.count()


class RoundKey(msgspec.Struct, frozen=True, cache_hash=True):
    """Rounds of one key can be answered together."""

    keys: tuple[Key, ...]


class Round:
    """What one client's captured step calls, in order. All calls have the same number of rows."""

    def __init__(self, key: RoundKey, works: "tuple[Work, ...]", bell: Tensor, reply: Tensor) -> None:
        """`bell`, `reply`: the words that say which call was made last, and which answered."""
        self.key, self.works, self.bell, self.reply = key, works, bell, reply
        self.calls: tuple[Call, ...] = tuple(work.call for work in works)
        self.number, self.peer, self.rows = next(_numbers), works[0].peer, works[0].plan.rows
        self.answered = 0  # calls of it when it begins, by an executor before us
        self.apart = _are_apart([work.places for work in works])
        self.gone = self.was_late = False
        self.alone: Run | None = None
        self._seconds: dict[int, float] = {}

    def is_behind(self, answered: int) -> bool:
        """Whether there are calls left when so many were answered: then it goes on from there."""
        left = 0 <= answered < len(self.calls)  # less than none: it was let go
        self.answered = answered if left else 0
        return left

    def seconds(self, rows: int, estimate: Callable[[Call, int], float]) -> float:
        """What its products of so many rows take."""
        if rows not in self._seconds:
            self._seconds[rows] = sum(estimate(call, rows) for call in self.calls)
        return self._seconds[rows]


class Run:
    """What the GPU does for a round, again and again. A table, with a page for each call, tells whom it answers (`kernels.rows`)."""

    def __init__(self, device: torch.device, calls: int, width: int) -> None:
        self._calls, self.stream = calls, torch.cuda.current_stream(device)
        self.table = torch.empty(calls, width, dtype=torch.int64, device=device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._stop, self._late = (torch.zeros(1, dtype=torch.int32, pin_memory=True) for _ in range(2))
        self._over = torch.cuda.Event()
        # each for the stream on which it was captured, and only there: cuBLAS's workspace is the stream's. None: it ran there once.
        self.graphs: dict[torch.cuda.Stream, torch.cuda.CUDAGraph | None] = {}
        self._captures = True
        self._tables: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self.begun, self.replayed = 0.0, False
        self.rounds: list[Round] = []

    def multiply(self, at: int) -> None:
        """The product of a call."""
        raise NotImplementedError

    def page(self, rounds: list[Round], at: int) -> list[int]:
        """... and what the table says of it, but for the answers."""
        raise NotImplementedError

    def begin(self, rounds: list[Round], stream: torch.cuda.Stream, first: int = 0) -> None:
        """Answer the calls of these rounds from `first` on. What was begun before is over."""
        self.rounds, self.stream = rounds, stream
        self._late[0] = self._stop[0] = 0
        table = self._table_of(rounds)
        self.begun = perf_counter()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            try:
                self.table.copy_(table)
                self.turn.fill_(first)
                graph = None if first else self._graph_on(stream)
                self.replayed = graph is not None
                if graph is None:
                    self._enqueue(first)
                else:
                    graph.replay()
            finally:  # whatever was enqueued
                self._over.record()

    def _graph_on(self, stream: torch.cuda.Stream) -> "torch.cuda.CUDAGraph | None":
        """From the second time on."""
        if stream not in self.graphs or not self._captures:
            self.graphs[stream] = None
        elif self.graphs[stream] is None:
            try:
                self.graphs[stream] = captured(self._enqueue, torch.cuda.graph_pool_handle())
            except RuntimeError as error:
                self._captures = False
                log(logging.WARNING, "a round cannot be captured", error=str(error).splitlines()[0])
        return self.graphs[stream]

    def _enqueue(self, first: int = 0) -> None:
        for at in range(first, self._calls):
            kernel.wait(self.table, self.turn, self._stop, self._late, ROUND_BELL - ROUND_REPLY, LATE_S)
            self.multiply(at)
            rows.answer(self.table, self.turn)

    def _table_of(self, rounds: list[Round]) -> Tensor:
        numbers = tuple(round.number for round in rounds)
        table = self._tables.get(numbers)
        if table is None:
            pages = [self._answers(rounds, at) + self.page(rounds, at) for at in range(self._calls)]
            table = self._tables[numbers] = torch.tensor(pages, dtype=torch.int64, device=self.table.device)
            if len(self._tables) > TABLES_KEPT:
                self._tables.popitem(last=False)
        self._tables.move_to_end(numbers)
        return table

    def _answers(self, rounds: list[Round], at: int) -> list[int]:
        """The reply words, and what they become: the number of the call, counted from 1."""
        words = [word for round in rounds for word in (round.reply.data_ptr(), at + 1)]
        return words + [0] * (2 * rows.PLACES - len(words))

    @property
    def over(self) -> bool:
        return self._over.query()

    @property
    def late(self) -> bool:
        """Whether somebody was waited for in vain, and nobody answered from then on."""
        return bool(self._late[0])

    @property
    def stopped(self) -> bool:
        return bool(self._stop[0])

    def stop(self) -> None:
        """Answer nobody from the next call on that one of them has not made. Waits for the end of that, which is near."""
        self._stop[0] = 1
        self.wait()

    def wait(self) -> None:
        """For the end of what was begun."""
        self._over.synchronize()


class Alone(Run):
    """One client's round, in its own memory. Where calls share places, results go there by a copy, which is not made any more when
    nobody is answered any more: what the products write then, nobody misses."""

    def __init__(self, device: torch.device, round: Round, multiply: Multiply, parts: Parts) -> None:
        works, self._multiply, self._copied = round.works, multiply, not round.apart
        outputs = max(len(work.places.outputs) for work in works) if self._copied else 0
        super().__init__(device, len(works), rows.IN + 3 * outputs)
        nbytes = max(nbytes_of(work, round.rows) for work in works) if self._copied else 0
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._products = []
        for work in works:
            y = parts_in(scratch, work, round.rows)[1] if self._copied else parts(work, Op.FORWARD)
            self._products.append((work.call, parts(work, Op.DGRAD), y))

    def multiply(self, at: int) -> None:
        call, x, y = self._products[at]
        self._multiply(call, x, y)
        if self._copied:
            rows.copy(self.table, self.turn, rows.IN, len(y), sum(part.nbytes for part in y))

    def page(self, rounds: list[Round], at: int) -> list[int]:
        if not self._copied:
            return []
        _, x, y = self._products[at]
        _, after = copies([rounds[0].works[at].places], x, y)
        return after + [0] * (self.table.shape[1] - rows.IN - len(after))


class Together(Run):
    """Rounds of up to so many clients, with up to so many rows: gathered, multiplied and scattered in memory of its own."""

    def __init__(self, device: torch.device, round: Round, multiply: Multiply, count: int, sessions: int) -> None:
        works = round.works
        inputs, outputs = (max(map(len, of)) for of in zip(*((w.places.inputs, w.places.outputs) for w in works), strict=True))  # fmt: skip
        self._after = rows.IN + 3 * sessions * inputs
        super().__init__(device, len(works), self._after + 3 * sessions * outputs)
        nbytes = max(nbytes_of(work, count) for work in works)
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._parts = [parts_in(scratch, work, count) for work in works]
        self._called, self._sessions, self._multiply = round.calls, sessions, multiply

    def multiply(self, at: int) -> None:
        x, y = self._parts[at]
        self._copy(rows.IN, x)
        self._multiply(self._called[at], x, y)
        self._copy(self._after, y)

    def _copy(self, first: int, parts: list[Tensor]) -> None:
        rows.copy(self.table, self.turn, first, self._sessions * len(parts), sum(part.nbytes for part in parts))

    def page(self, rounds: list[Round], at: int) -> list[int]:
        before, after = copies([round.works[at].places for round in rounds], *self._parts[at])
        between = self._after - rows.IN - len(before)
        behind = self.table.shape[1] - self._after - len(after)
        return [*before, *[0] * between, *after, *[0] * behind]


class Rounds:
    """On one GPU, which serves several programs at the same time."""

    def __init__(
        self,
        multiply: Multiply,
        parts: Parts,
        on_over: Callable[[Hashable, float], None],
        device: torch.device,
    ) -> None:
        """`parts`: what goes into a call's product, and comes out; `on_over` hears what rounds of a key take."""
        self._multiply, self._parts, self._on_over = multiply, parts, on_over
        self._device, self._streams = device, list[torch.cuda.Stream]()
        self.draining = False  # who is not answered to the end goes on at the executor that comes next
        self._keys: dict[RoundKey, RoundKey] = {}
        self._runs: OrderedDict[Hashable, list[Together]] = OrderedDict()
        self._running: list[Run] = []

    def new(self, works: "tuple[Work, ...]", bell: Tensor, reply: Tensor, most: float) -> Round:
        """Raises `CallError` if these calls cannot be answered so, or one has `most` rows or more."""
        if not works or any(work.places is None or work.plan.rows >= most for work in works):
            raise CallError(
                Code.UNKNOWN_OP, "a round has calls of few rows, which a program on the executor's own GPU makes"
            )
        if len({work.plan.rows for work in works}) > 1:
            raise CallError(Code.UNKNOWN_OP, "the calls of a round have the same number of rows")
        key = RoundKey(tuple(work.plan.key for work in works))
        return Round(self._keys.setdefault(key, key), works, bell, reply)

    def __bool__(self) -> bool:
        """Whether something was begun of which nobody has seen the end."""
        return bool(self._running)

    def begin(self, rounds: list[Round]) -> None:
        """Answer these, which have one key, together; by itself, who is in the midst of one, or kept others waiting."""
        if len(rounds) > rows.PLACES:
            raise ValueError(f"{len(rounds)} rounds do not fit a page")
        if len(rounds) == 1:
            self._begin_alone(rounds[0])
            return
        fresh = sorted([r for r in rounds if not r.answered and not r.was_late], key=lambda round: round.number)
        if len(fresh) > 1:
            self._begin(self._together(fresh), fresh)
        for round in [round for round in rounds if len(fresh) < 2 or round not in fresh]:
            self._go_on(round)

    def look(self) -> None:
        """See what is over. Who was not answered to the end goes on alone."""
        for run in [run for run in self._running if run.over]:
            self._running.remove(run)
            rounds, run.rounds = run.rounds, []
            if run.replayed and not run.late:
                self._on_over(rounds[0].key, perf_counter() - run.begun)
            for round in [round for round in rounds if run.late and not round.gone and not self.draining]:
                answered = int(round.reply.item())
                if round.is_behind(answered):
                    round.was_late = not run.stopped and int(round.bell.item()) == answered
                    self._go_on(round)

    def leave(self, peer: Any) -> None:
        """A client is gone: what was begun for it ends, and uses its memory no more."""
        for run in self._running:
            theirs = [round for round in run.rounds if round.peer is peer]
            for round in theirs:
                round.gone = True
            if theirs:
                run.stop()

    def _go_on(self, round: Round) -> None:
        """By itself. A failure is its client's alone."""
        try:
            self._begin_alone(round)
        except Exception as error:  # whatever it is: the executor has other clients
            refuse(round.peer, 0, call_error(error))

    def _begin_alone(self, round: Round) -> None:
        if round.alone is None:
            round.alone = Alone(self._device, round, self._multiply, self._parts)
        if round.alone in self._running:  # its last answer is out, or the client would not have rung
            self._running.remove(round.alone)
            round.alone.wait()
        first, round.answered = round.answered, 0
        self._begin(round.alone, [round], first)

    def _begin(self, run: Run, rounds: list[Round], first: int = 0) -> None:
        """On a stream where no other one waits for its clients."""
        used = {other.stream for other in self._running}
        free = [stream for stream in self._streams if stream not in used]
        if not free:
            free = [new_stream(self._device, HIGHEST)]
            self._streams += free
        stream = max(free, key=lambda stream: (run.graphs.get(stream) is not None, stream in run.graphs))
        try:
            run.begin(rounds, stream, first)
        except BaseException:
            run.stop()
            raise
        self._running.append(run)

    def _together(self, rounds: list[Round]) -> Together:
        """One that does not run yet, for so many."""
        count, sessions = rounded(sum(round.rows for round in rounds)), power_of_two(len(rounds))
        key = rounds[0].key, count, sessions
        runs = self._runs.setdefault(key, [])
        self._runs.move_to_end(key)
        run = next((run for run in runs if run not in self._running), None)
        if run is None:
            run = Together(self._device, rounds[0], self._multiply, count, sessions)
            runs.append(run)
            if len(self._runs) > RUNS_KEPT:
                self._runs.popitem(last=False)
        return run


def _are_apart(places: "list[Any]") -> bool:
    """Whether no two calls share memory."""
    spans = sorted(
        (address, address + place.rows * nbytes)
        for place in places
        for address, nbytes in (*place.inputs, *place.outputs)
    )
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
