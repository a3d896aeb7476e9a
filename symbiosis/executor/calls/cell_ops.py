"""Computes calls that do not go by rows: a box of their cells, all of them, or those of several calls at once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from symbiosis.executor.calls.cells import GRAINS, Box, Grain, part_of
from symbiosis.executor.calls.price import grid_of
from symbiosis.executor.model.store import Store
from symbiosis.kernels.grouped import grouped, merge
from symbiosis.kernels.operand import norms
from symbiosis.kernels.product import product
from symbiosis.protocol import Call, Op
from symbiosis.transport.tensors import TORCH_DTYPE, as_multiplied, check_ids

Index = tuple[slice, ...]
Part = tuple[Index, Tensor]  # a part of the result, and where it belongs there
Payload = tuple[Tensor, ...]


class CellOps:
    """`here` copies a part of a payload to the device that computes."""

    def __init__(self, store: Store, here: Callable[[Tensor], Tensor]) -> None:
        self._store, self._here = store, here
        self.makes: dict[Op, Callable[[Call, Payload, Tensor, Box, Grain], Part]] = {
            Op.PRODUCT: self._product,
            Op.LEFT: self._left,
            Op.GROUPED: self._grouped,
            Op.LOOKUP: self._lookup,
            Op.NORMS: self._norms,
            Op.READ: self._read,
            Op.ECHO: self._echo,
        }

    def together(self, call: Call, payloads: Sequence[Payload], outs: Sequence[Tensor]) -> None:
        """Compute several calls that differ in their payloads only."""
        rows = [len(payload[0]) for payload in payloads]
        x_TK = torch.cat([self._here(payload[0]) for payload in payloads])
        y_TN = BATCHED[call.op](self, call, x_TK, payloads)
        for out, part_TN in zip(outs, y_TN.split(rows), strict=True):
            out.copy_(part_TN)

    def whole(self, call: Call, payload: Payload, out: Tensor) -> None:
        if call.op is Op.ECHO:
            out.copy_(payload[0], non_blocking=True)
            return
        self.part(
            call, payload, out, tuple(slice(0, side) for side in grid_of(call, out.shape, (), GRAINS[0])), GRAINS[0]
        )

    def part(self, call: Call, payload: Payload, out: Tensor, box: Box, grain: Grain) -> None:
        """Compute a box of cells into its place. Copies to or from a GPU are not waited for."""
        index, value = self.makes[call.op](call, payload, out, box, grain)
        target = out.view(-1) if call.op is Op.ECHO else out
        target[index].copy_(value, non_blocking=True)

    def _operand(self, call: Call, *part: Any) -> Tensor:
        return self._store.operand(call.layer, call.op, call.view, call.dtype, part)

    def _product(self, call: Call, payload: Payload, out: Tensor, box: Box, grain: Grain) -> Part:
        *stack, panels, blocks = box
        columns, rows = part_of(panels, out.shape[-1], grain.columns), part_of(blocks, out.shape[-2], grain.rows)
        x = self._here(as_multiplied(call, payload[0])[(*stack, rows)])
        v, (bias,) = self._operand(call, *stack, slice(None), columns), self._store.biases_of(call)
        return (*stack, rows, columns), product(x, v, None if bias is None else bias[columns])

    def _left(self, call: Call, payload: Payload, out: Tensor, box: Box, grain: Grain) -> Part:
        *stack, blocks, panels = box
        rows, columns = part_of(blocks, out.shape[-2], grain.rows), part_of(panels, out.shape[-1], grain.columns)
        x = self._here(as_multiplied(call, payload[0])[(*stack, slice(None), columns)])
        return (*stack, rows, columns), torch.matmul(self._operand(call, *stack, rows), x)

    def _grouped(self, call: Call, payload: Payload, out: Tensor, box: Box, grain: Grain) -> Part:
        columns, rows = part_of(box[0], out.shape[1], grain.columns), part_of(box[1], out.shape[0], grain.rows)
        x_TK, ends_G = map(self._here, (payload[0][rows], payload[1]))
        groups = slice(None)
        if len(x_TK) < len(out):  # keep the groups that have any of these rows
            first, last = torch.searchsorted(ends_G, torch.tensor([rows.start, rows.stop - 1]), right=True).tolist()
            if first == len(ends_G):
                return (rows, columns), out.new_zeros(len(x_TK), 1)
            groups = slice(first, last + 1)
            ends_G = (ends_G[groups] - rows.start).clamp_(0, len(x_TK)).to(torch.int32)
        return (rows, columns), grouped(x_TK, self._operand(call, groups, slice(None), columns), ends_G)

    def _lookup(self, call: Call, payload: Payload, out: Tensor, box: Box, grain: Grain) -> Part:
        ids = payload[0][box].clone()  # a client that shares this memory could change them after the check
        check_ids(ids, self._store.manifest[call.layer])
        return box, self._store.rows(call.layer, self._here(ids))

    def _lookups(self, call: Call, ids: Tensor, payloads: Sequence[Payload]) -> Tensor:
        check_ids(ids, self._store.manifest[call.layer])
        return self._store.rows(call.layer, ids)

    def _groups(self, call: Call, x_TK: Tensor, payloads: Sequence[Payload]) -> Tensor:
        order, ends = map(self._here, merge([ends for _, ends in payloads], [len(rows) for rows, _ in payloads]))
        sorted_TN = grouped(x_TK[order], self._operand(call, ...), ends)
        return torch.empty_like(sorted_TN).index_copy_(0, order, sorted_TN)

    def _norms(self, call: Call, payload: Payload, out: Tensor, box: Box, grain: Grain) -> Part:
        kind = self._store.manifest[call.layer].kind
        return box, norms(self._store.whole(call.layer), kind, TORCH_DTYPE[call.dtype], box[0])

    def _read(self, call: Call, payload: Payload, out: Tensor, box: Box, grain: Grain) -> Part:
        if call.layer in self._store.packed:
            return box, self._operand(call, *box)
        return box, self._store.matrix(call.layer, call.op, call.view)[box]  # cast where it is put

    def _echo(self, call: Call, payload: Payload, out: Tensor, box: Box, grain: Grain) -> Part:
        return box, payload[0].reshape(-1)[box]


BATCHED: dict[
    Op, Callable[[CellOps, Call, Tensor, Sequence[Payload]], Tensor]
] = {  # ops of which several calls run together on a CPU
    Op.LOOKUP: CellOps._lookups,
    Op.GROUPED: CellOps._groups,
}
