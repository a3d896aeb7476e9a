"""Packed weights that lie once in a host's memory, in a sealed file, which begins with what it holds.

0      how many bytes the head has
8      the head: the number, kind, figures and parts of each weight
...    the parts, each at a multiple of 64 bytes
"""

import fcntl
import mmap
import os
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from math import prod
from typing import Annotated, Any, BinaryIO

import msgspec
import torch
from torch import Tensor

from symbiosis.errors import Code, ProtocolError
from symbiosis.kernels.packed import GroupedWeight, MicroscaledWeight, PackedWeight, ScaledWeight, TableWeight
from symbiosis.protocol import ELSEWHERE, Layer
from symbiosis.transport.local.segment import must_hold
from symbiosis.transport.local.shared_weights import ALIGNED, SEALS
from symbiosis.transport.tensors import bytes_of

NAME = "symbiosis-packed-weights"
LENGTH = struct.Struct("<Q")
LONGEST_HEAD = 64 << 20  # bytes
KINDS: dict[str, Callable[..., PackedWeight]] = {
    kind.__name__: kind for kind in (ScaledWeight, TableWeight, GroupedWeight, MicroscaledWeight)
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32,
)}  # fmt: skip
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Numbers = Annotated[tuple[int, ...], msgspec.Meta(max_length=8)]


class FilePart(msgspec.Struct, frozen=True):
    """One tensor of a packed weight, and how far behind the head it begins."""

    dtype: str
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=8)]
    begin: Size

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


class FileEntry(msgspec.Struct, frozen=True):
    """One packed weight: its number in the manifest, and all that is needed to make it again."""

    number: int
    kind: str
    figures: dict[str, str | int | float | Numbers | None]
    parts: dict[str, FilePart]


def publish(weights: dict[int, PackedWeight]) -> BinaryIO:
    """Write packed weights into a memory file and seal it. Each is taken from `weights` when it is written."""
    entries = list(_entries(weights))
    head = msgspec.msgpack.encode(entries)
    start = _aligned(LENGTH.size + len(head))
    size = start + _nbytes(entries)
    file = os.fdopen(os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b", buffering=0)
    file.truncate(size)
    with mmap.mmap(file.fileno(), size) as memory:
        memory[: LENGTH.size + len(head)] = LENGTH.pack(len(head)) + head
        for entry in entries:
            parts = weights.pop(entry.number).parts
            for name, part in entry.parts.items():
                begin = start + part.begin
                memory[begin : begin + part.nbytes] = bytes_of(parts.pop(name))
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
    return file


def _entries(weights: dict[int, PackedWeight]) -> Iterator[FileEntry]:
    begin = 0
    for number, weight in weights.items():
        parts = {}
        for name, tensor in weight.parts.items():
            parts[name] = FilePart(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), begin)
            begin = _aligned(begin + tensor.nbytes)
        figures = {one.name: getattr(weight, one.name) for one in fields(weight) if one.name not in parts}
        yield FileEntry(number, type(weight).__name__, figures, parts)


def _nbytes(entries: Sequence[FileEntry]) -> int:
    """Return how many bytes all parts take, with what lies between them."""
    return max((part.begin + part.nbytes for entry in entries for part in entry.parts.values()), default=0)


def taken(manifest: Sequence[Layer], fd: int) -> dict[int, PackedWeight]:
    """Map the packed weights of the file `fd`, by number. Raises `ProtocolError` unless they are those of the manifest. A write to one ends the
    process (SIGSEGV)."""
    must_hold(fd, LENGTH.size, SEALS)
    (length,) = LENGTH.unpack(os.pread(fd, LENGTH.size, 0))
    if length > LONGEST_HEAD:
        raise ProtocolError(Code.BAD_FRAME, f"packed weights begin with at most {LONGEST_HEAD} bytes, not {length}")
    start = _aligned(LENGTH.size + length)
    must_hold(fd, start, SEALS)
    try:
        entries = msgspec.msgpack.decode(os.pread(fd, length, LENGTH.size), type=list[FileEntry])
        size = start + _nbytes(entries)
        must_hold(fd, size, SEALS)
        memory = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        found = {entry.number: _weight(memory, start, entry) for entry in entries}
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise ProtocolError(Code.BAD_FRAME, f"these are no packed weights: {error}") from None
    told = {
        number: (layer.packed, layer.shape)
        for number, layer in enumerate(manifest)
        if layer.packed and layer.kind != ELSEWHERE
    }
    if told != {number: (weight.format, weight.shape) for number, weight in found.items()}:
        raise ProtocolError(Code.BAD_FRAME, "the packed weights are not those of the manifest")
    return found


def _weight(memory: mmap.mmap, start: int, entry: FileEntry) -> PackedWeight:
    parts = {name: _tensor(memory, start + part.begin, part) for name, part in entry.parts.items()}
    figures: dict[str, Any] = dict(entry.figures)
    return KINDS[entry.kind](**figures, **parts)


def _tensor(memory: mmap.mmap, begin: int, part: FilePart) -> Tensor:
    dtype = DTYPES[part.dtype]
    if not part.nbytes:
        return torch.empty(part.shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # as intended
        return torch.frombuffer(memory, dtype=dtype, count=prod(part.shape), offset=begin).view(part.shape)


def _aligned(place: int) -> int:
    return -(-place // ALIGNED) * ALIGNED
