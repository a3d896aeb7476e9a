"""Products of numbers that somebody else has told, as those of a tensor's shape: however many there are and however large, they take no time."""

import math
from collections.abc import Iterable, Sequence

MOST_DIMS = 64  # of a tensor
MOST_CELLS = 1 << 60  # no memory has more


def product(numbers: Iterable[int], most: int) -> int | None:
    """Return the product of numbers from 1 on, or None once it is more than `most`.

    >>> product([2, 3], most=6), product([2, 3, 10**300, 5], most=6)
    (6, None)
    """
    found = 1
    for number in numbers:
        if (found := found * number) > most:
            return None
    return found


def cells(shape: Sequence[int], most: int = MOST_CELLS) -> int | None:
    """Return how many numbers a tensor of this shape has. None, if no tensor has such a shape, or if its sides, but for those of 0, make more than
    `most`.

    >>> cells([2, 3]), cells([]), cells([2, 0]), cells([0, 1 << 62]), cells([-1]), cells([True]), cells([1] * 1000)
    (6, 1, 0, None, None, None, None)
    """
    if len(shape) > MOST_DIMS or not all(type(side) is int and 0 <= side <= most for side in shape):
        return None
    found = math.prod(side for side in shape if side)  # so few numbers, none of which is large
    if found > most:
        return None
    return 0 if 0 in shape else found
