"""What tenants have on the disk. Each may have as much as it leaves free, so one alone has half, and none fills it for the others."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from symbiosis.server.tinker.tinker_messages import TinkerRefusal

COUNT_S = 10.0  # so often files are counted anew; in between what is asked for is added


class DiskShares:
    """Who may write more.

    Args:
        folders: Returns a tenant's folders.
        free: Returns how many bytes are free there.

    >>> shares = DiskShares(lambda tenant: [], free=lambda: 100)
    >>> shares.take("anna", 40)
    >>> shares.take("anna", 40)
    Traceback (most recent call last):
    symbiosis.server.tinker.tinker_messages.TinkerRefusal: this key has 40 bytes on the disk, where 100 are free: delete checkpoints, or finish sessions
    """

    def __init__(self, folders: Callable[[str], Iterable[Path]], free: Callable[[], int]) -> None:
        self._folders, self._free = folders, free
        self._counted: dict[str, tuple[float, int]] = {}  # when, and how many bytes
        self._lock = threading.Lock()

    def take(self, tenant: str, nbytes: int) -> None:
        """Raise `TinkerRefusal` unless a tenant may write so many bytes more."""
        now, free = time.monotonic(), self._free()
        counted, taken = self._counted.get(tenant, (-COUNT_S, 0))
        if now - counted >= COUNT_S:
            counted, taken = now, sum(size_of(folder) for folder in self._folders(tenant))
        with self._lock:
            self._counted[tenant] = counted, taken
            if taken + nbytes > free - nbytes:
                raise TinkerRefusal(
                    f"this key has {taken} bytes on the disk, where {free} are free: delete checkpoints, or finish sessions",
                    507,
                )
            self._counted[tenant] = counted, taken + nbytes


def free_at(folder: Path) -> int:
    """Return how many bytes are free on the disk of a folder.

    >>> free_at(Path("/")) >= 0
    True
    """
    return shutil.disk_usage(folder).free


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder, some of which may be removed meanwhile.

    >>> size_of(Path("/nowhere"))
    0
    """
    found = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                found += Path(parent, name).lstat().st_size
    return found
