"""Pages of one memory, by number: who holds which is told here, and nothing of what lies in them."""

from collections.abc import Iterable


class NoRoom(Exception):
    """There are not as many pages as were asked for; nothing was taken."""


class Pool:
    """Keys and values, and the rows of adapters, take pages from the same pool.

    >>> pool = Pool(3)
    >>> pages = pool.take(2)
    >>> pool.free
    1
    >>> pool.give_back(pages)
    >>> pool.free
    3
    """

    def __init__(self, pages: int) -> None:
        self.total = pages
        self._free = list(reversed(range(pages)))
        self._is_taken = bytearray(pages)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many pages, or `NoRoom`."""
        if count > len(self._free):
            raise NoRoom
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_taken[page] = True
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._is_taken[page], f"page {page} is free"
            self._is_taken[page] = False
            self._free.append(page)
