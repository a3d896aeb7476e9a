"""Every field of OpenAI's requests is honoured, refused by name, or known to change no answer: compared with the types of openai-python."""

import json
import typing
from typing import Any

import msgspec
import openai.types.chat as chats
import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses import response_create_params
from openai.types.shared_params import function_definition, response_format_json_schema

from symbiosis.server.api_errors import ApiError
from symbiosis.server.guides import JsonSchema, ResponseFormat
from symbiosis.server.openai_fields import DEFAULTS, HARMLESS, OF_RESPONSES, OF_TEMPLATE
from symbiosis.server.openai_protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DrawnBody,
    StreamOptions,
    read,
)
from symbiosis.server.pooling_protocol import EmbeddingsBody
from symbiosis.server.prompts import GIVEN, Prompts
from symbiosis.server.responses_protocol import ResponsesBody
from symbiosis.server.tools import Function, Tool
from symbiosis.serving.request import Sampling
from tests.unit.test_serving_detokenize import bytes_tokenizer

NEW = (
    "openai-python has fields that nobody has looked at: {}. Look each up in its docs. Honour it (a field of {}, that changes what the engine or "
    "the chat template is asked); or, in symbiosis/server/openai_fields.py, refuse it with DEFAULTS, or put it into HARMLESS if no answer depends "
    "on it. Then docs/serving.md says so."
)
HONOURED = {
    CompletionBody: {
        "model", "prompt", "best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "seed",
        "stop", "stream", "stream_options", "temperature", "top_p",
    },
    ChatBody: {
        "model", "messages", "frequency_penalty", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "n", "presence_penalty",
        "parallel_tool_calls", "response_format", "seed", "stop", "stream", "stream_options", "temperature", "tool_choice", "tools", "top_logprobs", "top_p",
    },
    ResponsesBody: {
        "model", "input", "instructions", "max_output_tokens", "temperature", "top_p", "stream", "store", "previous_response_id", "tools",
        "tool_choice", "parallel_tool_calls", "text",
    },
    EmbeddingsBody: {"input", "model", "dimensions", "encoding_format"},
    Tool: {"type", "function"},
    Function: {"name", "description", "parameters", "strict"},
    StreamOptions: {"include_usage"},
    ResponseFormat: {"type", "json_schema"},
    JsonSchema: {"name", "description", "schema", "strict"},  # its name and description are for people; it always holds
}  # fmt: skip
THEIRS: list[tuple[type, list[Any]]] = [
    (CompletionBody, [completions.CompletionCreateParamsNonStreaming, completions.CompletionCreateParamsStreaming]),
    (ChatBody, [chat.CompletionCreateParamsNonStreaming, chat.CompletionCreateParamsStreaming]),
    (
        ResponsesBody,
        [response_create_params.ResponseCreateParamsNonStreaming, response_create_params.ResponseCreateParamsStreaming],
    ),
    (EmbeddingsBody, [EmbeddingCreateParams]),
    (Tool, [chats.ChatCompletionFunctionToolParam]),
    (Function, [function_definition.FunctionDefinition]),
    (StreamOptions, [chats.ChatCompletionStreamOptionsParam]),
    (ResponseFormat, [response_format_json_schema.ResponseFormatJSONSchema]),
    (JsonSchema, [response_format_json_schema.JSONSchema]),
]
OF_MESSAGES = {  # by openai's name for them: those that are refused, unless they are null or the template reads them
    "audio", "function_call", "refusal",
}  # fmt: skip
# values of another meaning than a field's default
OTHERS: dict[str, Any] = {
    "store": True, "service_tier": "flex", "prompt_cache_options": {"mode": "explicit"}, "prompt_cache_retention": "24h", "suffix": "x",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"}, "modalities": ["text", "audio"], "audio": {"format": "wav", "voice": "alloy"},
    "moderation": {"model": "x"}, "web_search_options": {}, "use_beam_search": True, "length_penalty": 0.5,
}  # fmt: skip


def asked(kind: type[Body], **fields: Any) -> Any:
    needed: dict[str, Any] = (
        {"prompt": "p"} if kind is CompletionBody else {"messages": [{"role": "user", "content": "x"}]}
    )
    return read(kind, json.dumps({"model": "m", **needed, **fields}).encode())


@pytest.mark.parametrize(("ours", "theirs"), THEIRS, ids=[ours.__name__ for ours, _ in THEIRS])
def test_each_field_of_openais_has_one_fate(ours: type[msgspec.Struct], theirs: list[Any]) -> None:
    names = {name for each in theirs for name in typing.get_type_hints(each)}
    known, others = set(ours.__struct_fields__), OF_RESPONSES if ours is ResponsesBody else {}
    fates = [
        HONOURED[ours],
        *(known & set(fate) - HONOURED[ours] for fate in (HARMLESS, DEFAULTS | others, OF_TEMPLATE)),
    ]
    assert not (new := names - set().union(*fates)), NEW.format(sorted(new), ours.__name__)
    assert all(sum(name in fate for fate in fates) == 1 and name in known for name in names)


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody, ResponsesBody, EmbeddingsBody])
@pytest.mark.parametrize("name", ["user", "safety_identifier", "prompt_cache_key", "metadata"])
def test_what_is_repeated_is_short(kind: type[Any], name: str) -> None:
    if name not in kind.__struct_fields__:
        return
    field = {"CompletionBody": "prompt", "ChatBody": "messages"}.get(kind.__name__, "input")
    needed = {field: [{"role": "user", "content": "x"}] if field == "messages" else "x"}
    wrap = (lambda text: {"a": text}) if name == "metadata" else str
    taken = read(kind, json.dumps({"model": "m", **needed, name: wrap("é" * 512)}).encode())
    assert getattr(taken, name) == wrap("é" * 512)
    with pytest.raises(ApiError, match=f"^{name}.* may have 512 characters"):
        read(kind, json.dumps({"model": "m", **needed, name: wrap("x" * 513)}).encode())


def test_a_format_of_text_is_short() -> None:
    text = {"format": {"type": "text", "schema": {"a": "x" * (1 << 18)}}}
    with pytest.raises(ApiError, match="^text holds too much"):
        read(ResponsesBody, json.dumps({"model": "m", "input": "x", "text": text}).encode())


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_only_a_default_is_taken_of_what_is_not_supported(kind: type[Body]) -> None:
    for name in set(kind.__struct_fields__) & set(DEFAULTS):
        for value in (None, *DEFAULTS[name][0]):
            asked(kind, **{name: value})
        with pytest.raises(ApiError, match=f"^{name} is not supported") as error:
            asked(kind, **{name: OTHERS[name]})
        assert error.value.status == 400 and error.value.body["error"]["param"] == name


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}, 7, ["none"]])
def test_nobody_chooses_a_tool_where_there_are_none(choice: Any) -> None:
    with pytest.raises(ApiError, match="tool_choice"):
        asked(ChatBody, tool_choice=choice)
    assert asked(ChatBody, tool_choice="none", parallel_tool_calls=False).n == 1


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "include_obfuscation"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"shape": 1}}, "stream_options.shape"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "lang": "x"}}},
            "response_format.json_schema.lang",
        ),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"verbosity": "loud"}, "verbosity"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "reasoning_effort"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ],
)
def test_nested_fields_are_not_ignored_either(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ApiError) as error:
        asked(ChatBody, **fields)
    assert error.value.body["error"]["param"] == name


def test_what_repeats_a_default_is_taken() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    assert asked(ChatBody, stream=True, stream_options=options, max_tokens=3, max_completion_tokens=3)


def prompts(template: str) -> Prompts:
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = template
    return Prompts(tokenizer, longest=4096, vocabulary=300, most=8)


def text(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    made = prompts(template)
    decoded: str = made._tokenizer.decode(made.of_chat(messages, options))
    return decoded


PLAIN = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
CALLS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and not m['content'] %}"
    "{% for call in m['tool_calls'] %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    "{% else %}{{ m['role'] + ':' + m['content'] + ';' }}{% endif %}{% endfor %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "y"},
]


def test_an_assistants_null_is_what_the_template_makes_of_it() -> None:
    assert text(PLAIN, HISTORY) == "user:x;assistant:;tool:y;"
    assert text(CALLS, HISTORY) == 'user:x;f({"a": 1})tool:y;'
    for alone in ({"role": "assistant", "content": None}, {"role": "assistant"}, {"role": "assistant", "content": []}):
        assert text(PLAIN, [alone]) == "assistant:;"
    assert text(CALLS, [{"role": "assistant", "content": None}]) == ""
    printed = "{% for m in messages %}{{ m['content'] | trim }};{% endfor %}"  # of which jinja would make "None"
    assert text(printed, HISTORY) == "x;;y;"
    defined = (
        "{% for m in messages %}{{ 'content' in m }};{% endfor %}"  # transformers leaves a null out, but for the oldest
    )
    told = [{name: value for name, value in message.items() if value is not None} for message in HISTORY]
    expected = bytes_tokenizer().apply_chat_template(told, chat_template=defined, tokenize=False)
    assert text(defined, HISTORY) == expected == "True;False;True;"
    with pytest.raises(ApiError, match="content is text"):
        text(PLAIN, [{"role": "user", "content": None}])


def test_arguments_that_are_no_object_stay_text() -> None:
    for given in ("[1", "[1]", ""):
        call = {**CALL, "function": {"name": "f", "arguments": given}}
        history = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        assert text(CALLS, history) == f"f({json.dumps(given)})"


def test_an_answer_of_ours_can_be_sent_back() -> None:
    message = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    assert text(PLAIN, [message]) == "assistant:x;"


@pytest.mark.parametrize("name", [*sorted(OF_MESSAGES), "name", "thinking", "x" * 100])
def test_a_messages_field_is_shown_or_refused(name: str) -> None:
    message = {"role": "user", "content": "x", name: "y"}
    with pytest.raises(ApiError, match="would ignore it") as error:
        text(PLAIN, [message])
    assert error.value.status == 400 and len(str(error.value)) < 300
    shows = "{% for m in messages %}{{ m['content'] }}{{ m['" + name + "'] }}{% endfor %}"
    assert text(shows, [message]) == "xy"


def test_a_name_that_is_a_tools_only_is_refused_too() -> None:
    with pytest.raises(ApiError, match="'name'"):
        text(CALLS, [{"role": "user", "content": "x", "name": "anna"}])
    assert text(PLAIN, [{"role": "tool", "content": "x", "name": "f"}]) == "tool:x;"


def test_each_field_of_openais_messages_has_one_fate() -> None:
    kinds = [
        kind
        for name in dir(chats)
        if name.endswith("MessageParam") and hasattr(kind := getattr(chats, name), "__annotations__")
    ]
    names = {name for kind in kinds for name in kind.__annotations__}
    assert len(kinds) >= 6 and not (new := names - GIVEN - OF_MESSAGES), NEW.format(sorted(new), "messages")


@pytest.mark.parametrize(
    "part", [{"type": "text", "text": "x", "prompt_cache_breakpoint": {}}, {"type": "image_url"}, "x", {"text": "x"}]
)
def test_a_part_of_a_message_is_text_and_nothing_else(part: Any) -> None:
    with pytest.raises(ApiError) as error:
        text(PLAIN, [{"role": "user", "content": [part]}])
    assert error.value.status == 400
    assert text(PLAIN, [{"role": "user", "content": [{"type": "text", "text": "x", "extra": None}]}]) == "user:x;"


@pytest.mark.parametrize("name", sorted(OF_TEMPLATE))
def test_effort_goes_to_a_template_that_reads_it(name: str) -> None:
    body = asked(ChatBody, **{name: "low"})
    with pytest.raises(ApiError, match=f"reads no '{name}'") as error:
        text(PLAIN, body.messages, **body.template_options)
    assert error.value.body["error"]["param"] == name
    assert text(PLAIN + "{{ " + name + " }}", body.messages, **body.template_options) == "user:x;low"
    assert asked(ChatBody).template_options == {}


def test_options_that_the_template_does_not_read_are_refused() -> None:
    with pytest.raises(ApiError, match="reads no 'enable_thinking'"):
        text(PLAIN, [{"role": "user", "content": "x"}], enable_thinking=False)
    assert text(PLAIN, [{"role": "user", "content": "x"}], verbosity="medium") == "user:x;"


def test_many_are_refused_before_anything_is_made_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {str(number): 1 for number in range(5000)}
    twice = f'{{"model": "m", "prompt": "p", "logit_bias": {json.dumps(many)}, "logit_bias": {{}}}}'
    assert read(CompletionBody, twice.encode()).logit_bias == {}  # of the first nothing is made
    made: list[Any] = []
    decode = msgspec.json.decode
    monkeypatch.setattr(msgspec.json, "decode", lambda data, **more: made.append(decode(data, **more)) or made[-1])
    for name, value in (
        ("logit_bias", many), ("stop", list(many)), ("stop_token_ids", [1] * 5000), ("metadata", many), ("chat_template_kwargs", many),
        ("messages", [{"role": "user", "content": "x"}] * 90_000), ("messages", [{"role": "user", "content": [many] * 40}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"a": [many] * 40}}}]), ("tool_choice", many), ("prediction", many),
        ("metadata", {"a": "x" * 300_000}), ("stop", ["x" * 300_000]), ("chat_template_kwargs", {"a": "x" * 300_000}),
        ("prediction", {"type": "content", "content": "x" * 300_000}),
    ):  # fmt: skip
        made.clear()
        with pytest.raises(ApiError) as error:
            asked(ChatBody, **{name: value})
        assert error.value.body["error"]["param"] == name
        assert not any(isinstance(each, list | dict) and len(each) > 1024 for each in made), name


def test_an_engine_counts_before_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    from symbiosis.serving.engine.limits import Unfit, check_sampling

    with pytest.raises(Unfit, match="logit_bias may have 1024, and has 240000"):
        monkeypatch.setattr(msgspec, "to_builtins", None)  # which would go over all of them
        check_sampling(Sampling(max_tokens=1, logit_bias=dict.fromkeys(range(240_000), 1.0)), 300_000)


def test_tools_are_shown_by_the_template_or_refused() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    shows = "{% for tool in tools %}{{ tool.function.name }};{% endfor %}{{ messages[0]['content'] }}"
    message = {"role": "user", "content": "x"}
    made = prompts(shows)
    assert made._tokenizer.decode(made.of_chat([message], {}, tools)) == "f;x"
    with pytest.raises(ApiError, match="shows no tools") as error:
        prompts(PLAIN).of_chat([message], {}, tools)
    assert error.value.body["error"]["param"] == "tools"


def test_responses_take_vllms_fields_of_sampling_as_chats_do() -> None:
    given = {
        "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {"7": 1.0},
        "seed": 42, "stop": ["x"], "ignore_eos": True, "priority": 3, "skip_special_tokens": False, "include_stop_str_in_output": True,
    }  # fmt: skip
    others = {"model", "stream", "temperature", "top_p", *HARMLESS, *DEFAULTS}  # OpenAI's
    assert given.keys() == set(DrawnBody.__struct_fields__) - others, "add to `given` what `DrawnBody` has now"
    chat = read(ResponsesBody, json.dumps({"model": "m", "input": "x", **given}).encode()).chat([])
    assert {name: getattr(chat, name) for name in given} == given
    with pytest.raises(ApiError, match="^stop"):
        read(ResponsesBody, json.dumps({"model": "m", "input": "x", "stop": ["x"] * 5000}).encode())
