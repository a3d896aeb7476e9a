"""Loads a rank's part of a checkpoint: `from_pretrained`, except that what other ranks hold is neither read nor given memory.

It stands on private names of transformers, tried with 5.24: `_load_pretrained_model` and `_finalize_model_loading` of a model's class,
which take a map of devices, and `[...]` and `.to` of the tensors in a lazy state dict.
"""

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from symbiosis.transport.tensors import CPU

META = torch.device("meta")


class UnreadTensor:
    """A tensor in a file, which is read when it goes to a device that has memory."""

    def __init__(self, lazy: Any) -> None:
        self._lazy = lazy

    def __getitem__(self, whole: Any) -> "UnreadTensor":
        return self

    def to(self, device: Any = CPU, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor, or on the meta device its shape."""
        if torch.device(device) == META:
            return torch.empty(self._lazy.get_shape(), dtype=dtype, device=META)
        read: Tensor = self._lazy[...]
        return read.to(device=device, dtype=dtype)


def load_part(
    kind: Any, checkpoint: Any, device: str, elsewhere: Collection[str], **words: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """Load a model of the class `kind`, in which the parameters and buffers named `elsewhere` stay on the meta device. Return what
    `from_pretrained` tells of it, too."""
    places = {"": device, **dict.fromkeys(elsewhere, "meta")}

    class OfRank(kind):  # type: ignore[misc]
        @staticmethod
        def _load_pretrained_model(model: nn.Module, state: Any, files: list[str], how: Any, *more: Any) -> Any:
            with ExitStack() as opened:
                lazy: dict[str, UnreadTensor] = {}
                for file in files:
                    held = opened.enter_context(safe_open(file, framework="pt"))
                    lazy |= {name: UnreadTensor(held.get_slice(name)) for name in held.keys()}  # noqa: SIM118  (no mapping)
                return kind._load_pretrained_model(model, lazy, files, replace(how, device_map=places), *more)

        @staticmethod
        def _finalize_model_loading(model: nn.Module, how: Any, info: Any) -> Any:
            return kind._finalize_model_loading(model, replace(how, device_map=places), info)

    OfRank.__name__, OfRank.__qualname__, OfRank.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    model, told = OfRank.from_pretrained(checkpoint, use_safetensors=True, output_loading_info=True, **words)
    model.__class__ = kind
    return model, told
