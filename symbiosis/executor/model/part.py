"""Loads a part of a checkpoint, or packed weights: `from_pretrained`, except that what other ranks hold is neither read nor given memory, and
that whole weights do not lie beside packed ones.

It stands on private names of transformers, tried with 5.24: `_load_pretrained_model` and `_finalize_model_loading` of a model's class,
which take a map of devices, and `[...]` and `.to` of the tensors in a lazy state dict.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import core_model_loading

from symbiosis.base.memory import give_back
from symbiosis.executor.model.packed_checkpoint import QuantisedFiles
from symbiosis.executor.model.packed_tensor import PackedTensor
from symbiosis.executor.model.store import served_entries
from symbiosis.kernels.packed import PackedWeight
from symbiosis.kernels.packing import pack, packs
from symbiosis.transport.fingerprint import digest
from symbiosis.transport.release import apart
from symbiosis.transport.tensors import CPU

ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"  # has transformers read a tensor when it is its turn
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


class UnreadPacked:
    """A packed weight, which becomes a tensor when it goes to a device."""

    def __init__(self, shape: tuple[int, ...], make: Callable[[], PackedWeight]) -> None:
        self._shape, self._make = shape, make

    def __getitem__(self, whole: Any) -> "UnreadPacked":
        return self

    def to(self, device: Any = CPU, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight as a tensor of this dtype, or on the meta device its shape."""
        if torch.device(device) == META:
            return torch.empty(self._shape, dtype=dtype, device=META)
        packed = self._make()
        return PackedTensor(
            packed if packed.device == device else packed.with_parts(lambda part: part.to(device)), dtype
        )


def load_packed(
    kind: Any,
    checkpoint: Any,
    device: str,
    elsewhere: Collection[str],
    name: str,
    told: Mapping[str, Any],
    **words: Any,
) -> tuple[nn.Module, dict[str, Any]]:
    """Load a quantised model of the class `kind`, whose packed weights are `PackedTensor`s. What is `elsewhere` stays on the meta device. Return
    what `from_pretrained` tells of it, too."""
    places = _places(device, elsewhere)

    def load(model: nn.Module, state: Any, files: list[str], how: Any, *more: Any) -> Any:
        with ExitStack() as opened:
            found = QuantisedFiles(name, list(map(Path, files)), told, opened, is_part=bool(elsewhere))
            lazy: dict[str, Any] = {key: UnreadTensor(found.lazy(key)) for key in found.others}
            lazy |= {key: UnreadPacked(*packed) for key, packed in found.packed.items()}
            return kind._load_pretrained_model(model, lazy, files, replace(how, device_map=places), *more)

    return _from_pretrained(kind, checkpoint, load, places, words)


def load_packing(
    kind: Any,
    checkpoint: Any,
    device: str,
    elsewhere: Collection[str],
    quantize: str,
    serve: Sequence[str],
    **words: Any,
) -> tuple[nn.Module, dict[str, Any]]:
    """Load a model of floats of the class `kind`, and pack each weight that is served when it is read. What is `elsewhere` stays on the meta
    device. Return what `from_pretrained` tells of it, too."""
    places = _places(device, elsewhere)

    def load(model: nn.Module, state: Any, files: list[str], how: Any, *more: Any) -> Any:
        served = {entry.key for entry in served_entries(model, serve) if packs(tuple(entry.tensor.shape), quantize)}

        def packed(name: str, value: Tensor) -> Tensor:
            if name not in served or value.is_meta:
                return value
            weight: PackedWeight = replace(pack(value, quantize), source=digest(value))
            if value.device == CPU:
                weight = weight.with_parts(apart)
                give_back()
            return PackedTensor(weight, value.dtype)

        with ExitStack() as opened, _each_weight(packed):
            lazy = _unread(files, opened)
            return kind._load_pretrained_model(model, lazy, files, replace(how, device_map=places), *more)

    return _from_pretrained(kind, checkpoint, load, places, words)


def _places(device: str, elsewhere: Collection[str]) -> dict[str, str]:
    """Return a map of devices for transformers."""
    return {"": device, **dict.fromkeys(elsewhere, "meta")}


def _unread(files: Sequence[str], opened: ExitStack) -> dict[str, UnreadTensor]:
    """Return the tensors of files by name, which are open as long as `opened`."""
    found: dict[str, UnreadTensor] = {}
    for file in files:
        held = opened.enter_context(safe_open(file, framework="pt"))
        found |= {name: UnreadTensor(held.get_slice(name)) for name in held.keys()}  # noqa: SIM118  (no mapping)
    return found


@contextmanager
def _each_weight(change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Have transformers' loader read one weight after another, and put what `change` makes of each into the model, in the block."""
    put, before = core_model_loading.set_param_for_module, os.environ.get(ONE_BY_ONE)

    def put_changed(model: Any, name: str, value: Any, *rest: Any, **words: Any) -> None:
        put(model, name, change(name, value), *rest, **words)

    core_model_loading.set_param_for_module = put_changed  # type: ignore[assignment]
    os.environ[ONE_BY_ONE] = "1"
    try:
        yield
    finally:
        core_model_loading.set_param_for_module = put
        os.environ.pop(ONE_BY_ONE)
        if before is not None:
            os.environ[ONE_BY_ONE] = before


def load_part(
    kind: Any, checkpoint: Any, device: str, elsewhere: Collection[str], **words: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """Load a model of the class `kind`, in which the parameters and buffers named `elsewhere` stay on the meta device. Return what
    `from_pretrained` tells of it, too."""
    places = _places(device, elsewhere)

    def load(model: nn.Module, state: Any, files: list[str], how: Any, *more: Any) -> Any:
        with ExitStack() as opened:
            lazy = _unread(files, opened)
            return kind._load_pretrained_model(model, lazy, files, replace(how, device_map=places), *more)

    return _from_pretrained(kind, checkpoint, load, places, words)


def _from_pretrained(
    kind: Any, checkpoint: Any, load: Callable[..., Any], places: dict[str, str], words: dict[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    """Call `from_pretrained` with another way to load the weights, and a map of devices."""

    class OfRank(kind):  # type: ignore[misc]
        _load_pretrained_model = staticmethod(load)

        @staticmethod
        def _finalize_model_loading(model: nn.Module, how: Any, info: Any) -> Any:
            return kind._finalize_model_loading(model, replace(how, device_map=places), info)

    OfRank.__name__, OfRank.__qualname__, OfRank.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    model, told = OfRank.from_pretrained(checkpoint, use_safetensors=True, output_loading_info=True, **words)
    model.__class__ = kind
    return model, told
