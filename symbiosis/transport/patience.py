"""Waits for an executor that is away, and tells the user about it."""

import logging
import threading
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import NamedTuple

from symbiosis.errors import CallError, ExecutorUnavailable, HandshakeFailed
from symbiosis.protocol.endpoints import how_to_start_one

logger = logging.getLogger("symbiosis")
JOIN_S = 10.0  # how long an executor may take to let a client in
CONNECT_S = (
    3.0  # ... and its host to accept the connection: shorter than a heartbeat, longer than to send a packet twice
)
LONGEST_PAUSE_S = 0.5  # between two attempts to find one
SILENT_S = 2.0  # a shorter wait is not worth telling of
SAYS_NOTHING = "it takes connections, and says nothing: if it is an executor, it hangs, is stopped, or is still starting, as its log says"
AWAY = "%s is away: this program goes on with the weights that it has mapped"
_lock = threading.Lock()
_waits: dict[tuple[str, ...], list["Patience"]] = {}  # the waits under way, by endpoints


class Reason(NamedTuple):
    """Why a client did not come in at an endpoint, and whether something answers there."""

    why: str
    is_there: bool

    @classmethod
    def of(cls, error: Exception) -> "Reason":
        """Return what an error says. The error itself would hold frames, and the rows of a call with them.

        >>> Reason.of(FileNotFoundError(2, "No such file or directory"))
        Reason(why='No such file or directory', is_there=False)
        """
        if isinstance(error, TimeoutError):
            return cls(SAYS_NOTHING, True)
        why = error.message if isinstance(error, CallError) else getattr(error, "strerror", None) or str(error)
        return cls(why, isinstance(error, HandshakeFailed))


class Patience:
    """One wait for an executor. Several waits of a process for the same executor are reported once."""

    def __init__(self, endpoints: Sequence[str], seconds: float, option: str) -> None:
        """`option` names what the user may change to wait longer or shorter."""
        self.begun, self.seconds = monotonic(), seconds
        self._key, self._option, self._told = tuple(endpoints), option, False
        self.reasons: dict[str, Reason] = {}  # by endpoint, as it was asked last
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
            f". {unavailable(dict(self.reasons))}" if self.reasons else "",
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


def unavailable(reasons: Mapping[str, Reason], longer: str = "") -> ExecutorUnavailable:
    """Return the error of a wait in vain at these endpoints. It says what to do about it, and which argument waits for `longer`.

    >>> print(unavailable({"local:///a.sock": Reason("Connection refused", False)}))
    no executor at local:///a.sock (Connection refused). Start one with: symbiosis-executor MODEL --listen local:///a.sock
    """
    asked = " or ".join(f"{endpoint} ({reason.why})" for endpoint, reason in reasons.items())
    absent = [endpoint for endpoint, reason in reasons.items() if not reason.is_there]
    start = f". {how_to_start_one(absent[0])}" if absent else ""
    return ExecutorUnavailable(f"no executor at {asked}{start}" + (f" ({longer} waits for longer)" if longer else ""))
