"""Decides which rank holds which tensors of a model. Pure functions over plain data, without torch."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from symbiosis.errors import ConfigError


class SizedTensor(NamedTuple):
    """One tensor of the model: its name, the module that it belongs to, its bytes, and the name of an earlier tensor that it is tied to."""

    name: str
    module: str
    nbytes: int
    tied_to: str = ""


def whole_layers(parts: Sequence[SizedTensor], shares: Sequence[float]) -> dict[str, int]:
    """Return the rank of each tensor: runs of whole modules, in the model's order, so that the fullest rank holds as little as it can for
    its share. What lies in one module (q, k, v and o; gate, up and down) stays together, and so do tied tensors.

    >>> model = [SizedTensor(f"{n}.{name}", f"{n}.{name}", 10) for n in range(3) for name in ("up", "down")]
    >>> list(whole_layers(model, (2, 1)).values())
    [0, 0, 0, 0, 1, 1]
    """
    runs = [list(run) for _, run in groupby(parts, key=lambda part: part.module.rpartition(".")[0])]
    sizes = [sum(part.nbytes for part in run if not part.tied_to) for run in runs]
    if len(runs) < len(shares):
        raise ConfigError(
            f"this model has {len(runs)} parts that can be held apart, and there are {len(shares)} ranks: choose fewer ranks"
        )
    held: dict[str, int] = {}
    for run, rank in zip(runs, ranks_of(sizes, shares), strict=True):
        held |= {part.name: held.get(part.tied_to, rank) for part in run}
    return held


def ranks_of(sizes: Sequence[int], shares: Sequence[float]) -> list[int]:
    """Return a rank for each size, in rising order and none left out, so that the largest sum for its share is as small as it can be.

    >>> ranks_of([4, 4, 4, 4], (3, 1))
    [0, 0, 0, 1]
    """
    low, high = 0.0, float(sum(sizes)) / min(shares) + 1.0
    found = filled(sizes, shares, high)
    assert found is not None
    for _ in range(64):
        middle = (low + high) / 2
        if (better := filled(sizes, shares, middle)) is None:
            low = middle
        else:
            high, found = middle, better
    return found


def filled(sizes: Sequence[int], shares: Sequence[float], limit: float) -> list[int] | None:
    """Give each rank at least one size, and no more than `limit` for its share; None if that cannot be."""
    sums = [0, *accumulate(sizes)]
    begins: list[dict[int, int]] = []  # for each rank, where it may end, and where it begins then
    starts = {0: 0}
    for share in shares:
        ends: dict[int, int] = {}
        for start in sorted(starts):
            last = bisect_right(sums, sums[start] + limit * share) - 1
            for end in range(max(start + 1, max(ends, default=0) + 1), last + 1):
                ends[end] = start
        begins.append(ends)
        starts = ends
    if len(sizes) not in starts:
        return None
    ranks: list[int] = []
    end = len(sizes)
    for rank in reversed(range(len(shares))):
        start = begins[rank][end]
        ranks[:0] = [rank] * (end - start)
        end = start
    return ranks
