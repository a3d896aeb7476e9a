"""A stream that breaks off anywhere goes on at another server: the text, the draws and all else are those of a stream that was not disturbed."""

import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.serving_api import Api, demo_api, eventually, web

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 9}}, "required": ["a", "b"]}  # fmt: skip
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.3, "top_p": 0.9, "seed": 7},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "seed": 3},
    "adapter": {"model": "shout", "temperature": 0.7, "seed": 1},
    "several": {"prompt": ["def a(", "class B"], "n": 2, "temperature": 1.0, "seed": 5, "stream_options": {"include_usage": True}},
    "stop": {"stop": ["\n\n", "return"], "temperature": 0, "max_tokens": 60, "stream_options": {"include_usage": True}},
    "log probabilities": {"logprobs": 2, "echo": True, "temperature": 0},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "name": "x"}}, "seed": 2, "max_tokens": 60},
    "bytes that are no characters": {"temperature": 60.0, "seed": 11},
}  # fmt: skip
MORE = ("drawn", "penalties", "greedy")  # which others include


class Event(NamedTuple):
    """One event of a stream, and the comment before it."""

    comment: str
    data: dict[str, Any]


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with demo_api() as api:
        yield api


def events(api: Api, path: str, body: dict[str, Any], most: int | None = None) -> list[Event]:
    """The events of a stream, at most so many, after which the reader hangs up."""
    found: list[Event] = []
    comment = ""
    with web.stream("POST", f"{api.url}/v1/{path}", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith(":"):
                comment = line
            elif line.startswith("data: ") and line != "data: [DONE]":
                found.append(Event(comment, json.loads(line[6:])))
                comment = ""
                if most is not None and len(found) == most:
                    break
    return found


def continued(body: dict[str, Any], told: list[Event], choices: int) -> dict[str, Any]:
    """The request for what has not come."""
    tokens: list[list[int]] = [[] for _ in range(choices)]
    ended = []
    for event in told:
        if event.comment:
            _, choice, *words = event.comment.split()
            tokens[int(choice)] += [int(word) for word in words if word != "."]
            ended += [int(choice)] if words[-1] == "." else []
    head = {
        "id": "mine-1",
        "created": 12345,
        "tokens": tokens,
        "ended": ended,
        "opened": sum(not event.comment for event in told),
    }
    return {**body, "continuation": head}


def text_of(told: list[Event]) -> dict[int, Any]:
    """All that clients read, by choice."""
    found: dict[int, Any] = {}
    for event in told:
        for choice in event.data["choices"]:
            mine = found.setdefault(choice["index"], {"text": "", "logprobs": [], "finish": None, "roles": 0})
            delta = choice.get("delta", {"content": choice.get("text")})
            mine["text"] += delta.get("content") or ""
            mine["roles"] += "role" in delta
            mine["logprobs"] += list((choice["logprobs"] or {}).get("text_offset", ()))
            assert mine["finish"] is None or not choice["finish_reason"], "it ends once"
            mine["finish"] = mine["finish"] or choice["finish_reason"]
    return found


def check(api: Api, path: str, body: dict[str, Any], choices: int, *, everywhere: bool = False) -> None:
    """Break it off after its first event, within and at the end; or also before and near all of these."""
    start = {"seed": 0, **body, "stream": True}
    whole = events(api, path, continued(start, [], choices))
    wanted = text_of(whole)
    assert len(wanted) == choices and all(mine["finish"] for mine in wanted.values())
    assert {event.data["id"] for event in whole} == {"mine-1"} and whole[0].data["created"] == 12345
    cuts = {1, len(whole) // 2, len(whole)}
    for cut in cuts | {0, 2, len(whole) - 1} if everywhere else cuts:
        begun = events(api, path, continued(start, [], choices), cut)
        eventually(lambda: not api.running)
        rest = events(api, path, continued(start, begun, choices))
        assert text_of([*begun, *rest]) == wanted, f"after {cut} of {len(whole)} events"
        if "stream_options" in body and cut < len(whole):
            assert rest[-1].data["usage"]["completion_tokens"] == whole[-1].data["usage"]["completion_tokens"]


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in MORE else ()) for name in REQUESTS]
)
def test_a_completion_goes_on(api: Api, name: str, everywhere: bool) -> None:
    if name == "schema":
        pytest.importorskip("llguidance")
    body = {"model": "demo", "prompt": "def average(numbers):", "max_tokens": 24, **REQUESTS[name]}
    check(api, "completions", body, 4 if name == "several" else 1, everywhere=everywhere)


def test_a_chat_goes_on_and_begins_once(api: Api) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "def"}], "max_tokens": 20, "n": 2, "seed": 4}
    check(api, "chat/completions", body, 2)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"stream": False}, "stream=true and a seed"),
        ({"continuation": {"id": "x", "created": 1, "tokens": [[1], [2]]}}, "a list of tokens for each choice"),
        ({"continuation": {"id": "x", "created": 1, "tokens": [[999999]]}}, "continuation has the token 999999"),
        ({"continuation": {"id": "x", "created": 1, "tokens": [[1] * 8]}}, "continuation has 8 tokens of a completion"),
        ({"continuation": {"id": "x", "created": 1, "nothing": 2}}, "nothing"),
    ],
)
def test_what_cannot_go_on_is_refused(api: Api, change: dict[str, Any], told: str) -> None:
    body = {"model": "demo", "prompt": "a", "max_tokens": 8, "seed": 1, "stream": True}
    body |= {"continuation": {"id": "x", "created": int(time.time())}, **change}
    answer = web.post(f"{api.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400 and told in answer.json()["error"]["message"], answer.text


def test_a_later_completion_goes_on_when_an_earlier_one_has_ended(api: Api) -> None:
    body = {"model": "demo", "prompt": "a", "max_tokens": 8, "n": 2, "seed": 1, "stream": True, "ignore_eos": True}
    before = {"id": "x", "created": 1, "tokens": [[97] * 8, [97] * 3], "ended": [0]}
    told = events(api, "completions", {**body, "continuation": before})
    assert [choice["index"] for event in told for choice in event.data["choices"]][-1] == 1
    assert told[-1].data["choices"][0]["finish_reason"] == "length"
