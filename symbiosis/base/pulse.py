"""Whether the process at the other end of a link still runs. It says so every second."""

import time
from collections.abc import Callable

BEAT_S = 1.0
SILENT_S = 15.0  # one that says nothing for so long hangs
FIRST_S = 300.0  # ... before it has said anything: it may still be starting


class Pulse:
    """How long the other side has been silent. Only time in which this side looked counts, so that after a freeze of both neither seems to
    hang.

    >>> now = iter([0.0, 0.5, 100.0])
    >>> pulse = Pulse(lambda: next(now))
    >>> pulse.look(), pulse.look()
    (0.5, 1.5)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._silent, self._most = clock, 0.0, FIRST_S
        self._looked = clock()

    def beat(self) -> None:
        """Note that the other side said something."""
        self._silent, self._most = 0.0, SILENT_S

    def look(self) -> float:
        """Return the seconds of silence. To be called at least every second."""
        now = self._clock()
        self._silent += min(now - self._looked, BEAT_S)
        self._looked = now
        return self._silent

    def seems_lost(self) -> bool:
        """Look, and return whether the silence is too long."""
        return self.look() > self._most
