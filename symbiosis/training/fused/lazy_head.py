"""The forward passes of a causal language model and of its head while there are labels: the head gives logits that nobody has made yet."""

import threading
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.client.layers.virt_layer import VirtLinear
from symbiosis.training.fused.lazy_logits import LazyLogits, Whole
from symbiosis.training.fused.module_forward import ModuleForward, is_watched


class _Labelled(threading.local):
    """The head whose logits are wanted for a loss, in this thread."""

    head: nn.Module | None = None


_labelled = _Labelled()


class ModelForward(ModuleForward):
    """The `forward` of a causal language model."""

    def __init__(self, module: nn.Module, head: nn.Module) -> None:
        super().__init__(module)
        self.head = head

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("labels") is None or is_watched() or torch.is_inference_mode_enabled():
            return self.own(*args, **kwargs)
        before, _labelled.head = _labelled.head, self.head
        try:
            return self.own(*args, **kwargs)
        finally:
            _labelled.head = before


class HeadForward(ModuleForward):
    """The `forward` of its head."""

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if _labelled.head is not self.module or args or kwargs or not is_frozen_product(self.module):
            return self.own(hidden, *args, **kwargs)  # type: ignore[no-any-return]
        _labelled.head = None
        width: Any = self.module.out_features
        like = torch.empty(*hidden.shape[:-1], width, dtype=_dtype_of_product(hidden), device="meta")
        return LazyLogits.of(Whole(self.own, hidden), hidden, like)


def is_frozen_product(head: nn.Module) -> bool:
    """Whether a head does nothing but multiply by a matrix that is not trained."""
    if type(head) not in (nn.Linear, VirtLinear):
        return False
    return not any(parameter.requires_grad for parameter in head._parameters.values() if parameter is not None)


def _dtype_of_product(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype
