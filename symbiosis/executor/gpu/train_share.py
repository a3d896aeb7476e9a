"""Large calls of training on a GPU: while somebody decodes, they take no more than a share of its time.

A GPU neither interrupts a product nor lets the small kernels of other programs in while a large one fills it, so whoever decodes
waits for most of each at every step. Who trains only gets less done.
"""

from collections import deque
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from symbiosis.executor.work import DeviceWork

DECODES_S = 0.1  # after a call somebody is still taken to decode


class Background:
    """Decides when they run: one after another, as they came."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.decoded = -inf  # when the last call of somebody who decodes came
        self._waiting: deque[DeviceWork] = deque()
        self._free = -inf  # from when on the next may run

    def __len__(self) -> int:
        return len(self._waiting)

    def takes(self, work: "DeviceWork", now: float) -> bool:
        """Whether a call that has just come has to wait here."""
        if not self._waiting and now >= self._ready():
            return False
        self.put(work)
        return True

    def put(self, work: "DeviceWork") -> None:
        """Of this there is more to run, in its turn."""
        self._waiting.append(work)

    def rations(self, now: float) -> bool:
        """Whether somebody decodes, so that they do not run as they can."""
        return self.share < 1 and now < self.decoded + DECODES_S

    def next(self, now: float) -> "DeviceWork | None":
        """The call to run now."""
        return self._waiting.popleft() if self._waiting and now >= self._ready() else None

    def ran(self, seconds: float, now: float) -> None:
        """One was launched that takes so long."""
        self._free = now + seconds / self.share

    def wake_at(self) -> float:
        """When `next` wants to be asked again."""
        return self._ready() if self._waiting else inf

    def _ready(self) -> float:
        return min(self._free, self.decoded + DECODES_S) if self.share < 1 else -inf

    def leave(self, peer: object) -> None:
        """Nobody waits any more for the calls of this one."""
        self._waiting = deque(work for work in self._waiting if work.peer is not peer)
