"""What products cost, in seconds: learned from those that ran, else guessed from their multiplications."""

from collections.abc import Hashable

from symbiosis.executor.scheduling.forecast import note, smooth
from symbiosis.executor.scheduling.queue import Batch, Item

USUAL_S = 4e-10  # a multiplication takes, until it is known
READING = 8  # rows take as long to multiply as their matrix to read
WORTH_LEARNING = 1 << 20  # multiplications of a product that shows how long one takes
ROUND_WORTH = 0.5  # of what a round takes, its client's own share included, that another one less would save
SMALLEST_SLICE = 64  # rows: products of fewer cost more for each row


class Costs:
    """Of each key: what a product costs, what a row among many does, and what a multiplication does where there are no rows.

    >>> costs = Costs()
    >>> costs.learn_product("layer", rows=100, seconds=1e-3), costs.of_row(Item(1, "layer", 8, 0, 0.0))
    (0.001, 1e-05)
    """

    def __init__(self) -> None:
        self._product: dict[Hashable, float] = {}
        self._row: dict[Hashable, float] = {}
        self._multiplication: dict[Hashable, float] = {}
        self._usual = USUAL_S  # of any key
        self.rounds: dict[Hashable, int] = {}  # calls that an item of the key stands for, if several

    def of_product(self, key: Hashable) -> float:
        """Of a key's products; 0 if it is not known."""
        return self._product.get(key, 0.0)

    def saved(self, key: Hashable, contention: float) -> float:
        """What one product less would save."""
        return (ROUND_WORTH if key in self.rounds else contention) * self.of_product(key)

    def of_row(self, item: Item) -> float:
        """Of one row among many; a guess, if nothing is known of its key."""
        return self._row.get(item.key) or self._usual * item.price / item.rows

    def of_rows(self, item: Item, rows: int) -> float:
        """What so many rows of a call will take, in the same way."""
        if not item.divisible:
            return self._multiplication.get(item.key, self._usual) * item.price
        if rows < SMALLEST_SLICE and item.key in self._product:
            return self._product[item.key]
        return self.of_row(item) * (rows + READING)

    def of_turn(self, batch: Batch) -> float:
        """What this turn of a batch will take, as far as is known; what a product of few rows takes besides is not counted."""
        key = batch.key
        whole = self._row.get(key, 0.0) * batch.rows + self._multiplication.get(key, 0.0) * batch.price
        return whole * (batch.last - batch.first) / batch.cells

    def learn(self, batch: Batch) -> None:
        """A batch has run that took `batch.seconds`."""
        by_rows = batch.slices[0].item.divisible
        self.learn_product(batch.key, batch.rows if by_rows else 0, batch.seconds)
        if (by_rows and batch.rows < SMALLEST_SLICE) or (price := batch.price) < WORTH_LEARNING:
            return
        self._usual = smooth(self._usual, batch.seconds / price)
        if not by_rows:
            self._learn(self._multiplication, batch.key, batch.seconds / price)

    def learn_product(self, key: Hashable, rows: int, seconds: float) -> float:
        """A product of the key took so long. Returns what one costs, as far as is known now."""
        if key in self.rounds:
            return self._product.get(key, seconds)
        if rows >= SMALLEST_SLICE:
            self._learn(self._row, key, seconds / rows)
        return self._learn(self._product, key, seconds)

    def learn_round(self, key: Hashable, seconds: float) -> None:
        """An item of several calls took so long, from the first to the last: that is what it costs, beside the others' as it runs."""
        self._learn(self._product, key, seconds)

    def _learn(self, table: dict[Hashable, float], key: Hashable, seconds: float) -> float:
        cost = smooth(table.get(key), seconds)
        note(table, key, cost)
        return cost
