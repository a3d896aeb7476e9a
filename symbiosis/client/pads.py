"""`Pads`: rows as integers with a one-time pad, whose effects a tenant computed beforehand from the public weights.

A pad file holds a key, from which the pads grow, and their effects `r q`, one after the other for each *stream*: the layers that
take the same rows, in one direction. How many rows of a stream are used is written to the disk before any of them is: a crash, a
fork or a second process may waste pads and never use one twice. (A copy of the file can: do not copy it.) Behind a layer's effects
are checksums, one for each row, which are compared when a row is used: what a disk has changed is an error, and no wrong result.

    magic, the head's length and checksum | head | rows used, of each stream | effects, checksums | effects, checksums | ...
"""

import fcntl
import os
import struct
import threading
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from symbiosis.client.fixed_point import INTEGERS
from symbiosis.client.groups import Member
from symbiosis.client.private import Group, IntegerLevel, PrivateSession, asked, checked_bits
from symbiosis.client.verify import Proofs
from symbiosis.errors import ConfigError, PadsUsedUp, WrapError
from symbiosis.keystream import keystream
from symbiosis.protocol import MAX_GROUP, Op, Priority

MAGIC = b"SYMpads2"
PAGE = 4096
AT_ONCE = 64  # rows that are written off together, as every writing waits for the disk
CHECKSUM = torch.uint32  # zlib.crc32
_HEAD = struct.Struct("<8sQI")
_COUNTER = struct.Struct("<QI")
_AGAIN = "make another file with symbiosis pads MODEL --tokens N -o FILE, and wrap the model with it"
_files: "weakref.WeakSet[PadFile]" = weakref.WeakSet()


class Effect(msgspec.Struct, frozen=True):
    """What one layer makes of a stream's pads: `width` values for each row, from `start` of the file on; then the checksums."""

    layer: str
    digest: str
    width: int
    start: int


class Stream(msgspec.Struct, frozen=True):
    """Pads for rows of `width` values that these layers take, in one direction."""

    gradient: bool
    width: int
    effects: tuple[Effect, ...]


class Contents(msgspec.Struct, frozen=True):
    """The head of a pad file."""

    key: bytes
    bits: int
    tokens: int
    streams: tuple[Stream, ...]
    nbytes: int = 0  # of the file

    @property
    def dtype(self) -> torch.dtype:
        return INTEGERS[self.bits]


class PadFile:
    """A file of pads, of which each is given out once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                magic, length, checksum = _HEAD.unpack(file.read(_HEAD.size))
                if magic != MAGIC:
                    raise ValueError("it begins otherwise, or an older version made it")
                head, nbytes = file.read(length), os.fstat(file.fileno()).st_size
                if zlib.crc32(head) != checksum:
                    raise ValueError("its head is damaged")
            self.contents = msgspec.msgpack.decode(head, type=Contents)
        except (OSError, ValueError, struct.error) as error:
            raise ConfigError(f"{path} is no file of pads ({error}): make one with symbiosis pads") from None
        if nbytes != self.contents.nbytes:
            raise ConfigError(f"{path} has {nbytes:,} bytes instead of {self.contents.nbytes:,}: {_AGAIN}")
        self._counters = _HEAD.size + length
        self._lock = threading.Lock()
        self._mine: dict[int, tuple[int, int]] = {}  # by stream: rows that are written off, and not yet used
        self._memory = torch.from_file(str(path), shared=False, size=nbytes, dtype=torch.uint8)
        _files.add(self)

    @staticmethod
    def create(path: Path, contents: Contents) -> None:
        """With nothing used, and room for the effects; for its owner's eyes only."""
        head = msgspec.msgpack.encode(contents)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(_HEAD.pack(MAGIC, len(head), zlib.crc32(head)) + head)
            file.write(_counter(0) * len(contents.streams))
            assert file.tell() <= data_start(contents)
            file.truncate(contents.nbytes)

    def forget_parent(self) -> None:
        """In a forked child: what is written off is the parent's, and a thread that holds the lock is not here."""
        self._lock = threading.Lock()
        self._mine = {}

    def left(self, stream: int) -> int:
        """Pads that nobody has written off."""
        with self._locked() as fd:
            return self.contents.tokens - self._used(fd, stream)

    def take(self, stream: int, rows: int) -> int:
        """The first of so many pads that were never used and never will be again."""
        with self._lock:
            first, end = self._mine.get(stream, (0, 0))
            if end - first < rows:
                first, end = self._write_off(stream, rows, end - first, end)
            self._mine[stream] = first + rows, end
            return first

    def _write_off(self, stream: int, rows: int, mine: int, end: int) -> tuple[int, int]:
        """On the disk, before they are used."""
        with self._locked() as fd:
            used = self._used(fd, stream)
            kept = mine if used == end else 0  # what follows on what is left belongs together with it
            until = min(self.contents.tokens, used + max(rows - kept, AT_ONCE))
            if until - used + kept < rows:
                raise PadsUsedUp(f"{self.path} has {until - used + kept} pads left for a call of {rows} rows: {_AGAIN}")
            os.pwrite(fd, _counter(until), self._counters + _COUNTER.size * stream)
            os.fdatasync(fd)
        return used - kept, until

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, for nobody else. Closing would not end that if there is a fork meanwhile, as the child keeps it open."""
        with self.path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield file.fileno()
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)

    def _used(self, fd: int, stream: int) -> int:
        found = os.pread(fd, _COUNTER.size, self._counters + _COUNTER.size * stream)
        used = int(_COUNTER.unpack(found)[0])
        if found != _counter(used):
            raise ConfigError(f"{self.path} is damaged: how many of its pads are used cannot be read; {_AGAIN}")
        return used

    def pads(self, stream: int, first: int, rows: int) -> Tensor:
        contents = self.contents
        shape = (rows, contents.streams[stream].width)
        return keystream(contents.key, shape, contents.dtype, stream, first)

    def effect(self, effect: Effect, first: int, rows: int) -> Tensor:
        """What the layer makes of these pads, if the disk has kept it."""
        row = effect.width * self.contents.dtype.itemsize
        values = self._part(effect.start + first * row, rows * row, self.contents.dtype).view(rows, effect.width)
        checksums = effect.start + self.contents.tokens * row + first * CHECKSUM.itemsize
        if not torch.equal(row_checksums(values), self._part(checksums, rows * CHECKSUM.itemsize, CHECKSUM)):
            raise ConfigError(
                f"{self.path} is damaged: what it has for {effect.layer} is not what was written; {_AGAIN}"
            )
        return values

    def _part(self, start: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        return self._memory[start : start + nbytes].view(dtype)


def _counter(used: int) -> bytes:
    return _COUNTER.pack(used, zlib.crc32(used.to_bytes(8)))


def row_checksums(values_TN: Tensor) -> Tensor:
    """Of a matrix in memory.

    >>> row_checksums(torch.zeros(2, 1, dtype=torch.int32)).tolist() == [zlib.crc32(bytes(4))] * 2
    True
    """
    return torch.tensor([zlib.crc32(row) for row in values_TN.numpy()], dtype=CHECKSUM)


def data_start(contents: Contents) -> int:
    """Where the effects may begin; starts and the size are numbers of up to 8 bytes in the head."""
    head = len(msgspec.msgpack.encode(contents)) + 9 * sum(len(stream.effects) for stream in contents.streams)
    return _page(_HEAD.size + head + 9 + _COUNTER.size * len(contents.streams))


def _page(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def laid_out(contents: Contents) -> Contents:
    """The same with a place for each effect, and the size of the file."""
    at, streams = data_start(contents), []
    for stream in contents.streams:
        effects = []
        for effect in stream.effects:
            effects.append(msgspec.structs.replace(effect, start=at))
            row = effect.width * contents.dtype.itemsize + CHECKSUM.itemsize
            at = _page(at + contents.tokens * row)
        streams.append(msgspec.structs.replace(stream, effects=tuple(effects)))
    return msgspec.structs.replace(contents, streams=tuple(streams), nbytes=at)


@dataclass(frozen=True)
class Pads:
    """Perfect against the operator, up to AES, with one executor; for as many rows as there are pads.

    Args:
        file: What `symbiosis pads MODEL --tokens N -o FILE` made, on a machine of the tenant's own. For training with `--training`.

    >>> Pads("alice.pads").file
    'alice.pads'
    """

    file: str | Path

    def level(self, proofs: Proofs | None) -> "PadsLevel":
        return PadsLevel(PadFile(Path(self.file)), proofs)


class PadsLevel(IntegerLevel):
    """Every row with a pad of its own."""

    def __init__(self, file: PadFile, proofs: Proofs | None) -> None:
        checked_bits(file.contents.bits)
        super().__init__(file.contents.bits, proofs)
        self.file = file
        self._members: dict[int, list[Member]] = {}  # by stream
        self._streams = {
            (effect.layer, stream.gradient): number
            for number, stream in enumerate(file.contents.streams)
            for effect in stream.effects
        }

    def open(self, session: PrivateSession) -> None:
        self._session = session
        self.needs(session)

    def learn(self, number: int, v_KN: Tensor) -> None:
        layer = self._session.manifest[number]
        effect = self._effect(layer.name, gradient=False)
        if effect.digest != layer.digest:
            raise WrapError(
                f"{layer.name}: {self.file.path} was made from other weights than the executor's: make pads from the same checkpoint, "
                f"with --dtype {layer.dtype}"
            )
        super().learn(number, v_KN)
        self._together(Member(number, v_KN.shape[1], False), layer.name)

    def _together(self, member: Member, layer: str) -> None:
        """Layers that take the same rows are to be called as one from the beginning: else each would use pads of its own."""
        members = self._members.setdefault(self._streams[layer, False], [])
        members.append(member)
        self._session.known_groups[members[0]] = tuple(members[:MAX_GROUP])

    def _effect(self, layer: str, gradient: bool) -> Effect:
        number = self._streams.get((layer, gradient))
        if number is None:
            what = (
                "its gradients: make pads with --training" if gradient else "it: keep the layer on the client (layers=)"
            )
            raise WrapError(f"{layer}: {self.file.path} has no pads for {what}")
        return next(effect for effect in self.file.contents.streams[number].effects if effect.layer == layer)

    def masked(self, op: Op, group: Group, x_TK: Tensor, priority: Priority) -> list[Tensor]:
        gradient, results = op is Op.DGRAD, []
        effects = {member: self._effect(self._session.name(member.layer), gradient) for member in group}

        def stream_of(member: Member) -> int:
            return self._streams[effects[member].layer, gradient]

        for stream, members in groupby(group, stream_of):
            together = tuple(members)
            first = self.file.take(stream, len(x_TK))
            sent_TK = x_TK + self.file.pads(stream, first, len(x_TK))
            call, shapes = self.call_for(op, together, x_TK, priority)
            answers = asked(self._session, self.proofs, call, (sent_TK,), shapes, sent_TK)
            for member, y_TN in zip(together, answers, strict=True):
                results.append(y_TN - self.file.effect(effects[member], first, len(x_TK)))
        return results

    def close(self) -> None:
        pass


def _after_fork() -> None:
    for file in list(_files):
        file.forget_parent()


os.register_at_fork(after_in_child=_after_fork)
