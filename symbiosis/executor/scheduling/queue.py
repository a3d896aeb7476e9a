"""Waiting calls, by key, and calls that run as one product: plain data, no torch."""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# How a call can be cut, from coarse to fine: how few rows a slice may have, and the cells of a slice's product (of a call that is not divided
# by rows: of its whole product).
Grains = Sequence[tuple[int, int]]


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
    batchable: bool = True  # may run with other calls of its key
    calls: int = 1  # how many calls it stands for; it may wait for each of them
    start: int = 0  # rows taken by earlier slices
    ran: int = 0  # rows with a result
    price: int = 0  # multiplications
    grains: Grains = ((64, 1),)
    kind: Hashable = None  # calls of one kind cost about the same for each multiplication
    turns: int = 1  # least number of turns that its product takes
    whole: bool = True  # neither cut yet nor too large to be batched as it is; the queue counts those that are not

    @property
    def left(self) -> int:
        return self.rows - self.start

    @property
    def finished(self) -> bool:
        return self.ran == self.rows


class Queue(deque[Item]):
    """The calls of one key, how many of their rows are left, and how many calls cannot be batched as a whole."""

    rows = apart = 0

    def drop(self, item: Item) -> None:
        if self[0] is item:
            self.popleft()
        else:
            self.remove(item)
        self.rows -= item.rows - item.start
        self.apart -= not item.whole

    def cut(self, item: Item, stop: int) -> None:
        """Take the rows of an item up to `stop`."""
        self.rows -= stop - item.start
        item.start = stop
        if item.whole and item.left:
            item.whole = False
            self.apart += 1


class Queues(dict[Hashable, Queue]):
    """All waiting calls, by key. No queue is empty."""

    def put(self, item: Item) -> None:
        queue = self.get(item.key)
        if queue is None:
            queue = self[item.key] = Queue()
        queue.append(item)
        queue.rows += item.rows - item.start
        queue.apart += not item.whole

    def remove(self, item: Item) -> None:
        """Remove the item if it still waits."""
        queue = self.get(item.key)
        if queue is not None and item in queue:
            queue.drop(item)
            if not queue:
                del self[item.key]

    def count(self) -> int:
        """Return how many calls wait. Other threads may ask."""
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
    """The slices that run as one product, and the turn that runs now: cells `first` to `last` of its `cells`."""

    key: Hashable
    slices: list[Slice]
    formed: float
    cells: int = 1
    first: int = 0
    last: int = 1
    seconds: float = 0.0  # taken by earlier turns
    grain: int = 0  # of the item's, by which it is cut
    inputs: Any = None  # rows that who computes has prepared for all turns
    prepared_s: float = 0.0  # what that took, of the first turn
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = 0
        for _, start, stop in self.slices:
            self.rows += stop - start

    @property
    def price(self) -> float:
        """Multiplications in all its turns."""
        price = 0.0
        for item, start, stop in self.slices:
            price += item.price * (stop - start) / item.rows
        return price

    @property
    def share(self) -> float:
        """The part of its cells that this turn computes."""
        return (self.last - self.first) / self.cells

    @property
    def ends(self) -> bool:
        """Whether this turn is its last."""
        return self.last == self.cells

    def ran(self) -> None:
        """Note that the results of these slices are there."""
        for item, start, stop in self.slices:
            item.ran += stop - start
