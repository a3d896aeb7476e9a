"""The executor's logs: names, sizes and codes, never a call's contents."""

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from symbiosis.base.logs import JsonLines
from symbiosis.errors import ConfigError

ALARM_S = 60.0  # between two warnings about the same thing
logger = logging.getLogger("symbiosis.executor")
logger.addHandler(logging.NullHandler())  # an executor inside a program logs where the program says, or nowhere


def log(level: int, event: str, **fields: Any) -> None:
    logger.log(level, event, extra={"fields": fields})


def log_mistake(event: str, error: Exception, **fields: Any) -> None:
    """Log a bug of the executor, with its traceback."""
    logger.error(event, exc_info=error, extra={"fields": fields})


class Alarm:
    """Repeats a warning about a lasting condition, but not too often.

    >>> alarm = Alarm()
    >>> [alarm.sounds(now) for now in (1.0, 2.0, 62.0)]
    [True, False, True]
    """

    def __init__(self) -> None:
        self._next = 0.0

    def sounds(self, now: float) -> bool:
        """Whether to warn now. If so, the warning counts as given."""
        if now < self._next:
            return False
        self._next = now + ALARM_S
        return True


class AuditLog(JsonLines):
    """`--audit-log FILE`: who joined, was refused, was struck off and left, one JSON object a line, with its time. Raises `ConfigError` if there
    is no such file and none can be made."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "audit")
        try:
            self.open()
        except OSError as error:
            raise ConfigError(f"cannot write the audit log {path}: {error.strerror}") from None

    def tell(self, event: str, **fields: object) -> None:
        """Write a line about an event."""
        self.write({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields})
