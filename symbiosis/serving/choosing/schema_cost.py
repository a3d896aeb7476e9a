"""What a JSON schema costs to prepare, told from its text: llguidance bounds all of it but numbers, which may stand for millions of states."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from symbiosis.serving.engine.limits import Unfit

MOST_REMAINDERS = (
    10_000  # that have to be told apart: of all different `multipleOf` together, which may have to hold at once
)
MOST_REPEATED = 50_000  # pieces that all patterns repeat
PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<least>\d{0,12})(?:,(?P<most>\d{0,12}))?\}|.", re.DOTALL)


def check_schema(schema: str) -> None:
    """Raise `Unfit` for a schema that would take seconds, or hundreds of megabytes, to prepare. What is no JSON is found later."""
    try:
        told = json.loads(schema)
    except (ValueError, RecursionError):
        return
    values = list(_values(told))
    together = math.prod({_remainders(value) for name, value in values if name == "multipleOf"})
    if together > MOST_REMAINDERS:
        raise Unfit("schema", f"may have multipleOf up to {MOST_REMAINDERS}, all that differ multiplied")
    if sum(repeated(value) for name, value in values if name == "pattern") > MOST_REPEATED:
        raise Unfit("schema", f"may have patterns that repeat {MOST_REPEATED} pieces")


def _values(told: Any) -> Iterator[tuple[str, Any]]:
    """Yield all numbers for `multipleOf` and all patterns."""
    left = [told]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left.extend(one)
        elif isinstance(one, dict):
            left.extend(one.values())
            if isinstance(number := one.get("multipleOf"), int | float):
                yield "multipleOf", number
            if isinstance(pattern := one.get("pattern"), str):
                yield "pattern", pattern
            if isinstance(names := one.get("patternProperties"), dict):
                yield from (("pattern", name) for name in names)


def _remainders(number: float) -> int:
    """Return how many remainders a division has, whatever the power of ten.

    >>> [_remainders(number) for number in (0.25, 60, 1e300, 9973)]
    [25, 6, 1, 9973]
    """
    digits = repr(abs(number)).partition("e")[0].replace(".", "").strip("0")
    return int(digits) if digits.isdecimal() else 1


def repeated(pattern: str) -> int:
    """Return how many pieces a pattern has once its repetitions are written out.

    >>> repeated("^([0-9]{4}-){2}[{9}]$")
    11
    """
    sizes, last = [0], 0  # of the groups that are open, and of the piece before
    for piece in PIECE.finditer(pattern):
        if piece[0] == "(":
            sizes.append(0)
            continue
        if piece["least"] is not None:
            times = max(int(piece["least"] or 0), int(piece["most"] or 0), 1)
            sizes[-1] += last * (times - 1)
            last *= times
        elif piece[0] == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif piece[0] not in "^$|?*+":
            sizes[-1] += 1
            last = 1
    return sum(sizes)
