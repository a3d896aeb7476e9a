"""Tools of chats: what may be asked, in which formats calls are read, however the text comes, and what grammars let through."""

import json
from typing import Any

import pytest

from symbiosis.server.api_errors import ApiError
from symbiosis.server.openai_protocol import ChatBody, read
from symbiosis.server.tool_parsers import PARSERS, CallPart, ToolParser
from symbiosis.server.tools import Function, Tool, ToolUse, check_use, format_of, grammar_of

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}}]


def chat(**fields: Any) -> ChatBody:
    message = {"role": "user", "content": "x"}
    return read(ChatBody, json.dumps({"model": "m", "messages": [message], **fields}).encode())


@pytest.mark.parametrize(
    ("fields", "name", "problem"),
    [
        ({"tool_choice": "auto"}, "tool_choice", "there are none"),
        ({"tool_choice": "bogus", "tools": TOOLS}, "tool_choice", "'bogus' is not supported: it may be 'none', 'auto'"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": TOOLS}, "tool_choice", "no tool 'g'"),
        ({"tools": TOOLS * 2}, "tools", "more than once"),
        ({"tools": [{"type": "function"}]}, "tools", "function"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools", "custom"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "a name has"),
        ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]}, "tools", "may have 128"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [[]] * 70_000}}}]}, "tools", "too much"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_tools_is_said(fields: dict[str, Any], name: str, problem: str) -> None:
    with pytest.raises(ApiError, match=problem) as error:
        chat(**fields)
    assert error.value.status == 400 and (error.value.body["error"]["param"] or "").startswith((name, "custom", "[0]"))


def test_tools_are_shown_as_they_came_unless_none_may_be_called() -> None:
    use = chat(tools=TOOLS).tool_use
    assert use is not None and use.shown == TOOLS and not use.must and use.most is None
    assert chat(tools=TOOLS, tool_choice="none").tool_use is None and chat(tools=[]).tool_use is None
    named = chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}}).tool_use
    assert named is not None and (named.must, named.name, named.most) == (True, "weather", 1)


CALL = '{"name": "weather", "arguments": {"city": "Ulm \\"}{ é", "days": 2}}'
ARGUMENTS = {"city": 'Ulm "}{ é', "days": 2}
OTHER = {"deep": [{"a": [1, 2]}], "s": "x,y"}
TWO: dict[str, str] = {
    "hermes": f"I look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n"
    f'{{"arguments": {json.dumps(OTHER)}, "name": "g"}}</tool_call>',
    "llama3_json": f'<|python_tag|>{CALL.replace("arguments", "parameters")}; {{"name": "g", "parameters": {json.dumps(OTHER)}}}',
    "mistral": f'I look.[TOOL_CALLS] [{CALL}, {{"name": "g", "arguments": {json.dumps(OTHER)}}}]',
    "mistral, later": f"I look.[TOOL_CALLS]weather{json.dumps(ARGUMENTS)}[TOOL_CALLS]g[ARGS]{json.dumps(OTHER)}",
    "pythonic": f"[weather(city={ARGUMENTS['city']!r}, days=2), g(**{{}}, deep=[{{'a': [1, 2]}}], s='x,y')]".replace("**{}, ", ""),
    "": f'[{CALL}, {{"name": "g", "parameters": {json.dumps(OTHER)}}}]',
}  # fmt: skip


def pieces(text: str, size: int) -> list[str]:
    return [text[place : place + size] for place in range(0, len(text), size)]


def read_all(parser: ToolParser, texts: list[str]) -> tuple[str, dict[int, list[str]]]:
    """The content, and of each call its name and its arguments."""
    content, calls = "", dict[int, list[str]]()
    for said, parts in [*(parser.add(text) for text in texts), parser.end()]:
        content += said
        for part in parts:
            assert (part.call in calls) != bool(part.name), "the first part has the name, and no other"
            call = calls.setdefault(part.call, [part.name, ""])
            call[1] += part.arguments
    return content, calls


def parser(format: str, most: int | None = None) -> ToolParser:
    return PARSERS[format.partition(",")[0] or None](most)


@pytest.mark.parametrize("format", TWO)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_two_calls_are_read_however_the_text_comes(format: str, size: int) -> None:
    content, calls = read_all(parser(format), pieces(TWO[format], size))
    assert content == ("I look." if "I look." in TWO[format] else "")
    assert [(name, json.loads(arguments)) for name, arguments in calls.values()] == [
        ("weather", ARGUMENTS),
        ("g", OTHER),
    ]
    assert list(read_all(parser(format, most=1), pieces(TWO[format], size))[1]) == [0]


@pytest.mark.parametrize("format", ["hermes", "llama3_json", "mistral"])
def test_arguments_are_told_as_they_come(format: str) -> None:
    one, text = parser(format), TWO[format]
    end = text.index("Ulm") + 2
    _, parts = one.add(text[:end])
    assert parts == [CallPart(0, "weather", '{"city": "Ul')]
    assert one.add("m!")[1] == [CallPart(0, "", "m!")]


FREE = [
    "", "Hello.", " Hello, <tool_cal l>. ", "{", '{"a": 1}', '{"name": "Anna", "age": 7}', "[1, 2]", "[f(1)]", "[f(a=g())]", "[", "a [x] {y}\n",
    "<tool_call>no JSON</tool_call>", '<tool_call>{"a": ', "[f(a='\\", '[TOOL_CALLS] none', "<", "[" * 300, "\n\n",
]  # fmt: skip


@pytest.mark.parametrize("format", ["hermes", "llama3_json", "mistral", "pythonic"])
@pytest.mark.parametrize("text", FREE)
def test_what_is_no_call_is_content(format: str, text: str) -> None:
    for size in (1, 1000):
        content, calls = read_all(parser(format), pieces(text, size))
        assert not calls
        assert content.replace("</tool_call>", "").split() == text.replace("</tool_call>", "").replace("[TOOL_CALLS]", "" if format == "mistral" else "[TOOL_CALLS]").split()  # fmt: skip


def test_a_call_that_is_cut_off_is_told_as_far_as_it_came() -> None:
    assert read_all(parser("hermes"), ['<tool_call>{"name": "f", "arguments": {"a": "x']) == (
        "",
        {0: ["f", '{"a": "x']},
    )
    assert read_all(parser("hermes"), ['<tool_call>{"name": "f"}</tool_call>']) == ("", {0: ["f", "{}"]})
    assert read_all(parser("hermes"), ['<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}']) == (
        "",
        {0: ["f", '{"a": 1}']},
    )


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("for each call <tool_call>\\n{\"name\": ...}\\n</tool_call>", "hermes"),
        ("<tool_call><function=f>", None),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}', "llama3_json"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ message.content }}", None),
    ],
)  # fmt: skip
def test_the_template_tells_the_format(template: str, format: str | None) -> None:
    assert format_of(template) == format


def use(must: bool = False, strict: bool = False, most: int | None = None) -> ToolUse:
    both = [Function("weather", parameters=WEATHER, strict=strict), Function("g")]
    return ToolUse([Tool("function", each) for each in both], must, None, most)


def follows(grammar: str, text: str) -> bool:
    """Whether a text is one that the grammar lets through, to its end."""
    llguidance = pytest.importorskip("llguidance")
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting())


GOOD = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city":"Ulm"}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city":"Ulm"}}',
}


@pytest.mark.parametrize("format", GOOD)
def test_a_strict_tool_is_called_as_its_schema_says_or_not_at_all(format: str) -> None:
    free, grammar = grammar_of(use(), format), grammar_of(use(strict=True), format)
    assert free is None and grammar is not None
    good = GOOD[format]
    assert follows(grammar, good) and follows(grammar, "Hello.") and follows(grammar, "")
    assert not follows(grammar, good.replace("city", "town")) and not follows(grammar, good.replace("weather", "f"))
    assert follows(grammar, good.replace("weather", "g").replace("city", "town")), "which is not strict"
    between = "\n" if format == "hermes" else "; "
    assert follows(grammar, good + between + good)
    once = grammar_of(use(strict=True, most=1), format)
    assert once is not None and follows(once, good) and not follows(once, good + between + good)


@pytest.mark.parametrize("format", [*GOOD, None])
def test_a_tool_that_must_be_called_is(format: str | None) -> None:
    check_use(use(must=True), format, "schema")
    assert grammar_of(use(must=True), format, '{"enum": ["yes"]}') == grammar_of(use(must=True), format)
    grammar = grammar_of(use(must=True), format)
    assert grammar is not None
    good = GOOD[format] if format else f"[{GOOD['llama3_json']}]"
    assert follows(grammar, good) and not follows(grammar, "Hello.") and not follows(grammar, "")
    assert not follows(grammar, good.replace("city", "town"))
    assert list(read_all(PARSERS[format](), [good])[1].values()) == [["weather", '{"city":"Ulm"}']]


def test_an_answer_that_calls_nothing_follows_its_own_schema() -> None:
    format = "hermes"
    grammar = grammar_of(use(), format, '{"enum": ["yes"]}')
    assert grammar is not None
    spaced = grammar_of(use(), format, json.dumps(WEATHER))
    assert spaced and follows(spaced, '{"city":"Ulm"}') and not follows(spaced, '{ "city": "Ulm"}'), (
        "or it may write spaces for ever"
    )
    assert follows(grammar, '"yes"') and follows(grammar, GOOD[format]) and not follows(grammar, "yes")


@pytest.mark.parametrize(
    ("asked", "format", "other", "problem"),
    [
        (use(), None, None, "--tool-parser"),
        (use(strict=True), "mistral", None, "strict"),
        (use(must=True), "hermes", "regex", "must be called"),
        (use(), "hermes", "regex", "cannot both be"),
        (use(), "pythonic", "schema", "only for models"),
        (use(), "llama3_json", "schema", "only for models"),
    ],
)
def test_what_a_model_cannot_is_refused(asked: ToolUse, format: str | None, other: str | None, problem: str) -> None:
    with pytest.raises(ApiError, match=problem):
        check_use(asked, format, other)
