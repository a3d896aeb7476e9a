"""The calls of captured steps: the GPU answers a whole round of them by itself, of one client or of several who go together.

What a client captured, it calls again and again in the same order. So all of it is enqueued ahead, as one CUDA graph: for each
call a kernel that waits for the bells, the product, and the answers. A CPU only begins the round, when all who take part have
rung for it. If one of them dies in the midst of it, or takes too long, that graph answers nobody any more, and the others' rounds
go on from where they are, each by itself.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from symbiosis.errors import CallError, Code
from symbiosis.executor.engine import HIGHEST, call_error
from symbiosis.executor.joined import Multiply, power_of_two, rounded
from symbiosis.executor.plan import Key
from symbiosis.executor.runs import Alone, Few, Parts, Run, Together
from symbiosis.kernels import rounds as kernel
from symbiosis.kernels import rows
from symbiosis.protocol import Call
from symbiosis.transport.base import refuse
from symbiosis.transport.cuda_driver import new_stream

if TYPE_CHECKING:
    from symbiosis.executor.engine import Work

RUNS_KEPT = 32
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
        self._device, self._streams = device, list[torch.cuda.Stream]()
        self.draining = False  # who is not answered to the end goes on at the executor that comes next
        self._keys: dict[RoundKey, RoundKey] = {}
        self._runs: OrderedDict[Hashable, list[Together]] = OrderedDict()
        self._running: list[Run] = []
        kernel.load_wait(device)

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
            run = Together(self._device, rounds[0], self._multiply, self._few_rows, count, sessions)
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
