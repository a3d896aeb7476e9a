"""A forward pass of a whole causal language model, as its parts see it."""

import threading
from typing import Any

import torch
from torch import nn

from symbiosis.training.fused.lora_group import LoraGroup, operands_in
from symbiosis.training.fused.module_forward import ModuleForward, is_watched


class _Labelled(threading.local):
    """The head whose logits are wanted for a loss only, in this thread."""

    head: nn.Module | None = None


labelled = _Labelled()


class ModelForward(ModuleForward):
    """The `forward` of a causal language model."""

    def __init__(self, module: nn.Module, head: nn.Module | None, groups: list[LoraGroup]) -> None:
        super().__init__(module)
        self.head, self.groups = head, groups
        self._may_skip_logits = head is not None and "skip_logits" in self.__signature__.parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_watched() or torch.is_inference_mode_enabled():
            return self.own(*args, **kwargs)
        if self._may_skip_logits:  # Liger's, whose own loss waits for the GPU, which a captured step cannot
            kwargs.setdefault("skip_logits", False)
        before, labelled.head = labelled.head, None if kwargs.get("labels") is None else self.head
        try:
            with operands_in(self.groups):
                return self.own(*args, **kwargs)
        finally:
            labelled.head = before
