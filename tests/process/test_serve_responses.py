"""`/v1/responses` as OpenAI's own client uses it."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.process.test_serve_tools import PARAMETERS, TEMPLATE
from tests.serving_api import Api, demo_engine, http_process, web

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": PARAMETERS,
    "strict": True,
}


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with demo_engine() as engine, http_process(engine, chat_template=TEMPLATE) as api:
        yield api


def respond(api: Api, **fields: Any) -> Any:
    given = {"model": "demo", "input": "def average(", "max_output_tokens": 12, "temperature": 0, **fields}
    return api.client.responses.create(**given)


def test_a_response_is_what_a_chat_answers(api: Api) -> None:
    chat = api.client.chat.completions.create(
        model="demo", messages=[{"role": "system", "content": "x"}, {"role": "user", "content": "def average("}], max_tokens=12, temperature=0,
    )  # fmt: skip
    answer = respond(api, instructions="x", metadata={"a": "b"})
    assert answer.output_text == chat.choices[0].message.content and answer.metadata == {"a": "b"}
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert chat.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "def average("}]}]
    assert respond(api, instructions="x", input=parts).output_text == answer.output_text


def test_a_stream_tells_its_items_in_order(api: Api) -> None:
    whole = respond(api)
    events = list(respond(api, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-4].text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == 12


def test_a_response_goes_on_from_another(api: Api) -> None:
    first = respond(api, instructions="x")
    second = respond(api, input="\nclass", previous_response_id=first.id)
    same = respond(api, input=[{"role": "user", "content": "def average("}, *(item.to_dict() for item in first.output), {"role": "user", "content": "\nclass"}])  # fmt: skip
    assert second.output_text == same.output_text and second.usage.input_tokens == same.usage.input_tokens
    assert second.previous_response_id == first.id
    assert api.client.responses.retrieve(first.id).output_text == first.output_text
    api.client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        api.client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="send the whole input") as error:
        respond(api, previous_response_id=first.id)
    assert error.value.code == "previous_response_not_found"
    unstored = respond(api, store=False)
    with pytest.raises(openai.NotFoundError):
        api.client.responses.retrieve(unstored.id)


def test_tools_are_called_and_answered(api: Api) -> None:
    fields: Any = {
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 150,
        "seed": None,
    }
    fields.pop("seed")
    answer = respond(api, input="Rome?", **fields)
    call = answer.output[0]
    assert (
        answer.status == "completed"
        and len(answer.output) == 1
        and call.type == "function_call"
        and call.name == "weather"
    )
    assert json.loads(call.arguments)["city"] in ("Ulm", "Rome")
    events = list(respond(api, input="Rome?", stream=True, **fields))
    told = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert told == call.arguments == events[-1].response.output[0].arguments
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert (done.name, done.arguments) == ("weather", told)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "fine"}
    after = respond(api, input=[output], previous_response_id=answer.id, max_output_tokens=5)
    arguments = json.dumps(json.loads(call.arguments))
    assert after.usage.input_tokens == len(f"Rome?{arguments}fine")
    named = respond(api, input="Rome?", **{**fields, "tool_choice": {"type": "function", "name": "weather"}})
    assert named.output[0].type == "function_call"


def test_a_text_has_a_format(api: Api) -> None:
    format: Any = {"type": "json_schema", "name": "x", "strict": True, "schema": {"enum": ["yes", "no"]}}
    answer = respond(api, text={"format": format})
    assert answer.status == "completed" and json.loads(answer.output_text) in ("yes", "no")
    assert answer.text.format.name == "x"
    with api.client.responses.stream(
        model="demo", input="def average(", temperature=0, text={"format": format}
    ) as stream:
        assert stream.get_final_response().output_text == answer.output_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": "ab c" * 5000}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}}, "text"),
    ],
    ids=["too many tokens", "a long text", "nothing", "a role", "no schema", "a wrong schema"],
)
def test_what_is_wrong_is_told_by_the_fields_that_a_response_has(api: Api, fields: dict[str, Any], param: str) -> None:
    """It is answered as a chat, whose fields have other names."""
    with pytest.raises(openai.BadRequestError) as error:
        api.client.responses.create(**{"model": "demo", "input": "x", **fields})
    assert error.value.param == param
    assert not re.search("messages|max_completion_tokens|response_format", str(error.value.body))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "reasoning"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "no images"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "call_id"),
        ({"input": []}, "empty"),
        (
            {"input": [{"content": "x"}, {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}]},
            "role",
        ),
        ({"input": [{"role": "assistant", "content": "x", "tool_calls": "y"}]}, "'tool_calls', too"),
        ({"previous_response_id": "resp_x"}, "no response 'resp_x'"),
        ({"extra_body": {"speed": 1}}, "speed"),
        ({"model": "nobody"}, "nobody"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_done_is_refused(api: Api, fields: dict[str, Any], told: str, stream: bool) -> None:
    with pytest.raises(openai.APIStatusError, match=told) as error:
        respond(api, stream=stream, **fields)
    assert error.value.status_code == (404 if "model" in fields else 400)


def test_defaults_are_taken(api: Api) -> None:
    given = {
        "background": False,
        "truncation": "disabled",
        "include": [],
        "service_tier": "auto",
        "reasoning": {},
        "store": True,
    }
    body = {"model": "demo", "input": "x", "max_output_tokens": 2, "text": {"format": {"type": "text"}}, **given}
    assert web.post(f"{api.url}/v1/responses", json=body, timeout=60).status_code == 200
    nulls = dict.fromkeys(["instructions", "tools", "metadata", "prompt", "conversation", "previous_response_id"])
    assert web.post(f"{api.url}/v1/responses", json={**body, **nulls}, timeout=60).status_code == 200
