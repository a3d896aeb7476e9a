"""Checks the patterns in configurations that strangers wrote. Some regular expressions never end, so each is tried where it can be
stopped."""

import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from typing import Any

from symbiosis.errors import AdapterError
from symbiosis.text import shown

PLAIN = re.compile(r"[\w.-]*")
LONGEST_S = 2.0
MOST = 10**6
FIELDS = ("target_modules", "feedforward_modules", "exclude_modules", "layers_pattern", "modules_to_save")
BY_PATTERN = ("rank_pattern", "alpha_pattern")
TRY = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    whole, end = re.compile(pattern), re.compile(rf"(.*\\.)?({pattern})$")
    for name in names:
        whole.fullmatch(name), whole.search(name), end.match(name)
"""


def check_patterns(config: dict[str, Any], names: Collection[str]) -> None:
    """Raise `AdapterError` unless all patterns can be compared with these names within two seconds.

    >>> check_patterns({"target_modules": r".*(q|v)_proj"}, ["model.q_proj"])
    """
    patterns = [pattern for pattern in _patterns(config) if not PLAIN.fullmatch(pattern)]
    if not patterns:
        return
    try:
        subprocess.run(
            [sys.executable, "-I", "-c", TRY],
            input=json.dumps([patterns, list(names)]).encode(), timeout=LONGEST_S, capture_output=True, check=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise AdapterError(f"its pattern {shown(patterns[0])} takes too long: name the modules in a list") from None
    except subprocess.CalledProcessError:
        raise AdapterError(f"its pattern {shown(patterns[0])} is not a regular expression") from None


def _patterns(config: dict[str, Any]) -> Iterator[str]:
    for field in FIELDS:
        value = config.get(field)
        yield from [value] if isinstance(value, str) else [each for each in value or () if isinstance(each, str)]
    for field in BY_PATTERN:
        if config.get(field) is not None and not isinstance(config[field], dict):
            raise AdapterError(f"its {field} is not a table of patterns and numbers")
        yield from config.get(field) or ()


def check_numbers(config: dict[str, Any], max_rank: int) -> None:
    """Raise `AdapterError` for sizes that nobody can mean, before anything is allocated for them."""
    for name in ("r", "rank", "init_r", "target_r"):
        if isinstance(config.get(name), int) and config[name] > max_rank:
            raise AdapterError(
                f"its rank is {config[name]} ({name}), and this server takes {max_rank} at most: start it with a larger max_rank"
            )
    for name, value in _numbers(config):
        if not abs(value) <= MOST:
            raise AdapterError(f"its {shown(name)} is {value}: numbers must be from {-MOST} to {MOST}")


def _numbers(config: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in config.items():
        for each in value.values() if isinstance(value, dict) else [value]:
            if isinstance(each, int | float):
                yield name, each
