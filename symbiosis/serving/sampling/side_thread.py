"""A thread for what may take long, so that whoever waits for it can go on without."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")


class TooSlow(Exception):
    """It was not done in time."""


class Outcome(NamedTuple):
    """What became of a call."""

    call: Callable[[], Any]
    result: Any
    error: BaseException | None


class SideThread:
    """Runs one thing after another in a thread. What is not done in time keeps that thread, and others get a new one. For one user at a time.

    >>> SideThread().within(10.0, lambda: 6 * 7)
    42
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Any] | None = None

    def begin(self, call: Callable[[], Any], done: "SimpleQueue[Outcome]") -> None:
        """Have this called, and its outcome put into a queue."""
        if self._work is None:
            self._work = SimpleQueue()
            threading.Thread(target=_run, args=(self._work,), name="serve-schema-mask", daemon=True).start()
        self._work.put((call, done))

    def within(self, seconds: float, call: Callable[[], Result]) -> Result:
        """Return what `call` returns. Raises `TooSlow` if it takes longer."""
        done = SimpleQueue[Outcome]()
        self.begin(call, done)
        try:
            _, result, error = done.get(timeout=seconds)
        except Empty:
            self.close()
            raise TooSlow from None
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def close(self) -> None:
        """Let the thread end, once it is done with what it does."""
        if self._work is not None:
            self._work.put(None)
            self._work = None


def _run(work: "SimpleQueue[Any]") -> None:
    while (asked := work.get()) is not None:
        call, done = asked
        try:
            done.put(Outcome(call, call(), None))
        except BaseException as error:  # whatever it is: who asked raises it
            done.put(Outcome(call, None, error))
