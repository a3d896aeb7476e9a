"""`local://` for clients on a GPU: the calls of a captured step, which the executor's GPU answers without a CPU for each."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from symbiosis.protocol import Call, Compose
from symbiosis.transport.cuda_driver import MemOps
from symbiosis.transport.tensors import Shapes, cut

if TYPE_CHECKING:
    from symbiosis.transport.cuda_client import Prepared

OTHER = -1  # instead of how many calls were made: they were not those of the round


class Round:
    """The calls that a step made when it ran last, to be captured one after another."""

    def __init__(
        self,
        compose: Compose,
        prepared: "list[Prepared]",
        apart: bool,
        begin: MemOps,
        make: Callable[[int, Tensor, Tensor], None],
    ) -> None:
        """`apart`: each call has a place of its own, where nobody writes until a graph runs again. `begin` tells the executor; `make` the
        call of a number, counted from 1, with these rows, which go to that place."""
        self.compose, self._prepared, self._apart, self._begin, self._make = compose, prepared, apart, begin, make
        self.made = 0

    @property
    def complete(self) -> bool:
        return self.made == len(self._prepared)

    def call(self, call: Call, x: Tensor, shapes: Shapes, stream: int) -> list[Tensor] | None:
        """What becomes of it, if it is the next one."""
        if not 0 <= self.made < len(self._prepared) or self._prepared[self.made].call != call:
            self.made = OTHER
            return None
        if not self.made:
            self._begin.enqueue(stream)
        prepared = self._prepared[self.made]
        self.made += 1
        self._make(self.made, x.reshape(call.shape), prepared.payload[0])
        outs = cut(prepared.out, shapes)
        return [out.data if self._apart else out.clone() for out in outs]
