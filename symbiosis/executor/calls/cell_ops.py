"""Computes calls that do not go by rows: a box of their cells, or all of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from symbiosis.executor.calls.cells import GRAINS, Box, Grain, grid_of, part_of
from symbiosis.executor.model.store import Store
from symbiosis.kernels.grouped import grouped
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
        return box, self._store.matrix(call.layer, call.op, call.view)[self._here(ids)]

    def _norms(self, call: Call, payload: Payload, out: Tensor, box: Box, grain: Grain) -> Part:
        weight, kind = self._store.weights[call.layer], self._store.manifest[call.layer].kind
        return box, norms(weight, kind, TORCH_DTYPE[call.dtype], box[0])

    def _read(self, call: Call, payload: Payload, out: Tensor, box: Box, grain: Grain) -> Part:
        return box, self._store.matrix(call.layer, call.op, call.view)[box]

    def _echo(self, call: Call, payload: Payload, out: Tensor, box: Box, grain: Grain) -> Part:
        return box, payload[0].reshape(-1)[box]
