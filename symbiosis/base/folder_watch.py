"""Tells which files of a folder change, by inotify(7), for which Python has no call of its own."""

import ctypes
import os
import select
import struct
from contextlib import suppress
from pathlib import Path

CREATE, CLOSE_WRITE, MOVED, DELETE, ATTRIB = 0x100, 0x8, 0xC0, 0x200, 0x4
DELETE_SELF, MOVE_SELF, ONLY_A_FOLDER = 0x400, 0x800, 0x1000000
WHAT = CREATE | CLOSE_WRITE | MOVED | DELETE | ATTRIB | DELETE_SELF | MOVE_SELF | ONLY_A_FOLDER
EVENT = struct.Struct("iIII")  # the watch, the kind, a cookie, and the length of the name that follows
MOST_BYTES = 64 << 10


class FolderWatch:
    """Watches one folder. It misses changes behind a link in the folder, on another host, and in a folder that takes this one's place,
    and sees nothing if the kernel has no watch left. So look at the folder now and then as well."""

    def __init__(self) -> None:
        self._watched, self._number = (0, 0), -1
        self._poll = select.poll()
        try:
            self._libc = ctypes.CDLL(None)
            self._fd = int(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        except (OSError, AttributeError):
            self._fd = -1
        if self._fd >= 0:
            self._poll.register(self._fd, select.POLLIN)

    @property
    def tells(self) -> bool:
        """Whether something has changed. It is cheap enough to ask for each message."""
        return bool(self._poll.poll(0))

    def follow(self, folder: Path) -> bool:
        """Watch the folder that lies there now. Return whether it is another one than before."""
        with suppress(OSError):
            found = folder.stat()
            if self._fd >= 0 and (found.st_dev, found.st_ino) != self._watched:
                self._number = self._libc.inotify_add_watch(self._fd, os.fsencode(folder), WHAT)
                self._watched = (found.st_dev, found.st_ino) if self._number >= 0 else (0, 0)
                return self._number >= 0
        return False

    def changed(self) -> set[str] | None:
        """Return the names of the files that changed, or None if more than that may have changed."""
        names: set[str] | None = set()
        with suppress(OSError):  # nothing to read
            events = os.read(self._fd, MOST_BYTES)
            while events:
                number, _, _, length = EVENT.unpack_from(events)
                name = events[EVENT.size : EVENT.size + length].rstrip(b"\0")
                events = events[EVENT.size + length :]
                if not name:  # the folder itself changed, or events were lost
                    names, self._watched = None, (0, 0)
                elif names is not None and number == self._number:
                    names.add(os.fsdecode(name))
        return names

    def close(self) -> None:
        if self._fd >= 0:
            self._poll.unregister(self._fd)
            os.close(self._fd)
            self._fd = -1
