"""An ordinary key asks for far more than it may: it is refused before anybody works for it, and its place is free again."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import symbiosis
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.serving import Engine
from tests.secret_files import write_secret
from tests.serving_api import Api, eventually, http_process, web

SHORT: dict[str, Any] = {"model": "demo", "prompt": "a", "max_tokens": 2}
STREAM: dict[str, Any] = {**SHORT, "stream": True, "seed": 1}
SOON_S = 5.0  # what is refused at once takes milliseconds, and what is not took 8 to 80 s


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    write_secret(
        keys,
        "one key-of-one requests=1\nslow key-of-slow tokens_per_s=50\nanna key-of-anna tokens_per_s=1000\nbob key-of-bob\n"
        "debtor key-of-debtor tokens_per_s=1\ndaily key-of-daily tokens_per_day=100\n",
    )
    with (
        symbiosis.Executor("demo") as executor,
        Engine(executor.endpoint, DEMO_MODEL, memory=1 << 25) as engine,
        http_process(engine, api_keys=str(keys)) as api,
    ):
        yield api


def post(api: Api, body: dict[str, Any], key: str = "one", path: str = "completions") -> httpx.Response:
    headers = {"authorization": f"Bearer key-of-{key}"}
    return web.post(f"{api.url}/v1/{path}", json=body, headers=headers, timeout=60)


def continued(**fields: Any) -> dict[str, Any]:
    return {**STREAM, "continuation": {"id": "x", "created": 1, **fields}}


REFUSED: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "echoes beyond what the key may have": ({**SHORT, "prompt": [[97] * 300] * 2000, "echo": True, "n": 2}, 400, "n"),
    "more completions than anybody has": ({**SHORT, "prompt": ["a"] * 100, "n": 128}, 400, "n"),
    "more prompts than the key may have": ({**SHORT, "prompt": ["a"] * 100}, 400, "prompt"),
    "a continuation of very many tokens": (continued(tokens=[[97] * 500_000]), 400, "continuation"),
    "a continuation of no tokens of the model": (continued(tokens=[[2**70]]), 400, "continuation"),
    "a continuation whose time is no time": (continued(created=2**70), 400, "continuation"),
    "a continuation of choices that are not there": (continued(ended=[5]), 400, "continuation"),
    "a continuation with a long name": (continued(id="x" * 100_000), 400, "continuation"),
    "more tokens than fit": ({**SHORT, "max_tokens": 10**6}, 400, "max_tokens"),
    "a long text": ({**SHORT, "prompt": "ab c" * 1_000_000}, 400, "prompt"),
    "a long prompt": ({**SHORT, "prompt": [97] * 1_000_000}, 400, "prompt"),
    "a schema of very many names": (
        {**SHORT, "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": list(map(str, range(100_000)))}}}},
        400,
        "response_format",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_too_much_is_refused_at_once_and_the_place_is_free_again(api: Api, what: str) -> None:
    body, status, param = REFUSED[what]
    began = time.monotonic()
    answer = post(api, body)
    took = time.monotonic() - began
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert took < SOON_S
    assert post(api, SHORT).status_code == 200


def test_a_chat_of_very_many_messages_is_refused_at_once(api: Api) -> None:
    messages = [{"role": "user", "content": ""}] * 100_000
    answer = post(api, {"model": "demo", "messages": messages}, path="chat/completions")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("value", [b"[]", b'""', b"1", rb'"\\""', b'{"[":{}}'])
def test_a_body_of_very_many_values_is_refused_before_they_are_made(api: Api, value: bytes) -> None:
    """... which would take a second and more, in which nobody else is answered."""
    values = b",".join([value] * (15_000_000 // (len(value) + 1)))
    body = b'{"model":"demo","messages":[{"role":"user","content":"a","x":[' + values + b"]}]}"
    headers = {"authorization": "Bearer key-of-one"}
    answer = web.post(f"{api.url}/v1/chat/completions", content=body, headers=headers, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(("messages holds too much", "the body is not JSON"))


def test_a_key_that_owes_tokens_sends_no_body(api: Api) -> None:
    assert post(api, {**SHORT, "prompt": [97] * 300}, key="debtor").status_code == 200
    answer = post(api, {"model": 1}, key="debtor")
    assert answer.status_code == 429, answer.text


def test_a_key_gets_no_more_once_it_has_had_its_tokens_of_the_day(api: Api) -> None:
    """What it did not use of what it reserved is given back; it is told and counted. Of what is refused nothing was computed, and it costs nothing."""
    long = {**SHORT, "prompt": [97] * 90}
    for wrong, status in (({"model": "nobody"}, 404), ({"structured_outputs": {"regex": "("}}, 400)):
        assert post(api, {**long, **wrong}, key="daily").status_code == status
    for length in (40, 40, 40):  # 42 each, of which most fit into 100
        answer = post(api, {**SHORT, "prompt": [97] * length, "ignore_eos": True}, key="daily")
        assert answer.status_code == 200, answer.text
    answer = post(api, SHORT, key="daily")
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) <= 24 * 60 * 60
    told = "this key may have 100 tokens a day, and has had 126 since midnight UTC"
    assert answer.json()["error"]["message"] == told
    figures = web.get(f"{api.url}/metrics", timeout=60).text
    assert 'symbiosis_serve_tenant_tokens_today{tenant="daily"} 126.0' in figures
    assert 'symbiosis_serve_tenant_tokens_per_day{tenant="daily"} 100.0' in figures
    assert 'refused_requests_total{reason="daily_tokens_of_key",status="429",tenant="daily"} 1.0' in figures
    assert post(api, SHORT, key="bob").status_code == 200


def test_a_key_gets_the_tokens_that_it_may_have_however_many_ask_at_once(api: Api) -> None:
    statuses: list[int] = []
    body = {"model": "demo", "prompt": [97], "max_tokens": 100, "n": 4, "ignore_eos": True}
    threads = [threading.Thread(target=lambda: statuses.append(post(api, body, "slow").status_code)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200] + [429] * 11


def test_what_was_reserved_and_not_used_is_given_back(api: Api) -> None:
    body = {**SHORT, "max_tokens": 400, "n": 4, "stop": ["\n", " ", "e", "a", "t", "i"]}
    assert [post(api, body, "anna").status_code for _ in range(3)] == [200] * 3


def test_an_answer_of_many_echoes_is_that_of_one(api: Api) -> None:
    body = {**SHORT, "prompt": "def average(", "echo": True, "logprobs": 3, "temperature": 0}
    (one,) = post(api, body).json()["choices"]
    many = post(api, {**body, "n": 100}, "bob")
    assert len(many.content) > 1 << 17, "it goes in pieces"
    assert [each["index"] for each in many.json()["choices"]] == list(range(100))
    for each in many.json()["choices"]:
        assert (each["text"], each["finish_reason"]) == (one["text"], one["finish_reason"])
        for name in ("tokens", "text_offset"):
            assert each["logprobs"][name] == one["logprobs"][name]
        assert each["logprobs"]["token_logprobs"][1:] == pytest.approx(one["logprobs"]["token_logprobs"][1:], abs=1e-3)
    assert one["logprobs"]["text_offset"][: len("def average(")] == list(range(len("def average(")))


def test_log_probabilities_of_many_prompts_leave_no_room_for_others_until_they_are_told(api: Api) -> None:
    body = {**SHORT, "prompt": [[97] * 400] * 850, "echo": True, "logprobs": 5, "max_tokens": 0}
    hung_up: list[bool] = []

    def begin_and_hang_up(seconds: float) -> None:
        headers = {"authorization": "Bearer key-of-bob"}
        try:
            web.post(f"{api.url}/v1/completions", json=body, headers=headers, timeout=httpx.Timeout(60, read=seconds))
        except httpx.ReadTimeout:
            hung_up.append(True)

    too_many = post(api, {**body, "prompt": body["prompt"] * 2}, "bob")
    assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "prompt")
    first = threading.Thread(target=begin_and_hang_up, args=(4.0,))
    first.start()
    eventually(lambda: api.running)
    refused = post(api, body, "bob")
    assert (refused.status_code, "log probabilities" in refused.text) == (503, True)
    told_none = {**body, "logprobs": None, "prompt": body["prompt"][:3]}
    assert post(api, told_none, "bob").status_code == 200
    assert post(api, {**SHORT, "echo": True, "logprobs": 5}, "one").status_code == 200, "another key has its own half"
    first.join()
    eventually(lambda: not api.running)
    begin_and_hang_up(1.0)
    eventually(lambda: not api.running)
    assert hung_up == [True, True], "there was room again"


def test_a_choice_is_not_computed_on_when_a_stop_string_has_ended_it(api: Api) -> None:
    """All begin alike, and one of each pair may not come to its end."""
    before = api.engine.figures().generated_tokens
    body = {
        **SHORT,
        "prompt": ["def f(", "def f("],
        "n": 8,
        "temperature": 1.5,
        "seed": 5,
        "max_tokens": 300,
        "ignore_eos": True,
    }
    told = post(api, {**body, "stop": ["e", "a"]}, "bob").json()
    finishes = [choice["finish_reason"] for choice in told["choices"]]
    assert finishes.count("stop") > 8
    eventually(lambda: not api.running)
    assert api.engine.figures().generated_tokens - before < told["usage"]["completion_tokens"] + 16 * 20


def test_a_long_prompt_whose_client_hangs_up_is_given_up(api: Api) -> None:
    prompts = [[97] * 400] * 2000
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            headers = {"authorization": "Bearer key-of-bob"}
            body = json.dumps({**SHORT, "prompt": prompts, "echo": True})
            web.post(f"{api.url}/v1/completions", content=body, headers=headers, timeout=httpx.Timeout(60, read=0.05))
    eventually(lambda: not api.running)
    assert post(api, SHORT).status_code == 200
