"""Threads for the work of many tenants: nobody's work waits behind all that another has asked for."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

Made = TypeVar("Made")
LARGE = 20_000  # bytes of a body: what is made of more is made in a thread, so that nobody waits for it
MANY_CHOICES = 100  # of a body: likewise


class TenantThreads:
    """One pool of threads, of which each tenant has at most half at a time. Tenants that wait get a thread in turn.

    >>> lanes = TenantThreads(2, "example")
    >>> lanes.submit("anna", lambda: 6 * 7).result()
    42
    >>> lanes.close()
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._each = max(1, threads // 2)
        self._lock = threading.Lock()
        self._running: dict[str, int] = {}  # threads, by tenant
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}

    def submit(self, tenant: str, make: Callable[[], Made]) -> Future[Made]:
        """Have something made in a thread. What is cancelled before it has begun is not made."""
        future: Future[Made] = Future()
        make = partial(copy_context().run, make)  # so that it knows for which request it is
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append((future, make))
            if self._running.get(tenant, 0) < self._each:
                self._running[tenant] = self._running.get(tenant, 0) + 1
                self._pool.submit(self._run_one, tenant)
        return future

    def close(self) -> None:
        """Let what runs end, and cancel what waits."""
        with self._lock:
            for future, _ in (each for waiting in self._waiting.values() for each in waiting):
                future.cancel()
        self._pool.shutdown()

    def _run_one(self, tenant: str) -> None:
        """Do one piece of a tenant's work, and queue again behind the others if there is more."""
        with self._lock:
            if not self._waiting[tenant]:  # two threads were sent for what was one's
                self._end(tenant)
                return
            future, make = self._waiting[tenant].popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)
        del future, make
        with self._lock:
            if self._waiting[tenant]:
                try:
                    self._pool.submit(self._run_one, tenant)
                except RuntimeError:  # it closes
                    self._running[tenant] -= 1
            else:
                self._end(tenant)

    def _end(self, tenant: str) -> None:
        """Count a thread no more that has nothing to do for this tenant."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant], self._waiting[tenant]
