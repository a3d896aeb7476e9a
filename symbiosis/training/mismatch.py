"""How far a sampler's log probabilities are from the trainer's, on the tokens that were drawn."""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from symbiosis.training.datum import Datum


class Mismatch(msgspec.Struct, frozen=True):
    """The sampler's log probabilities less the trainer's, over the tokens that were drawn. The means are the cookbook's two estimates of their KL
    divergence.

    Args:
        kl_v1: The mean difference. Differences of unlike sign cancel out in it.
        kl_v2: Half the mean of its square.
        largest: The largest difference, without its sign.
        tokens: How many were drawn.
    """

    kl_v1: float
    kl_v2: float
    largest: float
    tokens: int

    @property
    def is_zero(self) -> bool:
        """Whether sampler and trainer agree on every token, to the bit."""
        return self.largest == 0.0


def mismatch(trained: Sequence[Tensor], data: Sequence[Datum]) -> Mismatch | None:
    """Return how far the sampler is from the trainer; None where the sampler's log probabilities are not told, or no token was drawn. Tokens that
    were not drawn, such as those of a prompt, have neither a log probability nor an advantage: both are 0.

    >>> drawn = Datum([1, 2, 3], [2, 3, 4], logprobs=[0.0, -1.0, -2.0], advantages=[0.0, 1.0, 1.0])
    >>> mismatch([torch.tensor([-7.0, -1.5, -1.5])], [drawn])
    Mismatch(kl_v1=0.0, kl_v2=0.125, largest=0.5, tokens=2)
    >>> mismatch([torch.tensor([-7.0, -1.0, -2.0])], [drawn]).is_zero
    True
    """
    apart = [
        (datum.logprobs.double() - found.double())[_drawn(datum)]
        for found, datum in zip(trained, data, strict=True)
        if datum.logprobs is not None
    ]
    flat = torch.cat(apart) if apart else torch.empty(0)
    if not len(flat):
        return None
    mean, square, largest = flat.mean(), 0.5 * flat.square().mean(), flat.abs().max()
    return Mismatch(float(mean), float(square), float(largest), len(flat))


def _drawn(datum: Datum) -> Tensor:
    assert datum.logprobs is not None
    drawn = datum.logprobs != 0
    return drawn if datum.advantages is None else drawn | (datum.advantages != 0)
