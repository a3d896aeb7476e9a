"""What the GPU does for a round of calls: it waits for each, multiplies and answers, without a CPU (`executor.rounds`)."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from symbiosis.executor.joined import Multiply, Places, copies, nbytes_of, parts_in
from symbiosis.executor.log import log
from symbiosis.kernels import rounds as kernel
from symbiosis.kernels import rows
from symbiosis.kernels.few_rows_gpu import FewRowsKernel
from symbiosis.kernels.graphs import captured
from symbiosis.protocol import Call, Op
from symbiosis.transport.line import ROUND_BELL, ROUND_REPLY

if TYPE_CHECKING:
    from symbiosis.executor.engine import Work
    from symbiosis.executor.rounds import Round

Parts = Callable[["Work", Op], list[Tensor]]
Few = Callable[[Call, int], FewRowsKernel | None]
LATE_S = 1.0  # that a client may take to make the next call of its round
TABLES_KEPT = 64


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

    def answer(self, at: int) -> None:
        """The product of a call, and the answers."""
        raise NotImplementedError

    def page(self, rounds: "list[Round]", at: int) -> list[int]:
        """... and what the table says of the product."""
        raise NotImplementedError

    def begin(self, rounds: "list[Round]", stream: torch.cuda.Stream, first: int = 0) -> None:
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
            self.answer(at)

    def _table_of(self, rounds: "list[Round]") -> Tensor:
        numbers = tuple(round.number for round in rounds)
        table = self._tables.get(numbers)
        if table is None:
            pages = [self._answers(rounds, at) + self.page(rounds, at) for at in range(self._calls)]
            pages = [page + [0] * (self.table.shape[1] - len(page)) for page in pages]
            table = self._tables[numbers] = torch.tensor(pages, dtype=torch.int64, device=self.table.device)
            if len(self._tables) > TABLES_KEPT:
                self._tables.popitem(last=False)
        self._tables.move_to_end(numbers)
        return table

    def _answers(self, rounds: "list[Round]", at: int) -> list[int]:
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

    def __init__(self, device: torch.device, round: "Round", multiply: Multiply, parts: Parts) -> None:
        works, self._multiply, self._copied = round.works, multiply, not round.apart
        outputs = max(len(work.places.outputs) for work in works) if self._copied else 0
        super().__init__(device, len(works), rows.IN + 3 * outputs)
        nbytes = max(nbytes_of(work, round.rows) for work in works) if self._copied else 0
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._products = []
        for work in works:
            y = parts_in(scratch, work, round.rows)[1] if self._copied else parts(work, Op.FORWARD)
            self._products.append((work.call, parts(work, Op.DGRAD), y))

    def answer(self, at: int) -> None:
        call, x, y = self._products[at]
        self._multiply(call, x, y)
        if self._copied:
            rows.copy(self.table, self.turn, rows.IN, len(y), sum(part.nbytes for part in y))
        rows.answer(self.table, self.turn)

    def page(self, rounds: "list[Round]", at: int) -> list[int]:
        _, x, y = self._products[at]
        return copies([rounds[0].works[at].places], x, y)[1] if self._copied else []


class Together(Run):
    """Rounds of up to so many clients, with up to so many rows."""

    def __init__(
        self, device: torch.device, round: "Round", multiply: Multiply, few_rows: Few, count: int, sessions: int
    ) -> None:
        few = [few_rows(call, count) for call in round.calls]
        rest = [work for work, product in zip(round.works, few, strict=True) if product is None]
        nbytes = max((nbytes_of(work, count) for work in rest), default=0)
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=device)
        done = torch.zeros(1, dtype=torch.int32, device=device)
        self._products: list[AtOnce | Gathered] = [
            Gathered(work, *parts_in(scratch, work, count), multiply, sessions) if product is None else AtOnce(product, done)
            for work, product in zip(round.works, few, strict=True)
        ]  # fmt: skip
        super().__init__(device, len(self._products), rows.IN + max(product.words for product in self._products))

    def answer(self, at: int) -> None:
        self._products[at].answer(self.table, self.turn, at)

    def page(self, rounds: "list[Round]", at: int) -> list[int]:
        return self._products[at].page([round.works[at].places for round in rounds])


class Gathered:
    """A product for which the rows of up to so many sessions are brought together, and taken apart again."""

    def __init__(self, work: "Work", x: list[Tensor], y: list[Tensor], multiply: Multiply, sessions: int) -> None:
        self._call, self._x, self._y, self._multiply, self._sessions = work.call, x, y, multiply, sessions
        self._between = 3 * sessions * len(x)  # words of the page
        self.words = self._between + 3 * sessions * len(y)

    def answer(self, table: Tensor, turn: Tensor, at: int) -> None:
        self._copy(table, turn, rows.IN, self._x)
        self._multiply(self._call, self._x, self._y)
        self._copy(table, turn, rows.IN + self._between, self._y)
        rows.answer(table, turn)

    def _copy(self, table: Tensor, turn: Tensor, first: int, parts: list[Tensor]) -> None:
        rows.copy(table, turn, first, self._sessions * len(parts), sum(part.nbytes for part in parts))

    def page(self, places: list[Places]) -> list[int]:
        before, after = copies(places, self._x, self._y)
        return [*before, *[0] * (self._between - len(before)), *after]


class AtOnce:
    """A product that one kernel makes of rows where they lie."""

    def __init__(self, few_rows: FewRowsKernel, done: Tensor) -> None:
        self._few_rows, self._done, self.words = few_rows, done, few_rows.words

    def answer(self, table: Tensor, turn: Tensor, at: int) -> None:
        self._few_rows.multiply(table[at], turn, at + 1, self._done)

    def page(self, places: list[Places]) -> list[int]:
        outputs = zip(*(place.outputs for place in places), strict=True)
        return self._few_rows.page(
            _each(places, [place.inputs[0] for place in places]), [_each(places, of) for of in outputs]
        )


def _each(places: list[Places], rows_at: Sequence[tuple[int, int]]) -> list[int]:
    """The addresses of all rows, where each place's first one lies, and how many bytes each has."""
    pairs = zip(places, rows_at, strict=True)
    return [address + row * nbytes for place, (address, nbytes) in pairs for row in range(place.rows)]
