"""What products cost, in seconds: learned from earlier products, else guessed from the multiplications."""

from collections.abc import Hashable

from symbiosis.executor.scheduling.forecast import note, smooth
from symbiosis.executor.scheduling.queue import Batch, Item

USUAL_S = 4e-10  # for a multiplication, until measured
UNSEEN_S = 4e-9  # at most, for one of a key that has not been measured
READING = 8  # reading a matrix takes as long as multiplying so many rows by it
WORTH_LEARNING = 1 << 20  # multiplications of the smallest product to learn from
ROUND_WORTH = 0.5  # the part of a round's time, its client's own share included, that one round less would save
SMALLEST_SLICE = 64  # rows; with fewer, each row costs more


class Costs:
    """The cost, for each key, of a product, of a row among many, and of a multiplication where there are no rows.

    >>> costs = Costs()
    >>> costs.learn_product("layer", rows=100, seconds=1e-3), costs.of_row(Item(1, "layer", 8, 0, 0.0))
    (0.001, 1e-05)
    """

    def __init__(self) -> None:
        self._product: dict[Hashable, float] = {}
        self._row: dict[Hashable, float] = {}
        self._multiplication: dict[Hashable, float] = {}
        self._usual = USUAL_S  # a multiplication, of whatever key
        self.rounds: dict[Hashable, int] = {}  # how many calls an item of the key stands for, if several

    def of_product(self, key: Hashable) -> float:
        """Return the cost of a product of this key, 0 if unknown."""
        return self._product.get(key, 0.0)

    def saved(self, key: Hashable, contention: float) -> float:
        """Return what one product less would save."""
        return (ROUND_WORTH if key in self.rounds else contention) * self.of_product(key)

    def of_row(self, item: Item) -> float:
        """Return the cost of one row among many, guessed if nothing is known of its key."""
        return self._row.get(item.key) or self._usual * item.price / item.rows

    def row_at_most(self, item: Item) -> float:
        """Return the cost of one row among many if that is known of its key, else what it hardly exceeds."""
        return self._row.get(item.key) or UNSEEN_S * item.price / item.rows

    def at_most(self, item: Item, rows: int) -> float:
        """Return how long so many rows of a call will take if that is known of its key, else what they hardly exceed."""
        if item.divisible:
            return self.row_at_most(item) * (rows + READING)
        return self._multiplication.get(item.key, UNSEEN_S) * item.price

    def of_rows(self, item: Item, rows: int) -> float:
        """Return how long so many rows of a call will take, guessed if nothing is known of its key."""
        if not item.divisible:
            return self._multiplication.get(item.key, self._usual) * item.price
        if rows < SMALLEST_SLICE and item.key in self._product:
            return self._product[item.key]
        return self.of_row(item) * (rows + READING)

    def of_turn(self, batch: Batch) -> float:
        """Return how long this turn of a batch will take, as far as is known, without the fixed cost of a product of few rows."""
        key = batch.key
        whole = self._row.get(key, 0.0) * batch.rows + self._multiplication.get(key, 0.0) * batch.price
        return whole * (batch.last - batch.first) / batch.cells

    def learn(self, batch: Batch) -> None:
        """Learn from a batch that has run."""
        by_rows = batch.slices[0].item.divisible
        self.learn_product(batch.key, batch.rows if by_rows else 0, batch.seconds)
        if (by_rows and batch.rows < SMALLEST_SLICE) or (price := batch.price) < WORTH_LEARNING:
            return
        self._usual = smooth(self._usual, batch.seconds / price)
        if not by_rows:
            self._learn(self._multiplication, batch.key, batch.seconds / price)

    def learn_product(self, key: Hashable, rows: int, seconds: float) -> float:
        """Learn from a product of this key. Return what one costs now."""
        if key in self.rounds:
            return self._product.get(key, seconds)
        if rows >= SMALLEST_SLICE:
            self._learn(self._row, key, seconds / rows)
        return self._learn(self._product, key, seconds)

    def learn_round(self, key: Hashable, seconds: float) -> None:
        """Learn from a round, timed from its first call to its last while other programs ran."""
        self._learn(self._product, key, seconds)

    def _learn(self, table: dict[Hashable, float], key: Hashable, seconds: float) -> float:
        old = table.get(key)
        if old is None:
            note(table, key, seconds)
            return seconds
        cost = table[key] = smooth(old, seconds)
        return cost
