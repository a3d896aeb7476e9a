"""Reads an adapter's files, as PEFT saves them. They are read as data only: nothing in them is ever run."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from symbiosis.errors import AdapterError
from symbiosis.text import shown

CONFIG, TENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MOST_CONFIG_BYTES, MOST_TENSOR_BYTES = 1 << 20, 1 << 30
HOW_TO_CONVERT = "save it again with PEFT's save_pretrained, which writes safetensors"


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter's configuration and its tensors, under the names that they have in PEFT's files."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def parse(cls, config: bytes, tensors: bytes) -> "AdapterWeights":
        """Read an adapter from the contents of its two files."""
        return cls(_config(config), _tensors(tensors))


def read_folder(folder: Path) -> AdapterWeights:
    """Read an adapter that PEFT's `save_pretrained` wrote."""
    if not folder.is_dir():
        raise AdapterError(f"{folder.name!r} is not a folder: an adapter is what PEFT's save_pretrained writes")
    config = _bytes(folder, CONFIG, MOST_CONFIG_BYTES)
    if not (folder / TENSORS).exists() and (folder / PICKLE).exists():
        raise AdapterError(f"{folder.name!r} has {PICKLE}, a pickle, which could run anything: {HOW_TO_CONVERT}")
    return AdapterWeights.parse(config, _bytes(folder, TENSORS, MOST_TENSOR_BYTES))


def state_of(folder: Path) -> tuple[int, ...] | None:
    """Return a tuple that differs whenever the adapter there has changed, or None if there is none."""
    try:
        states = [(folder / name).stat() for name in (CONFIG, TENSORS)]
    except OSError:
        return None
    return tuple(number for state in states for number in (state.st_mtime_ns, state.st_size, state.st_ino))


def _bytes(folder: Path, name: str, most: int) -> bytes:
    file = folder / name
    if not file.is_file():
        raise AdapterError(f"{folder.name!r} has no {name}: an adapter is what PEFT's save_pretrained writes")
    if not file.resolve().is_relative_to(folder.resolve()):
        raise AdapterError(f"{file.name} is a link to a file outside of its folder: put the file itself there")
    if file.stat().st_size > most:
        raise AdapterError(f"{name} has more than {most} bytes, which is more than an adapter's may have")
    return file.read_bytes()


def check_finite(values: Iterable[tuple[str, Tensor]], why: str) -> None:
    for name, tensor in values:
        if tensor.is_floating_point() and tensor.numel() and not _is_finite(tensor):
            raise AdapterError(f"{shown(name)} has values that are infinite or not numbers: {why}")


def _is_finite(tensor: Tensor) -> bool:
    """Look at the least and the largest number: forty times as fast as to look at each. What is not a number is either."""
    least, largest = torch.aminmax(tensor if tensor.itemsize > 1 else tensor.float())
    return bool(torch.isfinite(least) and torch.isfinite(largest))


def _config(data: bytes) -> dict[str, Any]:
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG} is not JSON ({shown(str(error))}): save the adapter again") from None
    if not isinstance(config, dict) or not isinstance(config.get("peft_type"), str):
        raise AdapterError(f"{CONFIG} has no peft_type: it is not of PEFT")
    return config


def _tensors(data: bytes) -> dict[str, Tensor]:
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise AdapterError(f"{TENSORS} cannot be read ({shown(str(error))}): was it cut off? Copy it again") from None
    if not tensors:
        raise AdapterError(f"{TENSORS} holds no tensors: gather the adapter's weights before they are saved")
    check_finite(tensors.items(), "its training has diverged")
    return tensors
