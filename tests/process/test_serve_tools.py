"""Tools and what texts follow, as OpenAI's own client asks for them. The demo model knows no tools: a grammar makes it call them."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from symbiosis.serving import Engine
from tests.process.test_serve_continuation import Event, continued, events
from tests.serving_api import Api, demo_engine, eventually, http_process

pytest.importorskip("llguidance")

# as short as can be: the demo model reads 512 bytes
TEMPLATE = (
    "{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{# <tool_call> #}"
    "{%- for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "clock", "parameters": PARAMETERS}},
]
USER: Any = [{"role": "user", "content": "Rome?"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with demo_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def api(engine: Engine) -> Iterator[Api]:
    with http_process(engine, chat_template=TEMPLATE) as api:
        yield api


def chat(api: Api, **fields: Any) -> Any:
    return api.client.chat.completions.create(
        **{"model": "demo", "messages": USER, "tools": TOOLS, "max_tokens": 150, "seed": 1, **fields}
    )


def checked(call: Any, name: str | None = None) -> None:
    assert call.type == "function" and re.fullmatch(r"\w{9}", call.id)
    assert call.function.name in ([name] if name else ["weather", "clock"])
    arguments = json.loads(call.function.arguments)
    assert list(arguments) == ["city", "days"] and arguments["city"] in ("Ulm", "Rome") and 1 <= arguments["days"] <= 9


def test_a_tool_that_must_be_called_is(api: Api) -> None:
    answer = chat(api, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    assert len(answer.message.tool_calls) == 1
    checked(answer.message.tool_calls[0])


def test_the_tool_that_is_named_is_called(api: Api) -> None:
    named: Any = {"type": "function", "function": {"name": "clock"}}
    answer = chat(api, tool_choice=named, n=2).choices
    for choice in answer:
        assert choice.finish_reason == "stop"
        checked(choice.message.tool_calls[0], "clock")
    assert answer[0].message.tool_calls[0].id != answer[1].message.tool_calls[0].id


def test_a_stream_tells_the_call_as_it_comes(api: Api) -> None:
    fields: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    whole = chat(api, **fields).choices[0].message.tool_calls[0].function
    parts = [
        call
        for event in chat(api, **fields, stream=True)
        for call in event.choices[0].delta.tool_calls or ()
    ]  # fmt: skip
    assert [part.function.name for part in parts if part.id] == [whole.name]
    assert "".join(part.function.arguments for part in parts) == whole.arguments
    assert len(parts) > 5, "in pieces"
    with api.client.chat.completions.stream(model="demo", messages=USER, tools=TOOLS, max_tokens=150, seed=1, **{**fields, "tool_choice": "required"}) as stream:  # fmt: skip
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.tool_calls
    assert final.message.tool_calls[0].function.arguments == whole.arguments


def test_a_free_answer_of_a_model_that_calls_nothing_is_text(api: Api, engine: Engine) -> None:
    answer = chat(api, temperature=0, max_tokens=20).choices[0]
    text = engine.generate("weatherclockRome?", max_tokens=20, temperature=0.0).text
    assert answer.finish_reason == "length" and not answer.message.tool_calls
    assert answer.message.content == text.rstrip() + text[len(text.rstrip()) :]
    assert chat(api, temperature=0, max_tokens=20, tool_choice="none").choices[0].message.content == engine.generate(
        "Rome?", max_tokens=20, temperature=0.0
    ).text  # fmt: skip


def test_a_history_with_calls_is_shown(api: Api, engine: Engine) -> None:
    call = {"id": "abc", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Ulm"}'}}
    history = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "abc", "content": "fine"}]  # fmt: skip
    told = chat(api, messages=history, temperature=0, max_tokens=10, logprobs=True).usage.prompt_tokens
    assert told == len('weatherclockRome?{"city": "Ulm"}fine')


def test_a_strict_tool_may_stay_uncalled_and_answers_may_follow_a_schema(api: Api) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    answer = chat(api, tools=strict, max_tokens=20, temperature=0).choices[0]
    assert not answer.message.tool_calls and answer.message.content
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    answer = chat(api, tools=strict, response_format=format).choices[0].message
    assert answer.tool_calls or json.loads(answer.content) in ("yes", "no")


def test_a_stream_of_a_call_goes_on_elsewhere(api: Api) -> None:
    def told(of: list[Event]) -> tuple[str, str, str | None]:
        choices = [choice for event in of for choice in event.data["choices"]]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        names = "".join(call["function"].get("name", "") for call in calls)
        return names, "".join(call["function"]["arguments"] for call in calls), choices[-1]["finish_reason"]

    body = {"model": "demo", "messages": USER, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "stream": True, "seed": 3, "max_tokens": 150}  # fmt: skip
    whole = events(api, "chat/completions", continued(body, [], 1))
    assert told(whole)[2] == "tool_calls"
    for cut in (2, len(whole) // 2, len(whole) - 3):
        begun = events(api, "chat/completions", continued(body, [], 1), cut)
        eventually(lambda: not api.running)
        rest = events(api, "chat/completions", continued(body, begun, 1))
        assert told([*begun, *rest]) == told(whole), cut


@pytest.mark.parametrize(
    ("how", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}-[0-9]{2}"}}, "[ab]{3}-[0-9]{2}"),
        ({"guided_choice": ["one", "two\n", 'th"ree']}, 'one|two\n|th"ree'),
        ({"structured_outputs": {"grammar": 'start: "x" ("+" "x"){1,3}'}}, r"x(\+x){1,3}"),
        ({"guided_grammar": 'root ::= "x" ("+" "y")?'}, r"x(\+y)?"),
        ({"guided_json": {"enum": ["a"]}}, '"a"'),
        ({"structured_outputs": {"json": '{"type": "integer", "minimum": 1, "maximum": 9}'}}, "[1-9]"),
    ],
)
def test_a_text_follows_what_is_asked_for(api: Api, how: dict[str, Any], pattern: str) -> None:
    for fields in ({"temperature": 0}, {"temperature": 2, "seed": 1}):
        answer = api.client.completions.create(model="demo", prompt="def", max_tokens=40, extra_body=how, **fields)
        assert re.fullmatch(pattern, answer.choices[0].text) and answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "structured_outputs"),
        ({"guided_regex": "a("}, "guided_regex"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_grammar": 'start: %json {"type": "number", "multipleOf": 0.00001237}'}, "guided_grammar"),
        ({"guided_json": '{"enum": '}, "guided_json"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(api: Api, how: dict[str, Any], field: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        api.client.completions.create(model="demo", prompt="def", max_tokens=40, extra_body=how)
    assert error.value.param == field and str(error.value.body["message"]).startswith(field)  # type: ignore[index]


WIDE = {
    "type": "object",
    "properties": {f"p{n}": {"type": "integer"} for n in range(2000)},
    "additionalProperties": False,
}


def test_a_schema_that_cannot_be_followed_to_its_end_is_the_client_s_fault(api: Api) -> None:
    """That the library gives up is found while the text is made, where a part that is not given comes first."""
    properties = {"t": {"type": "string", "maxLength": 1}, "k": WIDE}
    schema = {"type": "object", "properties": properties, "required": ["t", "k"], "additionalProperties": False}
    how: dict[str, Any] = {"extra_body": {"guided_json": json.dumps(schema)}}
    with pytest.raises(openai.BadRequestError, match="cannot be followed") as error:
        api.client.completions.create(model="demo", prompt="def", max_tokens=40, **how)
    assert error.value.param is None
    with pytest.raises(openai.APIError, match="cannot be followed") as late:
        list(api.client.completions.create(model="demo", prompt="def", max_tokens=40, stream=True, **how))
    assert not isinstance(late.value, openai.APIStatusError)  # an event: the status has been told


@pytest.mark.parametrize("schema", [WIDE, {"type": "array", "prefixItems": [{"const": "a"}, WIDE], "minItems": 2}])
def test_a_schema_that_fails_behind_what_every_text_begins_with_is_refused_before_a_stream_begins(
    api: Api, schema: dict[str, Any]
) -> None:
    how: dict[str, Any] = {"extra_body": {"guided_json": json.dumps(schema)}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="cannot be followed") as error:
            api.client.completions.create(model="demo", prompt="def", max_tokens=40, stream=stream, **how)
        assert error.value.param == "guided_json"


def test_tools_are_refused_where_the_template_shows_none(engine: Engine) -> None:
    with http_process(engine) as api, pytest.raises(openai.BadRequestError, match="--chat-template FILE"):
        chat(api)


def test_the_format_of_calls_can_be_given(engine: Engine) -> None:
    template = TEMPLATE.replace("{# <tool_call> #}", "")
    with (
        http_process(engine, chat_template=template) as api,
        pytest.raises(openai.BadRequestError, match="--tool-parser"),
    ):
        chat(api)
    with http_process(engine, chat_template=template, tool_parser="llama3_json") as api:
        assert chat(api, max_tokens=5).choices[0].message.content
        checked(chat(api, tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls[0])
