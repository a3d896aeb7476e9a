"""What can be told of JSON before objects are made of it, at about memory's speed: a body of 16 MiB may stand for millions of objects, and
nobody else is answered while they are made."""

import re

from symbiosis.serving.http.failures import wrong

MOST_TEXTS, MOST_CONTAINERS, MOST_VALUES = 500_000, 200_000, 4_000_000  # of a body
TEXT = re.compile(rb'"[^"]*"')


def without_texts(json: bytes, most: int) -> bytes | None:
    """Return JSON in which a quotation mark stands for each text, or None if there are more than `most` texts.

    >>> without_texts(rb'{"a": ["b, \\"c\\"", 1]}', most=10)
    b'{": [", 1]}'
    """
    if b"\\" in json:
        json = json.replace(rb"\\", b"").replace(rb"\"", b"")  # now each quotation mark begins or ends a text
    return None if json.count(b'"') > 2 * most else TEXT.sub(b'"', json)


def check_cost(json: bytes) -> None:
    """Raise `ApiError` for a body of which more would have to be made than any request needs. Whether it is JSON at all is found later: up
    to where it is not, this counts what JSON's reader would make."""
    outside = without_texts(json, MOST_TEXTS)
    if outside is None:
        raise wrong(f"a body has at most {MOST_TEXTS} texts")
    if outside.count(b"[") + outside.count(b"{") > MOST_CONTAINERS:
        raise wrong(f"a body has at most {MOST_CONTAINERS} lists and objects")
    if outside.count(b",") > MOST_VALUES:
        raise wrong(f"a body has at most {MOST_VALUES} values")
