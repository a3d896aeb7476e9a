"""Accounts of sessions and tenants: what each has in flight and has used, and whether there is room for another call."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from time import monotonic

from symbiosis.base.memory import whole_memory
from symbiosis.errors import CallError, Code
from symbiosis.executor.observe.snapshot import Usage
from symbiosis.protocol import Limits
from symbiosis.transport.base import Direct, Peer, Tokens

MOST_ROWS, MOST_COUNTED = 10**15, 1 << 60  # direct rows in one report of a client, and in all
# the same of multiplications: a report may be that of weeks without an executor
MOST_MULTIPLICATIONS, MOST_MULTIPLIED = 1e24, 1e29
BUSY_S = 0.02  # when to try again if that depends on other calls: the time of a few products
ALWAYS_ROOM = 4 << 20  # bytes that a session may always have in flight, in however many calls


@dataclass(slots=True)
class RateLimit:
    """Allows `most` a second. Up to a second's worth is saved up, and an excess is owed.

    >>> rate = RateLimit(10)
    >>> rate.take(25)
    >>> rate.wait(0.0), rate.wait(2.6)
    (2.6, 0.0)
    """

    most: int
    _left: float = 0.0
    _at: float = 0.0

    def wait(self, now: float) -> float:
        """Return the seconds until something may come again, 0 if it may now."""
        if not self.most:
            return 0.0
        self._left = min(float(self.most), self._left + (now - self._at) * self.most)
        self._at = now
        return 0.0 if self._left > 0 else (1 - self._left) / self.most

    def take(self, amount: float) -> None:
        self._left -= amount


class BytePool:
    """The bytes that the calls of all tenants hold together."""

    def __init__(self, most: int, readers: Callable[[], Iterable[Peer]] = tuple) -> None:
        self.most, self._readers = most, readers
        self.bytes = 0  # held by calls in flight and their replies

    def has_room(self, held: int) -> bool:
        unread = chain.from_iterable(reader.unread for reader in self._readers())
        return self.bytes + held + sum(unread) <= self.most


@dataclass(slots=True, eq=False)
class Account:
    """The account of one tenant; without keys, of one session."""

    limits: Limits
    pool: BytePool = field(default_factory=lambda: BytePool(1 << 62))
    usage: Usage = field(default_factory=Usage)
    in_flight: int = 0
    bytes: int = 0  # held by calls in flight and their replies
    readers: set[Peer] = field(default_factory=set)  # the other ends of its sessions
    limited: bool = field(init=False)  # whether any rate is
    _rates: dict[str, RateLimit] = field(init=False)

    def __post_init__(self) -> None:
        of = self.limits
        self._rates = {
            "rows": RateLimit(of.max_tenant_rows_per_s),
            "multiplications": RateLimit(of.max_tenant_multiplications_per_s),
            "bytes": RateLimit(of.max_tenant_bytes_per_s),
        }
        self.limited = any(rate.most for rate in self._rates.values())

    def check(self, peer: Peer, held: int, own: int, now: float, scratch: int = 0) -> None:
        """Raise `CallError` unless there is room for a call of `held` bytes in a session that has `own` bytes in flight. While it is
        computed, it needs `scratch` bytes more."""
        limits = self.limits
        if held + scratch > limits.max_tenant_bytes:
            raise CallError(
                Code.TOO_LARGE,
                f"a call, its reply and the memory to compute it may take {limits.max_tenant_bytes} bytes, and this one takes "
                f"{held + scratch}: send smaller batches, or ask for a larger --max-tenant-bytes",
            )
        if self.in_flight >= limits.max_tenant_in_flight:
            raise busy(
                BUSY_S, f"a tenant may have {limits.max_tenant_in_flight} calls in flight", "max-tenant-in-flight"
            )
        if own and own + held > ALWAYS_ROOM:
            raise busy(BUSY_S, f"calls of more than {ALWAYS_ROOM} bytes are taken one at a time")
        unread = peer.unread
        if len(unread) > 1 and sum(unread) + held > ALWAYS_ROOM:
            raise busy(BUSY_S, f"{len(unread)} large replies are on their way to this session: read them")
        all_unread = 0
        for reader in self.readers:
            all_unread += sum(reader.unread)
        if self.bytes + held + all_unread > limits.max_tenant_bytes:
            raise busy(
                BUSY_S,
                f"a tenant's calls and unread replies may have {limits.max_tenant_bytes} bytes",
                "max-tenant-bytes",
            )
        if self.bytes + held + all_unread > ALWAYS_ROOM and not self.pool.has_room(held):
            raise busy(
                BUSY_S,
                f"the calls and unread replies of all tenants together may have {self.pool.most} bytes",
                "max-bytes",
            )
        for what, rate in self._rates.items() if self.limited else ():
            if rate.most and (seconds := rate.wait(now)):
                raise busy(seconds, f"a tenant may send {rate.most} {what} a second", f"max-tenant-{what}-per-s")

    def sent(self, rows: int, multiplications: int = 0, nbytes: int = 0) -> None:
        """Charge a call to the rates."""
        for rate, amount in zip(self._rates.values(), (rows, multiplications, nbytes), strict=True):
            rate.take(amount)


@dataclass(slots=True)
class ServedSession:
    """The executor's record of one session."""

    number: int
    peer: Peer
    client: str
    priority: int | None
    observer: bool
    heard: float
    account: Account
    in_flight: int = 0
    held: int = 0  # bytes of its calls in flight and their replies
    calls: int = 0
    rows: int = 0
    multiplications: int = 0
    bytes: int = 0
    refused: int = 0
    joined: float = field(default_factory=monotonic)
    address: str = ""
    ends_for: str = ""  # the reason, if the executor itself ends it
    direct: Direct = Direct(0, 0, 0, Tokens.NONE)  # products that its client made directly

    def count_direct(self, now: Direct) -> None:
        """Count the products that the client says it made directly. Implausible figures are ignored."""
        rows, multiplications = now.rows - self.direct.rows, now.multiplications - self.direct.multiplications
        if (
            0 <= rows < MOST_ROWS
            and 0.0 <= multiplications < MOST_MULTIPLICATIONS  # which a NaN is not
            and max(now.calls, now.rows) < MOST_COUNTED
        ):
            usage, self.direct = self.account.usage, now
            usage.direct_rows = min(usage.direct_rows + rows, MOST_COUNTED)
            usage.direct_multiplications = min(usage.direct_multiplications + multiplications, MOST_MULTIPLIED)

    def begin(self, held: int = 0) -> None:
        """Count a call in flight that holds so many bytes of the executor's memory."""
        account = self.account
        self.in_flight += 1
        account.in_flight += 1
        self.held += held
        account.bytes += held
        account.pool.bytes += held

    def end(self, held: int = 0, calls: int = 1) -> None:
        """Count calls that were answered or dropped, and free the bytes that they held."""
        account = self.account
        self.in_flight -= calls
        account.in_flight -= calls
        self.held -= held
        account.bytes -= held
        account.pool.bytes -= held


def half_of_memory() -> int:
    """Return half of this machine's memory in bytes, or of what its cgroups allow."""
    return whole_memory() // 2


def busy(seconds: float, why: str, option: str = "") -> CallError:
    """Return the refusal of a call that may come again in `seconds`; `option` is the limit that a larger value would lift."""
    remedy = f", or ask for a larger --{option}" if option else ""
    return CallError(Code.BUSY, f"{why}: try again in {seconds:.3f} s{remedy}", seconds)
