"""Waits for an executor that is away, and tells the user about it."""

import logging
import threading
from collections.abc import Sequence
from time import monotonic

from symbiosis.errors import ExecutorUnavailable, HandshakeFailed
from symbiosis.protocol.endpoints import how_to_start_one

logger = logging.getLogger("symbiosis")
JOIN_S = 10.0  # how long an executor may take to let a client in
LONGEST_PAUSE_S = 0.5  # between two attempts to find one
SILENT_S = 2.0  # a shorter wait is not worth a line
SAYS_NOTHING = (
    "what listens there takes connections, and says nothing. If it is an executor, it hangs, is stopped, or is still starting: "
    "see its log"
)
AWAY = "%s is away: this program goes on with the weights that it has mapped"
_lock = threading.Lock()
_waits: dict[tuple[str, ...], list["Patience"]] = {}  # the waits under way, by endpoints


class Patience:
    """One wait for an executor. Several waits of a process for the same executor are reported once."""

    def __init__(self, endpoints: Sequence[str], seconds: float, option: str) -> None:
        """`option` names what the user may change to wait longer or shorter."""
        self.begun, self.seconds = monotonic(), seconds
        self._key, self._option, self._told = tuple(endpoints), option, False
        self.why = ""  # what the user is told besides
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
            "waiting for an executor at %s, for up to %g s (%s); ctrl-C stops waiting%s",
            " or ".join(self._key),
            self.seconds,
            self._option,
            f". {self.why}" if self.why else "",
        )

    def end(self, endpoint: str | None) -> None:
        """End the wait. `endpoint` is the executor that answers, or None if it was in vain."""
        self._timer.cancel()
        with _lock:
            waits = _waits[self._key]
            waits.remove(self)
            if not waits:
                del _waits[self._key]
            elif self._told and endpoint is None:  # another wait goes on, and takes over the line that was logged
                waits[0]._told, self._told = True, False
        if self._told and endpoint is not None:
            logger.warning("the executor at %s answers, after %.1f s", endpoint, monotonic() - self.begun)


def unavailable(endpoints: Sequence[str], cause: Exception, longer: str = "") -> ExecutorUnavailable:
    """Return the error of a wait in vain, which says what to do about it, and which argument waits for `longer`."""
    more = f" ({longer} waits for longer)" if longer else ""
    if isinstance(cause, HandshakeFailed):
        return ExecutorUnavailable(f"{cause}{more}")
    if isinstance(cause, TimeoutError):
        return ExecutorUnavailable(f"no executor answers at {' or '.join(endpoints)}: {SAYS_NOTHING}{more}")
    said = str(cause).removeprefix(f"no executor answers at {endpoints[0]}: ")
    return ExecutorUnavailable(
        f"no executor at {' or '.join(endpoints)} ({said}). {how_to_start_one(endpoints[0])}{more}"
    )
