"""The executor's event loop: runs callbacks when file descriptors become readable. It is the one place where an executor's thread
sleeps.

Going to sleep and being woken on another core costs more than a small call: tens of microseconds, hundreds on a virtual machine. So
before it sleeps, the reactor looks at the doorbells in shared memory (`Bell`) for about as long as a client computes between two calls,
unless another thread needs the core. It tells the bells when it sleeps, so that clients ring a descriptor only then.

It also contains errors. Whatever goes wrong while a peer is served ends that peer at most, and never the loop (`Reactor.attempt`).
"""

import logging
import os
import platform
import select
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from time import perf_counter
from typing import Any, Protocol

SPIN_S = 2e-3
LOOKS = 8  # between two calls of sched_yield
SHORTEST_SLEEP_S = 1e-3  # epoll counts in milliseconds: a shorter wait spins and yields
CONTENDED_S = 30e-6  # if a yield takes so long, another thread needs the core
# Looking instead of sleeping needs stores to become visible in order, which x86 guarantees.
CAN_SPIN = platform.machine() in ("x86_64", "AMD64")
DESCRIPTORS_EVERY = 16  # a pass that found a bell skips the descriptors, except every 16th pass

FENCE = Lock()  # taking it is a full barrier: this thread's writes are visible to others before its next reads
logger = logging.getLogger("symbiosis")


def spin(look: Callable[[], bool], limit: float = SPIN_S, glance: Callable[[], bool] | None = None) -> bool:
    """Call `look` until it succeeds, for a moment at most (`limit`) and only while no other thread needs the core. `glance`, which
    costs more, is tried now and then. Return whether either succeeded."""
    end = perf_counter() + min(limit, SPIN_S)
    while True:
        for _ in range(LOOKS):
            if look():
                return True
        if glance is not None and glance():
            return True
        before = perf_counter()
        os.sched_yield()
        now = perf_counter()
        if now > end or (now - before > CONTENDED_S and limit > SHORTEST_SLEEP_S):
            return look()


class Endable(Protocol):
    """Something that the reactor serves, and can end."""

    def close(self) -> None: ...


class Bell(Endable, Protocol):
    """A peer's doorbell, which lies in memory."""

    @property
    def busy(self) -> bool:
        """Whether it is about to ring, so that sleeping does not pay."""
        ...

    @property
    def nap(self) -> float:
        """The longest sleep that it allows, because it may not be able to ring a descriptor."""
        ...

    def look(self) -> bool:
        """Handle the bell if it rang. Return whether it did."""
        ...

    def sleeping(self, flag: bool) -> None:
        """Note whether the loop sleeps, so that ringing needs a descriptor."""
        ...


def log_failure(peer: Endable | None, error: Exception) -> None:
    """Log an error; the default for `on_failure`."""
    logger.error("a bug ended %s", peer or "nobody", exc_info=error)


class Reactor:
    """A thin epoll. `wake` may be called from any thread or signal handler."""

    def __init__(self, on_failure: Callable[[Endable | None, Exception], None] = log_failure) -> None:
        """`on_failure` is called with each error and the peer that it concerns. If it raises, the loop ends."""
        self._on_failure = on_failure
        self._epoll = select.epoll()
        self._bells: tuple[Bell, ...] = ()
        self._looks: tuple[tuple[Callable[[], bool], Bell], ...] = ()
        self.passes = 0  # of the loop
        self._quiet = False  # nothing happened during the last sleep
        self._callbacks: dict[int, tuple[Callable[[], object], Endable | None]] = {}
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._soon: deque[tuple[Callable[[], object], Endable | None]] = deque()
        self.watch(self._bell, self._run_soon, on_change=True)

    def attempt(self, peer: Endable | None, act: Callable[..., Any], *words: Any) -> Any:
        """Call `act` for `peer`. Whatever it raises ends that peer, and nothing else."""
        try:
            return act(*words)
        except Exception as error:
            return self.failed(peer, error)

    def failed(self, peer: Endable | None, error: Exception) -> None:
        """Report an error that arose while `peer` was served, and end the peer."""
        self._on_failure(peer, error)
        if peer is not None:
            try:
                peer.close()
            except Exception as another:
                self._on_failure(None, another)

    def watch(
        self, fd: int, callback: Callable[[], object], peer: Endable | None = None, *, on_change: bool = False
    ) -> None:
        """Call `callback` for `peer` while `fd` is readable, or with `on_change` once each time it is written to."""
        self._callbacks[fd] = callback, peer
        self._epoll.register(fd, select.EPOLLIN | (select.EPOLLET if on_change else 0))

    def forget(self, fd: int) -> None:
        if self._callbacks.pop(fd, None):
            self._epoll.unregister(fd)

    def watch_bell(self, bell: Bell) -> None:
        self._set_bells((*self._bells, bell))

    def forget_bell(self, bell: Bell) -> None:
        self._set_bells(tuple(other for other in self._bells if other is not bell))

    def _set_bells(self, bells: tuple[Bell, ...]) -> None:
        self._bells, self._looks = bells, tuple((bell.look, bell) for bell in bells)

    def poll(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for something to happen, and handle it."""
        self.passes += 1
        if self._bells and CAN_SPIN:
            short = timeout <= SHORTEST_SLEEP_S
            found = (
                self._scan() if timeout <= 0 or (self._quiet and not short) else spin(self._scan, timeout, self._glance)
            )
            if not found and not short and not any(self._asked("busy")):
                self._sleep(timeout)
                return
            self._quiet = False
            if found and self.passes % DESCRIPTORS_EVERY:
                return
            timeout = 0.0
        self._handle(self._epoll.poll(timeout))

    def _sleep(self, timeout: float) -> None:
        self._tell_bells(True)
        timeout = min((timeout, *self._asked("nap")))
        with FENCE:
            pass
        found = self._scan()
        events = self._epoll.poll(0.0 if found else timeout)
        self._tell_bells(False)
        self._quiet = not found and not events
        self._handle(events)

    def _tell_bells(self, sleeps: bool) -> None:
        for bell in self._bells:
            try:
                bell.sleeping(sleeps)
            except Exception as error:
                self.failed(bell, error)

    def _glance(self) -> bool:
        events = self._epoll.poll(0.0)
        self._handle(events)
        return bool(events)

    def _scan(self) -> bool:
        found = False
        for look, bell in self._looks:
            try:
                found |= look()
            except Exception as error:
                self.failed(bell, error)
        return found

    def _asked(self, what: str) -> list[Any]:
        """Return this attribute of each bell."""
        told = []
        for bell in self._bells:
            try:
                told.append(getattr(bell, what))
            except Exception as error:
                self.failed(bell, error)
        return told

    def _handle(self, events: list[tuple[int, int]]) -> None:
        for fd, _ in events:
            if watched := self._callbacks.get(fd):
                callback, peer = watched
                self.attempt(peer, callback)

    def call_soon(self, callback: Callable[[], object], peer: Endable | None = None) -> None:
        """Run `callback` for `peer` in the reactor's thread; callable from any thread."""
        self._soon.append((callback, peer))
        self.wake()

    def wake(self) -> None:
        with suppress(OSError, ValueError):  # a closed reactor does not sleep
            os.eventfd_write(self._bell, 1)

    def _run_soon(self) -> None:
        for _ in range(len(self._soon)):  # callbacks that these add wait for the next pass
            callback, peer = self._soon.popleft()
            self.attempt(peer, callback)

    def close(self) -> None:
        self._epoll.close()
        bell, self._bell = self._bell, -1  # the number may soon be another file's
        os.close(bell)
