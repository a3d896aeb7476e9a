"""What clients may ask of OpenAI's `/v1/responses`, and the chat that it means."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from symbiosis.server.api_errors import wrong
from symbiosis.server.guides import JsonSchema, ResponseFormat
from symbiosis.server.openai_fields import DEFAULTS, OF_RESPONSES, RAW, Label, check_default
from symbiosis.server.openai_protocol import ChatBody, DrawnBody, Tokens, check
from symbiosis.server.tools import Choice, Function, NamedTool, Tool, ToolName
from symbiosis.serving.request import Guide

Message = dict[str, Any]
AS_RESPONSE = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
}  # of a chat
OF_ITEMS = ("id", "status", "type", "phase")  # fields of items that no model is shown
TEXTS = ("input_text", "output_text", "text")


class ResponseChat(ChatBody, kw_only=True):
    """The chat that a body of POST /v1/responses means. What the engine refuses of it is told by the names there."""

    @property
    def names(self) -> Mapping[str, str]:
        return {of_engine: AS_RESPONSE.get(name, name) for of_engine, name in super().names.items()}

    @property
    def follows(self) -> tuple[str, Guide] | None:
        found = super().follows
        return found and ("text", found[1])


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    schema: msgspec.Raw = RAW
    name: Label | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class FunctionChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


class ResponsesBody(DrawnBody, kw_only=True):
    """The body of POST /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    # DEFAULTS
    background: msgspec.Raw = RAW
    context_management: msgspec.Raw = RAW
    conversation: msgspec.Raw = RAW
    image: msgspec.Raw = RAW
    include: msgspec.Raw = RAW
    max_tool_calls: msgspec.Raw = RAW
    moderation: msgspec.Raw = RAW
    prompt: msgspec.Raw = RAW
    reasoning: msgspec.Raw = RAW
    stream_options: msgspec.Raw = RAW
    top_logprobs: msgspec.Raw = RAW
    truncation: msgspec.Raw = RAW
    access_programs: msgspec.Raw = RAW
    background_options: msgspec.Raw = RAW

    def messages(self) -> list[Message]:
        """Return the messages that the input stands for."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return messages_of(self.input)

    def chat(self, before: list[Message]) -> ChatBody:
        """Return the chat that this asks for, behind the messages of the responses before. Raises `ApiError` for what is wrong with it."""
        for name in self.__struct_fields__:
            if isinstance(given := getattr(self, name), msgspec.Raw):
                check_default(name, given, DEFAULTS | OF_RESPONSES)
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        functions = [Function(each.name, each.description, each.parameters, each.strict) for each in self.tools or ()]
        choice: Choice | None = (
            NamedTool("function", ToolName(self.tool_choice.name))
            if isinstance(self.tool_choice, FunctionChoice)
            else self.tool_choice
        )
        body = ResponseChat(
            messages=[*first, *before, *self.messages()], max_completion_tokens=self.max_output_tokens, tool_choice=choice,
            tools=[Tool("function", each) for each in functions] or None, parallel_tool_calls=self.parallel_tool_calls,
            response_format=self._format(), verbosity=self.text.verbosity if self.text else None,
            **{name: getattr(self, name) for name in DrawnBody.__struct_fields__},
        )  # fmt: skip
        check(body)
        return body

    def _format(self) -> ResponseFormat | None:
        if self.text is None or self.text.format is None:
            return None
        given = self.text.format
        if given.type != "json_schema":
            return ResponseFormat(given.type)
        return ResponseFormat(given.type, JsonSchema(given.schema, given.name, given.strict, given.description))


def messages_of(items: list[dict[str, Any]]) -> list[Message]:
    """Return the messages of a chat that items stand for: what an assistant calls is one message, with what it says before.

    >>> messages_of([{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}])[0]["tool_calls"][0]["function"]
    {'name': 'f', 'arguments': '{}'}
    """
    messages = list[Message]()
    for item in items:
        kind = item.get("type", "message")
        told = {name: value for name, value in item.items() if name not in OF_ITEMS and value is not None}
        if kind == "message":
            if unknown := told.keys() - {"role", "content"}:
                raise wrong(
                    f"input: a message has a role and content, and this has {min(unknown)[:100]!r}, too", "input"
                )
            messages.append({"role": told.get("role"), "content": _content(told.get("content"))})
        elif kind == "function_call":
            _check_fields(kind, told, "call_id", "name", "arguments")
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            function = {"name": told["name"], "arguments": told["arguments"]}
            call = {"id": told["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            _check_fields(kind, told, "call_id", "output")
            messages.append({"role": "tool", "tool_call_id": told["call_id"], "content": _content(told["output"])})
        else:
            raise wrong(
                f"input: an item is a message, a function_call or its output, and not {str(kind)[:100]!r}", "input"
            )
    return messages


def _check_fields(kind: str, told: dict[str, Any], *names: str) -> None:
    if (
        told.keys() != set(names)
        or not isinstance(told.get("name", ""), str)
        or not isinstance(told.get("arguments", ""), str)
    ):
        raise wrong(f"input: a {kind} has {', '.join(names)}, and this has {', '.join(sorted(told))[:200]}", "input")


def _content(content: Any) -> Any:
    """Return a message's content as a chat has it."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in TEXTS:
            raise wrong(
                "input: messages may have parts that are texts only: this server reads no images or sound", "input"
            )
        told = {name: value for name, value in part.items() if name not in ("annotations", "logprobs")}
        parts.append({**told, "type": "text"})
    return parts
