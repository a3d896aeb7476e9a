"""What `--speculate` says: who drafts tokens, and how many."""

import re
from typing import NamedTuple

from symbiosis.errors import ConfigError

MOST = 15  # draft tokens of one text in a step
RULE = re.compile(r"(ngram|draft:(?P<draft>.+)):(?P<tokens>\d+)")


class SpeculateRule(NamedTuple):
    """How tokens are drafted."""

    draft: str | None  # the checkpoint of a draft model; None: by n-grams of the text
    tokens: int  # of a text in one step

    @classmethod
    def from_text(cls, text: str, devices: int = 1) -> "SpeculateRule":
        """Read `ngram:TOKENS` or `draft:CHECKPOINT:TOKENS`, for a model over so many devices.

        >>> SpeculateRule.from_text("ngram:4"), SpeculateRule.from_text("draft:/models/small:3")
        (SpeculateRule(draft=None, tokens=4), SpeculateRule(draft='/models/small', tokens=3))
        """
        found = RULE.fullmatch(text)
        if found is None or not 1 <= int(found["tokens"]) <= MOST:
            raise ConfigError(
                f"speculate is ngram:N or draft:CHECKPOINT:N, with N from 1 to {MOST} tokens, not {text!r:.200}"
            )
        if devices > 1:
            raise ConfigError(
                "speculate goes with one device: ranks of a divided model compute one token of a text in a step"
            )
        return cls(found["draft"], int(found["tokens"]))
