"""What a run is trained with: sequences, the tokens wanted at their positions, and what the loss needs of each."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from symbiosis.errors import ConfigError

IGNORED = -100  # transformers' label of a token without loss


@dataclass(frozen=True, eq=False)
class Datum:
    """One sequence.

    Args:
        tokens: What the model reads, [length].
        targets: The token wanted after each, [length]; or several, [length, k].
        weights: Of each target in the loss; default: 1.
        logprobs: Of the targets, as whoever sampled them had it; for importance_sampling, ppo, cispo, dro and gspo.
        advantages: Of the targets; for the same.

    Each may be a tensor, a list or an array.

    >>> len(Datum([5, 6, 7], targets=[6, 7, 8], weights=[0.0, 1.0, 1.0]))
    3
    """

    tokens: Tensor
    targets: Tensor
    weights: Tensor | None = None
    logprobs: Tensor | None = None
    advantages: Tensor | None = None
    ahead: int = field(
        default=0, init=False
    )  # 1: the first target is to follow an adapter's prompt, so each is one token earlier

    def __post_init__(self) -> None:
        self._set("tokens", _whole_numbers("tokens", self.tokens))
        self._set("targets", _whole_numbers("targets", self.targets))
        if self.tokens.dim() != 1 or not len(self):
            raise ConfigError(f"tokens of a Datum are one sequence, and these have the shape {_shape(self.tokens)}")
        if self.targets.dim() not in (1, 2) or len(self.targets) != len(self) or not self.targets.numel():
            raise ConfigError(
                f"{len(self)} tokens need {len(self)} targets, or rows of targets: these are {_shape(self.targets)}"
            )
        for name in ("weights", "logprobs", "advantages"):
            if (given := getattr(self, name)) is not None:
                self._set(name, _numbers(name, given, self.targets))

    @property
    def counts(self) -> bool:
        """Whether any of its targets has a loss."""
        return self.weights is None or bool(self.weights.any())

    def moved(self, ahead: int) -> "Datum":
        """Have each target follow the token before the one that it is given with."""
        object.__setattr__(self, "ahead", ahead)
        return self

    def __len__(self) -> int:
        return len(self.tokens)

    def _set(self, name: str, value: Tensor) -> None:
        object.__setattr__(self, name, value)


def sequences(batch: Any, ahead: int = 0) -> list[Datum]:
    """Return the sequences of a batch: a `Datum`, several, or what transformers' models are called with. The loss of those is the mean over all
    labels, as it is there; with `ahead` the first one counts, since an adapter has a prompt in front of it.

    >>> [datum] = sequences({"input_ids": [[5, 6, 7]], "labels": [[-100, 6, 7]]})
    >>> datum.targets.tolist(), datum.weights.tolist()
    ([6, 7, 0], [0.5, 0.5, 0.0])
    """
    if isinstance(batch, Datum):
        return [batch]
    if isinstance(batch, Mapping):
        return _labelled(batch, ahead)
    if isinstance(batch, str | bytes | Tensor) or not isinstance(batch, Iterable):
        raise _no_batch(batch)
    data: list[Datum] = []
    for one in batch:
        if not isinstance(one, Datum | Mapping):
            raise _no_batch(one)
        data += sequences(one, ahead)
    if not data:
        raise ConfigError("the batch is empty")
    return data


def _no_batch(given: Any) -> ConfigError:
    return ConfigError(
        f"a batch is a Datum, a list of them, or a dict with input_ids and labels, and this has a {type(given).__name__}"
    )


def check_tokens(data: Iterable[Datum], vocabulary: int, longest: int) -> None:
    """Refuse what the model cannot read."""
    for datum in data:
        if len(datum) > longest:
            raise ConfigError(f"a sequence has {len(datum)} tokens, and this model reads {longest}: cut it")
        for name, tokens in (("tokens", datum.tokens), ("targets", datum.targets)):
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= vocabulary:
                wrong = low if low < 0 else high
                raise ConfigError(f"{name} are numbers from 0 to {vocabulary - 1}, and one is {wrong}")


def _labelled(batch: Mapping[str, Any], ahead: int) -> list[Datum]:
    if missing := {"input_ids", "labels"} - batch.keys():
        raise ConfigError(f"a batch needs {' and '.join(sorted(missing))}, as transformers' models do")
    if more := batch.keys() - {"input_ids", "labels", "attention_mask"}:
        raise ConfigError(f"a batch has input_ids, labels and attention_mask, and nothing is known of {sorted(more)}")
    ids, labels = (_whole_numbers(name, batch[name]) for name in ("input_ids", "labels"))
    mask = _whole_numbers("attention_mask", batch.get("attention_mask", torch.ones_like(ids)))
    if ids.dim() != 2 or not ids.numel() or ids.shape != labels.shape or ids.shape != mask.shape:
        shapes = ", ".join(_shape(each) for each in (ids, labels, mask))
        raise ConfigError(f"input_ids, labels and attention_mask are matrices of one shape, and these are {shapes}")
    counted = int((labels[:, 1 - ahead :] != IGNORED).sum())
    return [_datum(*row, counted, ahead) for row in zip(ids, labels, mask.bool(), strict=True)]


def _datum(ids: Tensor, labels: Tensor, mask: Tensor, counted: int, ahead: int) -> Datum:
    if not mask.any():
        raise ConfigError("a row of the batch is masked as a whole: leave it out")
    first, last = int(mask.nonzero()[0]), int(mask.nonzero()[-1]) + 1
    if not mask[first:last].all():
        raise ConfigError("attention_mask has a hole within a row: only tokens at its ends can be masked")
    ids, labels = ids[first:last], labels[first:last]
    wanted = labels if ahead else torch.cat([labels[1:], labels.new_tensor([IGNORED])])
    counts = wanted != IGNORED
    return Datum(ids, wanted.where(counts, 0), counts.float() / max(counted, 1)).moved(ahead)


def _whole_numbers(name: str, given: Any) -> Tensor:
    tensor = _tensor(name, given)
    if tensor.is_floating_point() or tensor.is_complex():
        raise ConfigError(f"{name} are whole numbers, and these are {tensor.dtype}")
    return tensor.long()


def _numbers(name: str, given: Any, targets: Tensor) -> Tensor:
    tensor = _tensor(name, given).float()
    if tensor.shape != targets.shape:
        raise ConfigError(f"{name} has the shape {_shape(tensor)}, and there are targets of {_shape(targets)}")
    if not tensor.isfinite().all():
        raise ConfigError(f"{name} has numbers that are infinite or not numbers")
    return tensor


def _tensor(name: str, given: Any) -> Tensor:
    try:
        return torch.as_tensor(given).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name} is no list of numbers: {error}") from None


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a single number"
