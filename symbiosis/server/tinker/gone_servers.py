"""What servers have left that do not come back: the others that share the folder of checkpoints remove it, so that it counts against no key for ever."""

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger("symbiosis")

GONE_S = 86_400.0  # a server that has been away for so long is gone: its clients have given up long ago
BEGINS_S = (
    600.0  # when a cluster comes back that was down, so long its servers have to begin, before one of them is missed
)
RUNS, SESSIONS, REQUESTS = "runs", "sessions", ".requests"  # within the folder of a server; and of a session, by run


class GoneServers:
    """The servers that share a folder, as one of them sees the others.

    Args:
        own: The folder of this server, beside those of the others.
        server: Its name; None: it is alone.
    """

    def __init__(self, own: Path, server: str | None, clock: Callable[[], float] = time.time) -> None:
        self._own, self._is_alone, self._clock = own, server is None, clock
        self._began = clock()

    def look(self) -> list[str]:
        """Say that this server is there, remove what others have left that are gone, and return the runs that they had."""
        if self._is_alone:
            return []
        now = self._clock()
        os.utime(self._own, (now, now))
        if now - self._began < BEGINS_S:
            return []
        others = [each for each in self._own.parent.iterdir() if each != self._own and each.is_dir()]
        return [run for each in others if now - each.stat().st_mtime > GONE_S for run in _emptied(each)]


def _emptied(server: Path) -> list[str]:
    """Remove sessions and runs of a server, unless a process has them. The folders stay, since whoever comes back locks the same ones."""
    with _unused(server / RUNS) as is_unused:
        if not is_unused:
            return []
        sessions = _within(server / SESSIONS)
        ids = [f"{s.name}:train:{r.name.removesuffix(REQUESTS)}" for s in sessions for r in s.glob(f"*{REQUESTS}")]
        left = [*sessions, *_within(server / RUNS)]
        for each in left:
            shutil.rmtree(each, ignore_errors=True)
        if left:
            logger.info("removed %d sessions of the server %s, which is gone for a day", len(sessions), server.name)
        return ids


def _within(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


@contextmanager
def _unused(runs: Path) -> Iterator[bool]:
    """Hold the lock that the training engine of a server has on its runs (`EngineFolder`); whether it was free."""
    if not runs.is_dir():
        yield True
        return
    lock = os.open(runs, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(lock)
