"""Tensors in equal parts in the memory files of several processes, which are mapped one behind the other: whole again, without a copy.

Each tensor begins `phase` bytes after a page, and is cut at pages. Its parts go to the ranks by their shares, to a different rank first for each
tensor, so that small ones are spread, too. The first file begins with what is needed to find them: the shares, and for each tensor its phase,
or 64 more than the number of an earlier tensor that it is tied to.
"""

import ctypes
import fcntl
import mmap
import os
import struct
import warnings
from collections.abc import Sequence
from math import prod
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from symbiosis.errors import Code, ProtocolError
from symbiosis.protocol import ELSEWHERE, ITEMSIZE, MOST_RANKS, Layer
from symbiosis.transport.local.segment import must_hold
from symbiosis.transport.local.shared_weights import ALIGNED, SEALS, phase
from symbiosis.transport.tensors import TORCH_DTYPE, bytes_of

PAGE = mmap.PAGESIZE
NAME = "symbiosis-weights-part"
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Piece(NamedTuple):
    """A run of bytes of a tensor's pages that lies in one rank's file."""

    rank: int
    begin: int  # in the mapping
    start: int  # in the file
    nbytes: int


class StripeLayout:
    """Where tensors begin in the mapping, by number, and their pieces; how large the mapping is, and each file. Both sides build it alike,
    tensor by tensor."""

    def __init__(self, manifest: Sequence[Layer], shares: Sequence[float]) -> None:
        self._manifest, self.shares, self.numbers = manifest, shares, in_stripes(manifest)
        self.phases: list[int] = []
        self.begins: dict[int, int] = {}
        self.pieces: dict[int, list[Piece]] = {}
        self.nbytes = 0
        self.files = [_pages(header_size(len(self.numbers), len(shares))) * PAGE] + [0] * (len(shares) - 1)

    def add(self, phase: int) -> int:
        """Place the next tensor, and return its number."""
        number = self.numbers[len(self.phases)]
        layer = self._manifest[number]
        self.phases.append(phase)
        self.pieces[number] = []
        if phase >= ALIGNED:
            self.begins[number] = self._begin_of_tied(number, phase - ALIGNED)
            return number
        if phase % ITEMSIZE[layer.dtype]:
            raise ProtocolError(Code.BAD_FRAME, f"{layer.name} cannot begin {phase} bytes after a page")
        self.begins[number] = self.nbytes + phase
        pages = _pages(phase + prod(layer.shape) * ITEMSIZE[layer.dtype])
        for rank, first, last in cuts(pages, self.shares, len(self.phases)):
            piece = Piece(rank, self.nbytes + first * PAGE, self.files[rank], (last - first) * PAGE)
            self.files[rank] += piece.nbytes
            self.pieces[number].append(piece)
        self.nbytes += pages * PAGE
        return number

    def _begin_of_tied(self, number: int, other: int) -> int:
        layer = self._manifest[number]
        same = other in self.begins and self._manifest[other].shape == layer.shape
        if not same or self._manifest[other].dtype != layer.dtype:
            raise ProtocolError(Code.BAD_FRAME, f"{layer.name} cannot be tied to tensor number {other}")
        return self.begins[other]


def in_stripes(manifest: Sequence[Layer]) -> list[int]:
    """Return the numbers of the tensors that lie in the files."""
    return [
        number
        for number, layer in enumerate(manifest)
        if layer.kind != ELSEWHERE and layer.dtype in ITEMSIZE and 0 not in layer.shape
    ]


def cuts(pages: int, shares: Sequence[float], turn: int) -> list[tuple[int, int, int]]:
    """Divide pages by shares: rank, first and last page of each part that has any. Another rank comes first at each turn.

    >>> cuts(10, (1, 1, 2), turn=0)
    [(0, 0, 2), (1, 2, 5), (2, 5, 10)]
    >>> cuts(1, (1, 1), turn=0), cuts(1, (1, 1), turn=1)
    ([(1, 0, 1)], [(0, 0, 1)])
    """
    total, taken, first = sum(shares), 0.0, 0
    found = []
    for step in range(len(shares)):
        rank = (step + turn) % len(shares)
        taken += shares[rank]
        last = pages if step == len(shares) - 1 else int(pages * taken / total)
        if last > first:
            found.append((rank, first, last))
        first = last
    return found


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE)


def header_size(tensors: int, ranks: int) -> int:
    """Return the bytes of the header of the first file: the number of ranks, their shares, and the phases."""
    return 8 + 8 * ranks + 4 * tensors


def _header(phases: Sequence[int], shares: Sequence[float]) -> bytes:
    return struct.pack(f"<Q{len(shares)}d{len(phases)}I", len(shares), *shares, *phases)


class PartFile:
    """One rank's file while it is written. Each tensor is given once, whole, in the manifest's order, and this rank's part is kept."""

    def __init__(self, manifest: Sequence[Layer], shares: Sequence[float], rank: int) -> None:
        self._layout, self._rank = StripeLayout(manifest, shares), rank
        self._fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.file: BinaryIO = os.fdopen(self._fd, "w+b", buffering=0)

    @property
    def nbytes(self) -> int:
        return self._layout.files[self._rank]

    @property
    def phases(self) -> list[int]:
        return self._layout.phases

    def add(self, tensor: Tensor) -> None:
        """Keep this rank's part of the next tensor."""
        number = self._layout.add(phase(tensor))
        begin, raw = self._layout.begins[number], bytes_of(tensor)
        for piece in self._layout.pieces[number]:
            if piece.rank == self._rank:
                first = max(0, piece.begin - begin)
                last = min(len(raw), piece.begin + piece.nbytes - begin)
                _write(self._fd, raw[first:last], piece.start + begin + first - piece.begin)

    def add_tied(self, other: int) -> None:
        """The next tensor is that of an earlier number."""
        self._layout.add(ALIGNED + other)

    def seal(self) -> BinaryIO:
        """Return the file, which nobody can change any more."""
        self.file.truncate(self.nbytes)
        if self._rank == 0:
            os.pwrite(self._fd, _header(self.phases, self._layout.shares), 0)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, SEALS)
        return self.file


def _write(fd: int, raw: memoryview, at: int) -> None:
    while len(raw):
        written = os.pwrite(fd, raw, at)
        raw, at = raw[written:], at + written


def opened(path: str) -> BinaryIO:
    """Open a part by way of a process of this user that has it: /proc/PID/fd/NUMBER."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC), "rb", buffering=0)


def mapped(manifest: Sequence[Layer], fds: Sequence[int], writable: bool = False) -> dict[int, Tensor]:
    """Map all tensors, by number; tied ones are the same object. A write to what is not `writable` ends the process (SIGSEGV); what is, may be changed freely: pages that
    change are this process's own."""
    numbers = in_stripes(manifest)
    size = header_size(len(numbers), len(fds))
    must_hold(fds[0], size, SEALS)
    head = os.pread(fds[0], size, 0)
    ranks, *rest = struct.unpack(f"<Q{len(fds)}d{len(numbers)}I", head)
    shares, phases = rest[: len(fds)], rest[len(fds) :]
    if ranks != len(fds) or len(fds) > MOST_RANKS or not all(0 < share < 2**64 for share in shares):
        raise ProtocolError(Code.BAD_FRAME, f"weights in {ranks} parts came with {len(fds)} descriptors")
    where = StripeLayout(manifest, shares)
    for one in phases:
        where.add(one)
    for fd, nbytes in zip(fds, where.files, strict=True):
        must_hold(fd, nbytes, SEALS)
    if not where.nbytes:
        return {}
    region = Region.of(where, fds, writable)
    at: dict[int, Tensor] = {}
    for number, place in where.begins.items():
        if place not in at:
            at[place] = _tensor(region, manifest[number], place)
    return {number: at[place] for number, place in where.begins.items()}


def _tensor(region: "Region", layer: Layer, place: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(region, dtype=TORCH_DTYPE[layer.dtype], count=prod(layer.shape), offset=place)  # type: ignore[arg-type]
    return flat.view(layer.shape)


class Region(ctypes.Array):  # type: ignore[type-arg]
    """Mapped memory, unmapped when the last tensor over it is gone. (Only its subclasses, which have a length, are made.)"""

    _type_, _length_ = ctypes.c_char, 0

    @classmethod
    def of(cls, where: StripeLayout, fds: Sequence[int], writable: bool) -> "Region":
        """Map the pieces of files one behind another."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        base = _mmap(None, where.nbytes, 0, reserved, -1, 0)  # PROT_NONE
        kind: Any = type("Region", (cls,), {"_type_": ctypes.c_char, "_length_": where.nbytes})
        region: Region = kind.from_address(base)
        for piece in (piece for pieces in where.pieces.values() for piece in pieces):
            at = base + piece.begin
            _mmap(at, piece.nbytes, protection, mmap.MAP_PRIVATE | MAP_FIXED, fds[piece.rank], piece.start)
        return region

    def __del__(self) -> None:
        _libc.munmap(ctypes.addressof(self), self._length_)


def _mmap(at: int | None, nbytes: int, protection: int, flags: int, fd: int, start: int) -> int:
    found = _libc.mmap(at, nbytes, protection, flags, fd, start)
    if found in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"cannot map weights: {os.strerror(ctypes.get_errno())}")
    return int(found)
