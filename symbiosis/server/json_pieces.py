"""JSON made piece by piece, so that others are answered while a long list is made and sent."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec

Item = TypeVar("Item")
PLACES = 256  # of a list, that are made at once: of 20 log probabilities each, in some milliseconds
MARK = b"\0"  # which JSON has nowhere


class LongList:
    """A list of JSON that is made when it is written, which it is once."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)

    def __iter__(self) -> Iterator[Any]:
        return self._items


def listed(make: Callable[[Item], Any], items: Sequence[Item]) -> "list[Any] | LongList":
    """Return what is made of these items: a long list when it is written."""
    return [make(each) for each in items] if len(items) <= PLACES else LongList(map(make, items))


def json_pieces(value: Any) -> Iterator[bytes]:
    """Yield JSON, of which each `LongList` is made in pieces.

    >>> b"".join(json_pieces({"a": LongList(range(3)), "b": [LongList(())]}))
    b'{"a":[0,1,2],"b":[[]]}'
    """
    long = list[LongList]()

    def left_out(each: Any) -> msgspec.Raw:
        if not isinstance(each, LongList):
            raise NotImplementedError(f"{type(each).__name__} is no JSON")
        long.append(each)
        return msgspec.Raw(MARK)

    first, *others = msgspec.json.encode(value, enc_hook=left_out).split(MARK)
    yield first
    for each, after in zip(long, others, strict=True):
        yield b"["
        between = b""
        while items := list(islice(each, PLACES)):
            yield between + msgspec.json.encode(items)[1:-1]
            between = b","
        yield b"]" + after
