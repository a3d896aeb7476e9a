"""Reads an adapter's files, as PEFT saves them. They are read as data only: nothing in them is ever run."""

import json
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from symbiosis.base.sizes import cells
from symbiosis.errors import AdapterError
from symbiosis.serving.lora.adapter import LARGE_CONFIG, LARGE_HEADER, MOST_CONFIG_PARTS, MOST_HEADER_BYTES, parts
from symbiosis.text import FEW_LETTERS, shown

PREFIX = "base_model.model."  # of the names of an adapter's tensors
METADATA = "adapter_config"  # of a file that is sent: the configuration, as JSON
CONFIG, TENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MOST_CONFIG_BYTES, MOST_TENSOR_BYTES = 1 << 20, 1 << 30
MOST_TENSORS = 1 << 16  # of a file, where nothing is known of the base
MOST_CELLS = 1 << 40  # of a tensor
PARTS_OF_A_TENSOR, FEW_OBJECTS = 12, 64  # of a header: its own, and those of the metadata
PIECE_BYTES = 4 << 20  # of a file that is read by several threads; what is less is not worth them
THREADS = min(8, len(os.sched_getaffinity(0)))
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
Data = bytes | bytearray | memoryview
Item = TypeVar("Item")
Result = TypeVar("Result")
NOT_SENT = "it is no safetensors file whose metadata has 'adapter_config', as JSON, or it was cut off: symbiosis.publish makes one"
HOW_TO_CONVERT = "save it again with PEFT's save_pretrained, which writes safetensors"


class LargeHeader(ValueError):
    """The header of a safetensors file is not parsed, because that could take long: others wait for it."""


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter's configuration and its tensors, under the names that they have in PEFT's files."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    contents: Tensor | None = None  # of the file of the tensors, which are views of it
    trained: torch.dtype | None = None  # of one that a program publishes: in which it is trained

    def place_of(self, tensor: Tensor) -> int | None:
        """Return where in the file a tensor lies, or None if it is no view of the file's contents."""
        if self.contents is None or not tensor.is_contiguous():
            return None
        at = tensor.data_ptr() - self.contents.data_ptr()
        return at if 0 <= at <= self.contents.nbytes - tensor.nbytes else None

    @classmethod
    def parse(cls, config: Data | None, contents: Data, most_tensors: int = MOST_TENSORS) -> "AdapterWeights":
        """Read an adapter from the contents of its two files, or of the one that `publish` sends, whose metadata has the configuration."""
        what = TENSORS if config is not None else "its file"
        try:
            tensors, metadata = parse_tensors(contents, most_tensors)
            told = metadata[METADATA].encode() if config is None else bytes(config)
        except LargeHeader as error:
            raise AdapterError(f"{what} has too many tensors, or too much beside them: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if config is None:
                raise AdapterError(f"{NOT_SENT} ({shown(str(error))})") from None
            raise AdapterError(f"{what} cannot be read ({shown(str(error))}): was it cut off? Copy it again") from None
        if not tensors:
            raise AdapterError(f"{what} holds no tensors: gather the adapter's weights before they are saved")
        return cls(parse_config(told), tensors)


def read_adapter(path: Path, most_bytes: int = MOST_TENSOR_BYTES, most_tensors: int = MOST_TENSORS) -> AdapterWeights:
    """Read an adapter from a folder, as PEFT's `save_pretrained` writes it, or from one file, as `publish` sends it.

    Args:
        most_bytes: Of the file of its tensors.
        most_tensors: In that file.
    """
    if path.is_file():
        config, contents = None, _read(path, most_bytes)
    else:
        if not path.is_dir():
            raise AdapterError(f"{path.name!r} is not a folder: an adapter is what PEFT's save_pretrained writes")
        if not (path / TENSORS).exists() and (path / PICKLE).exists():
            raise AdapterError(f"{path.name!r} has {PICKLE}, a pickle, which could run anything: {HOW_TO_CONVERT}")
        for name in (CONFIG, TENSORS):
            if not (path / name).is_file():
                raise AdapterError(f"{path.name!r} has no {name}: an adapter is what PEFT's save_pretrained writes")
            if not (path / name).resolve().is_relative_to(path.resolve()):
                raise AdapterError(f"{name} is a link to a file outside of its folder: put the file itself there")
        config, contents = _read(path / CONFIG, MOST_CONFIG_BYTES), _read(path / TENSORS, most_bytes)
    weights = AdapterWeights.parse(config, contents, most_tensors)
    return replace(weights, contents=torch.frombuffer(contents, dtype=torch.uint8))


def state_of(folder: Path) -> tuple[int, ...] | None:
    """Return a tuple that differs whenever the adapter there has changed, also by who puts its mtime back, or None if there is none."""
    try:
        states = [(folder / name).stat() for name in (CONFIG, TENSORS)]
    except OSError:
        return None
    return tuple(
        number for state in states for number in (state.st_mtime_ns, state.st_ctime_ns, state.st_size, state.st_ino)
    )


def _read(file: Path, most: int) -> memoryview:
    """Read a file of so many bytes at most, piece by piece by several threads."""
    with file.open("rb", buffering=0) as opened:
        size = os.fstat(opened.fileno()).st_size
        if size > most:
            more = ": start the server with more --adapter-memory or --max-adapter-bytes" if file.name != CONFIG else ""
            raise AdapterError(f"{file.name} has {size} bytes, and may have {most}{more}")
        view: memoryview = torch.empty(size, dtype=torch.uint8).numpy().data
        if size <= PIECE_BYTES:
            done = opened.readinto(view)
        else:
            done = sum(in_parallel(partial(_read_piece, opened.fileno(), view), range(0, size, PIECE_BYTES)))
        if done < size:
            raise AdapterError(f"{file.name} became shorter while it was read: copy it again")
    return view


def _read_piece(file: int, view: memoryview, at: int) -> int:
    return os.preadv(file, [view[at : at + PIECE_BYTES]], at)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "symbiosis-adapters")


def in_each_thread(function: Callable[[], object]) -> None:
    """Call a function in each of several threads, which share its work as they get on."""
    in_parallel(lambda _: function(), range(THREADS))


def in_parallel(function: Callable[[Item], Result], items: Iterable[Item], nbytes: int = PIECE_BYTES) -> list[Result]:
    """Call a function for each, in several threads if there are several, and as many bytes to look at as are worth it. It must not call this
    itself.

    >>> in_parallel(abs, [-3, 1, -2])
    [3, 1, 2]
    """
    given, threads = list(items), THREADS
    if threads < 2 or len(given) < 2 or nbytes < PIECE_BYTES:
        return [function(each) for each in given]
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()  # each thread has its own

    def share(first: int) -> list[Result]:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return [function(each) for each in given[first::threads]]

    shares = list(_threads().map(share, range(threads)))
    return [shares[number % threads][number // threads] for number in range(len(given))]


def check_finite(values: Iterable[tuple[str, Tensor]], why: str) -> None:
    """Raise `AdapterError` for values that are not finite: look at the least and the largest of each, which is forty times as fast as to look at
    all. What is not a number is either."""
    given = [(name, tensor) for name, tensor in values if tensor.is_floating_point() and tensor.numel()]
    wide = [tensor if tensor.itemsize > 1 else tensor.float() for _, tensor in given]
    bounds = in_parallel(torch.aminmax, wide, sum(tensor.nbytes for tensor in wide))
    for (name, _), (least, largest) in zip(given, bounds, strict=True):
        if not (math.isfinite(least.item()) and math.isfinite(largest.item())):
            raise AdapterError(f"{shown(name)} has values that are infinite or not numbers: {why}")


def parse_config(text: bytes) -> dict[str, Any]:
    """Return a configuration of PEFT's."""
    if len(text) > MOST_CONFIG_BYTES:
        raise AdapterError(f"{CONFIG} has {len(text)} bytes, and may have {MOST_CONFIG_BYTES}")
    if parts(text) > MOST_CONFIG_PARTS:
        raise AdapterError(LARGE_CONFIG)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG} is not JSON ({shown(str(error))}): save the adapter again") from None
    if not isinstance(config, dict) or not isinstance(config.get("peft_type"), str):
        raise AdapterError(f"{CONFIG} has no peft_type: it is not of PEFT")
    return config


def parse_tensors(data: Data, most: int = MOST_TENSORS) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of a safetensors file, as views into it where they can be, and its metadata, as whatever they are. What that format does
    not allow is a `ValueError`, or another error of a wrong type."""
    size = int.from_bytes(data[:8], "little")
    begin = 8 + size
    if len(data) < 8 or begin > len(data):
        raise ValueError("it ends before its header does")
    if size > MOST_HEADER_BYTES:
        raise LargeHeader(LARGE_HEADER)
    told = bytes(data[8:begin])
    if parts(told) > PARTS_OF_A_TENSOR * most + MOST_CONFIG_PARTS or told.count(b"{") > most + FEW_OBJECTS:
        raise LargeHeader(f"its header tells of more than {most}")
    header: dict[str, Any] = json.loads(told.decode())
    metadata = header.pop("__metadata__", {})
    memory = memoryview(bytearray(data) if isinstance(data, bytes) else data)
    tensors, at = {}, 0
    for place in sorted((_place(name, entry) for name, entry in header.items()), key=lambda place: place[:2]):
        first, last, name, dtype, shape, count = place
        if first != at or begin + last > len(memory):
            raise ValueError(f"the place of {shown(name, FEW_LETTERS)!r} is wrong")
        tensors[name], at = _tensor(memory, begin + first, dtype, shape, count), last
    if begin + at != len(memory):
        raise ValueError("it goes on behind its last tensor")
    return tensors, metadata


def _place(name: str, entry: dict[str, Any]) -> tuple[int, int, str, torch.dtype, list[int], int]:
    """Return where a tensor begins and ends, and its name, dtype, shape and how many numbers it has."""
    first, last = entry["data_offsets"]
    dtype, shape = DTYPES[entry["dtype"]], list(entry["shape"])
    count = cells(shape, MOST_CELLS)
    if count is None or not all(type(number) is int and number >= 0 for number in (first, last)):
        raise ValueError(f"the shape or the place of {shown(name, FEW_LETTERS)!r} is no tensor's")
    if last - first != count * dtype.itemsize:
        raise ValueError(f"the place of {shown(name, FEW_LETTERS)!r} has not the size of its shape")
    return first, last, name, dtype, shape, count


def _tensor(memory: memoryview, at: int, dtype: torch.dtype, shape: list[int], count: int) -> Tensor:
    if not count:
        return torch.empty(shape, dtype=dtype)
    if at % dtype.itemsize:
        memory, at = memoryview(bytearray(memory[at : at + count * dtype.itemsize])), 0
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=at).view(shape)
