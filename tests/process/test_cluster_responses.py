"""`/v1/responses` at a cluster's address: what goes on from a response goes to the server that keeps it, and is told apart by its id."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest

from symbiosis.server.server_marks import mark_of
from tests.cluster import Front, front_of
from tests.process.test_serve_tools import PARAMETERS, TEMPLATE
from tests.serving_api import Api, client, demo_engine, http_process

NAMES = ("demo-server-1", "demo-server-2")


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Api]]:
    with demo_engine() as engine, ExitStack() as stack:
        yield {name: stack.enter_context(http_process(engine, chat_template=TEMPLATE, server=name)) for name in NAMES}


@pytest.fixture(scope="module")
def running(servers: dict[str, Api], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front_of(tmp_path_factory.mktemp("runtime"), {name: each.url for name, each in servers.items()}) as running:
        yield running


def respond(at: openai.OpenAI, **fields: Any) -> Any:
    return at.responses.create(
        **{"model": "demo", "input": "def average(", "max_output_tokens": 12, "temperature": 0, **fields}
    )


def test_what_goes_on_from_a_response_is_where_that_is(running: Front, servers: dict[str, Api]) -> None:
    there = client(running.url)
    first = respond(there)
    (name,) = (name for name in NAMES if first.id.startswith(f"resp_{mark_of(name)}_"))
    after = respond(there, input="and", previous_response_id=first.id)
    assert after.id[:13] == first.id[:13] and after.usage.input_tokens > first.usage.input_tokens
    alone = respond(servers[name].client, input="and", previous_response_id=first.id)
    assert after.output_text == alone.output_text
    assert there.responses.retrieve(first.id).output_text == first.output_text
    there.responses.delete(first.id)
    for gone in (lambda: there.responses.retrieve(first.id), lambda: there.responses.retrieve("resp_1")):
        with pytest.raises(openai.NotFoundError):
            gone()
    with pytest.raises(openai.BadRequestError, match="send the whole input"):
        respond(there, previous_response_id=first.id)


def test_a_stream_is_handed_on_as_it_comes(running: Front) -> None:
    there = client(running.url)
    events = list(respond(there, stream=True))
    assert [event.type for event in events][:2] == ["response.created", "response.in_progress"]
    assert events[-1].response.output_text == respond(there).output_text


def test_tools_are_called(running: Front) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
    there = client(running.url)
    answer = respond(there, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_output_tokens=150)
    [call] = answer.output
    assert (call.type, call.name) == ("function_call", "weather")
    chat = there.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "x"}], max_tokens=200, temperature=0, tool_choice="required",
        tools=[{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}],
    )  # fmt: skip
    assert chat.choices[0].message.tool_calls and chat.choices[0].message.tool_calls[0].function.name == "weather"


def test_fields_of_sampling_are_honoured(running: Front, servers: dict[str, Api]) -> None:
    there, alone = client(running.url), servers[NAMES[-1]].client
    drawn = {"temperature": 1, "seed": 7, "top_k": 20, "repetition_penalty": 1.5, "logit_bias": {"100": -100}}
    for more in (drawn, {"stop": [" "], "include_stop_str_in_output": True}, {"ignore_eos": True, "priority": 2}):
        assert respond(there, extra_body=more).output_text == respond(alone, extra_body=more).output_text
    for wrong in ({"top_p": 7}, {"top_k": -3}, {"stop": ["x"] * 17}, {"min_tokens": 3}):
        [field] = wrong
        with pytest.raises(openai.BadRequestError, match=field):
            respond(there, extra_body=wrong)


def test_what_is_wrong_is_said(running: Front) -> None:
    there = client(running.url)
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        respond(there, model="other")
    with pytest.raises(openai.BadRequestError, match="reasoning"):
        respond(there, reasoning={"effort": "high"})
