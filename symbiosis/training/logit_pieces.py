"""How many rows of a head are computed at once: logits never exist for all rows of a pass."""

from collections.abc import Iterable, Iterator

LOGITS_BYTES = 1 << 28  # that are there at once


def rows_at_once(vocabulary: int, each: int) -> int:
    """Return how many rows have room for their logits, if what is made of each takes so many bytes.

    >>> rows_at_once(vocabulary=128_256, each=4), rows_at_once(vocabulary=1 << 40, each=4)
    (512, 1)
    """
    rows = max(1, LOGITS_BYTES // (each * vocabulary))
    return rows // 128 * 128 or rows


def row_pieces(rows: int, vocabulary: int, each: int) -> Iterator[slice]:
    """Cut rows into pieces."""
    most = rows_at_once(vocabulary, each)
    return (slice(first, min(first + most, rows)) for first in range(0, rows, most))


def sequence_pieces(lengths: Iterable[int], most: int) -> Iterator[slice]:
    """Cut a list of sequences into pieces of at most so many rows, or of one sequence.

    >>> list(sequence_pieces([3, 4, 9, 2], most=8))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    first = end = rows = 0
    for length in lengths:
        if rows and rows + length > most:
            yield slice(first, end)
            first, rows = end, 0
        rows, end = rows + length, end + 1
    yield slice(first, end)
