"""Adapters in a step on a GPU: at each group of layers that any loaded adapter acts on, their products are computed together when the
first of them is called, one kernel shrinks the rows for all, and one expands them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symbiosis.errors import AdapterError
from symbiosis.kernels import with_triton
from symbiosis.serving.adapters.kinds import LoadedAdapter
from symbiosis.serving.gpu.books import Book
from symbiosis.serving.gpu.compiled import put_in_place
from symbiosis.serving.gpu.groups import Group, width_of
from symbiosis.serving.gpu.tables import Rows

FIRST_RANKS = 64  # of a group together, that there is room for at first
Run = tuple[int, int, Book]  # rows behind each other of one adapter: the first, and how many


class Records:
    """Who is at which tile: addresses by entry, int64 [entries, tiles], on the device."""

    def __init__(self, entries: int, tiles: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self._host = torch.zeros(entries, tiles, dtype=torch.int64, pin_memory=is_gpu)
        self.device = torch.zeros(entries, tiles, dtype=torch.int64, device=device)
        self._is_current = True
        self._copied = torch.cuda.Event() if is_gpu else None
        self._now: list[Any] = []

    def fill(self, addresses: list[Any]) -> None:
        """Of each tile."""
        if len(addresses) == len(self._now) and all(a is b for a, b in zip(addresses, self._now, strict=True)):
            return
        if self._copied is not None:
            self._copied.synchronize()
        host = self._host.numpy()
        host[:] = 0
        if addresses:
            host[:, : len(addresses)] = np.stack(addresses, axis=1)
        self._now, self._is_current = addresses, False

    def upload(self) -> None:
        if not self._is_current:
            self.device.copy_(self._host, non_blocking=True)
            self._is_current = True
            if self._copied is not None:
                self._copied.record()


class Adapting:
    """Puts itself in the place of layers' products, once an adapter acts there; their hooks go on as they were.

    `state` tells graphs apart: it changes with the layers at which adapters act, and with what tensors there are.
    """

    def __init__(
        self, groups: Sequence[Group], rows: Rows, page: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._of = {name: group for group in groups for name in group.names}
        self._taken: set[Group] = set()
        self._page, self._dtype, self._device = page, dtype, device
        self._ranks = FIRST_RANKS
        self._entries = [1 + max([0, *(g.last_entry for g in groups if g.is_head == head)]) for head in (False, True)]
        self.state = 0
        self._is_compiled = False
        self.acts = False  # whether this step has rows of adapters
        self._kernels = with_triton("gpu.adapter_rows")
        self._parts = max((self._kernels.parts_of(group.width) for group in groups), default=1)
        self.resize(rows)

    def resize(self, rows: Rows) -> None:
        self._rows = rows
        tiles = rows.tiles_of(rows.rows), rows.tiles_of(rows.sequences)
        self._records = [
            Records(entries, count, self._device) for entries, count in zip(self._entries, tiles, strict=True)
        ]
        self._low = torch.empty(rows.rows * self._parts * self._ranks, dtype=torch.float32, device=self._device)
        self.state += 1

    def add(self, adapter: LoadedAdapter) -> None:
        """Its places exist from now on."""
        for name in adapter.parts:
            group = self._of[name]
            ranks = sum(
                0 if (part := adapter.parts.get(each)) is None or part.down is None else len(part.down)
                for each in group.names
            )
            if ranks > self._ranks:
                self._ranks = 1 << (ranks - 1).bit_length()
                self.resize(self._rows)
            if group not in self._taken:
                self._take_over(group)

    def _take_over(self, group: Group) -> None:
        self._taken.add(group)
        if not self._is_compiled:
            self._put_in_place(group)
        self.state += 1

    def put_everywhere(self) -> None:
        """Before anything is compiled: a compiler would not see what is put in place later."""
        for group in dict.fromkeys(self._of.values()):
            if group not in self._taken:
                self._put_in_place(group)
        self._is_compiled = True

    def _put_in_place(self, group: Group) -> None:
        before = [module.forward for module in group.modules]
        for member, module in enumerate(group.modules):
            put_in_place(module, partial(self._forward, group, member, before), width_of(module))

    def begin(self, runs: Sequence[Run], kept_runs: Sequence[Run]) -> None:
        self.acts = bool(runs or kept_runs)
        self._rows.wait()
        for section, records, of, head in (
            ("tiles", self._records[0], runs, False),
            ("kept_tiles", self._records[1], kept_runs, True),
        ):
            tiles = self._kernels.tiles_of([(first, rows) for first, rows, _ in of])
            words = self._rows.host[section]
            words[:] = 0
            if tiles:
                words[: len(tiles)] = [tile[:2] for tile in tiles]
            books = [of[tile[2]][2] for tile in tiles]
            records.fill([book.kept_addresses if head else book.addresses for book in books])

    def upload(self) -> None:
        for records in self._records:
            records.upload()

    def _forward(self, group: Group, member: int, before: list[Any], x: Tensor) -> Tensor:
        if not self.acts:
            return before[member](x)  # type: ignore[no-any-return]
        if member in group.ready and _are_same(group.given, x):
            y = group.ready.pop(member)
            if not group.ready:
                group.given = None
            return y
        ys = [forward(x) for forward in before]
        self._adapt_(group, x, ys)
        group.given, group.ready = x, dict(enumerate(ys))
        y = group.ready.pop(member)
        if not group.ready:
            group.given = None
        return y  # type: ignore[no-any-return]

    def _adapt_(self, group: Group, x: Tensor, ys: list[Tensor]) -> None:
        x_TK, y_TNs = x.reshape(-1, x.shape[-1]).contiguous(), [y.view(-1, y.shape[-1]) for y in ys]
        rows, records = len(x_TK), self._records[group.is_head].device
        words = self._rows.device["kept_tiles" if group.is_head else "tiles"]
        if rows > (self._rows.sequences if group.is_head else self._rows.rows):
            raise AdapterError(f"{group.names[0]} was given {rows} rows: adapters cannot act there")
        tiles, count = self._kernels.Tiles(words, records), self._rows.tiles_of(rows)
        parts = self._kernels.parts_of(x_TK.shape[1])
        low = self._low[: rows * parts * self._ranks].view(rows, parts, self._ranks)
        self._kernels.shrink(x_TK, tiles, count, group.entry, self._page, low)
        self._kernels.expand_(y_TNs, tiles, count, group.entry + 1, self._page, low)


def _are_same(a: Tensor | None, b: Tensor) -> bool:
    """Whether they are the same rows; a compiler passes on other objects."""
    if a is b:
        return True
    return a is not None and (a.data_ptr(), a.shape, a.stride(), a.dtype) == (
        b.data_ptr(),
        b.shape,
        b.stride(),
        b.dtype,
    )
