"""What ranks compute together: sums of their parts, and rows of which each has some columns.

A compiler sees two custom ops. Before the ranks are connected a sum is the rank's own part: that is enough to find out which layers a model has.
"""

from collections import Counter
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad


class RankGroup(Protocol):
    """Ranks that are connected: `GlooGroup` on CPUs, `NcclGroup` on GPUs. Tensors are contiguous."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Return all ranks' tensors, [ranks, ...]."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """Give all ranks the first one's values."""
        ...

    def abort(self) -> None:
        """End what waits for other ranks, undone."""
        ...


class Collectives:
    """The collective operations of one rank. It counts them by what they are for: how many, and the bytes that a rank sends if they go around in a ring.

    >>> one = Collectives(rank=0, ranks=2)
    >>> one.sum(torch.ones(3, 4), "mlp").shape, one.calls["mlp"], one.sent["mlp"]
    (torch.Size([3, 4]), 1, 48)
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.group: RankGroup | None = None
        self.calls, self.sent = Counter[str](), Counter[str]()
        _all[id(self)] = self

    def sum(self, x: Tensor, what: str) -> Tensor:
        """Return the sum of all ranks' rows."""
        if torch.compiler.is_compiling():
            return _sum_of_ranks(x, id(self), what)
        return self.sum_now(x, what)

    def sum_now(self, x: Tensor, what: str) -> Tensor:
        """Return the sum, also while another thread compiles: torch says of all threads that they do, then."""
        self.calls[what] += 1
        self.sent[what] += 2 * (self.ranks - 1) * x.nbytes // self.ranks
        return x if self.group is None else self.group.sum(x.contiguous())

    def gather(self, x: Tensor, widths: list[int], what: str) -> Tensor:
        """Return whole rows, of which each rank has so many columns."""
        most = max(widths)
        self.calls[what] += 1
        self.sent[what] += (self.ranks - 1) * x.numel() // x.shape[-1] * most * x.itemsize
        if self.group is None:
            return pad(x, (0, sum(widths) - x.shape[-1]))
        parts = self.group.gather(pad(x, (0, most - x.shape[-1])).contiguous())
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)

    def broadcast(self, x: Tensor) -> None:
        """Give all ranks the first one's values, in place."""
        if self.group is not None:
            self.group.broadcast(x)


_all: "WeakValueDictionary[int, Collectives]" = WeakValueDictionary()


@torch.library.custom_op("symbiosis::sum_of_ranks", mutates_args=())
def _sum_of_ranks(x: Tensor, collectives: int, what: str) -> Tensor:
    made = _all[collectives].sum_now(x, what)
    return made.clone() if made is x else made


@_sum_of_ranks.register_fake
def _shape_of_sum(x: Tensor, collectives: int, what: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
