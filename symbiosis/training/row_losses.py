"""The losses that need nothing but a token's own row, for all rows of a pass at once: what a GPU computes between the two halves of a pass."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from symbiosis.training.datum import Datum
from symbiosis.training.losses import LOSSES

KINDS = {name: number for number, name in enumerate(("cross_entropy", "importance_sampling", "ppo", "cispo", "dro"))}
NUMBERS = 6  # of a row: weight, the sampler's log probability, advantage, low, high, beta


def row_numbers(kind: str, data: Sequence[Datum], config: Mapping[str, float], backward: bool) -> tuple[Tensor, Tensor]:
    """Return what the loss of each row needs: its kind [rows], and numbers [NUMBERS, rows]. Without a backward pass its slope is zero."""
    rows = sum(map(len, data))
    chosen = {**LOSSES[kind], **config}
    numbers = torch.zeros(NUMBERS, rows)
    parts = [(each.weights, each.logprobs, each.advantages) for each in data]
    for at, otherwise in ((0, 1.0), (1, 0.0), (2, 0.0)):
        given = [part[at] for part in parts]
        numbers[at] = torch.cat([torch.full((len(d),), otherwise) if g is None else g for d, g in zip(data, given, strict=True)])  # fmt: skip
    if not backward:
        numbers[0] = 0.0
    numbers[3], numbers[4] = chosen.get("clip_low_threshold", 0.0), chosen.get("clip_high_threshold", 0.0)
    numbers[5] = chosen.get("beta", 0.0)
    return torch.full((rows,), KINDS[kind], dtype=torch.int32), numbers


def losses_and_slopes(logprobs: Tensor, kinds: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, and its derivative by the row's log probability.

    >>> kinds, numbers = row_numbers("cross_entropy", [Datum([1, 2], [2, 3], weights=[1.0, 0.5])], {}, backward=True)
    >>> [each.tolist() for each in losses_and_slopes(torch.tensor([-1.0, -2.0]), kinds, numbers)]
    [[1.0, 1.0], [-1.0, -0.5]]
    """
    weight, old, advantage, low, high, beta = numbers
    ratio = torch.exp(logprobs - old)
    clipped = ratio.clamp(low, high)
    free, bound = ratio * advantage, clipped * advantage
    off = logprobs - old
    each = torch.stack(
        [-logprobs, -free, -torch.minimum(free, bound), -clipped * logprobs * advantage, 0.5 * beta * off**2 - logprobs * advantage]
    )  # fmt: skip
    slope = torch.stack(
        [
            -torch.ones_like(free),
            -free,
            -free * (free <= bound),
            -bound,
            beta * off - advantage,
        ]  # past the clip ppo is flat
    )
    which = kinds.long()[None]
    # a weight of zero leaves no trace, even where a ratio is beyond all numbers
    return tuple(torch.where(weight == 0, 0.0, weight * all_kinds.gather(0, which)[0]) for all_kinds in (each, slope))  # type: ignore[return-value]
