"""The ways in which a model's attention may differ from the usual, for tests of kernels that compute it."""

import torch

from symbiosis.kernels.paged_attention import How


def kinds(heads: int, steepest: float) -> dict[str, How]:
    """Return a `How` of each kind, for so many heads of queries. `steepest` scales the scores of the one that is all of them at once."""
    sinks = torch.linspace(-2, 2, heads)
    return {
        "plain": How(0.3),
        "window": How(0.3, window=5),
        "window beyond": How(0.3, window=200),
        "soft cap": How(0.3, softcap=1.5),
        "sinks": How(0.3, sinks=sinks),
        "all": How(steepest, 20, 30.0, sinks),
    }
