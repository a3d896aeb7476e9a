"""Schemas of many patterns are tried in a process of their own before an engine prepares them."""

import json
import time
from itertools import pairwise
from string import ascii_lowercase
from typing import Any

import pytest

from symbiosis.serving.engine.limits import Unfit
from symbiosis.serving.sampling.schema_cost import check_schema

PATTERNS = [f".*{letter}.*" for letter in ascii_lowercase]
TOGETHER: dict[str, dict[str, Any]] = {
    "in a list": {"allOf": [{"type": "string", "pattern": pattern} for pattern in PATTERNS]},
    "by references": {
        "$defs": {one: {"pattern": f".*{one}.*", "$ref": f"#/$defs/{next}"} for one, next in pairwise(ascii_lowercase)}
        | {"z": {"type": "string"}},
        "$ref": "#/$defs/a",
    },
}


@pytest.mark.parametrize("how", TOGETHER)
def test_patterns_whose_states_multiply_are_refused(how: str) -> None:
    """To prepare them took all of the memory, and nobody could end the thread that did so."""
    pytest.importorskip("llguidance")
    began = time.monotonic()
    with pytest.raises(Unfit, match="schema may have patterns and choices that take"):
        check_schema(json.dumps(TOGETHER[how]))
    assert time.monotonic() - began < 10


def test_many_patterns_that_hold_one_by_one_are_taken() -> None:
    pytest.importorskip("llguidance")
    check_schema(json.dumps({"properties": {pattern: {"type": "string", "pattern": pattern} for pattern in PATTERNS}}))


def test_a_choice_of_what_begins_alike_is_refused() -> None:
    """What may come first takes the cube of their number."""
    pytest.importorskip("llguidance")
    alike = [{"type": "array", "items": {"$ref": "#/$defs/a"}}] * 1_200
    with pytest.raises(Unfit, match="schema may have patterns and choices that take"):
        check_schema(json.dumps({"$defs": {"a": {"anyOf": alike}}, "$ref": "#/$defs/a"}))


def test_a_long_choice_of_what_differs_is_taken() -> None:
    pytest.importorskip("llguidance")
    tools = [
        {"type": "object", "properties": {"name": {"const": f"tool{n}"}, "a": {"type": "string"}}} for n in range(300)
    ]
    check_schema(json.dumps({"anyOf": tools}))
