"""Waiting for an executor: for how long, and what the user is told meanwhile."""

import logging
import threading
from collections.abc import Sequence
from time import monotonic

from symbiosis.endpoints import how_to_start_one
from symbiosis.errors import ExecutorUnavailable, HandshakeFailed

logger = logging.getLogger("symbiosis")
SILENT_S = 2.0  # a wait that is over sooner is not worth a line
_lock = threading.Lock()
_waits: dict[tuple[str, ...], list["Patience"]] = {}  # that last, by what they wait for


class Patience:
    """One wait for an executor. Those of one process that wait for the same one are told of once."""

    def __init__(self, endpoints: Sequence[str], seconds: float, option: str) -> None:
        """`option`: what the user may change to wait longer or shorter."""
        self.begun, self.seconds = monotonic(), seconds
        self._key, self._option, self._told = tuple(endpoints), option, False
        with _lock:
            _waits.setdefault(self._key, []).append(self)
        self._timer = threading.Timer(SILENT_S, self._tell)
        self._timer.daemon = True
        self._timer.start()

    @property
    def left(self) -> float:
        return self.begun + self.seconds - monotonic()

    def _tell(self) -> None:
        with _lock:
            waits = _waits.get(self._key, ())
            if self not in waits or any(wait._told for wait in waits):
                return
            self._told = True
        logger.warning(
            "waiting for an executor at %s, for up to %g s (%s); ctrl-C stops waiting",
            " or ".join(self._key),
            self.seconds,
            self._option,
        )

    def end(self, endpoint: str | None) -> None:
        """The wait is over, by the executor at `endpoint`, or in vain."""
        self._timer.cancel()
        with _lock:
            waits = _waits[self._key]
            waits.remove(self)
            if not waits:
                del _waits[self._key]
            elif self._told and endpoint is None:  # others go on, of which a line was written
                waits[0]._told, self._told = True, False
        if self._told and endpoint is not None:
            logger.warning("the executor at %s answers, after %.1f s", endpoint, monotonic() - self.begun)


def unavailable(endpoints: Sequence[str], cause: Exception) -> ExecutorUnavailable:
    """What a wait in vain raises, and what to do about it."""
    if isinstance(cause, HandshakeFailed):
        return ExecutorUnavailable(str(cause))
    return ExecutorUnavailable(f"no executor at {' or '.join(endpoints)} ({cause}). {how_to_start_one(endpoints[0])}")
