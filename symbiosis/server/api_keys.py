"""API keys: who asks, and how much each may ask for at a time. The file is read again when it changes."""

import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from symbiosis.base.allowance import TokenBucket
from symbiosis.base.key_lines import KeyLine, digest, read_keys
from symbiosis.errors import ConfigError
from symbiosis.server.api_errors import ApiError, wrong

logger = logging.getLogger("symbiosis")

LOOK_EVERY_S = 1.0
DAY_S = 24 * 60 * 60
OF_DAY = "daily_tokens_of_key"  # why a key gets nothing more before midnight


@dataclass
class Day:
    """What a tenant has had of one day, by UTC. What began on a day is counted there, also if it ends on the next one.

    >>> Day.of(DAY_S * 3.75).left_s
    21600.0
    """

    number: int = -1  # since 1970
    left_s: float = 0.0  # until the next one, when its tenant last asked
    spent: int = 0  # tokens
    reserved: int = 0  # ... for what is under way

    @staticmethod
    def of(now: float) -> "Day":
        return Day(int(now // DAY_S), DAY_S - now % DAY_S)


class Tenant:
    """The owner of a key: what its line says, and what it has. Where there are no keys, everybody is one tenant without limits."""

    def __init__(self, line: KeyLine) -> None:
        self.name, self.under_way, self.day = line.name, 0, Day()
        self.tokens = TokenBucket(0.0, 0.0)
        self.take(line)

    def look_at_day(self, now: float) -> None:
        """Begin a day, if it is another one. `now`: in seconds since 1970."""
        today = Day.of(now)
        if today.number != self.day.number:
            self.day = today
        self.day.left_s = today.left_s

    def take(self, line: KeyLine) -> None:
        """Take over what its line says by now. It keeps what it has under way, owes, and has had of the day."""
        before = self.tokens
        self.line, self.tokens = line, TokenBucket(line.tokens_per_s, line.tokens_per_s)
        self.is_limited = bool(line.requests or line.tokens_per_s or line.tokens_per_day)
        if before.per_s and line.tokens_per_s:  # without a limit nothing is owed, nor saved up
            self.tokens.owed, self.tokens.since = before.owed, before.since

    def check_most(self, requests: int, field: str = "n") -> None:
        """Raise `ApiError` if the tenant may never have so many requests under way. `field`: what says how many there are."""
        most = self.line.requests
        if most and requests > most:
            raise wrong(f"this key may have {most} requests under way, and this would be {requests}", field)

    def check(self, requests: int, now: float) -> None:
        """Raise `ApiError` if so many more requests are too many, or if the tenant owes tokens."""
        self.check_most(requests)
        most = self.line.requests
        if most and self.under_way + requests > most:
            raise too_many(
                f"this key may have {most} requests under way, and has {self.under_way}",
                1.0,
                "requests_of_key",
            )
        if self.tokens.per_s and (wait_s := self.tokens.wait_s(now)):
            raise too_many(f"this key may have {self.tokens.per_s} tokens per second", wait_s, "tokens_of_key")
        self._check_day()

    def _check_day(self) -> None:
        most, day = self.line.tokens_per_day, self.day
        if most and day.spent + day.reserved >= most:
            under_way = f", and {day.reserved} are reserved for what is under way" if day.reserved else ""
            message = f"this key may have {most} tokens a day, and has had {day.spent} since midnight UTC{under_way}"
            raise too_many(message, 1.0 if day.spent < most else day.left_s, OF_DAY)

    def admit(self, requests: int, now: float, tokens: int = 0) -> "Admission":
        """Count so many requests as under way, and their tokens as spent, until they end, if they may be."""
        if self.is_limited:
            self.check(requests, now)
            self.tokens.take(tokens)
        self.under_way += requests
        self.day.reserved += tokens
        return Admission(self, requests, tokens, self.day)


@dataclass
class Admission:
    """What a tenant has been let in with, until it ends: so many requests, and as many tokens as they may come to.

    >>> tenant = Tenant(KeyLine("anna", tokens_per_s=10))
    >>> admission = tenant.admit(1, now=0.0, tokens=100)
    >>> admission.end(used=30)
    >>> tenant.under_way, tenant.tokens.owed
    (0, 30.0)
    """

    tenant: Tenant
    requests: int
    reserved: int
    day: Day  # on which it began
    at_end: list[Callable[[], None]] = field(default_factory=list)  # called once

    def reserve(self, tokens: int) -> None:
        """Count so many tokens as spent, instead of those so far."""
        if self.tenant.is_limited:
            self.tenant.tokens.take(tokens - self.reserved)
        self.day.reserved += tokens - self.reserved
        self.reserved = tokens

    def end(self, used: int = 0) -> None:
        """Give back everything but the tokens that were used. It may be called again."""
        if self.requests:
            if self.tenant.is_limited:
                self.tenant.tokens.take(used - self.reserved)
            self.day.reserved -= self.reserved
            self.day.spent += used
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
        self.nobody = Tenant(KeyLine(may_change_adapters=True))  # everybody, where no keys are needed
        self._tenants: dict[str, Tenant] = {}
        # all that there ever were: whose line comes back goes on with what it has under way and has had of the day
        self._known: dict[str, Tenant] = {}
        self._stamp: tuple[int, int] | None = None
        self._looked = clock()
        if file is not None:
            self._take(read_keys(file))
            self._stamp = _stamp(file)

    def tenant(self, authorization: str | None) -> Tenant:
        """Return the tenant that has this key. The key is compared with all, and each comparison takes the same time whatever is in it."""
        if self._file is None:
            return self.nobody
        self._look()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            message = "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", reason="no_key")
        given = digest(key.strip())
        found = [each for each in self._tenants.values() if hmac.compare_digest(each.line.digest, given)]
        old = [each for each in self._tenants.values() if hmac.compare_digest(each.line.old_digest, given)]
        if old:
            self._check_old(old[0])
        if not found and not old:
            raise ApiError(401, "the server does not know this API key", code="invalid_api_key")
        tenant = (found or old)[0]
        tenant.look_at_day(self._today())
        return tenant

    def with_days(self) -> dict[str, Tenant]:
        """Return those that may have so many tokens a day, by name."""
        limited = {name: tenant for name, tenant in self._tenants.items() if tenant.line.tokens_per_day}
        for tenant in limited.values():
            tenant.look_at_day(self._today())
        return limited

    def _check_old(self, tenant: Tenant) -> None:
        """Raise `ApiError` if a tenant's old key has expired. That it is still in use is logged once."""
        if self._today() >= tenant.line.old_expires:
            message = "this API key has expired: use the new one"
            raise ApiError(401, message, code="invalid_api_key", reason="expired_key")
        if tenant.line.old_digest not in self._still_old:
            self._still_old.add(tenant.line.old_digest)
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
            self._take(read_keys(self._file))
            logger.info("the API keys were read again: %d", len(self._tenants))
        except (ConfigError, OSError) as error:
            logger.warning("the API keys stay as they were: %s", error)

    def _take(self, read: dict[str, KeyLine]) -> None:
        """Take over what was read, of which this process holds its part."""
        for name, line in read.items():
            self._known.setdefault(name, Tenant(KeyLine(name))).take(line.part(self._processes))
        self._tenants = {name: self._known[name] for name in read}


def too_many(message: str, retry_s: float, reason: str) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", retry_s=retry_s, reason=reason)


def _stamp(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_ctime_ns, found.st_size  # which another mode changes, too
