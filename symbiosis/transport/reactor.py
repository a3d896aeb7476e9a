"""Runs callbacks when file descriptors become readable: the one place where an executor's thread sleeps."""

import os
import select
from collections import deque
from collections.abc import Callable
from contextlib import suppress


class Reactor:
    """A thin epoll. `wake` may be called from any thread or signal handler."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._soon: deque[Callable[[], None]] = deque()
        self.watch(self._bell, self._run_soon, on_change=True)

    def watch(self, fd: int, callback: Callable[[], None], *, on_change: bool = False) -> None:
        """Call `callback` while `fd` is readable; `on_change`: once for every time it is written to."""
        self._callbacks[fd] = callback
        self._epoll.register(fd, select.EPOLLIN | (select.EPOLLET if on_change else 0))

    def forget(self, fd: int) -> None:
        if self._callbacks.pop(fd, None):
            self._epoll.unregister(fd)

    def poll(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for something to happen, and handle all of it."""
        for fd, _ in self._epoll.poll(timeout):
            if callback := self._callbacks.get(fd):
                callback()

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run `callback` in the reactor's thread; callable from any thread."""
        self._soon.append(callback)
        self.wake()

    def wake(self) -> None:
        with suppress(OSError):  # closed: nobody sleeps any more
            os.eventfd_write(self._bell, 1)

    def _run_soon(self) -> None:
        while self._soon:
            self._soon.popleft()()

    def close(self) -> None:
        self._epoll.close()
        os.close(self._bell)


