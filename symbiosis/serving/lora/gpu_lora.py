"""Adapters in a step on a GPU. When the first layer of a group is called on which any loaded adapter acts, the products of the whole group
are computed, few rows' beside one another. Meanwhile, on a stream of its own, one kernel shrinks the rows for all adapters. Then another
expands them for all."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symbiosis.client.layers.virt_layer import is_multiplied_here
from symbiosis.errors import AdapterError
from symbiosis.kernels import with_triton
from symbiosis.kernels.gpu.records import RANKS
from symbiosis.serving.lora.adapter_kinds import LoadedAdapter
from symbiosis.serving.lora.gpu_staging import Book
from symbiosis.serving.runner.compiled_layers import put_in_place
from symbiosis.serving.runner.parallel_streams import ParallelStreams
from symbiosis.serving.runner.shared_inputs import Group, width_of
from symbiosis.serving.runner.step_tables import Rows

Run = tuple[int, int, Book]  # consecutive rows of one adapter: the first, and how many


class Records:
    """Which adapter is at which tile: the addresses of its records, int64 [entries, tiles], on the device."""

    def __init__(self, entries: int, tiles: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self._host = torch.zeros(entries, tiles, dtype=torch.int64, pin_memory=is_gpu)
        self.device = torch.zeros(entries, tiles, dtype=torch.int64, device=device)
        self._is_current = True
        self._copied = torch.cuda.Event() if is_gpu else None
        self._now: list[Any] = []

    def fill(self, addresses: list[Any]) -> None:
        """Take the addresses of each tile, unless they are those of the step before."""
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
        """Copy the addresses to the device, if they have changed."""
        if not self._is_current:
            self.device.copy_(self._host, non_blocking=True)
            self._is_current = True
            if self._copied is not None:
                self._copied.record()


class GpuLora:
    """Computes the products of layers on which adapters act, in the layers' place. The hooks of the layers still run.

    `state` tells graphs apart: it changes with the layers on which adapters act, and with the tensors that a graph uses.
    """

    def __init__(
        self, groups: Sequence[Group], rows: Rows, page: int, dtype: torch.dtype, come: Tensor, priority: int = 0
    ) -> None:
        self._of = {name: group for group in groups for name in group.names}
        self._ranks: dict[Group, int] = {}  # of the groups on which adapters act: how many ranks there is room for
        self._page, self._dtype, self._device, self._come = page, dtype, come.device, come
        self._stage = -1  # up to which this pass has waited for adapters that are on their way
        self._entries = [1 + max([0, *(g.last_entry for g in groups if g.is_head == head)]) for head in (False, True)]
        self.state = 0
        self._is_compiled = False
        self.acts = False  # whether this step has rows of adapters
        self.is_wide = False  # ... and of some that are float32 where rows are narrower
        self._singly = False  # whether each of its sequences has one row
        self._runs: tuple[Sequence[Run], Sequence[Run]] = (), ()
        self._filled: Any = None  # what the tables say
        self._kernels = with_triton("gpu.adapter_rows")
        self._beside = ParallelStreams(come.device, max([1, *(len(group.names) for group in groups)]), priority)
        self.resize(rows)

    def resize(self, rows: Rows) -> None:
        """Make room for as many rows and sequences as `rows` has."""
        self._rows, self._filled = rows, None
        self._records = [Records(entries, rows.tiles_of(rows.rows), self._device) for entries in self._entries]
        self._make_low()

    def _make_low(self) -> None:
        each = max((self._kernels.parts_of(group.width) * ranks for group, ranks in self._ranks.items()), default=0)
        self._low = torch.empty(self._rows.rows * each, dtype=torch.float32, device=self._device)
        self.state += 1

    def add(self, adapter: LoadedAdapter) -> None:
        """Prepare the groups of layers on which an adapter acts."""
        before = dict(self._ranks)
        for name in adapter.parts:
            group = self._of[name]
            ranks = sum(
                0 if (part := adapter.parts.get(each)) is None or part.down is None else len(part.down)
                for each in group.names
            )
            if group not in self._ranks and not self._is_compiled:
                self._put_in_place(group)
            self._ranks[group] = max(self._ranks.get(group, 0), _rounded(ranks))
        if self._ranks != before:
            self._make_low()

    def put_everywhere(self) -> None:
        """Take the place of all layers' products. To be called before layers are compiled: a compiler would not see later changes."""
        for group in dict.fromkeys(self._of.values()):
            if group not in self._ranks:
                self._put_in_place(group)
        self._is_compiled = True

    def _put_in_place(self, group: Group) -> None:
        before = [module.forward for module in group.modules]
        put_in_place(
            group.modules, partial(self._products, group, before), [width_of(module) for module in group.modules]
        )

    def begin(self, runs: Sequence[Run], kept_runs: Sequence[Run]) -> None:
        """Say which adapters a step's rows have, and which those of them whose logits are kept."""
        self.acts, self._runs = bool(runs or kept_runs), (runs, kept_runs)
        self.is_wide = any(book.is_wide for of in self._runs for _, _, book in of)

    def fill(self, singly: bool) -> None:
        """Fill in the tables of a step, unless the step before had the same. `singly` says that each of its sequences has one row."""
        if self._filled == (self._runs, singly):
            return
        self._singly, self._filled = singly, None
        self._rows.wait()
        size = 1 if singly else self._kernels.TILE
        for section, records, of, head in (
            ("tiles", self._records[0], self._runs[0], False),
            ("kept_tiles", self._records[1], self._runs[1], True),
        ):
            tiles = self._kernels.tiles_of([(first, rows) for first, rows, _ in of], size)
            words = self._rows.host[section]
            words[:] = 0
            if tiles:
                words[: len(tiles)] = [tile[:2] for tile in tiles]
            books = [of[tile[2]][2] for tile in tiles]
            records.fill([book.head_addresses if head else book.addresses for book in books])
        brought = [book.number for runs in self._runs for _, _, book in runs]
        self._rows.host["awaited"][0] = max(brought, default=0)
        self._filled = self._runs, singly

    def begin_pass(self) -> None:
        """The model is about to be run through."""
        self._stage = -1

    def upload(self) -> None:
        for records in self._records:
            records.upload()

    def _products(self, group: Group, before: list[Any], x: Tensor) -> list[Tensor]:
        """Compute the products of all layers of a group, with what adapters add."""
        if not self.acts or group not in self._ranks:
            return self._bases(group, before, x)
        x_TK, kernels = x.reshape(-1, x.shape[-1]).contiguous(), self._kernels
        tiles, count = self._tiles(group, len(x_TK))
        parts, ranks = kernels.parts_of(x_TK.shape[1]), self._ranks[group]
        low = self._low[: len(x_TK) * parts * ranks].view(len(x_TK), parts, ranks)
        ys = self._bases(group, before, x, partial(self._shrink, group, x_TK, tiles, count, low))
        kernels.expand_([y.view(-1, y.shape[-1]) for y in ys], tiles, count, group.entry + 1, self._page, low)
        return ys

    def _bases(self, group: Group, before: list[Any], x: Tensor, *shrink: Any) -> list[Tensor]:
        """Compute the products of the layers alone, and run `shrink` beside them. Few rows take as long as a weight takes to be read, and one
        product does not ask for all that a GPU can read: they run beside one another, unless the executor is called, one call at a time."""
        products = [partial(forward, x) for forward in before]
        rows = x.numel() // x.shape[-1]
        if self._singly and all(is_multiplied_here(module, rows) for module in group.modules):
            return self._beside.run(*products, *shrink)[: len(products)]
        ys: list[Tensor] = self._beside.run(lambda: [product() for product in products], *shrink)[0]
        return ys

    def _shrink(self, group: Group, x_TK: Tensor, tiles: Any, count: int, low: Tensor) -> None:
        if self._come.is_cuda and group.stage > self._stage:
            self._kernels.wait_until_come(self._come, group.stage, self._rows.device["awaited"])
            self._stage = group.stage
        self._kernels.shrink(x_TK, tiles, count, group.entry, self._page, low)

    def _tiles(self, group: Group, rows: int) -> tuple[Any, int]:
        """Return the tiles of the rows that the group sees, and how many there may be."""
        if rows > self._rows.rows:
            raise AdapterError(f"{group.names[0]} was given {rows} rows: adapters cannot act there")
        words = self._rows.device["kept_tiles" if group.is_head else "tiles"]
        tiles = self._kernels.Tiles(words, self._records[group.is_head].device, self._singly, self.is_wide)
        return tiles, rows if self._singly else self._rows.tiles_of(rows)


def _rounded(ranks: int) -> int:
    """Round up to as many ranks as are computed at once, so that there are few kinds of graphs."""
    return max(1, -(-ranks // RANKS)) * RANKS
