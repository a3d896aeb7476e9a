"""The register of how many pads of each file this user has used on this machine. It is kept apart from the files.

A copy of a pad file, or a file that was restored from a backup, says that fewer of its pads are used than the register does. Two things are
not noticed: a register that goes back together with the file (a snapshot of the whole machine), and a copy on another machine.
"""

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from symbiosis.base.folders import Use, user_folder
from symbiosis.errors import ConfigError

COUNTER = struct.Struct("<QI")  # a number and its checksum


class Damaged(Exception):
    """A number is not the one that was written."""


class Counters:
    """Numbers in an open file. Each is on the disk when it is set."""

    def __init__(self, fd: int, start: int = 0) -> None:
        self._fd, self._start = fd, start

    def __getitem__(self, index: int) -> int:
        found = os.pread(self._fd, COUNTER.size, self._start + COUNTER.size * index)
        number = int(COUNTER.unpack(found)[0]) if len(found) == COUNTER.size else 0
        if found != packed(number):
            raise Damaged
        return number

    def __setitem__(self, index: int, number: int) -> None:
        os.pwrite(self._fd, packed(number), self._start + COUNTER.size * index)
        os.fdatasync(self._fd)


def packed(number: int) -> bytes:
    """Return a counter as it is written."""
    return COUNTER.pack(number, zlib.crc32(number.to_bytes(8)))


@contextmanager
def locked(fd: int, path: Path) -> Iterator[None]:
    """Open the file and lock it against others. If there is a fork meanwhile, closing the file does not end the lock, because the child
    keeps it open."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be locked ({error.strerror}), so another program could use the same pads: put it on a local disk"
        ) from None
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


@contextmanager
def registered(name: str, streams: int) -> Iterator[Counters]:
    """Return the numbers of the file of this name; zeros for a file that was never used here."""
    path = user_folder(Use.STATE, "pads", make=True) / name
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _unwritten(path, error) from None
    try:
        with locked(fd, path):
            try:
                if not os.fstat(fd).st_size:
                    os.pwrite(fd, packed(0) * streams, 0)
            except OSError as error:  # the disk is full
                raise _unwritten(path, error) from None
            yield Counters(fd)
    finally:
        os.close(fd)


def _unwritten(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be written ({error.strerror}), where the number of used pads is kept: set XDG_STATE_HOME to a folder "
        "that can be, and that stays"
    )
