"""More connections of one session, for threads that would wait for each other. Each thread that had to wait gets one of its own.

They are extra. A call that a lane loses, or that the executor does not take there, goes over the session's own connection, which joins
again, slows down and waits. So whatever happens to a lane, its thread is never worse off than without one.
"""

import itertools
import threading
from collections.abc import Callable
from time import monotonic

from torch import Tensor

from symbiosis import transport
from symbiosis.client.connection.lifetime import beat_every, beat_from_now_on
from symbiosis.client.connection.reconnect import Answer, call_once
from symbiosis.errors import CallError, Code, ConnectionLost, ProtocolError, SymbiosisError
from symbiosis.protocol import Call
from symbiosis.transport.reply_checks import MoreRoom
from symbiosis.transport.tensors import Shapes

IDLE_S = 10.0  # a lane that made no call for so long is closed
AGAIN_S = 5.0  # after the executor refused one, none is asked for


class Lane:
    """One connection. Its thread makes the calls, the heartbeat's thread beats; each holds the lock while it does."""

    def __init__(self, connection: transport.Connection) -> None:
        self.connection, self.owner, self.used = connection, threading.current_thread(), monotonic()
        self.closed = False
        self.lock = threading.Lock()
        self._seq = itertools.count(1)

    def attempt(self, call: Call, payload: tuple[Tensor, ...], timeout: float, shapes: Shapes) -> Answer | None:
        """Make a call and return the answer, or None if the session's own connection must be asked."""
        with self.lock:
            if self.closed:
                return None
            self.used = monotonic()
            try:
                return call_once(self.connection, next(self._seq), call, payload, timeout, shapes)
            except (ConnectionLost, MoreRoom):
                self._close()
            except CallError as error:
                if error.code is not Code.BUSY and (error.code is Code.DRAINING or isinstance(error, ProtocolError)):
                    self._close()
                if error.code not in (Code.BUSY, Code.DRAINING):
                    raise
            except BaseException:  # interrupted: the next call must not meet this one's reply
                self._close()
                raise
        return None

    def beat(self) -> None:
        """Tell the executor that the thread lives, or end what nobody uses."""
        if self.lock.acquire(blocking=False):
            try:
                if not self.owner.is_alive() or monotonic() > self.used + IDLE_S:
                    self._close()
                elif not self.closed:
                    self.connection.beat()
            finally:
                self.lock.release()

    def close(self, timeout: float) -> None:
        if self.lock.acquire(timeout=timeout):  # else a call is under way, and the process is ending
            try:
                self._close()
            finally:
                self.lock.release()

    def _close(self) -> None:
        if not self.closed:
            self.closed = True
            self.connection.close()


class Mine(threading.local):
    """The lane of the present thread."""

    lane: Lane | None = None


class Lanes:
    """The lanes of one session."""

    def __init__(self) -> None:
        self.mine = Mine()
        self._lock = threading.Lock()
        self._lanes: list[Lane] = []
        self._not_before = 0.0

    def __len__(self) -> int:
        """Return how many are open."""
        return sum(not lane.closed for lane in self._lanes)

    def open(self, join: Callable[[], transport.Connection], may: Callable[[], bool]) -> Lane | None:
        """Open a lane for this thread. Return None if there are enough, if another thread is just opening one, or if the executor
        refuses it."""
        if monotonic() < self._not_before or not self._lock.acquire(blocking=False):
            return None
        try:
            lane = self._left_over()
            if lane is None and may():
                lane = Lane(join())
                self._add(lane)
            self.mine.lane = lane
            return lane
        except SymbiosisError:
            self._not_before = monotonic() + AGAIN_S
            return None
        finally:
            self._lock.release()

    def _left_over(self) -> Lane | None:
        """Return a lane whose thread has ended, if there is one."""
        for lane in self._lanes:
            if not lane.owner.is_alive():
                with lane.lock:
                    if not lane.closed:
                        lane.owner = threading.current_thread()
                        return lane
        return None

    def _add(self, lane: Lane) -> None:
        self._lanes.append(lane)
        if len(self._lanes) == 1:
            beat_from_now_on(self, beat_every(lane.connection), Lanes._beat)

    def _beat(self) -> bool:
        for lane in list(self._lanes):
            lane.beat()
        with self._lock:
            self._lanes = [lane for lane in self._lanes if not lane.closed]
            return bool(self._lanes)

    def close(self, timeout: float) -> None:
        end = monotonic() + timeout
        for lane in list(self._lanes):
            lane.close(max(0.0, end - monotonic()))
