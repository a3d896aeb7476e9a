"""What can be told of JSON before objects are made of it, at about memory's speed: a body of 16 MiB may stand for millions of objects, and
nobody else is answered while they are made."""

import re
from typing import NamedTuple

TEXT = re.compile(rb'"[^"]*"')


class Most(NamedTuple):
    """How much a field may hold."""

    texts: int  # keys of objects, too
    lists: int  # and objects
    values: int
    size: int = 1 << 40  # bytes, as it is written

    def holds(self, json: bytes) -> bool:
        """Whether JSON stands for no more. Whether it is JSON at all is found later: up to where it is not, this counts what is made of it.

        >>> Most(texts=2, lists=1, values=1).holds(b'{"a": "b"}'), Most(texts=1, lists=1, values=1).holds(b'{"a": "b"}')
        (True, False)
        """
        if len(json) > self.size or (outside := without_texts(json, self.texts)) is None:
            return False
        return outside.count(b"[") + outside.count(b"{") <= self.lists and outside.count(b",") < self.values

    def __str__(self) -> str:
        size = f"{self.size} bytes, " if self.size < 1 << 40 else ""
        return f"{size}{self.values} values, {self.texts} texts, and {self.lists} lists and objects"


def without_texts(json: bytes, most: int) -> bytes | None:
    """Return JSON in which a quotation mark stands for each text, or None if there are more than `most` texts.

    >>> without_texts(rb'{"a": ["b, \\"c\\"", 1]}', most=10)
    b'{": [", 1]}'
    """
    if b"\\" in json:
        json = json.replace(rb"\\", b"").replace(rb"\"", b"")  # now each quotation mark begins or ends a text
    if (marks := json.count(b'"')) > 2 * most:
        return None
    return TEXT.sub(b'"', json) if marks else json
