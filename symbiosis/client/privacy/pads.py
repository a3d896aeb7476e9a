"""`Pads`: rows as integers with a one-time pad, whose effects a tenant has computed beforehand from the public weights."""

import hashlib
import logging
import os
import struct
import threading
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from symbiosis.base.forks import at_fork, look_for_fork
from symbiosis.base.keystream import keystream
from symbiosis.base.secret_files import create_secret, open_secret
from symbiosis.client.layers.groups import GroupMember
from symbiosis.client.privacy.masked_session import Group, IntegerLevel, PrivateSession, asked, checked_bits
from symbiosis.client.privacy.pad_layout import (
    CHECKSUM,
    HEAD,
    MAGIC,
    Contents,
    Effect,
    data_start,
    opening,
    row_checksums,
)
from symbiosis.client.privacy.pad_register import Counters, Damaged, locked, packed, registered
from symbiosis.client.privacy.verify import Proofs
from symbiosis.errors import ConfigError, PadsUsedUp, WrapError
from symbiosis.protocol import MAX_GROUP, Op, Priority

AT_ONCE = 64  # rows that are written off together, as every writing waits for the disk
_AGAIN = "make another file with symbiosis pads MODEL --tokens N -o FILE, and wrap the model with it"
_files: "weakref.WeakSet[PadFile]" = weakref.WeakSet()
logger = logging.getLogger("symbiosis")


class PadFile:
    """A file of pads, each of which is given out once. Everything is read and written through one descriptor."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # the folder that this program is in may change
        self._lock = threading.Lock()
        self._mine: dict[int, tuple[int, int]] = {}  # by stream: rows that are written off, and not yet used
        self._fd = self._open()
        found = os.fstat(self._fd)
        self._identity = found.st_dev, found.st_ino
        try:
            self._opening = os.pread(self._fd, HEAD.size, 0)
            magic, length, checksum = HEAD.unpack(self._opening)
            if magic != MAGIC:
                raise ValueError("it starts with other bytes, or an older version made it")
            if length > found.st_size:
                raise ValueError("its head is cut off")
            head = os.pread(self._fd, length, HEAD.size)
            if zlib.crc32(head) != checksum:
                raise ValueError("its head is damaged")
            self.contents = msgspec.msgpack.decode(head, type=Contents)
        except (OSError, ValueError, struct.error) as error:
            raise ConfigError(f"{path} is not a pad file ({error}): make one with symbiosis pads") from None
        if found.st_size != self.contents.nbytes:
            raise ConfigError(f"{path} has {found.st_size:,} bytes instead of {self.contents.nbytes:,}: {_AGAIN}")
        self._counters = HEAD.size + length
        self._name = hashlib.sha256(head).hexdigest()[:32]  # of the key, too: no other file has it
        self._compare_with_register()
        _files.add(self)

    @staticmethod
    def create(path: Path, contents: Contents) -> None:
        """Create a file with no pad used and with room for the effects. Only its owner can read it."""
        head = msgspec.msgpack.encode(contents)
        with os.fdopen(create_secret(path), "wb") as file:
            file.write(opening(head) + head)
            file.write(packed(0) * len(contents.streams))
            assert file.tell() <= data_start(contents)
            file.truncate(contents.nbytes)

    def _open(self) -> int:
        try:
            fd = open_secret(self.path, os.O_RDWR)
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be opened for reading and writing ({error.strerror}): a file of pads is made with symbiosis pads, "
                "and records which pads are used"
            ) from None
        self._closing = weakref.finalize(self, os.close, fd)
        return fd

    def forget_parent(self) -> None:
        """Start anew in a forked child. The pads written off are the parent's, as is the lock of its descriptor, and a thread that held
        this object's lock does not exist here."""
        self._closing()
        self._fd = -1
        self._lock = threading.Lock()
        self._mine = {}

    def left(self, stream: int) -> int:
        """How many pads are left."""
        look_for_fork()
        with self._lock, self._alone() as (used, _):
            return self.contents.tokens - used[stream]

    def take(self, stream: int, rows: int) -> int:
        """Return the number of the first of so many pads that were never used, and never will be again."""
        look_for_fork()
        with self._lock:
            self._must_be_the_same()
            first, end = self._mine.get(stream, (0, 0))
            if end - first < rows:
                first, end = self._write_off(stream, rows, end - first, end)
            self._mine[stream] = first + rows, end
            return first

    def _write_off(self, stream: int, rows: int, mine: int, end: int) -> tuple[int, int]:
        """Mark pads as used on the disk, before they are used."""
        with self._alone() as (counters, known):
            used = counters[stream]
            self._must_not_be_behind(stream, used, max(known[stream], end))
            kept = mine if used == end else 0  # what follows on what is left belongs together with it
            until = min(self.contents.tokens, used + max(rows - kept, AT_ONCE))
            if until - used + kept < rows:
                raise PadsUsedUp(f"{self.path} has {until - used + kept} pads left for a call of {rows} rows: {_AGAIN}")
            counters[stream] = until
            known[stream] = until  # after the file: what dies in between is not taken for a copy
        return used - kept, until

    @contextmanager
    def _alone(self) -> Iterator[tuple[Counters, Counters]]:
        """Lock the file and the register, and yield how many pads each says are used."""
        self._must_be_the_same()
        with locked(self._fd, self.path), registered(self._name, len(self.contents.streams)) as known:
            try:
                yield Counters(self._fd, self._counters), known
            except OSError as error:
                raise ConfigError(f"{self.path}: how many of its pads are used cannot be written ({error})") from None
            except Damaged:
                raise ConfigError(
                    f"{self.path} is damaged: how many of its pads are used cannot be read; {_AGAIN}"
                ) from None

    def _must_be_the_same(self) -> None:
        """Raise unless the file at the path is still the one that was opened: else its counters, pads and effects would not belong
        together."""
        if self._fd < 0:
            self._fd = self._open()
        opened = os.fstat(self._fd)
        with suppress(OSError):
            found = self.path.stat()
            same = (found.st_dev, found.st_ino) == self._identity == (opened.st_dev, opened.st_ino)
            whole = opened.st_size == self.contents.nbytes and os.pread(self._fd, HEAD.size, 0) == self._opening
            if same and whole:
                return
        raise ConfigError(
            f"{self.path} is no longer the file that was opened: it was renewed, moved, cut off or written over while it was in use. Wrap "
            "the model again, with a file that stays where it is"
        )

    def _must_not_be_behind(self, stream: int, used: int, known: int) -> None:
        if used < known:
            raise ConfigError(
                f"{self.path} says that {used} of its pads are used where {known} were (stream {stream}): it is a copy, or was restored "
                f"from a backup or snapshot, and what its pads hid would be exposed; {_AGAIN}"
            )

    def _compare_with_register(self) -> None:
        """Refuse a copy that was overtaken before anything is wrapped. Pads that were used elsewhere are noted here, and logged."""
        with self._alone() as (counters, known):
            elsewhere = 0
            for stream in range(len(self.contents.streams)):
                used, here = counters[stream], known[stream]
                self._must_not_be_behind(stream, used, here)
                if used > here:
                    elsewhere = max(elsewhere, used - here)
                    known[stream] = used
        if elsewhere:
            logger.warning(
                "%s was used before, by another machine, user or container (%d pads of a stream, of which nothing is known here): if it was "
                "copied rather than moved, both would use the same pads, and neither can notice. Remove all but one",
                self.path,
                elsewhere,
            )

    def pads(self, stream: int, first: int, rows: int) -> Tensor:
        contents = self.contents
        shape = (rows, contents.streams[stream].width)
        return keystream(contents.key, shape, contents.dtype, stream, first)

    def effect(self, effect: Effect, first: int, rows: int) -> Tensor:
        """Return the layer's product with these pads, or raise if the disk has not kept it."""
        row = effect.width * self.contents.dtype.itemsize
        values = self._part(effect.start + first * row, rows * row, self.contents.dtype).view(rows, effect.width)
        checksums = effect.start + self.contents.tokens * row + first * CHECKSUM.itemsize
        if not torch.equal(row_checksums(values), self._part(checksums, rows * CHECKSUM.itemsize, CHECKSUM)):
            self._must_be_the_same()
            raise ConfigError(f"{self.path} is damaged: its data for {effect.layer} are not what was written; {_AGAIN}")
        self._must_be_the_same()  # another file of this model has checksums of its own
        return values

    def _part(self, start: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        """Read, and not mapped: a mapped file that is cut off ends the process that looks at it. What is not there is zeros."""
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        view, at = memory.numpy().data, 0
        while at < nbytes and (got := os.preadv(self._fd, [view[at:]], start + at)):
            at += got
        return memory.view(dtype)


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
        if not isinstance(self.file, str | Path):
            raise WrapError(f"Pads({self.file!r}): write the path of a file that symbiosis pads made")
        return PadsLevel(PadFile(Path(self.file)), proofs)


class PadsLevel(IntegerLevel):
    """Gives every row a pad of its own."""

    def __init__(self, file: PadFile, proofs: Proofs | None) -> None:
        checked_bits(file.contents.bits)
        super().__init__(file.contents.bits, proofs)
        self.file = file
        self._members: dict[int, list[GroupMember]] = {}  # by stream
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
        if layer.packed:
            raise WrapError(
                f"{layer.name}: pads are made from whole weights, and {self._session.endpoint} holds this one packed as {layer.packed}: use an "
                "executor of floats, or privacy=Split(...)"
            )
        effect = self._effect(layer.name, gradient=False)
        if effect.digest != layer.digest:
            raise WrapError(
                f"{layer.name}: {self.file.path} was made from other weights than the executor's: make pads from the same checkpoint, "
                f"with --dtype {layer.dtype}"
            )
        super().learn(number, v_KN)
        self._together(GroupMember(number, v_KN.shape[1], False), layer.name)

    def _together(self, member: GroupMember, layer: str) -> None:
        """Make layers that take the same rows a group from the beginning, because alone each would use pads of its own."""
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

        def stream_of(member: GroupMember) -> int:
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


at_fork(_after_fork)
