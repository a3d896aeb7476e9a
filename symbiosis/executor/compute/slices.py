"""Computes a batch: gathers the rows of its slices, multiplies them, and scatters the results.

Shapes: T rows of all sessions, K what goes in, N what comes out.
"""

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from symbiosis.base.keystream import keystream
from symbiosis.errors import CallError
from symbiosis.executor.call_kinds import SingleCall
from symbiosis.executor.calls.cell_ops import CellOps
from symbiosis.executor.calls.cells import GRAINS, boxes
from symbiosis.executor.calls.validation import check_finite, check_share
from symbiosis.executor.compute.products import Products
from symbiosis.executor.scheduling.queue import Batch, Slice
from symbiosis.kernels.few_rows import FewRows
from symbiosis.kernels.product import product
from symbiosis.protocol import Call, Op
from symbiosis.transport.tensors import TORCH_DTYPE


class Slices:
    """Computes slices of single calls. Callable from any thread."""

    def __init__(self, products: Products, ops: CellOps, wait: Callable[[], None], workers: int) -> None:
        """`wait` waits until the device has done what was enqueued. `workers` threads may compute at the same time."""
        self._products, self._ops, self._wait = products, ops, wait
        self._store, self._device, self._here = products.store, products.device, products.here
        self._product_of_joined: Callable[..., Tensor] = product
        self._on_gpu = self._device.type == "cuda"
        if not self._on_gpu:
            self._product_of_joined = FewRows(self._store.linear_weights(), threads=workers)

    def compute(self, slices: list[Slice]) -> None:
        """Compute all rows of the slices by one product."""
        first: SingleCall = slices[0].item.work
        try:
            if len(slices) > 1:
                self._joined(first.call, slices)
            elif first.call.by_rows:
                self._rows_alone(first, slices[0])
            else:
                self._check(first, slice(None))
                self._ops.whole(first.call, first.payload, first.out)
        finally:
            if self._on_gpu:
                self._land(slices)

    def compute_turn(self, batch: Batch) -> None:
        """Compute one turn: some cells of a slice's result, or of a call that does not go by rows. A call that has failed is
        skipped."""
        piece = batch.slices[0]
        work: SingleCall = piece.item.work
        if work.error is not None:
            return
        grain = GRAINS[batch.grain]
        if work.call.by_rows:
            self._prepare(batch, work)
            for (side,) in boxes(work.plan.grids[batch.grain], batch.first, batch.last):
                self._products.multiply_panels(work.call, batch.inputs, _outputs(piece), side, grain.columns)
        else:
            if work.finite:
                first, last = batch.first / batch.cells, batch.last / batch.cells
                check_share(work.call, work.payload, first, last, self._store)
            for box in boxes(work.plan.grids[batch.grain], batch.first, batch.last):
                self._ops.part(work.call, work.payload, work.out, box, grain)
        if self._on_gpu:
            self._land(batch.slices)

    def _check(self, work: SingleCall, rows: slice) -> None:
        """Note the error of a call with rows that are not finite."""
        if work.finite and work.error is None:
            try:
                check_finite(work.call, work.payload, rows, self._store)
            except CallError as error:
                work.error = error

    def _prepare(self, batch: Batch, work: SingleCall) -> None:
        """Before the first turn of a slice, check its rows, and prepare them for all its turns."""
        if batch.first:
            return
        begun = perf_counter()
        piece = batch.slices[0]
        self._check(work, slice(piece.start, piece.stop))
        batch.inputs = self._products.prepared(work.call, self._inputs(batch.slices[0]))
        batch.prepared_s = perf_counter() - begun

    def _joined(self, call: Call, slices: list[Slice]) -> None:
        """Compute slices of several calls. Rows of one that are not finite do the others no harm."""
        for piece in slices:
            self._check(piece.item.work, slice(piece.start, piece.stop) if call.by_rows else slice(None))
        if call.by_rows:
            self._rows_together(call, slices)
        else:
            works = [piece.item.work for piece in slices]
            self._ops.together(call, [work.payload for work in works], [work.out for work in works])

    def _rows_alone(self, work: SingleCall, piece: Slice) -> None:
        """Multiply one slice, straight from the session's memory into the session's memory if that is on the device."""
        rows = slice(piece.start, piece.stop)
        if work.finite and work.error is None:
            check_finite(work.call, work.payload, rows, self._store)
        x, out = self._inputs(piece), [part[rows] for part in work.outputs]
        if out[0].device == self._device:
            self._products.multiply(work.call, x, out)
        else:
            y = self._products.multiply(work.call, x)
            for out_TN, y_TN in zip(out, y, strict=True):
                out_TN.copy_(y_TN, non_blocking=True)

    def _rows_together(self, call: Call, slices: list[Slice]) -> None:
        """Gather the rows of all slices, make one product (or one for each layer of a group), and scatter the results."""
        rows = [piece.stop - piece.start for piece in slices]
        x = [torch.cat(parts) for parts in zip(*map(self._inputs, slices), strict=True)]
        y = self._products.multiply(call, x, forward=self._product_of_joined)
        for y_TN, outs in zip(y, zip(*map(_outputs, slices), strict=True), strict=True):
            for out_TN, part_TN in zip(outs, y_TN.split(rows), strict=True):
                out_TN.copy_(part_TN, non_blocking=True)

    def _inputs(self, piece: Slice) -> list[Tensor]:
        """Return the slice's rows on this device: one tensor, or one for each member of a group's DGRAD."""
        work: SingleCall = piece.item.work
        if work.call.seeded and work.payload[0].dtype is torch.uint8:
            return self._grown(work, piece)
        return [self._here(part[piece.start : piece.stop]) for part in work.inputs]

    def _grown(self, work: SingleCall, piece: Slice) -> list[Tensor]:
        """Make the slice's rows from the seed that came in their place. The stream makes rows of the whole payload's width; what each
        member of a group's DGRAD takes of it lies behind what the members before it take."""
        call, key = work.call, work.payload[0].numpy().tobytes()
        grown, begun = [], 0
        for rows, width in (work.plan.parts if call.op is Op.DGRAD else ()) or (call.shape,):
            first, last = begun + piece.start * width, begun + min(piece.stop, rows) * width
            grown.append(self._here(_run(key, call, first, last).view(-1, width)))
            begun += rows * width
        return grown

    def _land(self, slices: list[Slice]) -> None:
        """Wait, once for all slices, until the copies between the host's memory and the GPU are done. None may land after the reply, even
        if that is an error."""
        if not all(piece.item.work.out.is_cuda for piece in slices):
            self._wait()


def _outputs(piece: Slice) -> list[Tensor]:
    """Return where the slice's results go: one tensor, or one for each member of a group's FORWARD."""
    work: SingleCall = piece.item.work
    return [part[piece.start : piece.stop] for part in work.outputs]


def _run(key: bytes, call: Call, first: int, last: int) -> Tensor:
    """Return the values `first` to `last` of the rows that a seed stands for, counted row by row."""
    width = max(1, call.shape[1])
    row, stop = first // width, -(-last // width)
    rows = keystream(key, (stop - row, call.shape[1]), TORCH_DTYPE[call.dtype], start=row)
    return rows.view(-1)[first - row * width : last - row * width]
