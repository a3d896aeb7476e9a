"""Prompts and chats become tokens. What is cheap to know of them is checked at once; the rest may take long, and any thread may do it."""

from inspect import signature
from typing import Any

from symbiosis.errors import ConfigError
from symbiosis.serving.engine.detokenize import chat_text, prompt_tokens
from symbiosis.serving.engine.limits import check_tokens
from symbiosis.serving.http.failures import ApiError, wrong
from symbiosis.serving.http.schemas import refusing

ROLES = ("system", "developer", "user", "assistant", "tool")


class Prompts:
    """What clients want completed.

    Args:
        longest: Tokens that the model takes.
        vocabulary: Tokens that it knows.
        most: Prompts in one request.
    """

    def __init__(self, tokenizer: Any, longest: int, vocabulary: int, most: int) -> None:
        self._tokenizer, self._longest, self._vocabulary, self._most = tokenizer, longest, vocabulary, most
        self.most_characters = longest * max(map(len, tokenizer.get_vocab()), default=1)

    def several(self, given: str | list[str | int | list[int]]) -> list[str | list[int]]:
        """Return the prompts of a request: one text, tokens, or a list of either. None is longer than what could fit."""
        several: list[Any] = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        if len(several) > self._most:
            raise wrong(f"at most {self._most} prompts", "prompt")
        for each in several:
            if isinstance(each, str):
                self._check_text(each, "prompt")
            elif not isinstance(each, list):
                raise wrong("a prompt is a text or a list of tokens; several are a list of them", "prompt")
            elif len(each) > self._longest:
                raise too_long(self._longest, f"{len(each)} tokens", "prompt")
        return several

    def tokens(self, prompt: str | list[int]) -> tuple[int, ...]:
        """Return the tokens of a prompt. A long one takes long."""
        if isinstance(prompt, str):
            return prompt_tokens(self._tokenizer, prompt)
        if not all(isinstance(token, int) for token in prompt):
            raise wrong("a prompt is a text or a list of tokens; several are a list of them", "prompt")
        with refusing():
            check_tokens("prompt", prompt, self._vocabulary)
        return tuple(prompt)

    def of_chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> tuple[int, ...]:
        """Return the tokens that the chat template makes of messages. Long ones take long."""
        own = {"messages", *signature(type(self._tokenizer).apply_chat_template).parameters} & options.keys()
        if own:
            raise wrong(
                f"chat_template_kwargs may not have {min(own)!r}, which is the server's", "chat_template_kwargs"
            )
        try:
            text = chat_text(self._tokenizer, [_plain(message) for message in messages], **options)
        except ConfigError as error:
            raise wrong(str(error), "messages") from None
        self._check_text(text, "messages")
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _check_text(self, text: str, name: str) -> None:
        if len(text) > self.most_characters:
            raise too_long(self._longest, f"{len(text)} characters", name)


def too_long(longest: int, size: str, name: str) -> ApiError:
    return wrong(f"the model takes {longest} tokens, and {size} are more: shorten it", name, "context_length_exceeded")


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its content as one text, as templates expect it."""
    content = message.get("content")
    if (role := message.get("role")) not in ROLES:
        raise wrong(f"each message has a role: {', '.join(ROLES)}, and not {str(role)[:100]!r}", "messages")
    if not isinstance(content, list):
        if not isinstance(content, str | None):
            raise wrong("a message's content is text, or a list of parts", "messages")
        return message
    parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise wrong("messages may have parts of the type text only: this server reads no images or sound", "messages")
    return {**message, "content": "\n".join(map(str, parts))}
