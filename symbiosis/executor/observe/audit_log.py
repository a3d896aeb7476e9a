"""`--audit-log FILE`: who joined, was refused, was struck off and left, one JSON object a line. Never what a call holds."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

from symbiosis.errors import ConfigError


class AuditLog:
    """Lines are appended to the file that lies at `path`, each by one write: when it is moved away, the next begins a new one.

    >>> import tempfile
    >>> log = AuditLog(Path(tempfile.mkdtemp()) / "audit.jsonl")
    >>> log.write("joined", tenant="alice", session=1)
    >>> json.loads(log.path.read_text())["tenant"]
    'alice'
    """

    def __init__(self, path: Path) -> None:
        self.path, self._fd = path, -1
        try:
            self._open()
        except OSError as error:
            raise ConfigError(f"cannot write the audit log {path}: {error.strerror}") from None

    def _open(self) -> None:
        self.close()
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)

    def write(self, event: str, **fields: object) -> None:
        """Write a line about an event, or raise `OSError`."""
        if self._fd < 0 or self._was_moved():
            self._open()
        line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields})
        os.write(self._fd, f"{line}\n".encode())

    def _was_moved(self) -> bool:
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self._fd))
        except FileNotFoundError:
            return True

    def close(self) -> None:
        """The next line opens the file anew."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
