"""Large calls of training on a GPU get only a share of its time while a client decodes.

A GPU does not interrupt a product, and while a large one fills it, the small kernels of other programs wait. So a client that decodes
would wait for most of a large product at every step. A client that trains only gets less done.
"""

from collections import deque
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from symbiosis.executor.call_kinds import DeviceWork

DECODES_S = 0.5  # how long after a call a client still counts as decoding: longer than a token takes, or training would slow it further
LATE_S = 1e-3  # so much of the time by which a call is launched late is made up for: the share would depend on the host's pace otherwise


class Background:
    """Decides when large calls of training run: one after another, in the order in which they came."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.decoded = -inf  # when the last call of a client that decodes came
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
        """Put a call, or the rest of a round, at the end of the line."""
        self._waiting.append(work)

    def rations(self, now: float) -> bool:
        """Whether these calls are held back, because a client decodes."""
        return self.share < 1 and now < self.decoded + DECODES_S

    def next(self, now: float) -> "DeviceWork | None":
        """Return the call to run now, if its time has come."""
        return self._waiting.popleft() if self._waiting and now >= self._ready() else None

    def ran(self, seconds: float, now: float) -> None:
        """Note that a call was launched that takes so long."""
        self._free = min(now, max(self._free, now - LATE_S)) + seconds / self.share

    def wake_at(self) -> float:
        """Return when to call `next` again."""
        return self._ready() if self._waiting else inf

    def _ready(self) -> float:
        return min(self._free, self.decoded + DECODES_S) if self.share < 1 else -inf

    def leave(self, peer: object) -> None:
        """Drop the calls of a client that is gone."""
        self._waiting = deque(work for work in self._waiting if work.peer is not peer)
