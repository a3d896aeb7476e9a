"""The sessions of this process. They beat while they live, join again in forked children and unpickled copies, and leave at the end."""

import atexit
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from symbiosis.base.forks import at_fork
from symbiosis.errors import RemoteWeightError
from symbiosis.transport.base import Connection

LONGEST_PAUSE_S = 10.0  # between two beats, however seldom the executor wants them


class Living(Protocol):
    """What this module needs of a session."""

    number: int

    def close(self, timeout: float = 1.0) -> None: ...

    def forget_parent(self) -> None: ...


Kept = TypeVar("Kept")
_numbers = itertools.count(1)
_sessions: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_restored: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()


def register(session: Living) -> int:
    """Register a session. Return the number by which compiled graphs find it again."""
    number = next(_numbers)
    _sessions[number] = session
    return number


def sessions() -> list[Any]:
    """Return the sessions of this process."""
    # not `values`, which fails if another thread registers one meanwhile
    return [session for reference in _sessions.valuerefs() if (session := reference()) is not None]


def session_of(number: int) -> Any:
    """Return the session of this number, for compiled graphs, which have no more than that."""
    session = _sessions.get(number)
    if session is None:
        raise RemoteWeightError(
            "the wrapped model of this compiled graph is gone, and with it the connection to the executor: keep the model until "
            "its backward pass is over"
        )
    return session


def restored(key: str, make: Callable[[], Kept]) -> Kept:
    """Return the session that a pickled one becomes in this process: one for each original."""
    session = _restored.get(key)
    if session is None:
        session = _restored[key] = make()
    return session  # type: ignore[no-any-return]


def beat_every(connection: Connection) -> float:
    """Return how many seconds may lie between two calls of `connection.beat`. A thread does it, which lives so long after its connection."""
    return min(connection.welcome.heartbeat_s / 4, connection.look_s, LONGEST_PAUSE_S)


def beat_from_now_on(alive: Kept, interval: float, beat: Callable[[Kept], bool]) -> None:
    """Start a thread that calls `beat` again and again, until it returns False or `alive` is gone."""
    reference = weakref.ref(alive)

    def run() -> None:
        while True:
            time.sleep(interval)
            found = reference()
            if found is None or not beat(found):
                return
            del found

    threading.Thread(target=run, name="symbiosis-heartbeat", daemon=True).start()


def _after_fork() -> None:
    for session in sessions():
        session.forget_parent()


def _leave() -> None:
    end = time.monotonic() + 1.0
    for session in sessions():
        session.close(max(0.0, end - time.monotonic()))


at_fork(_after_fork)
atexit.register(_leave)
