"""What a JSON schema or a grammar costs to prepare. llguidance bounds all of it but numbers, which may stand for millions of states and are told from the
text, and patterns that hold at once, whose states multiply: many of them are tried in a process of its own, which can be stopped."""

import json
import re
from collections.abc import Iterable, Iterator
from subprocess import TimeoutExpired
from typing import Any

from symbiosis.base.procs import tried
from symbiosis.base.sizes import product
from symbiosis.serving.engine.limits import Unfit
from symbiosis.serving.request import Guide

MOST_REMAINDERS = (
    10_000  # that have to be told apart: of all different `multipleOf` together, which may have to hold at once
)
MOST_REPEATED = 50_000  # pieces that all patterns repeat
MOST_UNTRIED = 8  # patterns and formats of a schema, which take some milliseconds if all of them hold at once
MOST_CHOICES = 100  # of all `anyOf` and `oneOf`: what begins alike takes the cube of their number
LONGEST_S, MOST_BYTES = 2, 1 << 30  # of a processor and of memory, of the process in which more are tried
TRY = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
from llguidance import LLMatcher, LLTokenizer, grammar_from
grammar = grammar_from(sys.argv[2], sys.stdin.buffer.read().decode())
matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
if not matcher.is_error():
    matcher.compute_bitmask()
if matcher.is_error():
    sys.exit(" ".join(matcher.get_error().partition("<state>")[0].split())[:300])
"""
FORMATS = {"schema": "json_schema"}  # what llguidance calls a kind of guide, if that is another word
MULTIPLE = re.compile(r'"multipleOf"\s*:\s*(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)')  # in a schema within a grammar
# what follows a bracket that is never closed is one piece: to look for its end at each bracket would take the square of the length
PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?|\{(?P<least>\d{0,12})(?:,(?P<most>\d{0,12}))?\}|.", re.DOTALL)


def check_guide(guide: Guide) -> None:
    """Raise `Unfit` for a guide that would take seconds, or hundreds of megabytes, to prepare. Of what is no schema little can be told from its
    text: it is tried.

    >>> check_guide(Guide("regex", "(a{1000}){1000}"))
    Traceback (most recent call last):
    symbiosis.serving.engine.limits.Unfit: regex may repeat 50000 pieces
    """
    if guide.kind == "schema":
        check_schema(guide.text)
        return
    if repeated(guide.text) > MOST_REPEATED:
        raise Unfit(guide.kind, f"may repeat {MOST_REPEATED} pieces")
    _check_remainders(guide.kind, map(float, MULTIPLE.findall(guide.text)))
    _try(guide)


def _check_remainders(kind: str, numbers: Iterable[float]) -> None:
    if product(set(map(_remainders, numbers)), MOST_REMAINDERS) is None:
        raise Unfit(kind, f"may have multipleOf up to {MOST_REMAINDERS}, all that differ multiplied")


def check_schema(schema: str) -> None:
    """Raise `Unfit` for a schema that would take seconds, or hundreds of megabytes, to prepare. What is no JSON is found later."""
    try:
        told = json.loads(schema)
    except (ValueError, RecursionError):
        return
    values = list(_values(told))
    _check_remainders("schema", (value for name, value in values if name == "multipleOf"))
    if sum(repeated(value) for name, value in values if name == "pattern") > MOST_REPEATED:
        raise Unfit("schema", f"may have patterns that repeat {MOST_REPEATED} pieces")
    expressions = {value for name, value in values if name in ("pattern", "format")}
    if len(expressions) > MOST_UNTRIED or sum(value for name, value in values if name == "choices") > MOST_CHOICES:
        _try(Guide("schema", schema))


def _try(guide: Guide) -> None:
    """Raise `Unfit` for a guide that takes too long to prepare, or that is wrong: what is wrong with a schema is found later. (A text has no special
    tokens here, so none may be named.)"""
    words = str(MOST_BYTES), FORMATS.get(guide.kind, guide.kind)
    try:
        ran = tried(TRY, *words, given=guide.text.encode(), most_s=LONGEST_S)
    except TimeoutExpired:
        raise Unfit(guide.kind, f"may have patterns and choices that take {LONGEST_S} s together") from None
    if ran.returncode < 0 or b"MemoryError" in ran.stderr:
        raise Unfit(guide.kind, f"may have patterns and choices that take {MOST_BYTES >> 20} MiB together")
    if ran.returncode and guide.kind != "schema":
        lines = ran.stderr.decode(errors="replace").strip().splitlines()
        raise Unfit(guide.kind, f"is wrong: {lines[-1][:300] if lines else 'it cannot be read'}")


def _values(told: Any) -> Iterator[tuple[str, Any]]:
    """Yield all numbers for `multipleOf`, all patterns, all formats, and how many there are in each choice."""
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
            if isinstance(form := one.get("format"), str):
                yield "format", form
            if isinstance(names := one.get("patternProperties"), dict):
                yield from (("pattern", name) for name in names)
            for choices in (one.get("anyOf"), one.get("oneOf")):
                if isinstance(choices, list):
                    yield "choices", len(choices)


def _remainders(number: float) -> int:
    """Return how many remainders a division has, whatever the power of ten.

    >>> [_remainders(number) for number in (0.25, 60, 1e300, 9973)]
    [25, 6, 1, 9973]
    """
    digits = repr(abs(number)).partition("e")[0].replace(".", "").strip("0")
    return int(digits) if digits.isdecimal() else 1


def repeated(pattern: str) -> int:
    """Return how many pieces a pattern has once its repetitions are written out. It stops counting at more than there may be.

    >>> repeated("^([0-9]{4}-){2}[{9}]$"), repeated("a{9}" + "{9}" * 1000) > MOST_REPEATED
    (11, True)
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
            if sizes[-1] > MOST_REPEATED:
                break
        elif piece[0] == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif piece[0] not in "^$|?*+":
            sizes[-1] += 1
            last = 1
    return sum(sizes)
