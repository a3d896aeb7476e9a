"""Limits how often something may be done: so many times at once, and so many a second in the long run."""

from collections.abc import Hashable
from dataclasses import dataclass

MOST_KNOWN = 4096  # callers that are told apart; others must wait until some of these have been quiet


@dataclass(slots=True)
class TokenBucket:
    """What one caller may have. It may take as much as it likes at a time, and no more until that has come in.

    Args:
        per_s: What comes in, in a second; 0: there is no limit.
        saves: As much of it is kept while nothing is taken.

    >>> bucket = TokenBucket(per_s=10, saves=10)
    >>> bucket.take(25)
    >>> bucket.wait_s(now=1.0), bucket.wait_s(now=2.5), bucket.owed
    (1.5, 0.0, 0.0)
    """

    per_s: float
    saves: float
    owed: float = 0.0  # at `since`; negative: saved
    since: float = 0.0

    def wait_s(self, now: float) -> float:
        """Return after how many seconds something may be taken; 0: now."""
        if self.per_s:
            self.owed = max(self.owed - (now - self.since) * self.per_s, -self.saves)
        self.since = now
        return max(0.0, self.owed) / self.per_s if self.per_s else 0.0

    def take(self, amount: float) -> None:
        """Count something as taken; as given back, if it is negative."""
        if self.per_s:
            self.owed += amount


class Allowance:
    """A limit that each of many callers has.

    >>> once_a_second = Allowance(at_once=2, per_s=1.0)
    >>> [once_a_second.takes("eve", now) for now in (0.0, 0.1, 0.2, 1.1)]
    [True, True, False, True]
    """

    def __init__(self, at_once: int, per_s: float) -> None:
        self._per_s, self._saves = per_s, at_once - 1
        self._buckets: dict[Hashable, TokenBucket] = {}

    def takes(self, who: Hashable, now: float) -> bool:
        """Whether `who` may do it now. If so, it counts as done."""
        if who not in self._buckets and len(self._buckets) >= MOST_KNOWN:
            return False
        bucket = self._of(who, now)
        if may := not bucket.wait_s(now):
            bucket.take(1)
        return may

    def spends(self, who: Hashable, now: float, times: int) -> bool:
        """Count what `who` has done, so many times. Return whether that was allowed: once, however often at a time, unless its share was
        used up before."""
        bucket = self._of(who, now)
        allowed = not bucket.wait_s(now)
        bucket.take(times)
        return allowed

    def forget(self, now: float) -> None:
        """Forget callers that are as good as new. Call it now and then."""
        for bucket in self._buckets.values():
            bucket.wait_s(now)
        self._buckets = {who: bucket for who, bucket in self._buckets.items() if bucket.owed > -bucket.saves}

    def _of(self, who: Hashable, now: float) -> TokenBucket:
        if who not in self._buckets:
            self._buckets[who] = TokenBucket(self._per_s, self._saves, -self._saves, now)
        return self._buckets[who]
