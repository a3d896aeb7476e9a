"""How often each of many may do something: so many times at once, and so many a second in the long run."""

from collections.abc import Hashable

MOST_KNOWN = 4096  # who are told apart; others must wait until some of these have been quiet


class Allowance:
    """
    >>> once_a_second = Allowance(at_once=2, per_s=1.0)
    >>> [once_a_second.takes("eve", now) for now in (0.0, 0.1, 0.2, 1.1)]
    [True, True, False, True]
    """

    def __init__(self, at_once: int, per_s: float) -> None:
        self._each_s, self._saved_s = 1 / per_s, (at_once - 1) / per_s
        self._used: dict[Hashable, float] = {}  # until when what each of them took is used up

    def has_some(self, who: Hashable, now: float) -> bool:
        """Whether there is some left."""
        used = self._used.get(who)
        return len(self._used) < MOST_KNOWN if used is None else used <= now + self._saved_s

    def takes(self, who: Hashable, now: float) -> bool:
        """Whether there was some left."""
        if not self.has_some(who, now):
            return False
        self._used[who] = max(now, self._used.get(who, now)) + self._each_s
        return True

    def forget(self, now: float) -> None:
        """Those who have as much left as anybody new. To be called from time to time."""
        self._used = {who: used for who, used in self._used.items() if used > now}
