"""What a front end reads of a body, and what it makes of a server's events, without a server."""

import asyncio
import json
import time
import tracemalloc
from typing import Any

import pytest
from starlette.types import Message

from symbiosis.base.fair_share import FairShare, Lease
from symbiosis.base.key_lines import KeyLine
from symbiosis.cluster.placement import RoutingRequest
from symbiosis.cluster.router import server_registry
from symbiosis.cluster.router.completion_fields import MOST_PROMPTS, CompletionFields, _Fields
from symbiosis.cluster.router.pooling_requests import PoolingFields
from symbiosis.cluster.router.relay import Relay
from symbiosis.cluster.router.server_registry import ServerRegistry
from symbiosis.protocol.cluster_state import Member
from symbiosis.server.api_errors import ApiError
from symbiosis.server.api_keys import Tenant
from symbiosis.server.sse import SseWriter


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("one", 1),
        ([1, 2, 3], 1),
        ([], 1),
        (["a", 'b", "c', "\\", '\\"[[', "é\\\\"], 5),
        ([[1], [2, 3], []], 3),
        (["a", [1], "b"], 3),
        ([" [1,2] ", "[[["], 2),
    ],
)
def test_prompts_are_counted_as_a_server_would(prompt: Any, count: int) -> None:
    for indent, ascii in ((None, True), (2, False)):
        asked = CompletionFields(json.dumps({"prompt": prompt, "n": 3}, indent=indent, ensure_ascii=ascii).encode())
        assert asked.sequences == 3 * count


@pytest.mark.parametrize("prompt", [["a"] * (MOST_PROMPTS + 1), [[1]] * (MOST_PROMPTS + 1)])
def test_too_many_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(ApiError, match="at most 4096 texts.* in prompt"):
        CompletionFields(json.dumps({"prompt": prompt}).encode())


def test_a_continuation_of_very_many_lists_is_refused_before_they_are_made() -> None:
    before = {"id": "x", "created": 1, "tokens": [[]] * 100_000}
    with pytest.raises(ApiError, match="continuation holds too much"):
        CompletionFields(json.dumps({"prompt": "a", "stream": True, "seed": 1, "continuation": before}).encode())


def relay_of(asked: CompletionFields) -> Relay:
    held, admission = Lease(FairShare(1 << 20), ""), Tenant(KeyLine()).admit(1, 0.0)
    return Relay(ServerRegistry("none", {}), "/", {}, asked, RoutingRequest(model="m"), held, admission)


@pytest.mark.parametrize("name", [name for name in _Fields.__struct_fields__ if name != "model"])
@pytest.mark.parametrize("is_chat", [False, True])
def test_null_is_as_absent(name: str, is_chat: bool) -> None:
    with_null, without = (
        vars(CompletionFields(json.dumps(body).encode(), is_chat))
        for body in ({"model": "m", name: None}, {"model": "m"})
    )
    assert {**with_null, "_data": b"", "size": 0} == {**without, "_data": b"", "size": 0}


def test_nothing_is_made_for_choices_before_a_server_has_let_them_in() -> None:
    asked = CompletionFields(json.dumps({"prompt": ["a"] * MOST_PROMPTS, "n": 128}).encode())
    tracemalloc.start()
    try:
        relay = relay_of(asked)
        assert asked.sequences == 128 * MOST_PROMPTS and tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert relay is not None


def test_the_length_that_counts_is_the_one_that_a_server_takes() -> None:
    body = b'{"max_tokens": 0, "max_completion_tokens": 9, "n": 2}'
    assert CompletionFields(body).most_tokens == 0 and CompletionFields(body, is_chat=True).most_tokens == 18
    assert CompletionFields(b"{}").most_tokens == 16


def test_what_is_added_replaces_what_was_there() -> None:
    body = CompletionFields(b' {"model": "a", "seed": null, "prompt": "x"} \n').body(model="b", seed=1)
    assert json.loads(body) == {"model": "b", "seed": 1, "prompt": "x"}
    assert (
        json.loads(CompletionFields(b"{ }").body(seed=1)) == {"seed": 1}
        and json.loads(CompletionFields(b"{}").body()) == {}
    )


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"[" * 10_000, "not a JSON object"),
        (b'{"a":' + b"[" * 10_000, "not JSON"),
        (b'{"model": "\xff"}', "not JSON"),
        (b'{"n": "2"}', "n`"),
        (b'{"n": 0}', "n must be at least 1"),
        (b'{"n": 129}', "n must be at most 128"),
        (b'{"max_tokens": -1}', "max_tokens must be"),
        (b'{"max_completion_tokens": 9999999999}', "max_completion_tokens must be"),
        (b'{"seed": 99999999999999999999}', "seed must be"),
        (b'{"continuation": {"nothing": 1}}', "nothing"),
        (b'{"continuation": {"id": "' + b"x" * (1 << 20) + b'"}}', "at most"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, told: str) -> None:
    with pytest.raises(ApiError, match=told) as raised:
        CompletionFields(data)
    assert raised.value.status == 400


EVENT = b'data: {"model":"m","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}'
ERROR = b'{"error":{"message":"no"}}'


@pytest.mark.parametrize(
    ("asked", "status", "body"),
    [
        (b'{"stream":true}', 200, EVENT + b"\n\ndata: " + ERROR + b"\n\ndata: [DONE]\n\n"),
        (b"{}", 500, ERROR),
    ],
    ids=["stream", "whole"],
)
def test_an_error_in_the_middle_ends_the_answer(asked: bytes, status: int, body: bytes) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def answer() -> None:
        outlet, relay = SseWriter(send, {}), relay_of(CompletionFields(asked))
        await relay._give(outlet, [EVENT])
        await relay._failed(outlet, 500, [], ERROR)

    asyncio.run(answer())
    assert sent[0]["status"] == status and b"".join(each["body"] for each in sent[1:]) == body
    assert not sent[-1]["more_body"]


@pytest.mark.parametrize("by_whom", ["the front end", "the server"])
def test_a_front_end_that_was_late_itself_takes_no_server_for_lost(
    by_whom: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... after one question, however late it was; one that gives no answer again and again is lost."""
    asked = list[str]()

    async def silence(url: str, path: str) -> Any:
        asked.append(url)
        if by_whom == "the front end":
            time.sleep(10 * server_registry.LOST_S)  # as if it had computed something
        raise TimeoutError

    for name, seconds in (("ASK_EVERY_S", 0.001), ("ANSWER_S", 0.004), ("LOST_S", 0.02)):
        monkeypatch.setattr(server_registry, name, seconds)
    monkeypatch.setattr(server_registry, "answer_of", silence)
    seen = server_registry.Seen(Member(name="m-server-1", kind="server", model="m", number=1, state="ready"))

    async def watched() -> None:
        watch = asyncio.create_task(server_registry.ServerRegistry("none", {})._ask(seen))
        while len(asked) < (3 if by_whom == "the front end" else 40):
            await asyncio.sleep(0)
        watch.cancel()

    asyncio.run(watched())
    assert seen.is_lost == (by_whom == "the server")


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"input": "one"}, 1),
        ({"input": [[1, 2], [3]], "messages": None}, 2),
        ({"messages": [{"role": "user", "content": "a"}] * 3}, 1),
        ({"query": "a", "documents": ["b", "c", "d"]}, 4),
        ({"text_1": ["a", "b"], "text_2": ["c", "d"]}, 4),
        ({}, 0),
    ],
)
def test_texts_are_counted_as_a_server_would(fields: dict[str, Any], texts: int) -> None:
    asked = PoolingFields(json.dumps(fields).encode())
    assert (asked.model, asked.texts) == (None, texts)
    wish = asked.wish("m", None, "eve", 3)
    assert (wish.sequences, wish.is_vain) == (texts, texts > 3)


def test_too_many_texts_are_refused_by_the_name_of_their_field() -> None:
    with pytest.raises(ApiError, match="at most 4096 texts: send fewer at once in ") as error:
        PoolingFields(json.dumps({"documents": ["a"] * (MOST_PROMPTS + 1)}).encode())
    assert error.value.body["error"]["param"] == "documents"
