"""Calls that wait, by key, and those that run as one product: plain data, no torch."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(slots=True, eq=False)
class Item:
    """One call in the queue. `work` is the caller's; the batcher never looks into it."""

    session: int
    key: Hashable
    rows: int
    priority: int
    arrived: float
    work: Any = None
    divisible: bool = True  # may run as several slices of rows
    joinable: bool = True  # may run with others of its key
    calls: int = 1  # that it stands for: for each, it may wait
    start: int = 0  # rows that earlier slices took
    ran: int = 0  # rows of which the results are there
    whole: bool = True  # not cut yet, nor too large to be joined as it is; the queue knows

    @property
    def left(self) -> int:
        return self.rows - self.start

    @property
    def finished(self) -> bool:
        return self.ran == self.rows


class Queue(deque[Item]):
    """The calls of one key, the rows that are left of them, and how many of them cannot be joined as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.apart = 0

    def put(self, item: Item) -> None:
        self.append(item)
        self.rows += item.left
        self.apart += not item.whole

    def drop(self, item: Item) -> None:
        self.remove(item)
        self.rows -= item.left
        self.apart -= not item.whole

    def cut(self, item: Item, stop: int) -> None:
        """The rows of an item before `stop` are taken."""
        self.rows -= stop - item.start
        item.start = stop
        if item.whole and item.left:
            item.whole = False
            self.apart += 1


class Slice(NamedTuple):
    """Rows `start` to `stop` of an item."""

    item: Item
    start: int
    stop: int

    @property
    def last(self) -> bool:
        return self.stop == self.item.rows


@dataclass(slots=True)
class Batch:
    """The slices that run as one product."""

    key: Hashable
    slices: list[Slice]
    formed: float

    @property
    def rows(self) -> int:
        return sum(piece.stop - piece.start for piece in self.slices)

    def ran(self) -> None:
        """Its results are there."""
        for item, start, stop in self.slices:
            item.ran += stop - start
