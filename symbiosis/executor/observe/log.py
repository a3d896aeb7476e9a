"""The executor's log: names, sizes and codes, never a call's contents, for people or as one JSON object a line."""

import json
import logging
import sys
import time
from typing import Any

import transformers

from symbiosis.text import shown

LONGEST_LINE = 1 << 14  # characters
ALARM_S = 60.0  # between two warnings about the same thing
logger = logging.getLogger("symbiosis.executor")
logger.addHandler(logging.NullHandler())  # an executor inside a program logs where the program says, or nowhere


def log(level: int, event: str, **fields: Any) -> None:
    logger.log(level, event, extra={"fields": fields})


def log_mistake(event: str, error: Exception, **fields: Any) -> None:
    """Log a bug of the executor, with its traceback."""
    logger.error(event, exc_info=error, extra={"fields": fields})


def worth_logging(count: int) -> bool:
    """Whether to log something that has happened `count` times: the 1st, 2nd, 4th, 8th, ... time, so that no client can fill the
    log."""
    return count & (count - 1) == 0


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


def set_up_logging(log_format: str) -> None:
    """Write log lines to stderr, for people or as JSON. With JSON nothing else is written, so progress bars are turned off."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger("symbiosis")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False
    if log_format == "json":
        transformers.utils.logging.disable_progress_bar()


class TextFormatter(logging.Formatter):
    """`12:00:01 INFO session joined session=1 client="pid 7"`; quoted, because a client's name may hold anything."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{key}={json.dumps(value)}" for key, value in _fields(record).items())
        line = f"{time.strftime('%H:%M:%S')} {record.levelname} {shown(record.getMessage(), LONGEST_LINE)}"
        line = f"{line} {fields}" if fields else line
        trace = self.formatException(record.exc_info).splitlines() if record.exc_info else ()
        return "\n".join((line, *map(shown, trace)))


class JsonFormatter(logging.Formatter):
    """One object per line, for log collectors."""

    def format(self, record: logging.LogRecord) -> str:
        head = {"time": record.created, "level": record.levelname.lower(), "event": record.getMessage()}
        trace = {"traceback": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps({**head, **_fields(record), **trace})


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})
