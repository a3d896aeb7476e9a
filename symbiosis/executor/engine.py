"""Runs a batch: one matrix product over the rows of several sessions, and the replies.

Shapes: T rows of all sessions, K what goes in, N what comes out.
"""

import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from symbiosis.errors import CallError, Code
from symbiosis.executor.batch import Batch, Slice
from symbiosis.executor.batcher import AGING_S, JOIN_BELOW
from symbiosis.executor.cut import boxes, columns_of, panels
from symbiosis.executor.headroom import keep_headroom
from symbiosis.executor.log import log, worth_logging
from symbiosis.executor.ops import Ops
from symbiosis.executor.pace import Pace
from symbiosis.executor.store import Store
from symbiosis.executor.validate import check_finite, check_share
from symbiosis.kernels.few_rows import FewRows
from symbiosis.kernels.graphs import captured
from symbiosis.kernels.grouped import grouped, merge
from symbiosis.kernels.integers import modular_product
from symbiosis.kernels.product import product
from symbiosis.keystream import keystream
from symbiosis.protocol import BY_ROWS, WEIGHT_BITS, Call, Op, Reply
from symbiosis.transport.base import refuse
from symbiosis.transport.tensors import TORCH_DTYPE, Shapes, cut


@dataclass(slots=True)
class Work:
    """One call as the engine sees it: the server fills it, `Engine.step` answers it."""

    peer: Any  # a Peer, or what a GPU client has instead
    seq: int
    call: Call
    payload: tuple[Tensor, ...]
    out: Tensor
    parts: Shapes = ()  # of what lies in memory for each member of a group
    plan: Any = None
    number: int = 0  # of a call that a GPU makes, again and again from the same places
    priority: int = 0  # ... and how urgent it is
    launches: int = 0  # so often did it run from the same places
    large: bool = False  # so many rows, made by a GPU, that others overtake it
    graph: "torch.cuda.CUDAGraph | None" = None  # of all that the stream does for it, reply included
    places: Any = None  # where its rows lie and go, as `joined` knows them; made by a GPU only
    round: Any = None  # the calls that it stands for, if a captured step makes them all
    error: Exception | None = None  # what a slice of it ran into; the reply waits for the last slice
    finite: bool = False  # whether rows that are not are refused
    outs: tuple[Tensor, ...] = ()  # where each member's result goes, if they do not lie together

    @property
    def calls(self) -> tuple[Call, ...]:
        """Those that are answered when this is."""
        return (self.call,) if self.round is None else self.round.calls


_LAUNCHED = Reply(0)
HIGHEST = -5  # priority of a stream, or what the GPU has
ALIGNED = 64  # bytes
GRAPH_AFTER = 2  # launches of a call after which a CUDA graph is made of it
Finished = Callable[[Work, Reply], None]
Attempt = Callable[..., Any]  # as `Reactor.attempt`


class Engine:
    """Answers batches. `on_done` hears of every reply, for the figures; `on_joined` of all that a GPU gives at once; `on_over` what
    rounds of a key took.

    A GPU's large calls, which gain nothing from others, run on a stream of their own: products of few rows overtake them.
    """

    def __init__(
        self,
        store: Store,
        on_done: Finished,
        on_joined: Callable[[Batch], None],
        workers: int = 1,
        on_over: Callable[[Any, float], None] = lambda *_: None,
        most_rows: int = 0,
        attempt: Attempt = lambda peer, act, *words: act(*words),
    ) -> None:
        """`most_rows`: of a batch, for which memory is kept; `attempt`: answers a peer, which is ended if that goes wrong."""
        self.attempt = attempt
        self._most_rows = most_rows
        self._store, self._on_done, self._on_joined, self._on_over = store, on_done, on_joined, on_over
        self.device = store.weights[0].device if store.weights else torch.device("cpu")
        self.stream = 0
        self._joined: Any = None
        self.rounds: Any = None
        self._has_few_rows = False  # whether one kernel multiplies the few rows of several clients
        self._few: dict[Any, Any] = {}
        self.shares_time = True  # programs take turns on the GPU, as they do without MPS
        self._not_joined = 0  # products that failed so
        self._overtaken_until = math.inf  # if a large call was launched: when the others wait for it
        self._pace: Pace | None = None
        self._ops = Ops(store, self._here)
        self._product_of_joined = (
            FewRows(store.linear_weights(), threads=workers) if self.device.type == "cpu" else product
        )
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device, priority=HIGHEST)
            self._aside = torch.cuda.Stream(self.device)
            self._pool, self._pool_aside = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
            self.stream = self._stream.cuda_stream

    def use_stream(self) -> None:
        """From now on this thread's products run on the engine's stream."""
        if self.stream:
            torch.cuda.set_device(self.device)
            torch.empty(1, device=self.device)  # makes the device's context this thread's
            torch.cuda.synchronize(self.device)  # the weights are there
            for stream in (self._aside, self._stream):
                torch.cuda.set_stream(stream)
                torch.cuda.current_blas_handle()  # for which torch takes memory now
            self._joined = _joined(self._multiply, self._pool)
            if self._joined is not None:
                from symbiosis.executor.rounds import Rounds
                from symbiosis.transport.cuda_driver import shares_time

                self.rounds = Rounds(self._multiply, self._few_rows, self._parts, self._on_over, self.device)
                self.shares_time = shares_time(self.device)
                self._has_few_rows = not self.shares_time and _loaded(self._store.linear_weights())
            if any(weight.dim() == 2 for weight in self._store.weights):
                self._pace = Pace(self._store.weights)
            keep_headroom(self._store.weights, self._most_rows, self.device)

    @property
    def join_below(self) -> int:
        """Rows from which on a call gains nothing from others."""
        return self._pace.join_below if self._pace else JOIN_BELOW

    def estimate(self, work: Work, rows: int) -> float:
        """The seconds that the GPU will take, if it was not waited for; of a large round, for what was launched last."""
        if work.round is None:
            return self._estimate(work.call, rows)
        if work.large:
            return sum(self._estimate(call, rows) for call in work.round.launched)
        return work.round.seconds(rows, self._estimate)  # type: ignore[no-any-return]

    def _estimate(self, call: Call, rows: int) -> float:
        if self._pace is None or call.op not in (*BY_ROWS, Op.GROUPED):
            return 0.0
        return sum(self._pace.seconds(self._store.weights[layer], rows) for layer in call.layers)

    def step(self, batch: Batch) -> float:
        """Compute and reply. Returns the seconds that takes."""
        begun = perf_counter()
        piece = batch.slices[0]
        if piece.item.work.number and len(batch.slices) == 1 and piece.start == 0 and piece.last:
            self.attempt(piece.item.work.peer, self._launch_and_tell, piece.item.work)
            batch.ran()
            return max(perf_counter() - begun, self.estimate(piece.item.work, batch.rows))
        if self._are_copied_by_the_gpu(batch.slices):
            try:
                seconds = self.join([piece.item.work for piece in batch.slices])
            except Exception as error:  # then one copy after the other, which tells whose call is to blame
                self._not_joined += 1
                if worth_logging(self._not_joined):
                    log(logging.WARNING, "calls were not joined", error=type(error).__name__, times=self._not_joined)
            else:
                self._on_joined(batch)
                batch.ran()
                return seconds
        if piece.item.work.round is not None:
            return self._launch_each(batch)
        seconds = self.compute(batch)
        self.reply(batch, seconds)
        return seconds

    def _launch_each(self, batch: Batch) -> float:
        """Rounds that are not answered together."""
        begun = perf_counter()
        for piece in batch.slices:
            self.attempt(piece.item.work.peer, self._launch_and_tell, piece.item.work)
        batch.ran()
        return max(perf_counter() - begun, self.estimate(batch.slices[0].item.work, batch.rows))

    def _launch_and_tell(self, work: Work) -> None:
        self._on_done(work, self.launch(work))

    def _are_copied_by_the_gpu(self, slices: list[Slice]) -> bool:
        """Whether they are several whole calls that `join` takes."""
        return (
            self._joined is not None
            and 1 < len(slices) <= self._joined.most
            and all(item.work.places is not None and start == 0 and stop == item.rows for item, start, stop in slices)
        )

    def join(self, works: Sequence[Work]) -> float:
        """Compute and answer calls of this GPU that can be copied word by word. Returns the seconds that takes."""
        begun = perf_counter()
        self._let_pass()
        if works[0].round is None:
            self._joined.run(works)
        else:
            self.rounds.begin([work.round for work in works])
        return max(perf_counter() - begun, self.estimate(works[0], sum(work.plan.rows for work in works)))

    def compute(self, batch: Batch) -> float:
        """The product alone, in any thread. A failure in company is retried alone: it must hit its own call only."""
        begun = perf_counter()
        self._let_pass()
        try:
            if batch.is_cut:
                self._compute_turn(batch)
            else:
                self._compute(batch.slices)
        except Exception as error:  # whatever it is: the executor has other clients
            if len(batch.slices) > 1:
                for piece in batch.slices:
                    self.compute(Batch(batch.key, [piece], batch.formed))
            else:
                batch.slices[0].item.work.error = error
        seconds = perf_counter() - begun
        if not self.stream or not all(piece.item.work.out.is_cuda for piece in batch.slices):
            return seconds
        return max(seconds, self.estimate(batch.slices[0].item.work, batch.rows))  # the GPU was not waited for

    def reply(self, batch: Batch, seconds: float) -> None:
        """... to the calls of which all has been computed by now."""
        if not batch.ends:
            return
        batch.ran()
        for piece in batch.slices:
            if piece.item.finished:
                self.attempt(piece.item.work.peer, self._reply, piece, batch, batch.seconds + seconds)

    def launch(self, work: Work, piecemeal: bool = False) -> Reply:
        """Answer a call that a GPU made, alone, as one CUDA graph if it comes again and again; a large round whole, or call by call."""
        if work.large and work.round is not None:
            return self._launch_large_round(work, piecemeal)
        if not work.large:
            self._let_pass()
            return self._launch(work)
        with torch.cuda.stream(self._aside):
            reply = self._launch(work)
        self._overtaken_until = min(self._overtaken_until, perf_counter() + AGING_S)
        return reply

    def _launch_large_round(self, work: Work, piecemeal: bool) -> Reply:
        if not work.round.left:
            work.peer.count(1, len(work.calls))
        try:
            self.rounds.begin_large(work.round, 1 if piecemeal else len(work.calls))
        except Exception as error:  # whatever it is: the executor has other clients
            work.round.left = 0
            return refuse(work.peer, work.seq, call_error(error))
        return _LAUNCHED

    def _let_pass(self) -> None:
        """Nobody is overtaken for longer than any call waits for more urgent ones."""
        if perf_counter() > self._overtaken_until:
            self._stream.wait_stream(self._aside)
            self._overtaken_until = math.inf

    def settle(self, peer: Any, then: Callable[[], None] = lambda: None) -> None:
        """Wait for all that was launched for a client which is gone: it waits for nobody. `then`: now, or when its large round is over."""

        def over() -> None:
            self._synchronize()
            then()

        if self.rounds is None:
            over()
        else:
            self.rounds.leave(peer, over)

    def forget(self, works: Sequence[Work]) -> None:
        """These calls are over, and do not come again."""
        for work in works:
            if work.round is not None:
                self.rounds.forget(work.round)
        self._synchronize()

    @property
    def works(self) -> bool:
        """Whether the device does: one that broke, answers nobody any more."""
        try:
            if self.stream:
                self._stream.query()
        except RuntimeError:
            return False
        return True

    def _synchronize(self) -> None:
        """With what no client is waited for."""
        for stream in (self._stream, self._aside):
            stream.synchronize()

    def _launch(self, work: Work) -> Reply:
        try:
            if work.round is not None:
                self.rounds.begin([work.round])
                work.peer.count(1, len(work.calls))
            elif work.graph is None:
                self._launch_first(work)
            else:
                work.graph.replay()
                work.peer.count(1)
        except Exception as error:  # whatever it is: the executor has other clients
            return refuse(work.peer, work.seq, call_error(error))
        return _LAUNCHED

    def _launch_first(self, work: Work) -> None:
        work.launches += 1
        if work.launches <= GRAPH_AFTER:
            self._run(work)
            work.peer.reply(Reply(work.seq, Code.OK, work.call.dtype), work.out)
            return
        try:
            work.graph = captured(lambda: self._run_and_reply(work), self._pool_aside if work.large else self._pool)
        except RuntimeError:  # grouped products of some dtypes ask the GPU for sizes
            work.launches = -sys.maxsize
            self._launch_first(work)
        else:
            work.graph.replay()
            work.peer.count(1)

    def _run_and_reply(self, work: Work) -> None:
        self._run(work)
        work.peer.enqueue_reply()

    def place(self, work: Work) -> None:
        """Note where the rows of a call lie that a GPU makes again and again, if others can join it."""
        if self._joined is not None and work.call.by_rows and work.peer.here:
            from symbiosis.executor.joined import Places

            places = Places(self._parts(work, Op.DGRAD), self._parts(work, Op.FORWARD), work.peer.answer(work.number))
            work.places = places if places.aligned else None

    def _run(self, work: Work) -> None:
        """The product of one call as a whole."""
        if work.call.by_rows:
            self._multiply(work.call, self._parts(work, Op.DGRAD), self._parts(work, Op.FORWARD))
        else:
            self._ops.whole(work.call, _in_range(work), work.out)

    def _compute(self, slices: list[Slice]) -> None:
        first: Work = slices[0].item.work
        self._check(slices)
        try:
            if len(slices) > 1:
                (self._rows_together if first.call.by_rows else self._together)(first.call, slices)
            elif first.call.by_rows:
                self._rows_alone(first.call, slices[0])
            else:
                self._ops.whole(first.call, first.payload, first.out)
        finally:  # a copy must not come behind the answer, be it an error's
            self._land(slices)

    def _compute_turn(self, batch: Batch) -> None:
        """Some cells of what a slice makes, or of what a call makes that does not go by rows. Nobody waits for the rest of one that
        has failed."""
        piece = batch.slices[0]
        work: Work = piece.item.work
        if work.error is not None:
            return
        self._check_turn(batch, work)
        for box in boxes(work.plan.grid, batch.first, batch.last):
            if work.call.by_rows:
                self._multiply_panels(piece, box[0])
            else:
                self._ops.part(work.call, work.payload, work.out, box)
        self._land(batch.slices)

    def _check(self, slices: list[Slice]) -> None:
        """Note whose rows are not finite: in a product they hurt no others."""
        for piece in slices:
            work: Work = piece.item.work
            if work.finite and work.error is None:
                rows = slice(piece.start, piece.stop) if work.call.by_rows else slice(None)
                try:
                    check_finite(work.call, work.payload, rows, self._store)
                except CallError as error:
                    work.error = error

    def _check_turn(self, batch: Batch, work: Work) -> None:
        """The same, of a slice with its first turn, else of as large a part of the payload as of the cells."""
        if not work.finite:
            return
        if not work.call.by_rows:
            check_share(work.call, work.payload, batch.first / batch.cells, batch.last / batch.cells, self._store)
        elif not batch.first:
            self._check(batch.slices)

    def _rows_alone(self, call: Call, piece: Slice) -> None:
        """Straight from the session's memory into the session's memory, where that is the device's."""
        x, out = list(map(self._here, self._inputs(piece))), self._outputs(piece)
        if out[0].device == self.device:
            self._multiply(call, x, out)
        else:
            y = self._multiply(call, x)
            for out_TN, y_TN in zip(out, y, strict=True):
                out_TN.copy_(y_TN, non_blocking=True)

    def _rows_together(self, call: Call, slices: list[Slice]) -> None:
        """Gather the rows of all, one product (or one for each layer of a group), scatter."""
        rows = [piece.stop - piece.start for piece in slices]
        x = [torch.cat(list(map(self._here, parts))) for parts in zip(*map(self._inputs, slices), strict=True)]
        y = self._multiply(call, x, forward=self._product_of_joined)
        for y_TN, outs in zip(y, zip(*map(self._outputs, slices), strict=True), strict=True):
            for out_TN, part_TN in zip(outs, y_TN.split(rows), strict=True):
                out_TN.copy_(part_TN, non_blocking=True)

    def _inputs(self, piece: Slice) -> list[Tensor]:
        """The slice's rows: for a group's DGRAD those of each member."""
        work: Work = piece.item.work
        if work.call.seeded and work.payload[0].dtype is torch.uint8:
            return self._grown(work, piece)
        return [part[piece.start : piece.stop] for part in self._parts(work, Op.DGRAD)]

    def _grown(self, work: Work, piece: Slice) -> list[Tensor]:
        """... of which only the seed came."""
        call, key = work.call, work.payload[0].numpy().tobytes()
        dtype = TORCH_DTYPE[call.dtype]
        if call.op is Op.DGRAD and call.also:  # what lies together are not the rows
            work.payload = (keystream(key, call.shape, dtype),)  # type: ignore[arg-type]
            return self._inputs(piece)
        return [keystream(key, (min(piece.stop, call.rows) - piece.start, call.shape[1]), dtype, start=piece.start)]

    def _outputs(self, piece: Slice) -> list[Tensor]:
        """Where the slice's results go: for a group's FORWARD those of each member."""
        return [part[piece.start : piece.stop] for part in self._parts(piece.item.work, Op.FORWARD)]

    def _parts(self, work: Work, op: Op) -> list[Tensor]:
        """What goes in (DGRAD) or comes out (FORWARD), by member where it is of several."""
        if op is Op.FORWARD and work.outs:
            return list(work.outs)
        rows = work.payload[0] if op is Op.DGRAD else work.out
        return cut(rows, work.parts if work.call.op is op else ())

    def _multiply(
        self, call: Call, x: list[Tensor], out: list[Tensor] | None = None, forward: Callable[..., Tensor] = product
    ) -> list[Tensor]:
        """One product for each layer, so that every one rounds as it would alone; gradients are added, the last one's first.
        `forward`: how to multiply the rows of several calls, which need not round as each would alone."""
        matrices = [self._store.operand(layer, call.op, call.view, call.dtype) for layer in call.layers]
        multiply: Callable[..., Tensor] = product
        if call.dtype in WEIGHT_BITS:  # of FORWARD and DGRAD only
            multiply = forward = modular_product
        if call.op is not Op.DGRAD:
            biases = self._biases(call)
            outs: Sequence[Tensor | None] = out or [None] * len(matrices)
            return [forward(x[0], *parts) for parts in zip(matrices, biases, outs, strict=True)]
        *others, (dy_TN, matrix) = zip(x, matrices, strict=True)
        dx_TK = multiply(dy_TN, matrix, None, out[0] if out else None)
        for dy_TN, matrix in reversed(others):
            dx_TK += multiply(dy_TN, matrix, None)
        return [dx_TK]

    def _multiply_panels(self, piece: Slice, side: slice) -> None:
        """The same for some columns of what a slice makes."""
        call = piece.item.work.call
        x, outs, biases = list(map(self._here, self._inputs(piece))), self._outputs(piece), self._biases(call)
        multiply: Callable[..., Tensor] = modular_product if call.dtype in WEIGHT_BITS else product
        if call.op is Op.DGRAD:
            columns = columns_of(side, outs[0].shape[1])
            members = list(zip(x, call.layers, strict=True))
            parts = (multiply(dy, self._panel(call, layer, columns), None) for dy, layer in reversed(members))
            outs[0][:, columns] = reduce(Tensor.add_, parts)
            return
        begun = 0
        for layer, out_TN, bias in zip(call.layers, outs, biases, strict=True):
            count = panels(out_TN.shape[1])
            mine = slice(max(side.start - begun, 0), min(side.stop - begun, count))
            if mine.start < mine.stop:
                columns = columns_of(mine, out_TN.shape[1])
                multiply(
                    x[0], self._panel(call, layer, columns), None if bias is None else bias[columns], out_TN[:, columns]
                )
            begun += count

    def _panel(self, call: Call, layer: int, columns: slice) -> Tensor:
        return self._store.operand(layer, call.op, call.view, call.dtype, (..., columns))

    def _biases(self, call: Call) -> list[Tensor | None]:
        """One for each layer, if the call asks for them."""
        return [self._store.bias(layer, call.dtype) if call.bias else None for layer in call.layers]

    def _few_rows(self, call: Call, rows: int) -> Any:
        """One kernel for the product of so many rows, which rounds in its own way; nothing if none takes the weights as they are."""
        if not self._has_few_rows or call.op is not Op.FORWARD:
            return None
        from symbiosis.kernels.few_rows_gpu import FewRowsKernel, padded, takes

        key = call.layers, call.view, call.bias, call.dtype, padded(rows)
        if key not in self._few:
            matrices = [self._store.matrix(layer, call.op, call.view) for layer in call.layers]
            biases = self._biases(call)
            as_it_is = matrices[0].dtype == TORCH_DTYPE[call.dtype] and takes(matrices, rows)
            self._few[key] = FewRowsKernel(matrices, biases, rows) if as_it_is else None
        return self._few[key]

    def _together(self, call: Call, slices: list[Slice]) -> None:
        """The same for calls whose rows belong to groups of matrices, and for lookups."""
        works: list[Work] = [piece.item.work for piece in slices]
        rows = [len(work.payload[0]) for work in works]
        x_TK = torch.cat([self._here(work.payload[0]) for work in works])
        if call.op is Op.LOOKUP:
            y_TN = self._store.matrix(call.layer, call.op, call.view)[x_TK]
        else:
            order, ends = (t.to(self.device) for t in merge([work.payload[1] for work in works], rows))
            sorted_TN = grouped(x_TK[order], self._operand(call), ends)
            y_TN = torch.empty_like(sorted_TN).index_copy_(0, order, sorted_TN)
        for work, part_TN in zip(works, y_TN.split(rows), strict=True):
            work.out.copy_(part_TN)

    def _operand(self, call: Call) -> Tensor:
        return self._store.operand(call.layer, call.op, call.view, call.dtype)

    def _here(self, tensor: Tensor) -> Tensor:
        """A call's payload on our device, aligned as torch's own memory: products must not depend on the transport. The copy is
        not waited for: the payload is there until the call is answered."""
        here = tensor.to(self.device, non_blocking=True)
        return here.clone() if here.untyped_storage().data_ptr() % ALIGNED else here

    def _land(self, slices: list[Slice]) -> None:
        """Wait, once for all, until what was copied between the host's memory and the GPU is there."""
        if self.stream and not all(piece.item.work.out.is_cuda for piece in slices):
            self._stream.synchronize()

    def _reply(self, piece: Slice, batch: Batch, seconds: float) -> None:
        work: Work = piece.item.work
        error, work.error = work.error, None  # the call may come again
        if error is not None:
            self._fail(work, error)
            return
        wait = max(0.0, batch.formed - piece.item.arrived)
        reply = Reply(
            work.seq, Code.OK, work.call.dtype, tuple(work.out.shape),
            len(batch.slices), int(wait * 1e6), int(seconds * 1e6),
        )  # fmt: skip
        work.peer.reply(reply, work.out)
        self._on_done(work, reply)

    def _fail(self, work: Work, error: Exception) -> None:
        self._on_done(work, refuse(work.peer, work.seq, call_error(error)))


def _in_range(work: Work) -> tuple[Tensor, ...]:
    """The payload; where it lies on a GPU, no CPU has checked where groups end."""
    if work.call.op is not Op.GROUPED:
        return work.payload
    rows, ends = work.payload
    return rows, ends.clamp(0, len(rows)).cummax(0).values.to(torch.int32)


def _joined(multiply: Any, pool: Any) -> Any:
    """For GPUs, and only there: it needs Triton, and what that compiles kernels with."""
    try:
        from symbiosis.executor.joined import Joined

        return Joined(multiply, pool)
    except Exception as error:  # whatever it is: calls are answered without it
        log(
            logging.WARNING, "Triton does not work here: calls of several clients are joined copy by copy, which is slower",
            error=f"{type(error).__name__} {error}",
        )  # fmt: skip
        return None


def _loaded(weights: Sequence[Tensor]) -> bool:
    """Whether this GPU multiplies few rows by one kernel."""
    from symbiosis.kernels import few_rows_gpu

    try:
        few_rows_gpu.load(weights)
    except Exception as error:  # whatever it is: there is another way
        log(
            logging.WARNING, "a kernel does not run here: decoding together is slower", error=f"{type(error).__name__} {error}"
        )  # fmt: skip
        return False
    return True


def call_error(error: Exception) -> CallError:
    """What to tell the client whose call ran into `error`."""
    if isinstance(error, CallError):
        return error
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error):
        return CallError(Code.RESOURCE, "the executor has no memory for this call: send fewer rows at once")
    return CallError(Code.INTERNAL, f"the call failed in the executor: {type(error).__name__} {error}".splitlines()[0])
