"""Which samples that are done are kept: each until it cannot be asked for any more, and those of one key in so many bytes."""

from collections import OrderedDict

ONE_BYTES = 1 << 10  # of a sample, besides its tokens


class KeptSamples:
    """The samples of one key that are done, by what each is asked for by.

    Args:
        most: So many bytes they may have together.

    >>> kept = KeptSamples(4 * ONE_BYTES)
    >>> kept.add("one", ONE_BYTES), kept.add("two", 0), kept.tell("two"), kept.add("three", ONE_BYTES)
    ([], [], None, ['two'])
    >>> kept.add("four", 9 * ONE_BYTES), len(kept)  # the newest one stays, however large it is
    (['one', 'three'], 1)
    """

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self._told, self._waiting = OrderedDict[str, int](), OrderedDict[str, int]()  # the oldest come first

    def __len__(self) -> int:
        return len(self._told) + len(self._waiting)

    def add(self, id: str, nbytes: int) -> list[str]:
        """Keep a sample, and return those that give way to it: first what a client has had, then what nobody has asked for, the oldest first."""
        gone = []
        self._bytes += nbytes + ONE_BYTES
        while len(self) and self._bytes > self._most:
            first, size = (self._told or self._waiting).popitem(last=False)
            self._bytes -= size
            gone.append(first)
        self._waiting[id] = nbytes + ONE_BYTES
        return gone

    def tell(self, id: str) -> None:
        """Note that a client has had a sample, which it may ask for again if the answer was lost."""
        if (size := self._waiting.pop(id, None)) is not None:
            self._told[id] = size

    def drop(self, id: str) -> None:
        for kept in (self._told, self._waiting):
            self._bytes -= kept.pop(id, 0)
