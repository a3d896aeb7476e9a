"""What one run is to compute in a pass."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from symbiosis.training.datum import Datum
from symbiosis.training.run_adapter import RunAdapter


@dataclass(eq=False)
class RunWork:
    """What one run is to compute in a pass: sequences, and their loss; or the derivatives of a loss that is known already. `found` are the log
    probabilities of all targets, then."""

    adapter: RunAdapter
    data: list[Datum]
    kind: str = "cross_entropy"
    config: Mapping[str, float] = field(default_factory=dict)
    backward: bool = True
    given: list[Tensor] | None = None  # derivatives by the log probabilities
    whole: "RunWork | None" = None  # of which this is a part
    found: list[Tensor] = field(default_factory=list)
    loss: float = 0.0

    def part(self, first: int, end: int) -> "RunWork":
        """Return the work for some of the sequences."""
        given = None if self.given is None else self.given[first:end]
        return replace(self, data=self.data[first:end], given=given, whole=self, found=[], loss=0.0)
