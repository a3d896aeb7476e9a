"""`/generate` of text-generation-inference and LoRAX: the completions are those of OpenAI's API, in other words."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import InferenceClient

from tests.serving_api import Api, demo_api, web

PROMPT = "def average(numbers):"


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with demo_api() as api:
        yield api


def asked(api: Api, path: str = "/generate", **parameters: Any) -> Any:
    return web.post(api.url + path, json={"inputs": PROMPT, "parameters": parameters}, timeout=60)


def completed(api: Api, **fields: Any) -> Any:
    return api.client.completions.create(
        **{"model": "demo", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields}
    )


def test_a_text_by_an_adapter(api: Api) -> None:
    for adapter in (None, "python"):
        expected = completed(api, model=adapter or "demo", logprobs=0).choices[0]
        plain = asked(api, adapter_id=adapter, max_new_tokens=12).json()
        assert plain == {"generated_text": expected.text}
        told = asked(api, adapter_id=adapter, adapter_source="local", max_new_tokens=12, details=True).json()
        details = told["details"]
        assert told["generated_text"] == expected.text == "".join(each["text"] for each in details["tokens"])
        assert [each["logprob"] for each in details["tokens"]] == pytest.approx(
            expected.logprobs.token_logprobs, rel=1e-3
        )
        assert (details["finish_reason"], details["generated_tokens"], details["prompt_tokens"]) == ("length", 12, 21)
        assert details["prefill"] == [] and details["seed"] is None


def test_a_stream_tells_each_token(api: Api) -> None:
    expected = completed(api, model="python").choices[0].text
    body = {"inputs": PROMPT, "parameters": {"adapter_id": "python", "max_new_tokens": 12}}
    for path, more in (("/generate_stream", {}), ("/", {"stream": True})):
        with web.stream("POST", api.url + path, json={**body, **more}, timeout=60) as answer:
            events = [json.loads(line.removeprefix("data:")) for line in answer.iter_lines() if line]
        assert "".join(each["token"]["text"] for each in events) == expected and len(events) == 12
        assert all(each["generated_text"] is None for each in events[:-1])
        assert events[-1]["generated_text"] == expected and events[-1]["details"]["finish_reason"] == "length"


def test_what_is_drawn_has_its_seed(api: Api) -> None:
    drawn = asked(api, max_new_tokens=8, do_sample=True, seed=7, details=True).json()
    assert drawn["details"]["seed"] == 7
    assert drawn["generated_text"] == completed(api, max_tokens=8, temperature=1, seed=7).choices[0].text
    cold = asked(api, max_new_tokens=8, temperature=0.5, top_k=4, seed=7).json()["generated_text"]
    expected = completed(api, max_tokens=8, temperature=0.5, seed=7, extra_body={"top_k": 4})
    assert cold == expected.choices[0].text


def test_stops_prompts_and_alternatives(api: Api) -> None:
    whole = completed(api, max_tokens=30).choices[0].text
    stop = whole[5:8]
    stopped = asked(api, max_new_tokens=30, stop=[stop], details=True, return_full_text=True).json()
    assert stopped["generated_text"] == PROMPT + whole[: whole.index(stop) + 3]
    assert stopped["details"]["finish_reason"] == "stop_sequence"
    short = asked(api, max_new_tokens=4, truncate=6, decoder_input_details=True, top_n_tokens=2).json()["details"]
    assert [each["text"] for each in short["prefill"]] == list(PROMPT[-6:]) and short["prefill"][0]["logprob"] is None
    assert all(len(each["alternative_tokens"]) == 2 for each in short["tokens"])
    chat = asked(api, max_new_tokens=4, apply_chat_template=True).json()["generated_text"]
    messages: Any = [{"role": "user", "content": PROMPT}]
    answer = api.client.chat.completions.create(model="demo", messages=messages, max_tokens=4, temperature=0)
    assert chat == answer.choices[0].message.content


def test_text_by_a_schema_or_an_expression(api: Api) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    told = asked(api, max_new_tokens=40, response_format={"type": "json_object", "schema": schema}).json()
    assert isinstance(json.loads(told["generated_text"])["a"], bool)
    assert asked(api, max_new_tokens=9, grammar={"type": "regex", "value": "x{3}y"}).json() == {
        "generated_text": "xxxy"
    }


def test_the_hubs_client_runs(api: Api) -> None:
    client = InferenceClient(model=api.url)
    expected = completed(api).choices[0].text
    assert client.text_generation(PROMPT, max_new_tokens=12) == expected
    assert "".join(client.text_generation(PROMPT, max_new_tokens=12, stream=True)) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"watermark": True}, "watermark"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"merged_adapters": {"ids": ["a"]}}, "merged_adapters"),
        ({"adapter_source": "s3"}, "adapter_source"),
        ({"speed": 1}, "parameters.speed"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 100_000}, "max_new_tokens"),
        ({"inputs": "word " * 5000}, "parameters.inputs"),
        ({"top_n_tokens": 21}, "top_n_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"grammar": {"type": "regex", "value": 3}}, "grammar"),
        ({"grammar": {"type": "json"}}, "value"),
        ({"stop": ["x"] * 17}, "stop"),
    ],
)
def test_what_is_not_there_is_refused_by_name(api: Api, fields: dict[str, Any], param: str) -> None:
    answer = asked(api, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    if "adapter" not in param:
        assert asked(api, path="/generate_stream", **fields).status_code == 400


def test_an_adapter_that_is_not_there(api: Api) -> None:
    assert asked(api, adapter_id="nobody").status_code == 404
