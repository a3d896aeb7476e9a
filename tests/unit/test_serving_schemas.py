"""Bodies of requests: what they mean to the engine, and what is refused, by name."""

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from symbiosis.server.api_errors import ApiError
from symbiosis.server.openai_fields import DEFAULTS, HARMLESS
from symbiosis.server.openai_protocol import AS_ASKED, SAME, Body, ChatBody, CompletionBody, read, sampling_of
from symbiosis.serving.engine.limits import LENGTHS, Unfit, check_sampling
from symbiosis.serving.request import Guide, Sampling
from symbiosis.serving.sampling.schema_cost import check_guide

DOCS = Path(__file__).parents[2] / "docs"


def completion(**fields: Any) -> CompletionBody:
    return read(CompletionBody, json.dumps({"model": "m", "prompt": "p", **fields}).encode())


def chat(**fields: Any) -> ChatBody:
    message = {"role": "user", "content": "x"}
    return read(ChatBody, json.dumps({"model": "m", "messages": [message], **fields}).encode())


def schema(itself: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": itself}}


def param(error: ApiError | Unfit) -> str | None:
    """The field that is wrong, by its name in the request, whoever found it."""
    names = {**AS_ASKED, "schema": "response_format"}
    return names.get(error.param, error.param) if isinstance(error, Unfit) else error.body["error"]["param"]


def guide(body: Body) -> Guide | None:
    return body.follows[1] if body.follows else None


def checked(body: CompletionBody) -> Sampling:
    """What the engine makes of a body, which it checks."""
    sampling = sampling_of(body, 16, body.logprobs, guide(body))
    check_sampling(sampling, 100)
    return sampling


def test_defaults_are_openais() -> None:
    sampling = sampling_of(completion(), 16, None)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.schema) == (1.0, 1.0, 0, None)
    assert sampling.seed is not None and sampling.seed != sampling_of(completion(), 16, None).seed


def test_nulls_are_defaults() -> None:
    body = completion(**dict.fromkeys(CompletionBody.__struct_fields__) | {"model": "m", "prompt": "p"})
    assert all(
        getattr(body, name) == getattr(completion(), name) for name in set(body.__struct_fields__) - set(DEFAULTS)
    )


@pytest.mark.parametrize("stop", ["", [""], [], None])
def test_an_empty_stop_string_stops_nothing(stop: str | list[str] | None) -> None:
    assert completion(stop=stop).stops == [] and completion(stop=["", "end"]).stops == ["end"]


def test_every_parameter_of_the_engines_can_be_asked_for() -> None:
    by_another_name = {
        "max_tokens",
        "stop_tokens",
        "schema",
        "regex",
        "grammar",
        "logprobs",
        "logit_bias",
        "allowed_tokens",
        "bad_sequences",
        "logprob_tokens",
    }
    of_trainers = {"scaled_logprobs"}  # of this process: `symbiosis.rollout` asks for it
    wanted, there = set(Sampling.__struct_fields__) - by_another_name - of_trainers, set(SAME) - by_another_name
    assert wanted == there, f"add {wanted - there} to `DrawnBody` or `Body`, and to the tests of bodies"


def test_the_documents_name_every_parameter() -> None:
    documents = "".join((DOCS / name).read_text() for name in ("serving.md", "training.md"))
    openai = {"presence_penalty", "frequency_penalty"}  # with whatever else is OpenAI's
    assert not [name for name in SAME if name not in openai and f"`{name}`" not in documents]


def test_every_field_reaches_the_engine() -> None:
    given = {
        "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -3, "ignore_eos": True,
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.5,
    }  # fmt: skip
    body = completion(**given, stop_token_ids=[5], logit_bias={"7": -100})
    sampling = sampling_of(body, 9, 3)
    assert {name: getattr(sampling, name) for name in given} == given
    assert (sampling.max_tokens, sampling.logprobs, sampling.stop_tokens, sampling.logit_bias) == (
        9,
        3,
        (5,),
        {7: -100.0},
    )


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_what_changes_nothing_is_taken(name: str) -> None:
    given: Any = {"metadata": {"a": "b"}, "prediction": {"type": "content", "content": "ab"}}.get(name, "x")
    assert msgspec.to_builtins(getattr(chat(**{name: given}), name)) == given


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"top_k": 2**64}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": 7}, "stop"),
        ({"stop": ["x" * 1025]}, "stop"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"response_format": schema({"enum": ["x" * 70_000]})}, "response_format"),
        ({"stream": True, "seed": 1, "continuation": {"id": "x" * 257, "created": 1}}, "continuation"),
        ({"suffix": "x"}, "suffix"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words"),
        ({"best_of": 3}, "best_of"),
        ({"speed": 3}, "speed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": None}, "prompt"),
        ({"model": 3}, "model"),
    ],
)
def test_what_is_wrong_is_said_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises((ApiError, Unfit)) as error:
        checked(completion(**fields))
    assert param(error.value) == name and name in str(error.value)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": ""}] * 16_385}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 16_385}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"prompt": "x"}, "prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"echo": True}, "echo"),
    ],
)
def test_what_is_wrong_in_a_chat_is_said_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ApiError) as error:
        chat(**fields)
    assert error.value.status == 400 and param(error.value) == name


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"": 1}}, "logit_bias"),
        ({"logit_bias": {"100": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "response_format"),
    ],
)
def test_what_the_model_does_not_have_is_said_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises((ApiError, Unfit)) as error:
        checked(completion(**fields))
    assert param(error.value) == name


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"model":'])
@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_what_is_no_body_is_refused(data: bytes, kind: type[Body]) -> None:
    with pytest.raises(ApiError) as error:
        read(kind, data)
    assert error.value.status == 400


def test_a_schemas_characters_are_counted_and_not_their_bytes() -> None:
    around = len('{"type":"object","description":""}')

    def asked(characters: int) -> bytes:
        schema = f'{{"type":"object","description":"{"é" * (characters - around)}"}}'
        wanted = f'{{"type":"json_schema","json_schema":{{"schema":{schema}}}}}'
        return f'{{"model":"m","prompt":"x","response_format":{wanted}}}'.encode()

    told = guide(read(CompletionBody, asked(LENGTHS["schema"])))
    assert told is not None and len(told.text) == LENGTHS["schema"] < len(told.text.encode())
    with pytest.raises(ApiError, match=f"may have 65536 characters, and has {LENGTHS['schema'] + 1}"):
        read(CompletionBody, asked(LENGTHS["schema"] + 1))


def test_a_schema_is_handed_on() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    told = sampling_of(body, 16, None, guide(body)).schema
    assert told is not None and json.loads(told) == schema
    assert guide(chat(response_format={"type": "text"})) is None
    assert guide(chat(response_format={"type": "json_object"})) == Guide("schema", '{"type":"object"}')


@pytest.mark.parametrize("name", ["structured_outputs", "guided"])
def test_what_a_text_follows_is_asked_by_vllms_names_too(name: str) -> None:
    def asked(kind: str, value: Any) -> Guide | None:
        fields = {name: {kind: value}} if name == "structured_outputs" else {f"guided_{kind}": value}
        return guide(completion(**fields))

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for given in (schema, json.dumps(schema)):
        told = asked("json", given)
        assert told is not None and told.kind == "schema" and json.loads(told.text) == schema
    assert asked("regex", "a+") == Guide("regex", "a+")
    assert asked("grammar", 'start: "a"') == Guide("grammar", 'start: "a"')
    assert asked("choice", ['say "a"', "b"]) == Guide("grammar", 'start: "say \\"a\\"" | "b"')


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_choice": ["a"] * 70_000}, "guided_choice"),
        ({"guided_json": 7}, "guided_json"),
    ],
)
def test_what_a_text_cannot_follow_is_said_by_name(fields: dict[str, Any], name: str) -> None:
    for kind in (completion, chat):
        with pytest.raises(ApiError) as error:
            kind(**fields)
        assert error.value.status == 400 and param(error.value) == name


def test_only_what_may_pass_is_asked_for_again() -> None:
    assert ApiError(500, "an adapter is damaged").response().headers["x-should-retry"] == "false"
    assert "x-should-retry" not in ApiError(503, "the server is ending").response().headers


@pytest.mark.parametrize(
    "given",
    [
        Guide("regex", "a" + "{999999999999}" * 60_000),
        Guide("schema", json.dumps([{"multipleOf": 10**300 + number} for number in range(5000)])),
    ],
    ids=["repetitions", "remainders"],
)
def test_numbers_of_a_guide_are_multiplied_up_to_what_there_may_be(given: Guide) -> None:
    began = time.process_time()
    with pytest.raises(Unfit):
        check_guide(given)
    assert time.process_time() - began < 1
