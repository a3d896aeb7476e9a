"""Makes text of tokens as they come, cut before stop strings, and tokens of prompts and chats."""

from collections.abc import Iterable, Sequence
from typing import Any

from symbiosis.errors import ConfigError

LONGEST_CHARACTER = 4  # bytes, and so tokens at most
BROKEN = "�"


class Text:
    """The text of one completion. It holds back bytes that are no whole character yet, and text that may be the beginning of a stop string.

    Args:
        tokenizer: Of transformers.
        stop: Strings that end the text, which is cut before them.
        min_tokens: So many tokens at the beginning are not searched for stop strings.
        special: Whether special tokens are part of the text.
    """

    def __init__(self, tokenizer: Any, stop: Iterable[str] = (), min_tokens: int = 0, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._stop = tuple(each for each in stop if each)
        self._min_tokens = min_tokens
        self._tokens: list[int] = []
        self._context = self._read = (
            0  # tokens from `context` on are decoded together; the text of those before `read` is out
        )
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def add(self, tokens: Iterable[int]) -> str:
        """Return what the text gains by these tokens. Once it has stopped, it gains nothing."""
        out = ""
        for token in tokens:
            if self.stopped:
                break
            self._tokens.append(token)
            out += self._release(self._whole_characters())
        return out

    def end(self) -> str:
        """Return what was held back, because no more tokens come."""
        if self.stopped:
            return ""
        out = self._release(self._decoded(len(self._tokens)))
        out, self._held = out + self._held, ""
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
        before = self._decode(self._tokens[self._context : self._read])
        return self._decode(self._tokens[self._context : upto])[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=not self._special, clean_up_tokenization_spaces=False
        )
        return text

    def _release(self, new: str) -> str:
        """Return `new` text, as far as it cannot be part of a stop string."""
        text = self._held + new
        if len(self._tokens) <= self._min_tokens:
            return text
        found = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        out, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return out


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `stop`.

    >>> _overlap("the e", "end")
    1
    """
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def text_of(tokenizer: Any, token: int) -> str:
    """Return one token by itself as text, to be shown beside its log probability."""
    text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def prompt_tokens(tokenizer: Any, prompt: str | Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of a prompt, which is text or tokens already."""
    if not isinstance(prompt, str):
        return tuple(prompt)
    if tokenizer is None:
        raise ConfigError(
            "this engine has no tokenizer: give Engine(..., tokenizer=...), or prompts as lists of tokens"
        )
    return tuple(tokenizer(prompt).input_ids)


def chat_tokens(tokenizer: Any, messages: Sequence[dict[str, Any]], **options: Any) -> tuple[int, ...]:
    """Return the prompt that the tokenizer's chat template makes of messages.

    Args:
        options: Options of the template, such as `tools` or `enable_thinking`.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            "the model's tokenizer has no chat template: ask for a completion of a prompt instead, or give the server one "
            "(--chat-template FILE)"
        )
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options)
    except Exception as error:  # whatever a template raises
        raise ConfigError(f"the chat template does not take these messages: {error}") from None
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)
