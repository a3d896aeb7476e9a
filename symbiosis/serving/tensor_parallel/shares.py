"""Which numbers of a dimension each rank has: heads, outputs, inputs, tokens of the vocabulary."""

from dataclasses import dataclass

from torch import Tensor, cat

Ranges = tuple[range, ...]  # in the order in which they lie in a rank's part


def shares(count: int, ranks: int, unit: int = 1) -> tuple[range, ...]:
    """Divide so many numbers as evenly as can be, in whole units if these divide them.

    >>> shares(10, 4)
    (range(0, 3), range(3, 6), range(6, 8), range(8, 10))
    >>> shares(24, 2, unit=8)
    (range(0, 16), range(16, 24))
    """
    unit = unit if count % unit == 0 else 1
    each, more = divmod(count // unit, ranks)
    ends = [unit * (rank * each + min(rank, more)) for rank in range(ranks + 1)]
    return tuple(range(first, end) for first, end in zip(ends, ends[1:], strict=False))


def widened(numbers: range, size: int, first: int = 0) -> range:
    """Return the numbers of all columns of these heads, each of so many columns.

    >>> widened(range(2, 4), 8, first=100)
    range(116, 132)
    """
    return range(first + numbers.start * size, first + numbers.stop * size)


def taken(tensor: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """Return these numbers of a dimension: a view, if they follow one another."""
    parts = [tensor.narrow(dim, each.start, len(each)) for each in ranges]
    return parts[0] if len(parts) == 1 else cat(parts, dim)


@dataclass(frozen=True, slots=True)
class HeadShares:
    """The heads of queries, and those of keys and values, that each rank has."""

    query: tuple[range, ...]
    shared: tuple[range, ...]

    @classmethod
    def of(cls, query: int, shared: int, ranks: int) -> "HeadShares":
        """Give each rank whole groups of heads that share keys. Where there are fewer such groups than ranks, several ranks have the same keys
        and values. Raises `ValueError` if that does not come out even.

        >>> HeadShares.of(query=8, shared=2, ranks=4)
        HeadShares(query=(range(0, 2), range(2, 4), range(4, 6), range(6, 8)), shared=(range(0, 1), range(0, 1), range(1, 2), range(1, 2)))
        """
        if shared >= ranks:
            groups = shares(shared, ranks)
            return cls(tuple(widened(each, query // shared) for each in groups), groups)
        if ranks % shared or query % ranks:
            raise ValueError(f"{query} heads with {shared} of keys and values cannot be given to {ranks} ranks evenly")
        alike = ranks // shared
        return cls(shares(query, ranks), tuple(range(rank // alike, rank // alike + 1) for rank in range(ranks)))

    @property
    def are_repeated(self) -> bool:
        """Whether several ranks have the same keys and values.

        >>> HeadShares.of(query=8, shared=2, ranks=4).are_repeated
        True
        """
        return len(set(self.shared)) < len(self.shared)
