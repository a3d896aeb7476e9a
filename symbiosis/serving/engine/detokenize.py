"""Makes text of tokens as they come, cut before stop strings, and tokens of prompts and chats."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from symbiosis.errors import ConfigError

LONGEST_CHARACTER = 4  # bytes, and so tokens at most
BROKEN = "�"
SPACE = "▁"  # in SentencePiece's pieces
ONE_BYTE = re.compile("<0x([0-9A-F]{2})>")  # how SentencePiece writes a byte for which there is no piece
_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
# by the characters in which GPT-2's kind of tokenizers writes bytes: those that can be seen as themselves
BYTES = {chr(byte): byte for byte in _PLAIN} | {chr(0x100 + n): byte for n, byte in enumerate(_OTHERS)}


class Stop:
    """A string that ends texts, and where its beginnings recur in it (Knuth, Morris and Pratt): to look for it in a text that comes piece by
    piece takes time in proportion to the text, whatever both are.

    >>> Stop("end").after("the e", 0)
    (None, 1)
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._shorter = [0]  # by characters that match: of how many of the last ones are the string's first, too
        matched = 0
        for character in text[1:]:
            while matched and character != text[matched]:
                matched = self._shorter[matched - 1]
            matched += character == text[matched]
            self._shorter.append(matched)

    def after(self, new: str, matched: int) -> tuple[int | None, int]:
        """Read text, behind which the string's first `matched` characters stand already. Return how many characters of it there are when the
        string is whole, None if it does not become so; and else how many match at its end."""
        text = self.text
        if not matched and text[0] not in new:
            return None, 0
        for place, character in enumerate(new, 1):
            while matched and character != text[matched]:
                matched = self._shorter[matched - 1]
            matched += character == text[matched]
            if matched == len(text):
                return place, 0
        return None, matched


class Text:
    """The text of one completion. It holds back bytes that are no whole character yet, and text that may be the beginning of a stop string.

    Args:
        tokenizer: Of transformers.
        stop: What ends the text, which is cut before it.
        min_tokens: So many tokens at the beginning are not searched for stop strings.
        special: Whether special tokens are part of the text.
        keeps_stop: Whether the stop string that ends the text is part of it.
        silent: Tokens that are no part of the text, because they end it.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Iterable[str | Stop] = (),
        min_tokens: int = 0,
        special: bool = False,
        keeps_stop: bool = False,
        silent: Iterable[int] = (),
    ) -> None:
        self._decode, self._skips = decoder(tokenizer), not special
        self._stops = [Stop(each) if isinstance(each, str) else each for each in stop if each]
        self._matched = [0] * len(self._stops)  # characters of each, at the end of the text
        self._min_tokens, self._keeps_stop, self._silent = min_tokens, keeps_stop, frozenset(silent)
        self._tokens: list[int] = []
        self._context = self._read = (
            0  # tokens from `context` on are decoded together; the text of those before `read` is out
        )
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped, self.taken = False, 0  # taken: so many tokens, with the one that has stopped it

    def add(self, tokens: Iterable[int]) -> str:
        """Return what the text gains by these tokens. Once it has stopped, it gains nothing."""
        out = ""
        for token in tokens:
            if self.stopped:
                break
            self.taken += 1
            if token in self._silent:
                continue
            self._tokens.append(token)
            new = self._whole_characters()
            out += self._release(new) if self._stops else new
        return out

    def end(self) -> str:
        """Return what was held back, because no more tokens come."""
        if self.stopped:
            return ""
        new = self._decoded(len(self._tokens)) if self._read < len(self._tokens) else ""
        out = self._release(new) + self._held if self._stops else new
        self._held = ""
        return out

    def _whole_characters(self) -> str:
        new = self._decoded(len(self._tokens))
        if not new.endswith(BROKEN):
            self._context, self._read = self._read, len(self._tokens)
            return new
        if len(self._tokens) - self._read < LONGEST_CHARACTER:
            return ""
        new = self._decoded(self._read + 1)  # no later token makes a character of this one
        self._read += 1
        self._context = self._read
        return new + self._whole_characters()

    def _decoded(self, upto: int) -> str:
        """Return the text of the tokens that were not read yet. Those before are decoded with them, because they decide about spaces."""
        before = self._decode(self._tokens[self._context : self._read], self._skips)
        return self._decode(self._tokens[self._context : upto], self._skips)[len(before) :]

    def _release(self, new: str) -> str:
        """Return `new` text, as far as it cannot be part of a stop string."""
        text = self._held + new
        if len(self._tokens) <= self._min_tokens:
            return text
        found = []  # where the text is cut, by each stop string that it has come to
        for number, stop in enumerate(self._stops):
            end, self._matched[number] = stop.after(new, self._matched[number])
            if end is not None:
                found.append(len(self._held) + end - (0 if self._keeps_stop else len(stop.text)))
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if self._keeps_stop else max(self._matched, default=0)
        out, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return out


Decode = Callable[[list[int], bool], str]


@lru_cache(maxsize=8)
def decoder(tokenizer: Any) -> Decode:
    """Return what makes text of tokens, without the special ones or with them. Where transformers only hands tokens on to the tokenizer in
    Rust, that one is asked at once, which takes a quarter of the time."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    plain = (PreTrainedTokenizerBase.decode, PreTrainedTokenizerFast._decode)
    if (getattr(kind, "decode", None), getattr(kind, "_decode", None)) == plain:
        return tokenizer.backend_tokenizer.decode  # type: ignore[no-any-return]

    def decode(tokens: list[int], skips: bool) -> str:
        text: str = tokenizer.decode(tokens, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
        return text

    return decode


@lru_cache(maxsize=1 << 16)
def text_of(tokenizer: Any, token: int) -> str:
    """Return one token by itself as text, to be shown beside its log probability."""
    text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


@lru_cache(maxsize=1 << 16)
def bytes_of(tokenizer: Any, token: int) -> bytes:
    """Return one token's own bytes. Together with those of the tokens beside it they are text; by themselves they may be a part of a
    character."""
    piece = tokenizer.convert_ids_to_tokens(token) or ""
    if token in _added(tokenizer):  # which is written as it is
        return piece.encode()
    if _writes_bytes(tokenizer):
        if BYTES.keys() >= set(piece):
            return bytes(BYTES[character] for character in piece)
    elif found := ONE_BYTE.fullmatch(piece):
        return bytes.fromhex(found[1])
    elif SPACE in piece and token not in tokenizer.all_special_ids:  # of which a decoder drops the first one
        return piece.replace(SPACE, " ").encode()
    return text_of(tokenizer, token).encode()


@lru_cache(maxsize=8)
def _added(tokenizer: Any) -> frozenset[int]:
    """The tokens that were added to those of a tokenizer's model."""
    return frozenset(tokenizer.added_tokens_decoder)


@lru_cache(maxsize=8)
def special_tokens(tokenizer: Any) -> frozenset[int]:
    """The tokens that a tokenizer leaves out of a text without special ones."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset([*tokenizer.all_special_ids, *(number for number, token in added if token.special)])


@lru_cache(maxsize=8)
def _writes_bytes(tokenizer: Any) -> bool:
    """Whether a tokenizer writes each byte as a character."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = b"" if backend is None or backend.decoder is None else backend.decoder.__getstate__()
    return b'"ByteLevel"' in decoder or hasattr(tokenizer, "byte_decoder")


def prompt_tokens(tokenizer: Any, prompt: str | Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of a prompt, which is text or tokens already."""
    if not isinstance(prompt, str):
        return tuple(prompt)
    if tokenizer is None:
        raise ConfigError(
            "this engine has no tokenizer: give Engine(..., tokenizer=...), or prompts as lists of tokens"
        )
    return tuple(tokenizer(prompt).input_ids)


def chat_text(tokenizer: Any, messages: Sequence[dict[str, Any]], /, **options: Any) -> str:
    """Return the text of the prompt that the tokenizer's chat template makes of messages.

    Args:
        options: Options of the template, such as `tools` or `enable_thinking`, and of what makes the prompt of it.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            "the model's tokenizer has no chat template: ask for a completion of a prompt instead, or give the server one "
            "(--chat-template FILE)"
        )
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tokenize=False, **{"add_generation_prompt": True, **options}
        )
    except Exception as error:  # whatever a template raises
        raise ConfigError(f"the chat template does not take these messages: {error}") from None
    return text
