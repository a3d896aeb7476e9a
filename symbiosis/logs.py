"""The log of all processes of this project: a line for people, or one JSON object a line."""

import json
import logging
import sys
import time
from collections import Counter
from typing import Any

from symbiosis.text import shown

LONGEST_LINE = 1 << 14  # characters
_process = ""  # whose lines these are, where several processes write to one place


def name_process(name: str) -> None:
    """Let this process's lines say from now on that they are its own."""
    global _process
    _process = name


def set_up_logging(log_format: str) -> None:
    """Write log lines to stderr, for people or as JSON: also those of the packages that are used. With JSON nothing else is written, so progress
    bars are turned off, and so they are where several processes write to one place."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.getLogger().handlers[:] = [handler]
    logging.getLogger("symbiosis").setLevel(logging.INFO)
    logging.captureWarnings(True)
    from transformers.utils import logging as of_transformers

    of_transformers.disable_default_handler()
    of_transformers.enable_propagation()
    if log_format == "json" or _process:
        of_transformers.disable_progress_bar()


def worth_logging(count: int) -> bool:
    """Whether to log something that has happened `count` times: the 1st, 2nd, 4th, 8th, ... time, so that no client can fill the
    log."""
    return count & (count - 1) == 0


class Tracebacks:
    """Says which errors are worth a traceback: of those of one kind from one line of code the 1st, 2nd, 4th, 8th, ... one."""

    def __init__(self) -> None:
        self._seen = Counter[tuple[type[BaseException], str, int]]()

    def of(self, error: BaseException) -> BaseException | None:
        """Return an error as `exc_info` if its traceback is to be logged."""
        trace, place = error.__traceback__, ("", 0)
        while trace is not None:
            place, trace = (trace.tb_frame.f_code.co_filename, trace.tb_lineno), trace.tb_next
        kind = type(error), *place
        self._seen[kind] += 1
        return error if worth_logging(self._seen[kind]) else None


class TextFormatter(logging.Formatter):
    """`12:00:01 INFO session joined session=1 client="pid 7"`; quoted, because a client's name may hold anything."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{key}={json.dumps(value)}" for key, value in _fields(record).items())
        told = shown(record.getMessage(), LONGEST_LINE)
        head = f"{time.strftime('%H:%M:%S')} {record.levelname}"
        line = f"{head} {_process}: {told}" if _process else f"{head} {told}"
        line = f"{line} {fields}" if fields else line
        trace = self.formatException(record.exc_info).splitlines() if record.exc_info else ()
        return "\n".join((line, *map(shown, trace)))


class JsonFormatter(logging.Formatter):
    """One object per line, for log collectors."""

    def format(self, record: logging.LogRecord) -> str:
        head = {"time": record.created, "level": record.levelname.lower(), "event": record.getMessage()}
        process = {"process": _process} if _process else {}
        trace = {"traceback": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps({**head, **process, **_fields(record), **trace})


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})
