"""The executor's log: names, sizes and codes, never a call's contents."""

import logging
from typing import Any

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
