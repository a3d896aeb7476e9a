"""Files that hold a secret: private keys, API keys, pads. There is one rule for all: their owner is this user or root, and nobody else may read
or write them, or put another file in their place."""

import os
import stat
from pathlib import Path

from symbiosis.base.ownership import ROOT, is_trusted, user_name, why_replaceable
from symbiosis.errors import ConfigError

OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO
AS_MOUNTED = "where it is mounted by Kubernetes: defaultMode: 0440, and a securityContext with fsGroup"


def open_secret(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of the file. Raise `ConfigError` if another user may read it, write it or choose which one it is, else `OSError`.
    A pipe is not waited for."""
    if why := why_replaceable(path):
        raise ConfigError(why)
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if why := why_exposed(path, os.fstat(descriptor)):
        os.close(descriptor)
        raise ConfigError(why)
    return descriptor


def read_secret(path: Path, longest: int) -> bytes:
    """Return what is in the file. Raise as `open_secret` does, and for a file of more than `longest` bytes."""
    with os.fdopen(open_secret(path), "rb") as opened:
        told = opened.read(longest + 1)
    if len(told) > longest:
        raise ConfigError(f"cannot use {path}: it has more than {longest} bytes")
    return told


def create_secret(path: Path) -> int:
    """Return a descriptor of a new file, for its owner only. Raise `OSError` if there is one already."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def why_exposed(path: Path, found: os.stat_result) -> str | None:
    """Return why a file is no secret of this user's, with what to do, or None if it is one."""
    if not stat.S_ISREG(found.st_mode):
        return f"cannot use {path}: it is not a file"
    if not is_trusted(found.st_uid):
        return f"{path} belongs to {user_name(found.st_uid)}, who could change it: chown it to {user_name(os.getuid())}"
    exposed = found.st_mode & OF_OTHERS
    if found.st_uid == ROOT != os.getuid():
        exposed &= ~stat.S_IRGRP  # root lets this process read its file by a group, as Kubernetes does
    if exposed:
        mode = stat.S_IMODE(found.st_mode)
        return f"others can read or write {path} (its mode is {mode:04o}), which is to hold a secret: chmod 600 {path} ({AS_MOUNTED})"
    return None
