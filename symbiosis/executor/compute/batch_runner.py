"""Runs a batch: multiplies the rows of several sessions, and replies."""

import logging
from collections.abc import Callable, Hashable
from time import perf_counter
from typing import Any

from symbiosis.base.logs import worth_logging
from symbiosis.errors import Code
from symbiosis.executor.call_kinds import DeviceWork, HostCall, Repeated, Round, SingleCall, Work, call_error
from symbiosis.executor.calls.cell_ops import CellOps
from symbiosis.executor.compute.products import Products
from symbiosis.executor.compute.slices import Slices
from symbiosis.executor.gpu.launcher import Launcher
from symbiosis.executor.model.store import Store
from symbiosis.executor.observe.log import log
from symbiosis.executor.scheduling.queue import Batch, Slice
from symbiosis.protocol import Reply
from symbiosis.transport.base import refuse

Attempt = Callable[..., Any]  # `Reactor.attempt`, or what stands for it


class BatchRunner:
    """Answers batches. Device calls that can be copied by the GPU are batched there, a single device call or round is launched, and for
    anything else a thread computes the product and replies."""

    def __init__(
        self,
        store: Store,
        on_done: Callable[[Work, Reply], None],
        on_batched: Callable[[Batch], None],
        workers: int = 1,
        on_over: Callable[[Hashable, float], None] = lambda *_: None,
        most_rows: int = 0,
        attempt: Attempt = lambda peer, act, *words: act(*words),
        batch_invariant: bool = False,
    ) -> None:
        """`on_done` is called with every reply, `on_batched` with a batch that the GPU has answered at once, `on_over` with the seconds
        of a round. `most_rows` bounds a batch. `attempt` does something for a peer, and ends that peer if it fails. With `batch_invariant` products
        are those of the unsplit model, bit for bit."""
        self.attempt, self._on_done, self._on_batched = attempt, on_done, on_batched
        products = products_of(store)
        ops = CellOps(store, products.here)
        self.device = products.device
        self.gpu = Launcher(products, ops, on_over, most_rows, batch_invariant)
        self.slices = Slices(products, ops, self.gpu.wait, workers)
        self._not_batched = 0  # products that could not be batched

    def step(self, batch: Batch) -> float:
        """Compute a batch and reply. Return the seconds that takes."""
        (item, start, stop), *others = batch.slices
        if not others and isinstance(item.work, Repeated) and start == 0 and stop == item.rows:
            return self._launch_each(batch)
        if others and len(others) < self.gpu.most and all(map(_is_copied_by_the_gpu, batch.slices)):
            try:
                seconds = self.gpu.launch_batch([piece.item.work for piece in batch.slices])
            except Exception as error:  # compute them below instead, which tells whose call is to blame
                self._not_batched += 1
                if worth_logging(self._not_batched):
                    log(logging.WARNING, "calls were not batched", error=type(error).__name__, times=self._not_batched)
            else:
                self._on_batched(batch)
                batch.ran()
                return seconds
        if isinstance(item.work, Round):
            return self._launch_each(batch)
        seconds = self.compute(batch)
        self.reply(batch, seconds)
        return seconds

    def _launch_each(self, batch: Batch) -> float:
        """Launch GPUs' calls one by one."""
        begun = perf_counter()
        for piece in batch.slices:
            self.attempt(piece.item.work.peer, self._launch, piece.item.work)
        batch.ran()
        return max(perf_counter() - begun, self.gpu.estimate(batch.slices[0].item.work, batch.rows))

    def _launch(self, work: DeviceWork) -> None:
        self._on_done(work, self.gpu.launch(work))

    def compute(self, batch: Batch) -> float:
        """Compute a batch without replying, in any thread. Return the seconds. If batched calls fail, each is tried alone, so that only
        the call that caused it fails."""
        begun = perf_counter()
        if self.gpu.stream:
            self.gpu.let_pass()
        try:
            if batch.cells > 1 and batch.share < 1:
                self.slices.compute_turn(batch)
            else:
                self.slices.compute(batch.slices)
        except Exception as error:  # whatever it is: the executor has other clients
            if len(batch.slices) > 1:
                for piece in batch.slices:
                    self.compute(
                        Batch(batch.key, [piece], batch.formed, batch.cells, batch.first, batch.last, grain=batch.grain)
                    )
            else:
                batch.slices[0].item.work.error = error
        seconds = perf_counter() - begun
        if not self.gpu.stream or not all(piece.item.work.out.is_cuda for piece in batch.slices):
            return seconds
        return max(seconds, self.gpu.estimate(batch.slices[0].item.work, batch.rows))  # the GPU was not waited for

    def reply(self, batch: Batch, seconds: float) -> None:
        """Answer the calls of this batch that are complete now."""
        if not batch.ends:
            return
        for piece in batch.slices:
            item, start, stop = piece
            item.ran += stop - start
            if item.ran == item.rows:
                self.attempt(item.work.peer, self._reply, piece, batch, batch.seconds + seconds)

    def _reply(self, piece: Slice, batch: Batch, seconds: float) -> None:
        work: SingleCall = piece.item.work
        error, work.error = work.error, None  # a device call comes again
        if error is not None:
            self._on_done(work, refuse(work.peer, work.seq, call_error(error)))
            return
        wait = max(0.0, batch.formed - piece.item.arrived)
        reply = Reply(
            work.seq, Code.OK, work.call.dtype, tuple(work.out.shape),
            len(batch.slices), int(wait * 1e6), int(seconds * 1e6),
        )  # fmt: skip
        work.peer.reply(reply, work.out)
        self._on_done(work, reply)


def products_of(store: Store) -> Products:
    """Return what multiplies by these weights."""
    if not store.gather_bytes:
        return Products(store)
    from symbiosis.executor.gpu.weight_gathers import GatheringProducts

    return GatheringProducts(store)


def _is_copied_by_the_gpu(piece: Slice) -> bool:
    """Whether the slice is a whole call that the GPU can copy."""
    item, start, stop = piece
    work: Work = item.work
    return start == 0 and stop == item.rows and not isinstance(work, HostCall) and work.can_be_batched
