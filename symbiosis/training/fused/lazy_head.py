"""The head of a causal language model while there are labels: it gives logits that nobody has made yet."""

from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.client.layers.virt_layer import VirtLinear
from symbiosis.training.fused.forward_pass import labelled
from symbiosis.training.fused.lazy_logits import LazyLogits, Whole
from symbiosis.training.fused.module_forward import ModuleForward


class HeadForward(ModuleForward):
    """The `forward` of a head."""

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if labelled.head is not self.module or args or kwargs or not is_frozen_product(self.module):
            return self.own(hidden, *args, **kwargs)  # type: ignore[no-any-return]
        labelled.head = None
        width: Any = self.module.out_features
        like = torch.empty(*hidden.shape[:-1], width, dtype=_dtype_of_product(hidden), device="meta")
        return LazyLogits.of(Whole(self.own, hidden), hidden, like)


def is_frozen_product(head: nn.Module) -> bool:
    """Whether a head does nothing but multiply by a matrix that is not trained, and is there whenever a piece needs it."""
    if type(head) not in (nn.Linear, VirtLinear) or head._forward_pre_hooks or head._forward_hooks:
        return False
    return not any(parameter.requires_grad for parameter in head._parameters.values() if parameter is not None)


def _dtype_of_product(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype
