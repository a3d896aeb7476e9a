"""Playbacks of rounds: for each call the GPU waits, multiplies and answers, without a CPU (`executor.gpu.rounds` begins them)."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from symbiosis.executor.call_kinds import DeviceCall, Round, RowAddresses, addresses_of
from symbiosis.executor.gpu.gathered_calls import Multiply, copies, nbytes_of, parts_in
from symbiosis.executor.observe.log import log
from symbiosis.kernels.gpu import LET_GO
from symbiosis.kernels.gpu import doorbell as kernel
from symbiosis.kernels.gpu import gather as rows
from symbiosis.kernels.gpu.few_rows import FewRowsKernel
from symbiosis.kernels.gpu.graphs import captured
from symbiosis.protocol import Call
from symbiosis.transport.cuda.driver import HIGHEST, WAIT_AT_LEAST, WRITE_32, MemOp, MemOps
from symbiosis.transport.cuda.words import ROUND_BELL, ROUND_REPLY, VOID

Few = Callable[[Call, int], FewRowsKernel | None]
LATE_S = 1.0  # how long clients may take to make the next call of a round before each goes on by itself
VOID_S = 5.0  # the same for a round that cannot go on, because its results lie where the client may put other things: it is void then
TABLES_KEPT = 64


class Playback:
    """The GPU's work for a round, which it does again and again."""

    def __init__(self, device: torch.device, calls: int, priority: int) -> None:
        self._calls, self.priority, self.stream = calls, priority, torch.cuda.current_stream(device)
        self._over = torch.cuda.Event()
        # A graph runs only on the stream on which it was captured, because cuBLAS has a workspace for each stream. None: it ran there once.
        self._graphs: dict[torch.cuda.Stream, torch.cuda.CUDAGraph | None] = {}
        self.captures = True
        self.begun, self.replayed, self.stopped = 0.0, False, False
        self.rounds: list[Round] = []

    def begin(self, rounds: list[Round], stream: torch.cuda.Stream, first: int, last: int) -> None:
        """Answer the calls from number `first` up to `last`, without `last`. Earlier work is over, or answers the calls before these."""
        self.rounds, self.stream, self.stopped = rounds, stream, False
        self.begun = perf_counter()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            try:
                self._prepare(first)
                graph = None if first or last < self._calls else self._graph_on(stream)
                self.replayed = graph is not None
                if graph is None:
                    self._enqueue(first, last)
                else:
                    graph.replay()
            finally:  # whatever was enqueued
                self._over.record()

    def _prepare(self, first: int) -> None:
        """Enqueue what has to run before the first call of the round, on the current stream."""

    def _enqueue(self, first: int, last: int) -> None:
        """Enqueue these calls. A graph captures this."""
        raise NotImplementedError

    def graphs_on(self, stream: torch.cuda.Stream) -> int:
        """Return 2 if there is a graph for this stream, 1 if it ran there once, else 0."""
        return (self._graphs.get(stream) is not None) + (stream in self._graphs)

    def _graph_on(self, stream: torch.cuda.Stream) -> "torch.cuda.CUDAGraph | None":
        """Return the graph for this stream. There is one from the second run on."""
        if stream not in self._graphs or not self.captures:
            self._graphs[stream] = None
        elif self._graphs[stream] is None:
            try:
                self._graphs[stream] = captured(lambda: self._enqueue(0, self._calls), torch.cuda.graph_pool_handle())
            except RuntimeError as error:
                self.captures = False
                log(logging.WARNING, "a round cannot be captured", error=str(error).splitlines()[0])
        return self._graphs[stream]

    @property
    def over(self) -> bool:
        return self._over.query()

    @property
    def late(self) -> bool:
        """Whether a client did not come in time, so that no call was answered from then on."""
        return False

    def stop(self) -> None:
        """Stop waiting for clients. To be called again until the playback is over."""
        self.stopped = True


class ByKernels(Playback):
    """Kernels wait and answer. A table tells them for which clients: it has a page for each call (`kernels.gpu.gather`)."""

    def __init__(self, device: torch.device, products: "Sequence[InPlace | Gathered | AtOnce]", error: int = 0) -> None:
        """`error` is the address of the word that tells a client that its round is void. It is given for one client only."""
        super().__init__(device, len(products), HIGHEST)
        self._products, self._error = products, error
        width = rows.IN + max(product.words for product in products)
        self.table = torch.empty(len(products), width, dtype=torch.int64, device=device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._stop, self._late = (torch.zeros(1, dtype=torch.int32, pin_memory=True) for _ in range(2))
        self._tables: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()

    def _prepare(self, first: int) -> None:
        self._late[0] = self._stop[0] = 0
        self.table.copy_(self._table_of(self.rounds))
        self.turn.fill_(first)

    def _enqueue(self, first: int, last: int) -> None:
        for at in range(first, last):
            self._wait(VOID_S if self._error else LATE_S)
            self._products[at].answer(self.table, self.turn, at)

    def _wait(self, seconds: float) -> None:
        behind = ROUND_BELL - ROUND_REPLY
        kernel.wait(self.table, self.turn, self._stop, self._late, behind, seconds, self._error, VOID)

    def _table_of(self, rounds: list[Round]) -> Tensor:
        serials = tuple(round.serial for round in rounds)  # clients number their rounds by themselves
        table = self._tables.get(serials)
        if table is None:
            pages = [self._page(rounds, at) for at in range(self._calls)]
            pages = [page + [0] * (self.table.shape[1] - len(page)) for page in pages]
            table = self._tables[serials] = torch.tensor(pages, dtype=torch.int64, device=self.table.device)
            if len(self._tables) > TABLES_KEPT:
                self._tables.popitem(last=False)
        self._tables.move_to_end(serials)
        return table

    def _page(self, rounds: list[Round], at: int) -> list[int]:
        """Return a page: each reply word and its new value, which is the number of the call, counted from 1; then the product's own words."""
        words = [word for round in rounds for word in (round.reply.data_ptr(), at + 1)]
        padding = [0] * (2 * rows.PLACES - len(words))
        return words + padding + self._products[at].page([addresses_of(round.members[at]) for round in rounds])

    @property
    def late(self) -> bool:
        return bool(self._late[0])

    def stop(self) -> None:
        """Stop answering, from the next call on that a client has not made, and wait until the playback is over, which is soon."""
        super().stop()
        self._stop[0] = 1
        self._over.synchronize()


class ByStream(Playback):
    """One client's round of large calls, for which stream memory operations wait and answer. A kernel that waits would take up a place on
    the GPU, and a product as large as the GPU would not fit beside it."""

    def __init__(self, device: torch.device, round: Round, multiply: Multiply) -> None:
        super().__init__(device, len(round.members), priority=0)
        self._multiply = multiply
        self._products = [(call.call, call.inputs, call.outputs) for call in round.members]
        self._round = round
        bell, reply = round.bell.data_ptr(), round.reply.data_ptr()
        numbers = range(1, self._calls + 1)
        self._waits = [MemOps([MemOp(WAIT_AT_LEAST, bell, number)]) for number in numbers]
        self._answers = [MemOps([MemOp(WRITE_32, reply, number)]) for number in numbers]
        self._let_us_go, self._let_it_go = (MemOps([MemOp(WRITE_32, word, LET_GO)]) for word in (bell, reply))

    def _enqueue(self, first: int, last: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        try:
            for at in range(first, last):
                self._waits[at].enqueue(stream)
                self._multiply(*self._products[at])
                self._answers[at].enqueue(stream)
        except BaseException:
            self._let_it_go.enqueue(stream)  # behind all answers that were enqueued
            raise

    @property
    def over(self) -> bool:
        return not self._round.left and super().over

    def stop(self) -> None:
        """Let the client go. The products that were enqueued are still made, of whatever lies there."""
        super().stop()
        self._let_us_go.enqueue(torch.cuda.current_stream().cuda_stream)


class InPlace:
    """A product of one client's rows, made where they lie. If the client does not come in time, its round is void, because by then its
    memory may hold other things."""

    words = 0  # of the page

    def __init__(self, call: Call, x: list[Tensor], y: list[Tensor], multiply: Multiply) -> None:
        self._call, self._x, self._y, self._multiply = call, x, y, multiply

    def answer(self, table: Tensor, turn: Tensor, at: int) -> None:
        self._multiply(self._call, self._x, self._y)
        rows.answer_at(table, turn, at)

    def page(self, places: list[RowAddresses]) -> list[int]:
        return []


class Gathered:
    """A product of the rows of several sessions, which are gathered before and scattered after it."""

    def __init__(self, work: DeviceCall, x: list[Tensor], y: list[Tensor], multiply: Multiply, sessions: int) -> None:
        self._call, self._x, self._y, self._multiply, self._sessions = work.call, x, y, multiply, sessions
        self._between = 3 * sessions * len(x)
        self.words = self._between + 3 * sessions * len(y)

    def answer(self, table: Tensor, turn: Tensor, at: int) -> None:
        self._copy(table, turn, rows.IN, self._x)
        self._multiply(self._call, self._x, self._y)
        self._copy(table, turn, rows.IN + self._between, self._y)
        rows.answer_at(table, turn, at)

    def _copy(self, table: Tensor, turn: Tensor, first: int, parts: list[Tensor]) -> None:
        rows.copy(table, turn, first, self._sessions * len(parts), sum(part.nbytes for part in parts))

    def page(self, places: list[RowAddresses]) -> list[int]:
        before, after = copies(places, self._x, self._y)
        return [*before, *[0] * (self._between - len(before)), *after]


class AtOnce:
    """A product that one kernel makes of the rows of several sessions, where they lie."""

    def __init__(self, few_rows: FewRowsKernel, done: Tensor) -> None:
        self._few_rows, self._done, self.words = few_rows, done, few_rows.words

    def answer(self, table: Tensor, turn: Tensor, at: int) -> None:
        self._few_rows.multiply(table[at], turn, at + 1, self._done)

    def page(self, places: list[RowAddresses]) -> list[int]:
        outputs = zip(*(place.outputs for place in places), strict=True)
        return self._few_rows.page(
            _each(places, [place.inputs[0] for place in places]), [_each(places, of) for of in outputs]
        )


def load(device: torch.device) -> None:
    """Have CUDA load the kernels that wait."""
    error = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    kernel.load_wait(device, LATE_S, 0, VOID)
    kernel.load_wait(device, VOID_S, error.data_ptr(), VOID)
    torch.cuda.synchronize()  # before the word is freed


def for_one(device: torch.device, round: Round, multiply: Multiply) -> ByKernels:
    """Make the playback of one client's round."""
    products = [InPlace(call.call, call.inputs, call.outputs, multiply) for call in round.members]
    return ByKernels(device, products, round.error)


def rest(device: torch.device, round: Round, multiply: Multiply) -> ByKernels:
    """Make the playback of the rest of a round that another executor began, and may still be ending. Results are copied to their places
    only if the client waits for them."""
    scratch = torch.empty(max(nbytes_of(work, round.rows) for work in round.members), dtype=torch.uint8, device=device)
    products = [Gathered(work, *parts_in(scratch, work, round.rows), multiply, 1) for work in round.members]
    return ByKernels(device, products)


def together(
    device: torch.device, round: Round, multiply: Multiply, few_rows: Few, count: int, sessions: int
) -> ByKernels:
    """Make the playback of rounds like this one, of up to `sessions` clients with up to `count` rows in all."""
    few = [few_rows(call, count) for call in round.calls]
    others = [work for work, product in zip(round.members, few, strict=True) if product is None]
    nbytes = max((nbytes_of(work, count) for work in others), default=0)
    scratch = torch.empty(nbytes, dtype=torch.uint8, device=device)
    done = torch.zeros(1, dtype=torch.int32, device=device)
    products = [
        Gathered(work, *parts_in(scratch, work, count), multiply, sessions) if product is None else AtOnce(product, done)
        for work, product in zip(round.members, few, strict=True)
    ]  # fmt: skip
    return ByKernels(device, products)


def _each(places: list[RowAddresses], rows_at: Sequence[tuple[int, int]]) -> list[int]:
    """Return the addresses of all rows. `rows_at` has the address of each place's first row, and the bytes of a row."""
    pairs = zip(places, rows_at, strict=True)
    return [address + row * nbytes for place, (address, nbytes) in pairs for row in range(place.rows)]
