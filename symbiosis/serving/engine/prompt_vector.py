"""The vector of a prompt, made of its last hidden states as they are computed."""

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from symbiosis.errors import ConfigError
from symbiosis.serving.lora.classification import ClassificationHead
from symbiosis.serving.request import Pooling
from symbiosis.serving.scheduler.scheduler_output import ScheduledRequest


class PromptVector:
    """What is known so far of one prompt's vector. Only the engine's thread touches it.

    Args:
        head: That of the adapter, if the vector is made by it.
    """

    def __init__(self, pooling: Pooling, head: ClassificationHead | None = None) -> None:
        self._pooling, self._head = pooling, head
        self._sums: dict[int, Tensor] = {}  # of rows, by the position of the first: a step may be computed again

    def read(self, segment: ScheduledRequest, hidden_TH: Tensor) -> None:
        """Read the last hidden states of a segment's rows. An adapter's virtual tokens are no part of a mean."""
        if self._pooling.kind != "mean":
            self._sums = {0: hidden_TH[-1]}
            return
        if not segment.position:
            self._sums.clear()
        own = hidden_TH[max(0, segment.sequence.virtual - segment.position) :]
        self._sums[segment.position] = own.sum(dim=0) / len(segment.sequence.request.prompt)

    def packed(self) -> bytes:
        """Return the vector, all rows having been read, as float32. Raises `ConfigError` if it is no vector of numbers."""
        vector = torch.stack([*self._sums.values()]).sum(dim=0)
        if self._head is not None:
            vector = linear(vector, self._head.weight, self._head.bias)
        if self._pooling.activates:
            vector = normalize(vector, dim=0) if self._head is None else _probabilities(vector)
        if not vector.isfinite().all():
            raise ConfigError("the model's numbers are not finite")
        return vector.contiguous().numpy().tobytes()


def _probabilities(logits: Tensor) -> Tensor:
    return torch.sigmoid(logits) if len(logits) == 1 else logits.softmax(dim=0)
