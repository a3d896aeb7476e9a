"""What processes of this project write: the log, a line for people or one JSON object a line, and files of JSON lines."""

import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from symbiosis.text import shown

logger = logging.getLogger("symbiosis")

LONGEST_LINE = 1 << 14  # characters
_process = ""  # whose lines these are, where several processes write to one place
unwritten = Counter[str]()  # lines of this process that could not be written, by what they were for
request_id: ContextVar[str] = ContextVar("request_id", default="")  # of the request that runs: its lines show it


@contextmanager
def about_request(id: str) -> Iterator[None]:
    """Let the lines of this block say that they are about a request."""
    token = request_id.set(id)
    try:
        yield
    finally:
        request_id.reset(token)


def name_process(name: str) -> None:
    """Let this process's lines say from now on that they are its own."""
    global _process
    _process = name


class _Lines(logging.StreamHandler[Any]):
    """Counts lines that cannot be written, as on a full disk: there is no place where it could be said."""

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], OSError):
            unwritten["stderr"] += 1
        else:
            super().handleError(record)


def write_lines(log_format: str = "text") -> None:
    """Write log lines to stderr, for people or as JSON."""
    handler = _Lines(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.getLogger().handlers[:] = [handler]
    logger.setLevel(logging.INFO)


def set_up_logging(log_format: str) -> None:
    """Write log lines to stderr, also those of the packages that are used. With JSON nothing else is written, so progress bars are turned off, and
    so they are where several processes write to one place."""
    write_lines(log_format)
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


class JsonLines:
    """A file that gets one JSON object a line, each by one write, from any number of processes. When the file is moved away, the next line begins
    a new one at its path. A line that cannot be written, as on a full disk, is lost and counted, and the log says so once until lines can be written again.

    >>> import tempfile
    >>> lines = JsonLines(Path(tempfile.mkdtemp()) / "lines.jsonl", "example")
    >>> lines.write({"tenant": "alice", "session": 1})
    >>> json.loads(lines.path.read_text())["tenant"]
    'alice'

    Args:
        name: What log it is: messages and `unwritten` say so.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self._name, self._fd = path, name, -1
        self._lost = 0  # lines since one could be written
        self._is_torn = False  # the last line broke off

    def open(self) -> None:
        """Open what lies at the path now. Raises `OSError`."""
        self.close()
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)

    def write(self, line: dict[str, Any]) -> None:
        try:
            if self._fd < 0 or self._was_moved():
                self.open()
            self._append(f"{json.dumps(line)}\n".encode())
        except OSError as error:  # whoever writes it goes on
            self._lost += 1
            unwritten[self._name] += 1
            if self._lost == 1:
                self._say(logging.ERROR, f"cannot write the {self._name} log", error=str(error))
        else:
            if self._lost:
                self._say(logging.WARNING, f"the {self._name} log is written again", left_out=self._lost)
            self._lost = 0

    def _append(self, data: bytes) -> None:
        data = b"\n" + data if self._is_torn else data
        if (written := os.write(self._fd, data)) < len(data):
            self._is_torn = self._is_torn or written > 0
            raise OSError("only a part of the line found room")
        self._is_torn = False

    def _was_moved(self) -> bool:
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self._fd))
        except FileNotFoundError:
            return True

    def _say(self, level: int, event: str, **fields: object) -> None:
        logger.log(level, event, extra={"fields": {"file": str(self.path), **fields}})

    def close(self) -> None:
        """The next line opens the file anew."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


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
    about = {"request": id} if (id := request_id.get()) else {}
    return {**about, **getattr(record, "fields", {})}
