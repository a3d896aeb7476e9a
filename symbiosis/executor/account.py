"""What one tenant has under way in the executor, and whether that leaves room for another call."""

from dataclasses import dataclass, field
from itertools import chain

from symbiosis.errors import CallError, Code
from symbiosis.protocol import Limits
from symbiosis.transport.base import Peer

BUSY_S = 0.02  # when to try again where it depends on others: some products last that long
ALWAYS_ROOM = 4 << 20  # bytes that a session may have under way at a time, however many calls that is


@dataclass(slots=True, eq=False)
class Account:
    """Of one tenant; without keys of one session."""

    limits: Limits
    in_flight: int = 0
    bytes: int = 0  # of the calls in flight and their replies
    readers: set[Peer] = field(default_factory=set)  # the other ends of its sessions
    _rows: float = 0.0  # that may still come now; below zero after a large call
    _at: float = 0.0

    def check(self, peer: Peer, held: int, own: int, now: float) -> None:
        """Raises BUSY if a call of `held` bytes must wait, in a session that has `own` bytes in flight."""
        limits = self.limits
        if held > limits.max_tenant_bytes:
            raise CallError(
                Code.TOO_LARGE,
                f"a call and its reply may have {limits.max_tenant_bytes} bytes, this one has {held}: send smaller batches, or "
                "ask for a larger --max-tenant-bytes",
            )
        if self.in_flight >= limits.max_tenant_in_flight:
            raise busy(BUSY_S, f"a tenant may have {limits.max_tenant_in_flight} calls in flight", "in-flight")
        if own and own + held > ALWAYS_ROOM:
            raise busy(BUSY_S, f"calls of more than {ALWAYS_ROOM} bytes go one after another")
        unread = peer.unread
        if len(unread) > 1 and sum(unread) + held > ALWAYS_ROOM:
            raise busy(BUSY_S, f"{len(unread)} large replies are on their way to this session: read them")
        all_unread = sum(chain.from_iterable(reader.unread for reader in self.readers))
        if self.bytes + held + all_unread > limits.max_tenant_bytes:
            raise busy(BUSY_S, f"a tenant's calls and unread replies may have {limits.max_tenant_bytes} bytes", "bytes")
        rate = limits.max_tenant_rows_per_s
        if rate and (missing := self._missing(rate, now)) >= 0:
            raise busy((missing + 1) / rate, f"a tenant may send {rate} rows a second", "rows-per-s")

    def sent(self, rows: int) -> None:
        """A call has come."""
        self._rows -= rows

    def begin(self, held: int) -> None:
        """... and is on its way."""
        self.in_flight += 1
        self.bytes += held

    def end(self, held: int, calls: int = 1) -> None:
        """... and is answered, or dropped."""
        self.in_flight -= calls
        self.bytes -= held

    def _missing(self, rate: int, now: float) -> float:
        """Rows that came too many so far. A second's worth may be saved up."""
        self._rows = min(float(rate), self._rows + (now - self._at) * rate)
        self._at = now
        return -self._rows


def busy(seconds: float, why: str, option: str = "") -> CallError:
    """What to tell who should come again, or get a larger limit."""
    remedy = f", or ask for a larger --max-tenant-{option}" if option else ""
    return CallError(Code.BUSY, f"{why}: try again in {seconds:.3f} s{remedy}", seconds)
