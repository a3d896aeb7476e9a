"""Launches the calls of GPU clients, which the GPU answers by itself: a call alone, several as one product, or a round."""

import logging
import math
import sys
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from symbiosis.base.folders import check_caches
from symbiosis.errors import Code
from symbiosis.executor.call_kinds import DeviceCall, DeviceWork, Round, RowAddresses, Work, call_error
from symbiosis.executor.calls.cell_ops import CellOps
from symbiosis.executor.compute.products import Products
from symbiosis.executor.gpu.headroom import keep_headroom
from symbiosis.executor.gpu.timing import GpuTiming
from symbiosis.executor.model.store import Store
from symbiosis.executor.observe.log import log
from symbiosis.executor.scheduling.ranking import AGING_S
from symbiosis.executor.scheduling.rules import BATCH_BELOW
from symbiosis.kernels.gpu.graphs import GraphPool
from symbiosis.protocol import Call, Op, Reply
from symbiosis.transport.base import Peer, refuse
from symbiosis.transport.cuda.driver import HIGHEST, shares_time
from symbiosis.transport.tensors import TORCH_DTYPE

if TYPE_CHECKING:
    from symbiosis.executor.gpu.gathered_calls import Gatherer
    from symbiosis.executor.gpu.rounds import Rounds
    from symbiosis.kernels.gpu.few_rows import FewRowsKernel

Made = TypeVar("Made")
GRAPH_AFTER = 2  # launches of a call after which a CUDA graph is made of it
_LAUNCHED = Reply(0)


class Launcher:
    """Launches on one GPU. Without a GPU it launches single calls only.

    Large calls gain nothing from a batch. They run on a stream of their own, so that products of few rows overtake them.
    """

    def __init__(
        self,
        products: Products,
        ops: CellOps,
        on_over: Callable[[Hashable, float], None],
        most_rows: int = 0,
        batch_invariant: bool = False,
    ) -> None:
        """`on_over` is told how long rounds of a key took. Memory is kept for batches of `most_rows` rows."""
        self._products, self._ops, self._on_over, self._most_rows = products, ops, on_over, most_rows
        self._batch_invariant = batch_invariant
        self._store, self.device = products.store, products.device
        self._gatherer: Gatherer | None = None
        self.rounds: Rounds | None = None
        self._has_few_rows = False  # whether one kernel multiplies the few rows of several clients
        self._few: dict[Any, FewRowsKernel | None] = {}
        self.shares_time = True  # programs take turns on the GPU, as they do without MPS
        self._overtaken_until = math.inf  # after a large call was launched: from when on the others wait for it
        self._pace: GpuTiming | None = None
        self.stream = 0  # of the device; 0 where there is none
        if self.device.type == "cuda":
            check_caches()
            self._stream = torch.cuda.Stream(self.device, priority=HIGHEST)
            self._aside = torch.cuda.Stream(self.device)
            self._pool, self._pool_aside = GraphPool(), GraphPool()
            self.stream = self._stream.cuda_stream

    # ------------------------------------------------------------------ the device

    def use_stream(self) -> None:
        """Run the products of this thread on the launcher's stream from now on. The first time on a machine this compiles kernels."""
        if not self.stream:
            return
        begun = perf_counter()
        torch.cuda.set_device(self.device)
        torch.empty(1, device=self.device)  # makes the device's context this thread's
        torch.cuda.synchronize(self.device)  # the weights are there
        for stream in (self._aside, self._stream):
            torch.cuda.set_stream(stream)
            torch.cuda.current_blas_handle()  # for which torch takes memory now
        self._gatherer = _made(
            partial(_gatherer, self._products, self._pool),
            "Triton does not work here: calls of several clients are batched copy by copy, which is slower",
        )
        if self._gatherer is not None:
            from symbiosis.executor.gpu.rounds import Rounds

            self.rounds = Rounds(
                self._products.multiply, self._few_rows, self._on_over, self.device, self._products.gathers_for
            )
            self.shares_time = shares_time(self.device)
            if not self.shares_time:
                slower = "a kernel does not run here: decoding together is slower"
                self._has_few_rows = bool(_made(partial(_load_few_rows, self._store), slower))
            if self._store.packed and not self._batch_invariant:
                _made(self._products.read_codes, "a kernel does not run here: few rows by packed weights are slower")
        if matrices := [weight for weight in self._store.shapes if weight.dim() == 2]:
            self._pace = GpuTiming(matrices, self.device)
        keep_headroom(self._store.shapes, self._most_rows, self.device)
        log(logging.INFO, "the GPU is ready", seconds=round(perf_counter() - begun, 1))

    @property
    def batch_below(self) -> int:
        """The number of rows from which on a call gains nothing from a batch."""
        return self._pace.batch_below if self._pace else BATCH_BELOW

    @property
    def works(self) -> bool:
        """Whether the GPU works. A broken one answers no calls any more."""
        try:
            if self.stream:
                self._stream.query()
        except RuntimeError:
            return False
        return True

    def wait(self) -> None:
        """Wait until everything that was launched on this stream is done."""
        self._stream.synchronize()

    def _synchronize(self) -> None:
        """Wait for both streams. Nothing on them waits for a client."""
        for stream in (self._stream, self._aside):
            stream.synchronize()

    # ------------------------------------------------------------------ how long it takes

    def estimate(self, work: Work, rows: int) -> float:
        """Return how many seconds the GPU takes for a call; for a large round, those of the calls that were launched last."""
        if not isinstance(work, Round):
            return self._estimate(work.call, rows)
        if work.large:
            return sum(self._estimate(call, rows) for call in work.launched)
        return work.seconds(rows, self._estimate)

    def _estimate(self, call: Call, rows: int) -> float:
        if self._pace is None or not (call.by_rows or call.op is Op.GROUPED):
            return 0.0
        return sum(self._pace.seconds(self._store.weights[layer], rows) for layer in call.layers)

    # ------------------------------------------------------------------ several as one

    @property
    def most(self) -> int:
        """How many calls `launch_batch` takes at most; 0 if it takes none."""
        return 0 if self._gatherer is None else self._gatherer.most

    def note_addresses(self, call: DeviceCall, at: Callable[[Tensor], int] | None = Tensor.data_ptr) -> None:
        """Note the addresses of a call's rows and results, if others can be batched with it. `at` returns that of a tensor; None if they are
        out of reach."""
        if self._gatherer is not None and call.call.by_rows and call.plan.rows and at is not None:
            addresses = RowAddresses(call.inputs, call.outputs, call.peer.answer(call.number), at)
            call.addresses = addresses if addresses.aligned else None

    def launch_batch(self, works: Sequence[DeviceWork]) -> float:
        """Compute and answer calls of one key together, or rounds of one key. Return the seconds it takes."""
        begun = perf_counter()
        self.let_pass()
        first, rows = works[0], sum(work.plan.rows for work in works)
        if isinstance(first, Round):
            assert self.rounds is not None
            self.rounds.begin(works)  # type: ignore[arg-type]
        else:
            assert self._gatherer is not None
            self._gatherer.run(works)  # type: ignore[arg-type]
        return max(perf_counter() - begun, self.estimate(first, rows))

    def _few_rows(self, call: Call, rows: int) -> "FewRowsKernel | None":
        """Return the kernel that makes a product of so many rows in one go, or None if there is none for these weights. It rounds in its own
        way."""
        if not self._has_few_rows or call.op is not Op.FORWARD:
            return None
        from symbiosis.kernels.gpu.few_rows import padded

        key = call.layers, call.view, call.bias, call.dtype, padded(rows)
        if key not in self._few:
            self._few[key] = self._made_few_rows(call, rows)
        return self._few[key]

    def _made_few_rows(self, call: Call, rows: int) -> "FewRowsKernel | None":
        from symbiosis.kernels.gpu.few_rows import FewRowsKernel, takes

        if any(layer in self._store.packed for layer in call.layers):
            return None
        matrices = [self._store.matrix(layer, call.op, call.view) for layer in call.layers]
        if matrices[0].dtype != TORCH_DTYPE[call.dtype] or not takes(matrices, rows):
            return None
        return FewRowsKernel(matrices, self._store.biases_of(call), rows)

    # ------------------------------------------------------------------ one alone

    def launch(self, work: DeviceWork, piecemeal: bool = False) -> Reply:
        """Answer a call by itself, as one CUDA graph if it comes often. A large round goes call by call if `piecemeal` is set, else whole."""
        if work.large:
            return self._launch_large_round(work, piecemeal) if isinstance(work, Round) else self._launch_aside(work)
        self.let_pass()
        return self._launch(work)

    def let_pass(self) -> None:
        """Let large calls pass that have been overtaken for as long as any call waits for more urgent ones."""
        if perf_counter() > self._overtaken_until:
            self._stream.wait_stream(self._aside)
            self._overtaken_until = math.inf

    def _launch_aside(self, work: DeviceWork) -> Reply:
        """Launch a large call on the stream where few rows overtake it."""
        with torch.cuda.stream(self._aside):
            reply = self._launch(work)
        self._overtaken_until = min(self._overtaken_until, perf_counter() + AGING_S)
        return reply

    def _launch_large_round(self, round: Round, piecemeal: bool) -> Reply:
        assert self.rounds is not None
        if not round.left:
            round.peer.count(1, len(round.calls))
        try:
            self.rounds.begin_large(round, 1 if piecemeal else len(round.calls))
        except Exception as error:  # whatever it is: the executor has other clients
            round.left = 0
            return refuse(round.peer, 0, call_error(error))
        return _LAUNCHED

    def _launch(self, work: DeviceWork) -> Reply:
        try:
            if isinstance(work, Round):
                assert self.rounds is not None
                self.rounds.begin([work])
                work.peer.count(1, len(work.calls))
            elif work.graph is None:
                self._launch_first(work)
            else:
                work.graph.replay()
                work.peer.count(1)
        except Exception as error:  # whatever it is: the executor has other clients
            return refuse(work.peer, work.seq, call_error(error))
        return _LAUNCHED

    def _launch_first(self, call: DeviceCall) -> None:
        call.launches += 1
        if call.launches > GRAPH_AFTER and not self._products.gathers_for(call.call):
            self._capture(call)
        if call.graph is None:
            self._run(call)
            call.peer.reply(Reply(call.seq, Code.OK, call.call.dtype), call.out)
        else:
            call.graph.replay()
            call.peer.count(1)

    def _capture(self, call: DeviceCall) -> None:
        pool = self._pool_aside if call.large else self._pool
        try:
            call.graph = pool.captured(lambda: self._run_and_reply(call))
        except torch.OutOfMemoryError:
            call.launches = 0  # there may be memory later
        except RuntimeError:  # grouped products of some dtypes ask the GPU for sizes
            call.launches = -sys.maxsize

    def _run_and_reply(self, call: DeviceCall) -> None:
        self._run(call)
        call.peer.enqueue_reply()

    def _run(self, call: DeviceCall) -> None:
        """Compute one call as a whole."""
        if call.call.by_rows:
            self._products.multiply(call.call, call.inputs, call.outputs)
        else:
            self._ops.whole(call.call, _in_range(call), call.out)

    # ------------------------------------------------------------------ the end of a client, or of its calls

    def drain(self, peer: Peer, then: Callable[[], None]) -> None:
        """Wait for what was launched for a client that is gone. `then` is called afterwards; if a large round of it runs, when that is over."""

        def over() -> None:
            self._synchronize()
            then()

        if self.rounds is None:
            over()
        else:
            self.rounds.leave(peer, over)

    def forget(self, works: Sequence[DeviceWork]) -> None:
        """Forget calls that are over and do not come again."""
        for work in works:
            if isinstance(work, Round) and self.rounds is not None:
                self.rounds.forget(work)
        self._synchronize()


def _in_range(call: DeviceCall) -> tuple[Tensor, ...]:
    """Return the payload, with ends of groups that lie within the rows: no CPU has checked those, because they lie on the GPU."""
    if call.call.op is not Op.GROUPED:
        return call.payload
    rows, ends = call.payload
    return rows, ends.clamp(0, len(rows)).cummax(0).values.to(torch.int32)


def _made(make: Callable[[], Made], slower: str) -> Made | None:
    """Return what this makes, or None, with a line in the log that says what is slower then, where it does not work: there is another way."""
    try:
        return make()
    except Exception as error:  # whatever it is
        log(logging.WARNING, slower, error=f"{type(error).__name__} {error}")
        return None


def _gatherer(products: Products, pool: GraphPool) -> "Gatherer":
    """Make the gatherer, which needs Triton, and the compiler that Triton needs."""
    from symbiosis.executor.gpu.gathered_calls import Gatherer

    return Gatherer(products.multiply, pool)


def _load_few_rows(store: Store) -> bool:
    """Load the kernel for few rows."""
    from symbiosis.kernels.gpu import few_rows

    few_rows.load(store.linear_weights())
    return True
