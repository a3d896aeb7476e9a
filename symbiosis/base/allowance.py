"""Limits how often each of many callers may do something: so many times at once, and so many a second in the long run."""

from collections.abc import Hashable

MOST_KNOWN = 4096  # callers that are told apart; others must wait until some of these have been quiet


class Allowance:
    """
    >>> once_a_second = Allowance(at_once=2, per_s=1.0)
    >>> [once_a_second.takes("eve", now) for now in (0.0, 0.1, 0.2, 1.1)]
    [True, True, False, True]
    """

    def __init__(self, at_once: int, per_s: float) -> None:
        self._each_s, self._saved_s = 1 / per_s, (at_once - 1) / per_s
        self._used: dict[Hashable, float] = {}  # until when each caller has used up its share

    def takes(self, who: Hashable, now: float) -> bool:
        """Whether `who` may do it now. If so, it counts as done."""
        used = self._used.get(who)
        if len(self._used) >= MOST_KNOWN if used is None else used > now + self._saved_s:
            return False
        self._used[who] = max(now, used or now) + self._each_s
        return True

    def spends(self, who: Hashable, now: float, times: int) -> bool:
        """Count what `who` has done, so many times. Return whether that was allowed: once, however often at a time, unless its share was
        used up before."""
        allowed = self._used.get(who, now) <= now + self._saved_s
        self._used[who] = max(now, self._used.get(who, now)) + times * self._each_s
        return allowed

    def forget(self, now: float) -> None:
        """Forget callers that are as good as new. Call it now and then."""
        self._used = {who: used for who, used in self._used.items() if used > now}
