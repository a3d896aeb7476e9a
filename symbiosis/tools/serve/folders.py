"""Folders that belong to one process. If it cannot remove them itself, the next one does."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from symbiosis.security.ownership import make_folder

PREFIX = "serve-"


@contextmanager
def own_folder(parent: Path) -> Iterator[Path]:
    """Make a new folder in `parent`, and remove those of processes that were killed: each is locked while its process lives."""
    make_folder(parent)
    with _locked(parent, fcntl.LOCK_EX):
        for left in parent.glob(f"{PREFIX}*"):
            _remove_if_left(left)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_if_left(folder: Path) -> None:
    try:
        with _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(folder)
    except OSError:
        return  # somebody lives there


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
