"""Packed weights that lie once in a host's memory, in a sealed file, which begins with what it holds.

0      how many bytes the head has
8      the head: the number, kind, figures and parts of each weight
...    the parts, each at a multiple of 64 bytes; those of a GPU lie in its memory (`transport.cuda.packed_pieces`), and the file ends here
"""

import fcntl
import mmap
import os
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    """One tensor of a packed weight, and how far behind the head it begins; or, on a GPU, in which piece of memory, and how far from its beginning."""

    dtype: str
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=8)]
    begin: Size
    piece: Size = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def end(self) -> int:
        return self.begin + self.nbytes


class FileEntry(msgspec.Struct, frozen=True):
    """One packed weight: its number in the manifest, and all that is needed to make it again."""

    number: int
    kind: str
    figures: dict[str, str | int | float | Numbers | None]
    parts: dict[str, FilePart]


def holds_packed(manifest: Sequence[Layer]) -> bool:
    """Whether any weights of an executor are packed."""
    return any(map(_is_packed, manifest))


def _is_packed(layer: Layer) -> bool:
    return bool(layer.packed) and layer.kind != ELSEWHERE


def publish(weights: dict[int, PackedWeight]) -> BinaryIO:
    """Write packed weights into a memory file and seal it. Each is taken from `weights` when it is written."""
    entries = entries_of(weights, ALIGNED)
    with _memory_file(entries) as file:
        start = _aligned(file.tell())
        size = start + max((part.end for part in parts_of(entries)), default=0)
        file.truncate(size)
        with mmap.mmap(file.fileno(), size) as memory:
            for entry in entries:
                parts = weights.pop(entry.number).parts
                for name, part in entry.parts.items():
                    begin = start + part.begin
                    memory[begin : begin + part.nbytes] = bytes_of(parts.pop(name))
    return file


def publish_head(entries: Sequence[FileEntry]) -> BinaryIO:
    """Write what there is of weights whose parts lie elsewhere into a memory file, and seal it."""
    with _memory_file(entries) as file:
        return file


@contextmanager
def _memory_file(entries: Sequence[FileEntry]) -> Iterator[BinaryIO]:
    """Make a memory file that begins with its head, let the block write what follows, and seal it."""
    head = msgspec.msgpack.encode(entries)
    file = os.fdopen(os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b", buffering=0)
    file.write(LENGTH.pack(len(head)) + head)
    yield file
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)


def entries_of(weights: dict[int, PackedWeight], aligned: int, most: int | None = None) -> list[FileEntry]:
    """Say where each part of some weights will lie: one behind the other, in pieces of at most `most` bytes if that is given."""
    entries, begin, piece = [], 0, 0
    for number, weight in weights.items():
        parts = {}
        for name, tensor in weight.parts.items():
            if most is not None and begin and begin + tensor.nbytes > most:
                begin, piece = 0, piece + 1
            parts[name] = FilePart(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), begin, piece)
            begin = _aligned(parts[name].end, aligned)
        figures = {one.name: getattr(weight, one.name) for one in fields(weight) if one.name not in parts}
        entries.append(FileEntry(number, type(weight).__name__, figures, parts))
    return entries


def parts_of(entries: Sequence[FileEntry]) -> Iterator[FilePart]:
    """Return the parts of all weights."""
    return (part for entry in entries for part in entry.parts.values())


def taken(manifest: Sequence[Layer], fd: int) -> dict[int, PackedWeight]:
    """Map the packed weights of the file `fd`, by number. Raises `ProtocolError` unless they are those of the manifest. A write to one ends the
    process (SIGSEGV)."""
    start, entries = head_of(fd)
    with packed_or_refused():
        size = start + max((part.end for part in parts_of(entries)), default=0)
        must_hold(fd, size, SEALS)
        memory = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        return made_again(manifest, entries, lambda part: _tensor(memory, start + part.begin, part))


def head_of(fd: int) -> tuple[int, list[FileEntry]]:
    """Read how far from the beginning of a file the parts begin, and what is told of them."""
    must_hold(fd, LENGTH.size, SEALS)
    (length,) = LENGTH.unpack(os.pread(fd, LENGTH.size, 0))
    if length > LONGEST_HEAD:
        raise ProtocolError(Code.BAD_FRAME, f"packed weights begin with at most {LONGEST_HEAD} bytes, not {length}")
    must_hold(fd, LENGTH.size + length, SEALS)
    with packed_or_refused():
        entries = msgspec.msgpack.decode(os.pread(fd, length, LENGTH.size), type=list[FileEntry])
    return _aligned(LENGTH.size + length), entries


@contextmanager
def packed_or_refused() -> Iterator[None]:
    """Refuse an executor of which anything in the block shows that it tells nonsense."""
    try:
        yield
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise ProtocolError(Code.BAD_FRAME, f"these are no packed weights: {error}") from None


def made_again(
    manifest: Sequence[Layer], entries: Sequence[FileEntry], tensor: Callable[[FilePart], Tensor]
) -> dict[int, PackedWeight]:
    """Return the weights, by number, of what lies in each of their parts. Raises `ProtocolError` unless they are those of the manifest."""
    found: dict[int, PackedWeight] = {}
    for entry in entries:
        figures: dict[str, Any] = dict(entry.figures)
        parts = {name: tensor(part) for name, part in entry.parts.items()}
        found[entry.number] = KINDS[entry.kind](**figures, **parts)
    told = {number: (layer.packed, layer.shape) for number, layer in enumerate(manifest) if _is_packed(layer)}
    if told != {number: (weight.format, weight.shape) for number, weight in found.items()}:
        raise ProtocolError(Code.BAD_FRAME, "the packed weights are not those of the manifest")
    return found


def _tensor(memory: mmap.mmap, begin: int, part: FilePart) -> Tensor:
    dtype = DTYPES[part.dtype]
    if not part.nbytes:
        return torch.empty(part.shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # as intended
        return torch.frombuffer(memory, dtype=dtype, count=prod(part.shape), offset=begin).view(part.shape)


def _aligned(place: int, to: int = ALIGNED) -> int:
    return -(-place // to) * to
