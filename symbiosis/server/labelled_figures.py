"""Figures by tenant and adapter, of which there may be any number: those that are used most have series of their own."""

import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

MOST = 20  # labels with series of their own
OTHER = "other"  # in the place of all further ones
MOST_KNOWN = 1024  # labels whose use is counted
HALVED_EVERY_S = 600.0  # so that "most" means lately
Key = tuple[str, ...]
Made = TypeVar("Made")


class Labelled(Generic[Made]):
    """What is counted by labels, the last of which may be any. One that is used twice as much as the least used one takes its place: a counter of
    Prometheus's may go and begin anew, but what others have counted must not move to it.

    >>> counts = Labelled(list, most=2)
    >>> for name in ("a", "b", "c", "b", "c", "c"):
    ...     counts.shown[counts.label(("model", name))].append(name)
    >>> counts.shown
    {('model', 'b'): ['b', 'b'], ('model', 'other'): ['c'], ('model', 'c'): ['c', 'c']}

    Args:
        pinned: Labels that always have series of their own.
    """

    def __init__(
        self, make: Callable[[], Made], most: int = MOST, pinned: Collection[Key] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        self._make, self._most, self._pinned, self._clock = make, most, pinned, clock
        self._used = Counter[Key]()  # lately
        self._halved = clock()
        self.shown: dict[Key, Made] = {}

    @property
    def named(self) -> list[Key]:
        """Labels that have series of their own and may lose them."""
        return [key for key in self.shown if key[-1] != OTHER and key not in self._pinned]

    def label(self, key: Key) -> Key:
        """Return the label under which this one is counted. It counts as a use."""
        while len(self._used) > MOST_KNOWN or self._clock() - self._halved > HALVED_EVERY_S:
            self._halved = self._clock()
            self._used = Counter({each: count // 2 for each, count in self._used.items() if count > 1})
        self._used[key] += 1
        if key not in self.shown and key not in self._pinned and len(named := self.named) >= self._most:
            least = min(named, key=self._used.__getitem__)
            if self._used[key] < 2 * max(1, self._used[least]):
                key = (*key[:-1], OTHER)
            else:
                del self.shown[least]
        if key not in self.shown:
            self.shown[key] = self._make()
        return key

    def drop(self, key: Key) -> None:
        """Forget a label: what it stood for is gone."""
        self.shown.pop(key, None)
        self._used.pop(key, None)
