"""What a forked child must not share with its parent: keys and pads, connections, threads that it does not have.

`os.fork` tells Python; a fork by libc, of a library or by ctypes, does not. So whoever is about to use such a thing asks. The kernel empties a page
in each child (MADV_WIPEONFORK): process ids alone do not tell, for a container's first process and its child in a namespace of its own are both 1.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap

MADV_WIPEONFORK = 18
_forget: list[Callable[[], object]] = []
_known = os.getpid(), 0  # the process in which nothing is another's, and how many forks made it
_page = mmap(-1, PAGESIZE, flags=MAP_PRIVATE | MAP_ANONYMOUS)
with suppress(OSError):  # an old kernel, where process ids have to do
    _page.madvise(MADV_WIPEONFORK)
_page[0] = 1  # 0 in a forked child
_locks: dict[tuple[int, int], threading.RLock] = {}  # by process: that of the parent may be held for ever


def at_fork(forget: Callable[[], object]) -> None:
    """Have this called in each forked child, before anything is used that `look_for_fork` guards."""
    _forget.append(forget)


def look_for_fork() -> int:
    """Forget what is the parent's, if this process has forked and nobody has said so. Return how many forks made it: what was made at another
    number is the parent's."""
    if not _page[0] or os.getpid() != _known[0]:
        _begin_once()
    return _known[1]


def _begin_once() -> None:
    with _locks.setdefault((_known[1], os.getpid()), threading.RLock()):
        if not _page[0] or os.getpid() != _known[0]:
            _begin()


def _begin() -> None:
    """Begin a forked child's own life. Other threads of the child wait until the last line."""
    global _known
    for forget in _forget:
        forget()
    _page[0] = 1
    _known = os.getpid(), _known[1] + 1


os.register_at_fork(after_in_child=_begin)
