"""Text that follows a JSON schema, a regular expression or a grammar: which tokens may come next. It needs llguidance, which the extra
`structured` installs."""

import threading
import time
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from symbiosis.errors import ConfigError
from symbiosis.serving.engine.limits import Unfit, check_length
from symbiosis.serving.request import Guide, Request
from symbiosis.serving.sampling.schema_cost import check_guide

COMPACT = {"whitespace_flexible": False}  # otherwise a model may write spaces for ever
KINDS = {"schema": "JSON schema", "regex": "regular expression", "grammar": "grammar"}  # for messages
KEPT = 16  # most guides that are kept, the last ones that were asked for
SLOW_S = 0.0005  # a mask that took so long is kept for other texts that have the same tokens so far
MOST_MASKS, LONGEST = 64, 32  # most masks of a schema that are kept, and most tokens before them
LATE_S = 1.0  # how long all others' next tokens may wait for what may come next in one text
MOST_LATE = 1024  # texts that were late, of which the last ones are remembered
REST_S = 60.0  # how long a tenant whose text was late begins no other


class NotFollowed(Exception):
    """A text by a schema or grammar cannot go on. It says why."""


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
        # at the beginning of a text, by tenant and guide: what others ask for cannot be told by how long one's own takes
        self._kept: OrderedDict[tuple[str, Guide], Grammar] = OrderedDict()
        self._late: dict[str, float] = {}  # when a text was late, by its guide's text, and by tenant behind a blank

    def was_late(self, request: Request) -> None:
        """Note that a text was late, in the engine's thread."""
        guide = request.sampling.guide
        for name in (guide.text if guide else "", *([f" {request.tenant}"] if request.tenant else ())):
            self._late.pop(name, None)
            self._late[name] = time.monotonic()
        while len(self._late) > MOST_LATE:
            del self._late[next(iter(self._late))]

    def begin(self, guide: Guide, texts: int = 1, tenant: str = "") -> "list[Grammar]":
        """Begin so many texts. The guide is prepared once for all. Raises an error if it is wrong."""
        check_length(guide.kind, len(guide.text))
        for name, of in ((guide.text, f"this {guide.kind}"), (f" {tenant}", f"another {guide.kind} of this key")):
            if time.monotonic() - self._late.get(name, -REST_S) < REST_S:
                raise Unfit(guide.kind, f"has to wait a minute: what may come next by {of} took longer than {LATE_S} s")
        grammar = self._kept.get((tenant, guide)) or self._begun(guide)
        with self._lock:
            self._kept[tenant, guide] = grammar
            self._kept.move_to_end((tenant, guide))
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return [grammar.copy() for _ in range(texts)]

    def _begun(self, guide: Guide) -> "Grammar":
        """Prepare a guide, and find what may come first, which takes long for a large choice. Nobody waits for this thread, and the copies
        that are made later share what was found."""
        _library()
        check_guide(guide)
        grammar = Grammar(self._matcher(guide), self._vocabulary, {}, KINDS[guide.kind])
        try:
            grammar.allowed()
            grammar.look_ahead()
        except NotFollowed as error:
            raise Unfit(guide.kind, f"is wrong: {error}") from None
        return grammar

    def _matcher(self, guide: Guide) -> Any:
        library = _library()
        try:
            if guide.kind == "schema":
                grammar = library.LLMatcher.grammar_from_json_schema(guide.text, defaults=COMPACT)
            else:
                grammar = library.grammar_from(guide.kind, guide.text)
        except (ValueError, RecursionError) as error:
            raise Unfit(guide.kind, f"is wrong: {str(error)[:300]}") from None
        with self._lock:
            prepared = self._prepare()
        return library.LLMatcher(prepared, grammar, log_level=0)  # else it writes to stderr, past the log

    def _prepare(self) -> Any:
        """Convert the vocabulary for the library, which takes about a second for a large one."""
        if self._prepared is None:
            if self._tokenizer is None:
                raise ConfigError(
                    "text by a schema or grammar needs the model's tokenizer: give Engine(..., tokenizer=...)"
                )
            from llguidance.hf import from_tokenizer

            try:
                self._prepared = from_tokenizer(self._tokenizer, self._vocabulary, self._ends or None)
            except ValueError as error:
                raise ConfigError(f"text by a schema or grammar cannot be had with this tokenizer: {error}") from None
        return self._prepared


class Grammar:
    """What may come next in one text.

    Args:
        masks: The masks that took long, by the tokens before. All texts of a guide share them.
        name: What the text follows, for messages.
    """

    def __init__(self, matcher: Any, vocabulary: int, masks: dict[tuple[int, ...], bytes], name: str) -> None:
        self._matcher, self._vocabulary, self._masks, self._name = matcher, vocabulary, masks, name
        self._taken: tuple[int, ...] = ()
        self._next: Tensor | None = None  # which tokens may come next, once that is found

    def copy(self) -> "Grammar":
        """Return another one, for a text that has not begun, as this one's has not."""
        assert not self._taken
        return Grammar(self._matcher.deep_copy(), self._vocabulary, self._masks, self._name)

    def _mask(self) -> bytes:
        if (kept := self._masks.get(self._taken)) is not None:
            return kept
        begun = time.perf_counter()
        mask: bytes = self._matcher.compute_bitmask()
        is_slow = time.perf_counter() - begun >= SLOW_S
        if is_slow and len(self._taken) <= LONGEST and len(self._masks) < MOST_MASKS and not self._matcher.is_error():
            self._masks[self._taken] = mask
        return mask

    def allowed(self) -> Tensor:
        """Return which tokens may come next, bool [vocabulary]. Raises `NotFollowed`."""
        if self._next is None:
            self._check()
            mask = self._mask()
            self._check()
            bits = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
            spread = (bits.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
            self._next = spread.flatten().bool()[: self._vocabulary]
        return self._next

    def look_ahead(self) -> None:
        """Find what may come behind the tokens with which each text begins, if there are such. Raises `NotFollowed`."""
        ahead = self.copy()
        if forced := ahead._matcher.compute_ff_tokens():
            ahead._matcher.consume_tokens(forced)
            ahead._taken = tuple(forced)
            ahead.allowed()

    def take(self, token: int) -> None:
        """Go on with this token. Raises `NotFollowed`."""
        self._next = None
        self._matcher.consume_token(token)
        self._check()
        if len(self._taken) <= LONGEST:
            self._taken = *self._taken, token

    def _check(self) -> None:
        if self._matcher.is_error():
            why = " ".join(self._matcher.get_error().split())[:300]
            raise NotFollowed(f"the {self._name} cannot be followed: {why}")

    @property
    def has_ended(self) -> bool:
        """Whether nothing more may come."""
        return bool(self._matcher.is_stopped())


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            "text by a schema or grammar needs llguidance: pip install 'symbiosis-llm[structured]' where the server runs"
        ) from None
    return llguidance
