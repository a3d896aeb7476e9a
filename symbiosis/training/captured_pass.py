"""A pass as one CUDA graph: forward, losses and backward. Its inputs are padded to buckets, and tables say which rows belong to whom, so that one
graph serves whatever runs and sequences there are."""

import logging
import struct
from collections.abc import Callable, Sequence
from itertools import groupby, zip_longest
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from symbiosis.client.capture import Captured
from symbiosis.errors import CaptureError
from symbiosis.kernels import with_triton
from symbiosis.kernels.gpu.streams import wait_until_done
from symbiosis.training.low_rank import SharedRows
from symbiosis.training.row_losses import KINDS, NUMBERS, row_numbers
from symbiosis.training.run_adapter import RunAdapter
from symbiosis.training.run_work import RunWork

logger = logging.getLogger("symbiosis")
MOST_GRAPHS = 16
HIGHEST_RANK = 128
LEAST_ROWS, LEAST_LENGTH = 64, 64


class PassTables(NamedTuple):
    """What a captured pass is given: tensors on the device, and numbers of which each has a graph of its own."""

    ids: Tensor  # [rows]
    positions: Tensor
    targets: Tensor
    kinds: Tensor  # of losses
    numbers: Tensor  # [NUMBERS, rows]: what they need
    begins: Tensor  # int32 [sequences + 1]
    tiles: Tensor
    segments: Tensor
    records: Tensor
    longest: int
    ranks: int
    groups: frozenset[int]  # of layers, at which adapters act
    backward: bool
    recomputed: bool  # layers, in the backward pass


class CapturedPass:
    """Captures `run`, which computes what the tables say and returns log probabilities and losses [2, rows]."""

    def __init__(self, run: Callable[..., Tensor], device: torch.device) -> None:
        self._device, self._kernels = device, with_triton("gpu.trained_rows")
        self._captured: Any = Captured(run, MOST_GRAPHS, draws=False, pool=torch.cuda.graph_pool_handle())
        self._of_adapters: WeakKeyDictionary[RunAdapter, tuple[Any, Tensor]] = WeakKeyDictionary()
        self._last: tuple[Tensor, list[Tensor]] = torch.empty(0, 0), []  # records of all, and of each

    @property
    def works(self) -> bool:
        return self._captured is not None

    @property
    def graphs(self) -> int:
        return self._captured.graphs if self.works else 0

    def fits(self, works: Sequence[RunWork], groups: Sequence[SharedRows]) -> bool:
        """Whether kernels compute all that these need at these layers."""
        names = {name for group in groups for name in group.names}
        apart = [adapter for adapter, _ in groupby(work.adapter for work in works)]
        return (
            self.works
            and len(apart) == len(set(apart))
            and all(_is_plain(adapter) and adapter.low_rank.keys() <= names for adapter in apart)
            and all(work.given is not None or work.kind in KINDS for work in works)
            and all(datum.targets.dim() == 1 for work in works for datum in work.data)
        )

    def compute(self, works: Sequence[RunWork], groups: Sequence[SharedRows], recomputed: bool) -> bool:
        """Compute a pass, unless it cannot be captured; then nothing has happened."""
        tables = self._tables(works, groups, recomputed)
        try:
            with torch.cuda.device(self._device):
                computed = self._captured(*tables)
                wait_until_done(self._device)
                found, losses = computed.cpu()
        except CaptureError as error:
            logger.warning("training runs without CUDA graphs: %s", error)
            self._captured = None
            return False
        first = 0
        for work in works:
            lengths = [len(datum) for datum in work.data]
            end = first + sum(lengths)
            work.found = list(found[first:end].clone().split(lengths))
            if work.given is None:
                work.loss = float(losses[first:end].double().sum())
            first = end
        return True

    def _tables(self, works: Sequence[RunWork], groups: Sequence[SharedRows], recomputed: bool) -> PassTables:
        data = [datum for work in works for datum in work.data]
        lengths = [len(datum) for datum in data]
        rows = sum(lengths)
        room = bucket(rows, LEAST_ROWS)
        rest = room - rows
        begins = torch.tensor([0, *lengths, rest]).cumsum(0)
        begins = pad(begins, (0, _power(len(lengths) + 1) - len(lengths) - 1), value=room)
        positions = torch.cat([torch.arange(length) for length in (*lengths, rest)])
        kinds, numbers = zip(*map(_numbers, works), strict=True)
        adapters = [adapter for adapter, _ in groupby(work.adapter for work in works)]
        sizes = [sum(len(d) for w in each for d in w.data) for _, each in groupby(works, key=lambda work: work.adapter)]
        tiles, segments = self._places(sizes, _power(len(adapters)), room)
        ranks = max(16, _power(max(low.a.shape[0] for adapter in adapters for low in adapter.low_rank.values())))
        ids, targets = (torch.cat([getattr(datum, name) for datum in data]) for name in ("tokens", "targets"))
        whole = torch.stack([pad(ids, (0, rest)), positions, pad(targets, (0, rest)), pad(torch.cat(kinds), (0, rest))])
        places = torch.cat([begins, tiles.view(-1), segments.view(-1)]).int()
        numbers_of_rows = pad(torch.cat(numbers, 1), (0, rest))
        rows_there, places_there, numbers_there = (
            each.to(self._device, non_blocking=True) for each in (whole, places, numbers_of_rows)
        )
        begins, tiles, segments = places_there.split([len(begins), tiles.numel(), segments.numel()])
        return PassTables(
            rows_there[0],
            rows_there[1],
            rows_there[2],
            rows_there[3],
            numbers_there,
            begins,
            tiles.view(-1, 3),
            segments.view(-1, 2),
            self._records(adapters, groups, len(segments) // 2),
            _power(max(*lengths, rest, LEAST_LENGTH)),
            ranks,
            acting_groups(adapters, groups),
            any(work.backward for work in works),
            recomputed,
        )

    def _places(self, sizes: Sequence[int], most: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return the tables of tiles and of segments, for so many segments at most."""
        tile, first = self._kernels.TILE, 0
        tiles, segments = [], []
        for number, size in enumerate(sizes):
            tiles += [(at, min(tile, first + size - at), number) for at in range(first, first + size, tile)]
            segments.append((first, first + size))
            first += size
        count = -(-rows // tile) + most
        return (
            torch.tensor(tiles + [(0, 0, 0)] * (count - len(tiles)), dtype=torch.int32),
            torch.tensor(segments + [(0, 0)] * (most - len(segments)), dtype=torch.int32),
        )

    def _records(self, adapters: Sequence[RunAdapter], groups: Sequence[SharedRows], most: int) -> Tensor:
        """Return where the matrices of all adapters lie, for so many segments, on the device."""
        each = [self._of(adapter, groups) for adapter in adapters]
        known, before = self._last
        if known.shape[1] != most or any(a is not b for a, b in zip_longest(each, before)):
            records = pad(torch.stack(each, 1), (0, 0, 0, 0, 0, most - len(each)))
            self._last = records.to(self._device), each
        return self._last[0]

    def _of(self, adapter: RunAdapter, groups: Sequence[SharedRows]) -> Tensor:
        """Return the records of an adapter, [groups, members, words]."""
        where = len(groups), *((flat.values.data_ptr(), flat.gradients.data_ptr()) for flat in adapter.flats)
        known = self._of_adapters.get(adapter)
        if known is None or known[0] != where:
            records = torch.zeros(len(groups), self._kernels.MEMBERS, self._kernels.WORDS, dtype=torch.int64)
            addresses = {
                id(p): (value.data_ptr(), gradient.data_ptr())
                for flat in adapter.flats
                for p, value, gradient in zip(
                    flat.parameters, flat.parts(flat.values.detach()), flat.parts(flat.gradients), strict=True
                )
            }
            for number, group in enumerate(groups):
                for member, name in enumerate(group.names):
                    if name in adapter.low_rank:
                        a, b, scale = adapter.low_rank[name]
                        (of_a, of_da), (of_b, of_db) = addresses[id(a)], addresses[id(b)]
                        words = of_a, of_b, of_da, of_db, len(a), _bits(scale)
                        records[number, member] = torch.tensor(words)
            known = self._of_adapters[adapter] = where, records
        return known[1]


def acting_groups(adapters: Sequence[RunAdapter], groups: Sequence[SharedRows]) -> frozenset[int]:
    """Return the numbers of the groups of layers at which any of these adapters acts."""
    names = {name for adapter in adapters for name in adapter.low_rank}
    return frozenset(group.group for group in groups if not names.isdisjoint(group.names))


def bucket(rows: int, least: int) -> int:
    """Return how many rows a graph has for so many: at most an eighth more.

    >>> [bucket(rows, 64) for rows in (1, 65, 100, 1000, 4096, 4097)]
    [64, 72, 104, 1024, 4096, 4608]
    """
    if rows <= least:
        return least
    step = max(8, _power(rows) // 16)
    return -(-rows // step) * step


def _power(number: int) -> int:
    """Return the next power of two."""
    return 1 << (number - 1).bit_length()


def _numbers(work: RunWork) -> tuple[Tensor, Tensor]:
    """Return kinds and numbers of a work's rows. A derivative that is known already is that of a weight."""
    if work.given is None:
        return row_numbers(work.kind, work.data, work.config, work.backward)
    numbers = torch.zeros(NUMBERS, sum(map(len, work.data)))
    numbers[0] = -torch.cat([each.cpu() for each in work.given])
    return torch.full((numbers.shape[1],), KINDS["cross_entropy"], dtype=torch.int32), numbers


def _is_plain(adapter: RunAdapter) -> bool:
    """Whether an adapter is nothing but LoRA that the kernels compute."""
    return (
        bool(adapter.layers)
        and adapter.low_rank.keys() == adapter.layers.keys()
        and all(flat.values.is_cuda and flat.values.dtype == torch.float32 for flat in adapter.flats)
        and all(len(low.a) <= HIGHEST_RANK for low in adapter.low_rank.values())
    )


def _bits(scale: float) -> int:
    """Return the bits of a number as float32."""
    return int(struct.unpack("<i", struct.pack("<f", scale))[0])
