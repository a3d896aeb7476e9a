"""Text that follows a JSON schema: which tokens may come next. It needs llguidance, which the extra `structured` installs."""

import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from symbiosis.errors import ConfigError
from symbiosis.serving.engine.limits import check_length

COMPACT = {"whitespace_flexible": False}  # else a model may go on with spaces for ever
KEPT = 16  # schemas: those that were asked for last are not prepared again


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
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Any] = OrderedDict()  # matchers at the beginning of a text, by schema

    def begin(self, schema: str, texts: int = 1) -> "list[Grammar]":
        """Begin so many texts. The schema is prepared once for all. Raises an error if it is wrong."""
        check_length("schema", len(schema))
        matcher = self._kept.get(schema) or self._matcher(schema)
        if matcher.is_error():
            raise ConfigError(f"the JSON schema cannot be followed: {' '.join(matcher.get_error().split())[:300]}")
        with self._lock:
            self._kept[schema] = matcher
            self._kept.move_to_end(schema)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return [Grammar(matcher.deep_copy(), self._vocabulary) for _ in range(texts)]

    def _matcher(self, schema: str) -> Any:
        library = _library()
        try:
            grammar = library.LLMatcher.grammar_from_json_schema(schema, defaults=COMPACT)
        except ValueError as error:
            raise ConfigError(f"the schema is not JSON: {error}") from None
        with self._lock:
            prepared = self._prepare()
        return library.LLMatcher(prepared, grammar)

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
