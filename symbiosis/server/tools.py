"""The tools of a chat: which of them a model may call, or must, and the grammars that make it do so."""

import re
from typing import Any, Literal, NamedTuple

import msgspec

from symbiosis.server.api_errors import wrong
from symbiosis.server.guides import literal
from symbiosis.serving.engine.limits import Unfit, check_count
from symbiosis.serving.serve_options import ToolFormat

NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
NO_FORMAT = (
    "the model's chat template does not tell in which format it calls tools: start the server with --tool-parser, or ask for "
    "tool_choice='required' or a function"
)
NOT_STRICT = (
    "tools: strict holds here with tool_choice 'required' or a function; with 'auto' only for models that call tools as hermes or llama3_json, and "
    "this one does as {}"
)
NO_SCHEMA = "tools: a schema for the answer beside them is only for models that call tools as hermes, and this one does as {}: ask for one of them"
SEVERAL = "tool_choice: a text with a {} and tools that must be called cannot be: ask for one of them"


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None

    @property
    def schema(self) -> str:
        """The schema of its arguments, for a grammar. They are written without spaces, which a model may else write for ever."""
        return compact(self.parameters or {"type": "object", "properties": {}})


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class ToolName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: ToolName


Choice = Literal["none", "auto", "required"] | NamedTool


class ToolUse(NamedTuple):
    """What a chat may do with tools."""

    tools: list[Tool]
    must: bool  # one of them must be called
    name: str | None  # this one
    most: int | None  # calls in an answer

    @property
    def shown(self) -> list[dict[str, Any]]:
        """What the chat template is given."""
        built: list[dict[str, Any]] = msgspec.to_builtins(self.tools)
        return built

    @property
    def callable(self) -> list[Function]:
        return [each.function for each in self.tools if self.name in (None, each.function.name)]


def tool_use(tools: list[Tool] | None, choice: Choice | None, parallel: bool | None) -> ToolUse | None:
    """Return what a chat may do with tools. None: nothing.

    >>> tool_use([Tool("function", Function("f"))], "required", False)[1:]
    (True, None, 1)
    """
    if not tools:
        if choice not in (None, "none"):
            raise wrong("tool_choice goes with tools, and there are none", "tool_choice")
        return None
    try:
        check_count("tools", len(tools))
    except Unfit as unfit:
        raise wrong(str(unfit), "tools") from None
    names = [each.function.name for each in tools]
    for each in names:
        if not NAME.fullmatch(each):
            raise wrong(f"tools: a name has up to 128 letters, digits and _.:/-, unlike {each[:130]!r}", "tools")
        if names.count(each) > 1:
            raise wrong(f"tools: {each!r} is there more than once", "tools")
    if choice == "none":
        return None
    name = choice.function.name if isinstance(choice, NamedTool) else None
    if name is not None and name not in names:
        raise wrong(f"tool_choice: there is no tool {name[:128]!r} among tools", "tool_choice")
    must = choice == "required" or name is not None
    return ToolUse(tools, must, name, 1 if parallel is False or name is not None else None)


def format_of(template: str) -> ToolFormat | None:
    """Return in which format a model calls tools, by what its chat template says of it.

    >>> format_of("<tool_call>{{ call | tojson }}</tool_call>"), format_of("{{ message.content }}")
    ('hermes', None)
    """
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<function=" in template:  # of Qwen's coders, whose calls are no JSON
        return None
    if "<tool_call>" in template:
        return "hermes"
    if "[func_name1(" in template or "[func1(" in template:
        return "pythonic"
    if "<|python_tag|>" in template or ('"parameters": dictionary' in template):
        return "llama3_json"
    return None


def check_use(use: ToolUse, format: str | None, follows: str | None) -> None:
    """Raise `ApiError` for what is asked of tools and cannot be had of this model. `follows`: what else the text must follow."""
    if use.must:
        if follows not in (None, "schema"):  # a schema is for an answer that calls nothing, of which there is none
            raise wrong(SEVERAL.format(follows), "tool_choice")
        return
    if format is None:
        raise wrong(NO_FORMAT, "tool_choice")
    if follows not in (None, "schema"):
        raise wrong(f"tools and a {follows} for the answer cannot both be: ask for one of them", "tools")
    if follows is not None and format != "hermes":  # what begins as a call does could not be told from an answer
        raise wrong(NO_SCHEMA.format(format), "tools")
    if any(each.strict for each in use.callable) and format not in ("hermes", "llama3_json"):
        raise wrong(NOT_STRICT.format(format), "tools")


def compact(schema: dict[str, Any]) -> str:
    """Return a schema, for a grammar, of JSON without spaces."""
    return msgspec.json.encode({**schema, "x-guidance": {"whitespace_flexible": False}}).decode()


def _compact_text(schema: str) -> str:
    try:
        return compact(msgspec.json.decode(schema, type=dict[str, Any]))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise wrong(f"response_format: the schema is not JSON: {error}", "response_format") from None


def call_format(use: ToolUse, format: str | None) -> str | None:
    """Return the format of calls. Where they must be called, a grammar sees to it: in the model's own, or as a JSON list (None)."""
    return format if not use.must or format in ("hermes", "llama3_json") else None


def grammar_of(use: ToolUse, format: str | None, answer: str | None = None) -> str | None:
    """Return the grammar of a text that calls tools, or may do so; None if it is free.

    Args:
        format: Of the calls; None: a JSON list, as for the formats that are no JSON.
        answer: The schema that the text follows if it calls nothing, for hermes.

    >>> print(grammar_of(ToolUse([Tool("function", Function("f", parameters={}))], True, None, 1), "llama3_json"))
    start: call
    call: call_0
    call_0: "{\\"name\\": \\"f\\", \\"parameters\\": " %json {"type":"object","properties":{},"x-guidance":{"whitespace_flexible":false}} "}"
    """
    functions, once = use.callable, use.most == 1
    if not use.must and answer is None and not any(each.strict for each in functions):
        return None
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(functions)))}"]
    for number, each in enumerate(functions):
        # what is not strict may have any arguments
        schema = each.schema if use.must or each.strict else '{"type":"object"}'
        key = "arguments" if format == "hermes" else "parameters"
        begin = '{"name": ' + literal(each.name) + f', "{key}": '
        before, after = ("\n", "\n</tool_call>") if format == "hermes" else ("", "")
        rules.append(f"call_{number}: {literal(before + begin)} %json {schema} {literal('}' + after)}")
    if format == "hermes":
        start = _hermes(use.must, once)
    elif format == "llama3_json":
        start = "call" if once else 'call ("; " call)*'
        start = start if use.must else f"TEXT | {start}\nTEXT: /([^{{](.|\\n)*)?/"
    else:
        start = '"[" call "]"' if once else '"[" call (", " call)* "]"'
    if answer is not None and not use.must:
        start = _hermes(True, once) + " | answer"
        rules.append(f"answer: %json {_compact_text(answer)}")
    return "\n".join([f"start: {start}", *rules])


def _hermes(must: bool, once: bool) -> str:
    if must:
        return '"<tool_call>" call' if once else '"<tool_call>" call ("\\n<tool_call>" call)*'
    start = "TEXT | tagged" if once else "tagged* TEXT"
    return f'{start}\ntagged: begin call\nbegin[lazy]: TEXT "<tool_call>"\nTEXT: /(.|\\n)*/'
