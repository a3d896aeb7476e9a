"""Prompts and chats become tokens. What is cheap to know of them is checked at once; the rest may take long, and any thread may do it."""

import re
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple

import msgspec

from symbiosis.errors import ConfigError
from symbiosis.server.api_errors import ApiError, too_many_at_once, wrong
from symbiosis.server.openai_fields import OF_TEMPLATE
from symbiosis.server.openai_protocol import Body, Prediction, refused
from symbiosis.server.pooling_protocol import PoolingBody
from symbiosis.serving.engine.detokenize import chat_text
from symbiosis.serving.engine.limits import Unfit, check_tokens

NO_PROMPT = "a prompt is a text or a list of tokens; several are a list of them"
ROLES = ("system", "developer", "user", "assistant", "tool")
GIVEN = {"role", "content", "name", "tool_calls", "tool_call_id"}  # fields of messages that any template may be given
NOT_SHOWN = (
    "the model's chat template shows no {!r} of messages, and would ignore it: leave it out, or say it in the content"
)
NO_TOOLS = (
    "the model's chat template shows no tools, and would ignore them: start the server with --chat-template FILE, or describe them in a message, and "
    "ask for JSON by response_format"
)
REASONING = {"reasoning_content", "reasoning", "thinking"}  # names of one field: transformers gives it by each
LONGEST_NAME = 256  # of a field
PARSES = re.compile(r"arguments\b['\"\]]*\s*\|\s*(tojson|items)")


class PromptCut(NamedTuple):
    """How a prompt is made shorter."""

    most: int  # tokens
    side: str  # which end goes: left or right


class Prompts:
    """What clients want completed.

    Args:
        longest: Tokens that the model takes.
        vocabulary: Tokens that it knows.
        most: Prompts in one request.
    """

    def __init__(self, tokenizer: Any, longest: int, vocabulary: int, most: int) -> None:
        self._tokenizer, self._longest, self._vocabulary, self._most = tokenizer, longest, vocabulary, most
        template = getattr(tokenizer, "chat_template", None) or ""
        self.template = template if isinstance(template, str) else "\n".join(template.values())
        self._parses = PARSES.search(self.template) is not None
        self.most_characters = longest * max(map(len, tokenizer.get_vocab()), default=1)

    def several(
        self, given: str | list[str | int | list[int]] | list[str], name: str = "prompt", cut: PromptCut | None = None
    ) -> list[str | list[int]]:
        """Return the prompts of a request: one text, tokens, or a list of either. None is longer than what could fit, unless it is cut."""
        several: list[Any] = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        if len(several) > self._most:
            raise too_many_at_once(name, self._most, len(several))
        for each in several:
            if not isinstance(each, str | list):
                raise wrong(NO_PROMPT, name)
            if isinstance(each, str) and cut is None and len(each) > self.most_characters:
                raise too_long(self._longest, f"{len(each)} characters", name)
            if isinstance(each, list) and cut is None and len(each) > self._longest:
                raise too_long(self._longest, f"{len(each)} tokens", name)
        return several

    def tokens(
        self, prompt: str | list[int], name: str = "prompt", cut: PromptCut | None = None, special: bool = True
    ) -> tuple[int, ...]:
        """Return the tokens of a prompt; of a text, with the tokenizer's special ones if those are wanted. A long one takes long."""
        if isinstance(prompt, str):
            return self.of_text(prompt, special, cut)
        if not all(isinstance(token, int) for token in prompt):
            raise wrong(NO_PROMPT, name)
        try:
            check_tokens(name, prompt, self._vocabulary)
        except Unfit as unfit:
            raise refused(unfit) from None
        return shortened(tuple(prompt), cut)

    def cut(self, body: Body | PoolingBody) -> PromptCut | None:
        """Return how the prompts of a body are shortened; None if they are not."""
        most, side = body.truncate_prompt_tokens, body.truncation_side
        if most is None:
            if side is not None:
                raise wrong("truncation_side goes with truncate_prompt_tokens", "truncation_side")
            return None
        if most > self._longest:
            message = (
                f"truncate_prompt_tokens must be from -1 to {self._longest}, which is what the model takes, not {most}. "
                "Please request a smaller truncation size."
            )
            raise wrong(message, "truncate_prompt_tokens")
        return PromptCut(self._longest if most < 0 else most, side or self._tokenizer.truncation_side)

    def of_text(self, text: str, special: bool = True, cut: PromptCut | None = None) -> tuple[int, ...]:
        """Return the tokens of a text, with the tokenizer's special ones if those are wanted. A cut leaves these."""
        if cut is None:
            return tuple(self._tokenizer(text, add_special_tokens=special).input_ids)
        text = self._fitting(text, cut)
        whole = tuple(self._tokenizer(text, add_special_tokens=special).input_ids)
        if len(whole) <= cut.most:
            return whole
        inner = tuple(self._tokenizer(text, add_special_tokens=False).input_ids)
        own = len(whole) - len(inner)
        before = next((n for n in range(own + 1) if whole[n : n + len(inner)] == inner), None)
        if before is None or own >= cut.most:
            return shortened(whole, cut)
        kept = shortened(inner, PromptCut(cut.most - own, cut.side))
        return whole[:before] + kept + whole[before + len(inner) :]

    def of_pair(self, pair: tuple[str, str], cut: PromptCut | None = None) -> tuple[int, ...]:
        """Return the tokens of two texts as one prompt, as the tokenizer puts them together."""
        one, other = (self._fitting(text, cut) for text in pair)
        return shortened(tuple(self._tokenizer(one, other).input_ids), cut)

    def _fitting(self, text: str, cut: PromptCut | None) -> str:
        """Return as much of a text as a cut may leave."""
        if cut is None or len(text) <= self.most_characters:
            return text
        return text[: self.most_characters] if cut.side == "right" else text[-self.most_characters :]

    def predicted(self, prediction: Prediction) -> tuple[int, ...]:
        """Return the tokens of what a client thinks that an answer will be; those beyond the longest text are of no use."""
        return tuple(self._tokenizer(prediction.text, add_special_tokens=False).input_ids[: self._longest])

    def sequences(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of words: as they stand at the beginning of a text, and behind a blank."""
        texts = [text for word in words if word.strip() for text in (word, " " + word.lstrip())]
        found = [tuple(self._tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
        return tuple(dict.fromkeys(each for each in found if each))

    def of_chat(
        self,
        messages: list[dict[str, Any]],
        options: dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
        generates: bool = True,
        continues: bool = False,
    ) -> tuple[int, ...]:
        """Return the tokens that the chat template makes of messages and tools. Long ones take long.

        Args:
            generates: Whether they end with what opens an answer.
            continues: Whether the last message is left open, to be gone on with.
        """
        self._check_options(options)
        if tools and not reads(self.template, "tools"):
            raise wrong(NO_TOOLS, "tools")
        plain = [self._plain(message) for message in messages]
        if tools:
            options = {**options, "tools": tools}
        if not generates:
            options = {**options, "add_generation_prompt": False}
        if continues:
            options = {**options, "continue_final_message": True}
        text = self._chat_text(plain, options)
        unnamed = [message if message["role"] == "tool" else without(message, "name") for message in plain]
        if unnamed != plain and self._chat_text(unnamed, options) == text:
            raise wrong(NOT_SHOWN.format("name"), "messages")
        if len(text) > self.most_characters:
            raise too_long(self._longest, f"{len(text)} characters", "messages")
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _chat_text(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """Return what the template makes of messages: of one without content as of an empty one, if that is all that it takes."""
        try:
            return chat_text(self._tokenizer, messages, **options)
        except ConfigError as error:
            if all("content" in message for message in messages):
                raise wrong(str(error), "messages") from None
            return self._chat_text([{"content": "", **message} for message in messages], options)

    def _check_options(self, options: dict[str, Any]) -> None:
        """Refuse what the chat template does not read."""
        own = {"messages", *signature(type(self._tokenizer).apply_chat_template).parameters} & options.keys()
        if own:
            raise wrong(
                f"chat_template_kwargs may not have {min(own)!r}, which is the server's", "chat_template_kwargs"
            )
        for name in options:
            if self.template and not reads(self.template, name) and (name, options[name]) != ("verbosity", "medium"):
                raise wrong(
                    f"the model's chat template reads no {name[:100]!r}, and would ignore it: leave it out",
                    name if name in OF_TEMPLATE else "chat_template_kwargs",
                )

    def _plain(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message as templates expect it: without fields that say nothing, and with its content as one text."""
        if (role := message.get("role")) not in ROLES:
            raise wrong(f"role {str(role)[:100]!r} is not supported: it may be {', '.join(ROLES)}", "messages")
        told = {name: value for name, value in message.items() if value is not None and value != []}
        for name in told.keys() - GIVEN:
            if not any(reads(self.template, each) for each in (REASONING if name in REASONING else (name,))):
                raise wrong(NOT_SHOWN.format(name[:100]), "messages")
        if self._parses and isinstance(calls := told.get("tool_calls"), list):
            told["tool_calls"] = [_parsed(call) for call in calls]
        content = message.get("content")
        if content is not None or role != "assistant":
            told["content"] = _text_of(content)
        return told


def shortened(tokens: tuple[int, ...], cut: PromptCut | None) -> tuple[int, ...]:
    """Return what a cut leaves of tokens.

    >>> shortened((1, 2, 3), PromptCut(2, "left")), shortened((1, 2, 3), PromptCut(2, "right")), shortened((1,), PromptCut(2, "left"))
    ((2, 3), (1, 2), (1,))
    """
    if cut is None:
        return tokens
    return tokens[: cut.most] if cut.side == "right" else tokens[max(0, len(tokens) - cut.most) :]


def too_long(longest: int, size: str, name: str, how: str = "") -> ApiError:
    """Return the error for what is longer than the model takes, in words by which clients know that: litellm goes to a model that takes more.

    >>> str(too_long(512, "600 tokens", "prompt"))
    "this model's maximum context length is 512 tokens, and this would be 600 tokens. Please reduce the length of the input prompt"
    """
    told = f"this model's maximum context length is {longest} tokens, and this would be {size}"
    message = f"{told}. Please reduce the length of the input prompt{how}"
    return wrong(message, name, "context_length_exceeded", "too_long")


@lru_cache(maxsize=256)
def reads(template: str, name: str) -> bool:
    """Return whether a chat template has this word.

    >>> reads("{{ message.thinking }}", "thinking"), reads("{{ message.thinking }}", "think")
    (True, False)
    """
    return len(name) <= LONGEST_NAME and re.search(rf"\b{re.escape(name)}\b", template) is not None


def without(message: dict[str, Any], name: str) -> dict[str, Any]:
    return {each: value for each, value in message.items() if each != name}


def content_of(message: dict[str, Any]) -> str:
    """Return the text of a message, empty if it has none."""
    return "" if message.get("content") is None else _text_of(message["content"])


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(map(_text_of_part, content))
    if not isinstance(content, str):
        raise wrong("a message's content is text, or a list of parts; an assistant's may be null", "messages")
    return content


def _text_of_part(part: Any) -> str:
    """Return the text of a part of a message."""
    told = {name: value for name, value in part.items() if value is not None} if isinstance(part, dict) else {}
    if told.get("type") != "text" or not isinstance(text := told.get("text"), str):
        raise wrong("messages may have parts of the type text only: this server reads no images or sound", "messages")
    for name in told.keys() - {"type", "text"}:
        raise wrong(f"a part of a message has the unknown field {name[:100]!r}: leave it out", "messages")
    return text


def _parsed(call: Any) -> Any:
    """Return a tool's call with its arguments as an object, if they are the text of one: so do templates expect them that write them as JSON."""
    try:
        arguments = msgspec.json.decode(call["function"]["arguments"], type=dict[str, Any])
    except (LookupError, TypeError, msgspec.MsgspecError, RecursionError):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}
