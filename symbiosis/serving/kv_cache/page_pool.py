"""Pages of one memory, by number. The pool knows which pages are taken, and nothing of what lies in them."""

from collections.abc import Iterable


class NoRoom(Exception):
    """There are fewer free pages than were asked for, and none was taken."""


class PagePool:
    """Free pages, for keys and values and for the rows of adapters alike.

    >>> pool = PagePool(3)
    >>> pages = pool.take(2)
    >>> pool.free
    1
    >>> pool.give_back(pages)
    >>> pool.free
    3
    """

    def __init__(self, pages: int) -> None:
        self.total = self.free = pages
        self._free = list(reversed(range(pages)))
        self._is_taken = bytearray(pages)

    def take(self, count: int) -> list[int]:
        """Take so many pages, or raise `NoRoom`."""
        if count > self.free:
            raise NoRoom
        pages = [self._free.pop() for _ in range(count)]
        self.free -= count
        for page in pages:
            self._is_taken[page] = True
        return pages

    def take_run(self, count: int) -> list[int] | None:
        """Take so many pages that follow one another, or none if there are no such pages."""
        first = self._is_taken.find(bytes(count))
        if first < 0:
            return None
        pages = list(range(first, first + count))
        self._free = [page for page in self._free if not first <= page < first + count]
        self.free -= count
        for page in pages:
            self._is_taken[page] = True
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._is_taken[page], f"page {page} is free"
            self._is_taken[page] = False
            self._free.append(page)
            self.free += 1
