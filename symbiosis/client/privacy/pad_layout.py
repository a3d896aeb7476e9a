"""The layout of a file of pads.

magic, the head's length and checksum | head | rows used, of each stream | effects, checksums | effects, checksums | ...
"""

import struct
import zlib

import msgspec
import torch
from torch import Tensor

from symbiosis.client.privacy.fixed_point import INTEGERS
from symbiosis.client.privacy.pad_register import COUNTER

MAGIC = b"SYMpads2"
HEAD = struct.Struct("<8sQI")
CHECKSUM = torch.uint32  # zlib.crc32
_PAGE = 4096


class Effect(msgspec.Struct, frozen=True):
    """One layer's products with a stream's pads: `width` values for each row, from byte `start` of the file on, then the checksums."""

    layer: str
    digest: str
    width: int
    start: int


class PadStream(msgspec.Struct, frozen=True):
    """Pads for rows of `width` values that these layers take, in one direction."""

    gradient: bool
    width: int
    effects: tuple[Effect, ...]


class Contents(msgspec.Struct, frozen=True):
    """The head of a pad file."""

    key: bytes
    bits: int
    tokens: int
    streams: tuple[PadStream, ...]
    nbytes: int = 0  # of the file

    @property
    def dtype(self) -> torch.dtype:
        return INTEGERS[self.bits]


def row_checksums(values_TN: Tensor) -> Tensor:
    """Return a checksum of each row of a matrix in memory.

    >>> row_checksums(torch.zeros(2, 1, dtype=torch.int32)).tolist() == [zlib.crc32(bytes(4))] * 2
    True
    """
    return torch.tensor([zlib.crc32(row) for row in values_TN.numpy()], dtype=CHECKSUM)


def opening(head: bytes) -> bytes:
    """Return the bytes that a file with this head begins with."""
    return HEAD.pack(MAGIC, len(head), zlib.crc32(head))


def data_start(contents: Contents) -> int:
    """Return where the effects may begin. Starts and sizes are numbers of up to 8 bytes in the head."""
    head = len(msgspec.msgpack.encode(contents)) + 9 * sum(len(stream.effects) for stream in contents.streams)
    return _page(HEAD.size + head + 9 + COUNTER.size * len(contents.streams))


def _page(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def laid_out(contents: Contents) -> Contents:
    """Give each effect its place in the file, and the file its size."""
    at, streams = data_start(contents), []
    for stream in contents.streams:
        effects = []
        for effect in stream.effects:
            effects.append(msgspec.structs.replace(effect, start=at))
            row = effect.width * contents.dtype.itemsize + CHECKSUM.itemsize
            at = _page(at + contents.tokens * row)
        streams.append(msgspec.structs.replace(stream, effects=tuple(effects)))
    return msgspec.structs.replace(contents, streams=tuple(streams), nbytes=at)
