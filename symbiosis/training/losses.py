"""Losses over the log probabilities of tokens, as Tinker and TRL have them. Each is a sum over the tokens of a sequence."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from symbiosis.errors import ConfigError
from symbiosis.text import shown
from symbiosis.training.datum import Datum

LETTERS = 80  # of a name, in an error that is kept with its run
Custom = Callable[[list[Tensor], list[Datum]], Tensor]
LOSSES: dict[str, dict[str, float]] = {  # and what may be chosen of each
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
}


def check_loss(kind: str, data: list[Datum], config: Mapping[str, float]) -> None:
    """Refuse a loss that there is not, or data that lack what it needs."""
    if kind not in LOSSES:
        raise ConfigError(
            f"the losses are {', '.join(LOSSES)}, or a function of one's own; not {shown(kind, LETTERS)!r}"
        )
    if unknown := config.keys() - LOSSES[kind].keys():
        known = ", ".join(LOSSES[kind]) or "nothing"
        raise ConfigError(f"{kind} has no {shown(min(unknown), LETTERS)}: {known} can be chosen")
    for name, number in config.items():
        if not isinstance(number, int | float) or not abs(number) < float("inf"):
            raise ConfigError(f"{name} is a number, not {number!r}")
    if kind == "cross_entropy":
        return
    for datum in data:
        if datum.logprobs is None or datum.advantages is None:
            raise ConfigError(f"{kind} needs logprobs and advantages of each Datum")
        if datum.targets.dim() == 2:
            raise ConfigError(f"{kind} has one target for each token: targets of two dimensions are for cross_entropy")


def loss_of(kind: str, logprobs: Tensor, datum: Datum, config: Mapping[str, float]) -> Tensor:
    """Return the loss of a sequence, given the log probabilities that the model gives its targets.

    >>> datum = Datum([1, 2], targets=[2, 3], weights=[1.0, 0.5])
    >>> float(loss_of("cross_entropy", torch.tensor([-1.0, -2.0]), datum, {}))
    2.0
    """
    weights = 1.0 if datum.weights is None else datum.weights.to(logprobs.device)
    if kind == "cross_entropy":
        return -(weights * logprobs).sum()
    assert datum.logprobs is not None and datum.advantages is not None
    old, advantages = datum.logprobs.to(logprobs.device), datum.advantages.to(logprobs.device)
    chosen = {**LOSSES[kind], **config}
    each = _EACH[kind](logprobs, old, advantages, weights, chosen)
    return (weights * each).sum()


def slopes(kind: str, logprobs: Tensor, datum: Datum, config: Mapping[str, float]) -> tuple[float, Tensor]:
    """Return the loss of a sequence, and its derivatives by the log probabilities: all that the model's backward pass needs of it."""
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        loss = loss_of(kind, leaf, datum, config)
        (slope,) = torch.autograd.grad(loss, leaf)
    return float(loss.detach()), slope


def slopes_of_function(function: Custom, logprobs: list[Tensor], data: list[Datum]) -> tuple[float, list[Tensor]]:
    """Return the loss and these derivatives of a function of all sequences' log probabilities."""
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in logprobs]
        loss = function(leaves, data)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ConfigError("a loss of one's own returns one number, made of the log probabilities that it is given")
        found = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
    return float(loss.detach()), [
        torch.zeros_like(leaf) if d is None else d for leaf, d in zip(leaves, found, strict=True)
    ]


def _importance_sampling(
    now: Tensor, old: Tensor, advantages: Tensor, weights: Any, chosen: Mapping[str, float]
) -> Tensor:
    return -torch.exp(now - old) * advantages


def _ppo(now: Tensor, old: Tensor, advantages: Tensor, weights: Any, chosen: Mapping[str, float]) -> Tensor:
    return _clipped(torch.exp(now - old), advantages, chosen)


def _cispo(now: Tensor, old: Tensor, advantages: Tensor, weights: Any, chosen: Mapping[str, float]) -> Tensor:
    ratio = torch.exp(now - old).clamp(chosen["clip_low_threshold"], chosen["clip_high_threshold"])
    return -ratio.detach() * now * advantages


def _dro(now: Tensor, old: Tensor, advantages: Tensor, weights: Any, chosen: Mapping[str, float]) -> Tensor:
    return -(now * advantages - 0.5 * chosen["beta"] * (now - old) ** 2)


def _gspo(now: Tensor, old: Tensor, advantages: Tensor, weights: Any, chosen: Mapping[str, float]) -> Tensor:
    counted = torch.ones_like(now) * (weights != 0)
    ratio = torch.exp(((now - old) * counted).sum() / counted.sum().clamp(min=1))  # of the whole sequence
    return _clipped(ratio.expand_as(now), advantages, chosen)


def _clipped(ratio: Tensor, advantages: Tensor, chosen: Mapping[str, float]) -> Tensor:
    within = ratio.clamp(chosen["clip_low_threshold"], chosen["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, within * advantages)


_EACH = {
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
}
