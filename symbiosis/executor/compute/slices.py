"""Computes a batch: gathers the rows of its slices, multiplies them, and scatters the results.

Shapes: T rows of all sessions, K what goes in, N what comes out.
"""

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from symbiosis.base.keystream import keystream
from symbiosis.errors import CallError
from symbiosis.executor.call_kinds import SingleCall
from symbiosis.executor.calls.cell_ops import CellOps
from symbiosis.executor.calls.cells import boxes, grains_for
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
        self._product_of_batched: Callable[..., Tensor] = product
        self._on_gpu = self._device.type == "cuda"
        if not self._on_gpu:
            self._product_of_batched = FewRows(self._store.linear_weights(), threads=workers)

    def compute(self, slices: list[Slice]) -> None:
        """Compute all rows of the slices by one product."""
        first: SingleCall = slices[0].item.work
        try:
            if len(slices) > 1:
                self._batched(first.call, slices)
            elif first.call.by_rows:
                self._rows_alone(first, slices[0])
            else:
                self._check(first, slice(None))
                self._ops.whole(first.call, first.payload, first.out)
        finally:
            if self._on_gpu:
                self._land(slices)

    def compute_turn(self, batch: Batch) -> None:
        """Compute one turn: some cells of the result of slices, or of a call that does not go by rows. Where all calls have failed,
        nothing is computed."""
        work: SingleCall = batch.slices[0].item.work
        if all(piece.item.work.error is not None for piece in batch.slices):
            return
        grain = grains_for(work.call.dtype)[batch.grain]
        if work.call.by_rows:
            self._prepare(batch)
            forward = self._product_of_batched if len(batch.slices) > 1 else product
            outs = _outputs_of(batch.slices)
            for (side,) in boxes(work.plan.grids[batch.grain], batch.first, batch.last):
                for number, columns, y_TN in self._products.panels(
                    work.call, batch.inputs, side, grain.columns, forward
                ):
                    _scatter(y_TN, [out_TN[:, columns] for out_TN in outs[number]])
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

    def _prepare(self, batch: Batch) -> None:
        """Before the first turn of slices, check their rows, and prepare them for all turns."""
        if batch.inputs is not None:
            return
        begun = perf_counter()
        for item, start, stop in batch.slices:
            self._check(item.work, slice(start, stop))
        batch.inputs = self._products.prepared(batch.slices[0].item.work.call, self._gathered(batch.slices))
        batch.prepared_s = perf_counter() - begun

    def _batched(self, call: Call, slices: list[Slice]) -> None:
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
        y = self._products.multiply(call, self._gathered(slices), forward=self._product_of_batched)
        for y_TN, outs in zip(y, _outputs_of(slices), strict=True):
            _scatter(y_TN, outs)

    def _gathered(self, slices: list[Slice]) -> list[Tensor]:
        """Return the rows of all slices, one below the other."""
        parts = [self._inputs(piece) for piece in slices]
        return parts[0] if len(parts) == 1 else list(map(torch.cat, zip(*parts, strict=True)))

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


def _outputs_of(slices: list[Slice]) -> list[tuple[Tensor, ...]]:
    """Return, for each result, where it goes of each slice."""
    return list(zip(*map(_outputs, slices), strict=True))


def _scatter(y_TN: Tensor, outs: Sequence[Tensor]) -> None:
    for out_TN, part_TN in zip(outs, y_TN.split(list(map(len, outs))), strict=True):
        out_TN.copy_(part_TN, non_blocking=True)


def _run(key: bytes, call: Call, first: int, last: int) -> Tensor:
    """Return the values `first` to `last` of the rows that a seed stands for, counted row by row."""
    width = max(1, call.shape[1])
    row, stop = first // width, -(-last // width)
    rows = keystream(key, (stop - row, call.shape[1]), TORCH_DTYPE[call.dtype], start=row)
    return rows.view(-1)[first - row * width : last - row * width]
