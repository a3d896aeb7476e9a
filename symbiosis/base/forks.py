"""What a forked child must not share with its parent: keys and pads, connections, threads that it does not have.

`os.fork` tells Python; a fork by libc, of a library or by ctypes, does not. So whoever is about to use such a thing asks.
"""

import os
import threading
from collections.abc import Callable

_forget: list[Callable[[], object]] = []
_known = os.getpid()  # the process in which nothing is another's
_locks: dict[int, threading.RLock] = {}  # by process: that of the parent may be held for ever


def at_fork(forget: Callable[[], object]) -> None:
    """Have this called in each forked child, before anything is used that `look_for_fork` guards."""
    _forget.append(forget)


def look_for_fork() -> None:
    """Forget what is the parent's, if this process has forked and nobody has said so."""
    global _known
    if (process := os.getpid()) != _known:
        with _locks.setdefault(process, threading.RLock()):
            if process != _known:
                for forget in _forget:
                    forget()
                _known = process


os.register_at_fork(after_in_child=look_for_fork)
