"""`local://` for clients on a GPU: the calls of a step that is being captured as a CUDA graph."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from symbiosis.protocol import Call, Compose
from symbiosis.transport.cuda_driver import DeviceMemory, MemOps
from symbiosis.transport.tensors import Shapes

OTHER = -1  # instead of how many calls were made: they were not what was expected


@dataclass(slots=True)
class Placed:
    """A call of the step: the rows as the model has them, where the executor looks for them, and where it leaves what it makes of
    them."""

    number: int
    rows: Tensor
    payload: Tensor
    results: list[Tensor]


@dataclass
class Round:
    """What the executor agreed to answer as one: these calls, in this order. `begin` tells it that they come."""

    compose: Compose
    calls: tuple[Call, ...]
    begin: MemOps


@dataclass(eq=False)
class Step:
    """What the executor knows of one captured step, until that is dropped.

    `place` finds a place for a call (the how manieth it is, the call, its rows, and the shapes of its results); `ring` makes a call
    whose number is this one, or its place in the round, counted from 1; `take` says what becomes of results.
    """

    place: Callable[[int, Call, Tensor, Shapes], Placed | None]
    ring: Callable[[int, Placed, int], None]
    take: Callable[[Tensor], Tensor]
    round: Round | None = None
    made: int = 0
    numbers: list[int] = field(default_factory=list)  # registered for it alone
    segments: dict[int, tuple[int, DeviceMemory]] = field(default_factory=dict)  # its memory, by addresses
    results: list[tuple[int, int]] = field(default_factory=list)  # what the executor writes there: addresses and bytes

    @property
    def complete(self) -> bool:
        """Whether what was captured is what was to be."""
        return self.made != OTHER and (self.round is None or self.made == len(self.round.calls))

    def call(self, call: Call, x: Tensor, shapes: Shapes, stream: int) -> list[Tensor] | None:
        """Its results, if it is one that was expected."""
        placed = self.place(self.made, call, x, shapes) if self._expects(call) else None
        if placed is None:
            self.made = OTHER
            return None
        if self.round and not self.made:
            self.round.begin.enqueue(stream)
        self.made += 1
        self.ring(self.made if self.round else placed.number, placed, stream)
        return [self.take(result) for result in placed.results]

    def _expects(self, call: Call) -> bool:
        if self.round is None:
            return self.made != OTHER
        return 0 <= self.made < len(self.round.calls) and self.round.calls[self.made] == call
