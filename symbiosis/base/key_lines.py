"""The file of API keys: what a line of it may say, and how it is read."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from symbiosis.base.curve_keys import moment
from symbiosis.base.secret_files import read_secret
from symbiosis.errors import ConfigError

SHORTEST_KEY, LONGEST_FILE = 8, 16 << 20
NUMBER = re.compile("[0-9]{1,15}")
LIMITS = ("requests", "tokens_per_s", "tokens_per_day")  # which processes hold together


@dataclass(frozen=True)
class KeyLine:
    """What a line says of a tenant."""

    name: str = ""
    digest: bytes = b""
    old_digest: bytes = b""  # of a key that is being exchanged; empty: there is none
    old_expires: float = inf  # in seconds since 1970
    requests: int = 0  # most under way; 0: any number
    tokens_per_s: int = 0  # 0: any number
    tokens_per_day: int = 0  # from midnight to midnight, UTC; 0: any number
    may_change_adapters: bool = False

    def part(self, processes: int) -> "KeyLine":
        """Return what one of some processes holds of its limits.

        >>> KeyLine("anna", requests=7, tokens_per_s=1).part(2).requests
        3
        """
        parts: dict[str, Any] = {name: part_of(getattr(self, name), processes) for name in LIMITS}
        return replace(self, **parts)


def part_of(limit: float, processes: int) -> int:
    """Return what each of some processes may let in, so that all of them keep a limit together. 0 is none.

    >>> part_of(7, 2), part_of(1, 2), part_of(0, 2)
    (3, 1, 0)
    """
    return max(1, int(limit) // processes) if limit else 0


def _limit(text: str, where: str) -> int:
    if not NUMBER.fullmatch(text):
        raise ConfigError(f"{where}: {LINE}")
    if not (limit := int(text)):
        raise ConfigError(
            f"{where}: a limit of 0 lets nothing in: take the line out, or leave the limit out if there is none"
        )
    return limit


def _moment(text: str, where: str) -> float:
    try:
        return moment(text)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def digest_of(key: str, where: str) -> bytes:
    """Return the digest of a key of the file. A `ConfigError` says what is wrong with the key, and does not show it."""
    if len(key) < SHORTEST_KEY:
        raise ConfigError(f"{where}: {LINE}; a key has at least {SHORTEST_KEY} characters")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{where}: keys are of ASCII's printable characters, which is all that HTTP's headers have")
    return digest(key)


def digest(key: str) -> bytes:
    """Return what is kept of a key."""
    return hashlib.sha256(key.encode()).digest()


class KeyOption(NamedTuple):
    """What may stand behind a key."""

    value: str  # what stands behind its `=`; empty: it has none
    field: str  # of `KeyLine`
    read: Callable[[str, str], Any]  # its value, at a place in a file


KEY_OPTIONS = {
    "admin": KeyOption("", "may_change_adapters", lambda value, where: True),
    "requests": KeyOption("N", "requests", _limit),
    "tokens_per_s": KeyOption("N", "tokens_per_s", _limit),
    "tokens_per_day": KeyOption("N", "tokens_per_day", _limit),
    "old_key": KeyOption("KEY", "old_digest", digest_of),
    "old_key_expires": KeyOption("DATE", "old_expires", _moment),
}
FORMAT = " ".join(
    ["NAME KEY", *(f"[{name}={option.value}]" if option.value else f"[{name}]" for name, option in KEY_OPTIONS.items())]
)
LINE = f"a line of it is `{FORMAT}`"


def read_keys(file: Path) -> dict[str, KeyLine]:
    """Return the lines of a file by the names of their tenants. A `ConfigError` never shows a key."""
    try:
        lines = read_secret(file, LONGEST_FILE).decode("utf-8-sig").split("\n")  # as editors on Windows write it
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {file}: {error}") from None
    found: dict[str, KeyLine] = {}
    digests = set[bytes]()
    for number, line in enumerate(lines, 1):
        if words := line.partition("#")[0].split():
            tenant = _read(words, f"{file}, line {number}")
            mine = {tenant.digest, tenant.old_digest} - {b""}
            if tenant.name in found or mine & digests or tenant.digest == tenant.old_digest:
                raise ConfigError(f"{file}, line {number}: this name or key is there already")
            digests |= mine
            found[tenant.name] = tenant
    if not found:
        raise ConfigError(f"{file} has no API keys: {LINE}")
    return found


def _read(words: list[str], where: str) -> KeyLine:
    if len(words) < 2 or not words[0].isprintable():
        raise ConfigError(f"{where}: {LINE}; names are of printable characters")
    told: dict[str, Any] = {"digest": digest_of(words[1], where)}
    for word in words[2:]:
        name, is_given, value = word.partition("=")
        if (option := KEY_OPTIONS.get(name)) is None or bool(is_given) != bool(option.value):
            raise ConfigError(f"{where}: {LINE}")
        if option.field in told:
            raise ConfigError(f"{where}: it has {name} twice")
        told[option.field] = option.read(value, where)
    found = KeyLine(words[0], **told)
    if found.old_expires < inf and not found.old_digest:
        raise ConfigError(f"{where}: old_key_expires goes with old_key=KEY")
    return found
