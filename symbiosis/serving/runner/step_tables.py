"""Tables of a step that kernels read: which token of which sequence each row is, where the pages lie, and which rows have which adapter.

They lie in tensors that stay where they are, so that a CUDA graph can read them. One copy fills in all that a step changes in its rows.
"""

from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symbiosis.serving.scheduler.scheduler_output import Block, SchedulerOutput, Sequence

EMPTY = -1
FIRST_BLOCKS = 64  # of a sequence: for so many there is room at first
MOST_FIRST_BLOCKS = 2048  # of a sequence: for so many there is room at most, once it is known how long texts may be


class Slots:
    """The pages of running sequences: int32 [slots, layers, blocks], on the device. A sequence has a slot while it has pages."""

    def __init__(self, slots: int, layers: int, device: torch.device) -> None:
        self.pages = torch.zeros(slots, layers, FIRST_BLOCKS, dtype=torch.int32, device=device)
        self._free = list(range(slots))
        self._known: dict[Sequence, tuple[int, list[Block]]] = {}
        self.moved = 0  # how often `pages` became another tensor

    def reserve(self, slots: int, blocks: int) -> None:
        """Make room for so many at once: with each new tensor all graphs are made anew."""
        have, room = len(self.pages), max(self.pages.shape[2], min(blocks, MOST_FIRST_BLOCKS))
        if slots > have or room > self.pages.shape[2]:
            self._free += range(have, slots)
            self._grow(max(slots, have), room)

    def of(self, sequence: Sequence) -> int:
        """Return the slot of a sequence, filled in with all its blocks."""
        slot, blocks = self._known.get(sequence) or (self._new(), [])
        new = sequence.blocks
        if blocks != new:
            same = len(blocks) if blocks == new[: len(blocks)] else 0
            self._put(slot, same, new[same:])
            self._known[sequence] = slot, list(new)
        return slot

    def forget(self, sequence: Sequence) -> None:
        """Free the slot of a sequence."""
        if (known := self._known.pop(sequence, None)) is not None:
            self._free.append(known[0])

    def _new(self) -> int:
        if not self._free:
            count = len(self.pages)
            self._free = list(range(count, 2 * count))
            self._grow(2 * count, self.pages.shape[2])
        return self._free.pop()

    def _put(self, slot: int, first: int, blocks: Items[Block]) -> None:
        end = first + len(blocks)
        if end > self.pages.shape[2]:
            self._grow(len(self.pages), 1 << (end - 1).bit_length())
        pages = torch.tensor([block.pages for block in blocks], dtype=torch.int32).T
        if self.pages.is_cuda:  # from memory that is not pinned, a copy would wait for the step that runs
            pages = pages.pin_memory()
        self.pages[slot, :, first:end] = pages.to(self.pages.device, non_blocking=True)

    def _grow(self, slots: int, blocks: int) -> None:
        pages = self.pages.new_zeros(slots, self.pages.shape[1], blocks)
        pages[: len(self.pages), :, : self.pages.shape[2]] = self.pages
        self.pages, self.moved = pages, self.moved + 1


class Rows:
    """What a step says of each row and of each sequence, in one tensor of 32-bit words with room for so many of both."""

    def __init__(self, rows: int, sequences: int, queries: int, tile: int, device: torch.device) -> None:
        self.rows, self.sequences, self._queries, self._tile = rows, sequences, queries, tile
        sizes = {
            "ids": (rows,), "fed": (rows,), "positions": (rows,), "slots": (rows,), "singles": (sequences, 3),
            "blocks": (self.blocks_of(rows), 4), "kept": (sequences,), "tiles": (self.tiles_of(rows), 2),
            "kept_tiles": (self.tiles_of(rows), 2), "awaited": (1,),
        }  # fmt: skip
        lengths = [int(np.prod(size)) for size in sizes.values()]
        self._host = torch.zeros(sum(lengths), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(sum(lengths), dtype=torch.int32, device=device)
        mine, theirs = self._host.split(lengths), self._device.split(lengths)
        self.host = {name: each.view(size).numpy() for (name, size), each in zip(sizes.items(), mine, strict=True)}
        self.device = {name: each.view(size) for (name, size), each in zip(sizes.items(), theirs, strict=True)}
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def blocks_of(self, rows: int) -> int:
        """Return how many blocks of queries so many rows have at most."""
        return rows // self._queries + self.sequences

    def tiles_of(self, rows: int) -> int:
        """Return how many tiles so many rows have at most."""
        return min(rows, rows // self._tile + self.sequences)

    def wait(self) -> None:
        """Wait until what was filled in last has been copied."""
        if self._copied is not None:
            self._copied.synchronize()

    def fill(self, step: SchedulerOutput, slots: Slots, kept: Tensor) -> None:
        """Fill in a step, of which the logits of the `kept` rows are wanted."""
        self.wait()
        ids: list[int] = []
        positions: list[int] = []
        of_rows: list[int] = []  # their slots
        singles: list[tuple[int, int, int]] = []
        blocks: list[tuple[int, int, int, int]] = []
        for segment in step.segments:
            first, rows, position = segment.first, segment.rows, segment.position
            slot = slots.of(segment.sequence)
            ids += segment.tokens
            positions += range(position, position + rows)
            of_rows += [slot] * rows
            if rows == 1:
                singles.append((first, slot, position + 1))
                continue
            for at in range(0, rows, self._queries):
                blocks.append((first + at, min(self._queries, rows - at), slot, position + at))
        host = self.host
        _put(host["ids"], ids, 0)
        _put(host["positions"], positions, 0)
        _put(host["slots"], of_rows, EMPTY)
        _put(host["singles"], singles, EMPTY)
        _put(host["blocks"], blocks, 0)
        _put(host["kept"], kept[: self.sequences].numpy(), 0)
        if step.fed is not None:
            host["fed"][: step.rows] = EMPTY
            host["fed"][step.fed.rows] = step.fed.sources

    def upload(self, step: SchedulerOutput) -> None:
        """Copy all of it to the device at once. Then put in the tokens that only the device knows."""
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if step.fed is not None:
            ids, fed = (self.device[name][: step.rows] for name in ("ids", "fed"))
            known = step.fed.chosen.clamp(min=0).int()[fed.clamp(min=0)]
            ids.copy_(torch.where(fed >= 0, known, ids))


def _put(section: Any, values: Any, empty: int) -> None:
    """Fill a section with these values, and the rest of it with what stands for none."""
    section[len(values) :] = empty
    if len(values):
        section[: len(values)] = values
