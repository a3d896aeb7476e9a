"""`--audit-log FILE`: who joined, was refused, was struck off and left, one JSON object a line. Never what a call holds."""

from datetime import UTC, datetime
from pathlib import Path

from symbiosis.base.logs import JsonLines
from symbiosis.errors import ConfigError


class AuditLog(JsonLines):
    """Each line has its time and its event. Raises `ConfigError` if there is no such file and none can be made."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "audit")
        try:
            self.open()
        except OSError as error:
            raise ConfigError(f"cannot write the audit log {path}: {error.strerror}") from None

    def tell(self, event: str, **fields: object) -> None:
        """Write a line about an event."""
        self.write({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields})
