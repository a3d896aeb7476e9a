"""API keys: who asks, and how much each may ask for at a time. The file is read again when it changes."""

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from symbiosis.base.allowance import TokenBucket
from symbiosis.base.curve_keys import moment
from symbiosis.base.secret_files import read_secret
from symbiosis.errors import ConfigError
from symbiosis.server.api_errors import ApiError, wrong

logger = logging.getLogger("symbiosis")

LINE = "a line of it is `NAME KEY`, and may end in requests=NUMBER, tokens_per_s=NUMBER, admin, and old_key=KEY with old_key_expires=DATE"
LOOK_EVERY_S = 1.0
SHORTEST_KEY, LONGEST_FILE = 8, 16 << 20
NUMBER = re.compile("[0-9]{1,15}")


@dataclass
class Tenant:
    """The owner of a key. Where there are no keys, everybody is one tenant without limits."""

    name: str = ""
    digest: bytes = b""
    old_digest: bytes = b""  # of a key that is being exchanged; empty: there is none
    old_expires: float = inf  # in seconds since 1970
    requests: int = 0  # most under way; 0: any number
    tokens: TokenBucket = field(default_factory=lambda: TokenBucket(0, 0))
    may_change_adapters: bool = False
    under_way: int = 0

    def check(self, requests: int, now: float) -> None:
        """Raise `ApiError` if so many more requests are too many, or if the tenant owes tokens."""
        if self.requests and requests > self.requests:
            raise wrong(f"this key may have {self.requests} requests under way, and this would be {requests}", "n")
        if self.requests and self.under_way + requests > self.requests:
            raise too_many(
                f"this key may have {self.requests} requests under way, and has {self.under_way}",
                1.0,
                "requests_of_key",
            )
        if self.tokens.per_s and (wait_s := self.tokens.wait_s(now)):
            raise too_many(f"this key may have {self.tokens.per_s} tokens per second", wait_s, "tokens_of_key")

    def admit(self, requests: int, now: float, tokens: int = 0) -> "Admission":
        """Count so many requests as under way, and their tokens as spent, until they end, if they may be."""
        self.check(requests, now)
        self.under_way += requests
        self.tokens.take(tokens)
        return Admission(self, requests, tokens)


@dataclass
class Admission:
    """What a tenant has been let in with, until it ends: so many requests, and as many tokens as they may come to.

    >>> tenant = Tenant("anna", tokens=TokenBucket(10, 10))
    >>> admission = tenant.admit(1, now=0.0, tokens=100)
    >>> admission.end(used=30)
    >>> tenant.under_way, tenant.tokens.owed
    (0, 30.0)
    """

    tenant: Tenant
    requests: int
    reserved: int
    at_end: list[Callable[[], None]] = field(default_factory=list)  # called once

    def reserve(self, tokens: int) -> None:
        """Count so many tokens as spent, instead of those so far."""
        self.tenant.tokens.take(tokens - self.reserved)
        self.reserved = tokens

    def end(self, used: int = 0) -> None:
        """Give back everything but the tokens that were used. It may be called again."""
        if self.requests:
            self.tenant.tokens.take(used - self.reserved)
            self.tenant.under_way -= self.requests
            self.requests = 0
        while self.at_end:
            self.at_end.pop()()


class Keys:
    """The tenants of a file. Without a file everybody is the same nameless tenant.

    Args:
        processes: How many share the limits: this one has its part of each.

    >>> Keys(None).tenant(None).name
    ''
    """

    def __init__(
        self, file: Path | None, clock: Callable[[], float] = time.monotonic, today: Callable[[], float] = time.time, processes: int = 1
    ) -> None:  # fmt: skip
        self._file, self.clock, self._today = file, clock, today
        self.are_needed, self._processes = file is not None, processes
        self._still_old = set[bytes]()  # keys of which was logged that they are still in use
        self.nobody = Tenant(may_change_adapters=True)  # everybody, where no keys are needed
        self._tenants: dict[str, Tenant] = {}
        self._stamp: tuple[int, int] | None = None
        self._looked = clock()
        if file is not None:
            self._tenants, self._stamp = self._read(file), _stamp(file)

    def tenant(self, authorization: str | None) -> Tenant:
        """Return the tenant that has this key. The key is compared with all, and each comparison takes the same time whatever is in it."""
        if self._file is None:
            return self.nobody
        self._look()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            message = "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", reason="no_key")
        digest = _digest(key.strip())
        found = [each for each in self._tenants.values() if hmac.compare_digest(each.digest, digest)]
        old = [each for each in self._tenants.values() if hmac.compare_digest(each.old_digest, digest)]
        if old:
            self._check_old(old[0])
        if not found and not old:
            raise ApiError(401, "the server does not know this API key", code="invalid_api_key")
        return (found or old)[0]

    def _check_old(self, tenant: Tenant) -> None:
        """Raise `ApiError` if a tenant's old key has expired. That it is still in use is logged once."""
        if self._today() >= tenant.old_expires:
            message = "this API key has expired: use the new one"
            raise ApiError(401, message, code="invalid_api_key", reason="expired_key")
        if tenant.old_digest not in self._still_old:
            self._still_old.add(tenant.old_digest)
            logger.info("%s still uses its old API key", tenant.name)

    def _look(self) -> None:
        """Read the file again if it has changed. If it is wrong now, that is logged, and the keys stay as they were."""
        if self._file is None or self.clock() - self._looked < LOOK_EVERY_S:
            return
        self._looked = self.clock()
        try:
            if (stamp := _stamp(self._file)) == self._stamp:
                return
            self._stamp = stamp
            self._take(self._read(self._file))
        except (ConfigError, OSError) as error:
            logger.warning("the API keys stay as they were: %s", error)

    def _read(self, file: Path) -> dict[str, Tenant]:
        read = read_keys(file)
        for tenant in read.values():
            tenant.requests = part_of(tenant.requests, self._processes)
            tenant.tokens.per_s = tenant.tokens.saves = part_of(tenant.tokens.per_s, self._processes)
        return read

    def _take(self, read: dict[str, Tenant]) -> None:
        """Take over what was read. A tenant keeps the requests that it has under way."""
        for name, new in read.items():
            if old := self._tenants.get(name):
                if old.tokens.per_s and new.tokens.per_s:  # without a limit nothing is owed, nor saved up
                    new.tokens.owed, new.tokens.since = old.tokens.owed, old.tokens.since
                for each in ("digest", "old_digest", "old_expires", "requests", "tokens", "may_change_adapters"):
                    setattr(old, each, getattr(new, each))
                read[name] = old
        self._tenants = read
        logger.info("the API keys were read again: %d", len(read))


def part_of(limit: float, processes: int) -> int:
    """Return what each of some processes may let in, so that all of them keep a limit together. 0 is none.

    >>> part_of(7, 2), part_of(1, 2), part_of(0, 2)
    (3, 1, 0)
    """
    return max(1, int(limit) // processes) if limit else 0


def read_keys(file: Path) -> dict[str, Tenant]:
    """Return the tenants of a file by name. A `ConfigError` never shows a key."""
    try:
        lines = read_secret(file, LONGEST_FILE).decode("utf-8-sig").split("\n")  # as editors on Windows write it
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {file}: {error}") from None
    found: dict[str, Tenant] = {}
    digests = set[bytes]()
    for number, line in enumerate(lines, 1):
        if words := line.partition("#")[0].split():
            tenant = _tenant(words, f"{file}, line {number}")
            mine = {tenant.digest, tenant.old_digest} - {b""}
            if tenant.name in found or mine & digests or tenant.digest == tenant.old_digest:
                raise ConfigError(f"{file}, line {number}: this name or key is there already")
            digests |= mine
            found[tenant.name] = tenant
    if not found:
        raise ConfigError(f"{file} has no API keys: {LINE}")
    return found


def _tenant(words: list[str], where: str) -> Tenant:
    if len(words) < 2 or not words[0].isprintable():
        raise ConfigError(f"{where}: {LINE}; names are of printable characters")
    tenant = Tenant(words[0], _digest_of(words[1], where))
    for word in words[2:]:
        name, _, value = word.partition("=")
        if word == "admin":
            tenant.may_change_adapters = True
        elif name == "old_key":
            tenant.old_digest = _digest_of(value, where)
        elif name == "old_key_expires":
            tenant.old_expires = _moment(value, where)
        elif name == "requests" and NUMBER.fullmatch(value):
            tenant.requests = int(value)
        elif name == "tokens_per_s" and NUMBER.fullmatch(value):
            tenant.tokens = TokenBucket(int(value), int(value))
        else:
            raise ConfigError(f"{where}: {LINE}")
    if tenant.old_expires < inf and not tenant.old_digest:
        raise ConfigError(f"{where}: old_key_expires goes with old_key=KEY")
    return tenant


def _moment(text: str, where: str) -> float:
    try:
        return moment(text)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _digest_of(key: str, where: str) -> bytes:
    """Return the digest of a key of the file. A `ConfigError` says what is wrong with the key, and does not show it."""
    if len(key) < SHORTEST_KEY:
        raise ConfigError(f"{where}: {LINE}; a key has at least {SHORTEST_KEY} characters")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{where}: keys are of ASCII's printable characters, which is all that HTTP's headers have")
    return _digest(key)


def too_many(message: str, retry_s: float, reason: str) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", retry_s=retry_s, reason=reason)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _stamp(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_ctime_ns, found.st_size  # which another mode changes, too
