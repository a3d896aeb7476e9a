"""Calls that wait, by key, and those that run as one product: plain data, no torch."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
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
    price: int = 0  # multiplications
    cells: int = 1  # that what a product makes of it can be cut into
    turns: int = 1  # that such a product takes at least
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


class Queues(dict[Hashable, Queue]):
    """All calls that wait, by key. No queue is empty."""

    def put(self, item: Item) -> None:
        queue = self.get(item.key)
        if queue is None:
            queue = self[item.key] = Queue()
        queue.put(item)

    def remove(self, item: Item) -> None:
        """Take the item out, if it still waits."""
        queue = self.get(item.key)
        if queue is not None and item in queue:
            queue.drop(item)
            if not queue:
                del self[item.key]

    def count(self) -> int:
        """The calls; other threads ask, too."""
        return sum(map(len, list(self.values())))


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
    """The slices that run as one product, and in which of its turns that is: the cells that are computed now."""

    key: Hashable
    slices: list[Slice]
    formed: float
    cells: int = 1
    first: int = 0
    last: int = 1
    seconds: float = 0.0  # that earlier turns took
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = 0
        for _, start, stop in self.slices:
            self.rows += stop - start

    @property
    def price(self) -> float:
        """Multiplications, of all turns."""
        price = 0.0
        for item, start, stop in self.slices:
            price += item.price * (stop - start) / item.rows
        return price

    @property
    def is_cut(self) -> bool:
        return self.last - self.first < self.cells

    @property
    def ends(self) -> bool:
        """Whether this is its last turn."""
        return self.last == self.cells

    def ran(self) -> None:
        """Its results are there."""
        for item, start, stop in self.slices:
            item.ran += stop - start
