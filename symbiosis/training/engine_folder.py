"""The folder in which an engine's runs outlive it."""

import fcntl
import os
import re
import shutil
from pathlib import Path

from symbiosis.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@=+-]{0,127}")  # of a run


class EngineFolder:
    """The folder of an engine's runs, which is its alone while it lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(f"another engine has {path}: end it, or name another folder") from None
        for left in path.glob(".*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)

    def names(self) -> set[str]:
        return {each.name for each in self.path.iterdir() if not each.name.startswith(".")}

    def has(self, name: str) -> bool:
        return NAME.fullmatch(str(name)) is not None and (self.path / name).is_dir()

    def close(self) -> None:
        os.close(self._lock)
