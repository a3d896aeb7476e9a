"""What products cost, in seconds: learned from earlier products, else from what was measured at the start, else guessed."""

from collections.abc import Hashable, Mapping

from symbiosis.executor.scheduling.arrival_model import SMOOTHING, observe
from symbiosis.executor.scheduling.queue import Batch, Item

USUAL_S = 4e-10  # for a multiplication, until measured
UNSEEN_S = 1e-8  # at most, for one of which nothing is known
UNSEEN_ROW_S = 4e-9  # at most, where only slices of rows are cut, as on a GPU
SLOW_S = 5e-10  # with multiplications that take so long, reading a matrix once for several calls gains nothing
READING = 8  # reading a matrix takes as long as multiplying so many rows by it
WORTH_LEARNING = 1 << 20  # multiplications of the smallest product to learn from
TIMED_S = 2e-4  # a turn that takes so long says what its multiplications cost, however few they are
ROUND_WORTH = 0.5  # the part of a round's time, its client's own share included, that one round less would save
FEW_ROWS = 64  # with fewer, each row costs more
# By the number of rows, as far as it counts: its class, within which a multiplication costs about the same (1, 2, 3, 3 and so on, to 7).
SIZES = tuple(rows.bit_length() for rows in range(FEW_ROWS + 1))


class Costs:
    """The cost, for each key, of a product, and of a row among many; and of a multiplication, for each key and each kind.

    >>> costs = Costs()
    >>> costs.learn_product("layer", rows=100, seconds=1e-3), costs.of_call(Item(1, "layer", 92, 0, 0.0))
    (0.001, 0.001)
    """

    def __init__(self) -> None:
        self.product: dict[Hashable, float] = {}  # a product, by key
        self._row: dict[Hashable, float] = {}
        self._of_key: dict[Hashable, float] = {}  # a multiplication, by the size of the product
        self._of_kind: dict[Hashable, float] = {}
        self._prepared: dict[Hashable, float] = {}  # a row, before any cell of it is computed
        self._usual = USUAL_S  # a multiplication, of whatever key
        self.slow: set[Hashable] = set()  # kinds of which batching calls gains nothing
        self.rounds: dict[Hashable, int] = {}  # how many calls an item of the key stands for, if several

    def measured(self, kinds: Mapping[Hashable, float], rows: int) -> None:
        """Begin with what a multiplication of these kinds was measured to take, in products of so many rows."""
        for kind, seconds in kinds.items():
            self._learn_kind(kind, SIZES[min(rows, FEW_ROWS)], seconds)

    def saved(self, key: Hashable, contention: float) -> float:
        """Return what one product less would save."""
        return (ROUND_WORTH if key in self.rounds else contention) * self.product.get(key, 0.0)

    def at_most(self, item: Item, rows: int) -> float:
        """Return how long so many rows of a call will take if that is known, else what they hardly exceed."""
        if not item.divisible:
            return self._of_multiplication(item, FEW_ROWS, UNSEEN_S) * item.price
        if len(item.grains) > 1:
            return self._of_multiplication(item, rows, UNSEEN_S) * item.price / item.rows * rows
        return (self._row.get(item.key) or UNSEEN_ROW_S * item.price / item.rows) * rows

    def of_call(self, item: Item) -> float:
        """Return how long a call will take, guessed if nothing is known of its key or kind."""
        if not item.divisible:
            return self._of_multiplication(item, FEW_ROWS, self._usual) * item.price
        if item.rows < FEW_ROWS and item.key in self.product:
            return self.product[item.key]
        row_s = self._row.get(item.key) or self._of_multiplication(item, FEW_ROWS, self._usual) * item.price / item.rows
        return row_s * (item.rows + READING)

    def of_turn(self, batch: Batch) -> float:
        """Return how long this turn of a batch will take, as far as is known, without the fixed cost of a product of few rows."""
        size = SIZES[min(batch.rows, FEW_ROWS) if batch.slices[0].item.divisible else FEW_ROWS]
        known = self._of_key.get((batch.key, size), 0.0) * batch.price
        return (known or self._row.get(batch.key, 0.0) * batch.rows) * batch.share

    def of_preparing(self, item: Item) -> float:
        """Return the cost of what is done with a row before any cell of it is computed, 0 if unknown."""
        return self._prepared.get(item.key, 0.0)

    def learn(self, batch: Batch) -> None:
        """Learn from a batch that has run."""
        by_rows = batch.slices[0].item.divisible
        self.learn_product(batch.key, batch.rows if by_rows else 0, batch.seconds)
        if batch.first:
            self._learn_all_turns(batch)
        if (by_rows and batch.rows < FEW_ROWS) or (price := batch.price) < WORTH_LEARNING:
            return
        self._usual += SMOOTHING * (batch.seconds / price - self._usual)

    def learn_turn(self, batch: Batch, seconds: float) -> None:
        """Learn from one turn of a batch, unless it was too short, or a product of few rows at once."""
        item = batch.slices[0].item
        if item.kind is None or (item.divisible and batch.rows < FEW_ROWS and batch.share == 1):
            return
        price = batch.price * batch.share
        if price < WORTH_LEARNING and not (batch.share < 1 and price and seconds > TIMED_S):
            return
        if batch.prepared_s and not batch.first:
            seconds -= batch.prepared_s
            observe(self._prepared, batch.key, batch.prepared_s / batch.rows)
        self._learn_multiplication(item, self._size(batch), seconds / price)

    def _learn_all_turns(self, batch: Batch) -> None:
        """Learn from all turns together that a multiplication costs less than was thought: turns that are cut too short for that teach nothing."""
        item, price = batch.slices[0].item, batch.price
        if item.kind is None or price < WORTH_LEARNING:
            return
        size = self._size(batch)
        known = self._of_key.get((item.key, size)) or self._of_kind.get((item.kind, size))
        if known and batch.seconds / price < known:
            self._learn_multiplication(item, size, batch.seconds / price)

    @staticmethod
    def _size(batch: Batch) -> int:
        return SIZES[min(batch.rows, FEW_ROWS) if batch.slices[0].item.divisible else FEW_ROWS]

    def _learn_multiplication(self, item: Item, size: int, seconds: float) -> None:
        known = self._learn_kind(item.kind, size, seconds)
        observe(self._of_key, (item.key, size), seconds, known)

    def learn_product(self, key: Hashable, rows: int, seconds: float) -> float:
        """Learn from a product of this key. Return what one costs now."""
        if key in self.rounds:
            return self.product.get(key, seconds)
        if rows >= FEW_ROWS:
            observe(self._row, key, seconds / rows)
        return observe(self.product, key, seconds)

    def learn_round(self, key: Hashable, seconds: float) -> None:
        """Learn from a round, timed from its first call to its last while other programs ran."""
        observe(self.product, key, seconds)

    def _of_multiplication(self, item: Item, rows: int, unknown: float) -> float:
        """Return the cost of one multiplication among so many rows: what is known of the call's key, of its kind, or no less than what is known
        of its kind with other numbers of rows. With more, a multiplication costs less; with fewer, more."""
        size = SIZES[min(rows, FEW_ROWS)]
        if known := self._of_key.get((item.key, size)) or self._of_kind.get((item.kind, size)):
            return known
        fewer = (self._of_kind.get((item.kind, other), 0.0) for other in range(size - 1, 0, -1))
        more = (self._of_kind.get((item.kind, other), 0.0) for other in range(size + 1, SIZES[FEW_ROWS] + 1))
        return (
            next(filter(None, fewer), 0.0) or next(filter(None, more), 0.0) * (rows + READING) / max(1, rows) or unknown
        )

    def _learn_kind(self, kind: Hashable, size: int, seconds: float) -> float:
        """Learn what a multiplication of a kind takes. Return what one costs now."""
        known = observe(self._of_kind, (kind, size), seconds)
        if size >= SIZES[READING]:
            (self.slow.add if known > SLOW_S else self.slow.discard)(kind)
        return known
