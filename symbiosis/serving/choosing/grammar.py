"""Text that follows a JSON schema: which tokens may come next. It needs llguidance, which the extra `structured` installs."""

from typing import Any

import torch
from torch import Tensor

from symbiosis.errors import ConfigError

COMPACT = {"whitespace_flexible": False}  # else a model may go on with spaces for ever


class Grammars:
    """Grammars for the texts of one tokenizer.

    Args:
        tokenizer: A fast one of transformers.
        vocabulary: How many logits the model has.
        ends: The tokens that end a text.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: frozenset[int]) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, sorted(ends)
        self._prepared: Any = None

    def begin(self, schema: str) -> "Grammar":
        """Begin a text. Raises an error if the schema is wrong."""
        library = _library()
        try:
            grammar = library.LLMatcher.grammar_from_json_schema(schema, defaults=COMPACT)
        except ValueError as error:
            raise ConfigError(f"the schema is not JSON: {error}") from None
        matcher = library.LLMatcher(self._prepare(), grammar)
        if matcher.is_error():
            raise ConfigError(f"the JSON schema cannot be followed: {' '.join(matcher.get_error().split())[:300]}")
        return Grammar(matcher, self._vocabulary)

    def _prepare(self) -> Any:
        """Convert the vocabulary for the library, which takes about a second for a large one."""
        if self._prepared is None:
            if self._tokenizer is None:
                raise ConfigError("text by a JSON schema needs the model's tokenizer: give Engine(..., tokenizer=...)")
            from llguidance.hf import from_tokenizer

            try:
                self._prepared = from_tokenizer(self._tokenizer, self._vocabulary, self._ends or None)
            except ValueError as error:
                raise ConfigError(f"text by a JSON schema cannot be had with this tokenizer: {error}") from None
        return self._prepared


class Grammar:
    """What may come next in one text."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def allowed(self) -> Tensor:
        """Return which tokens may come next, bool [vocabulary]."""
        mask = self._matcher.compute_bitmask()
        bits = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
        spread = (bits.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
        return spread.flatten().bool()[: self._vocabulary]

    def take(self, token: int) -> None:
        """Go on with this token."""
        self._matcher.consume_token(token)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more may come."""
        return bool(self._matcher.is_stopped())


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            "text by a JSON schema needs llguidance: pip install 'symbiosis-llm[structured]' where the server runs"
        ) from None
    return llguidance
