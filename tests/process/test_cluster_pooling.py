"""Vectors, scores and tokens of texts at a cluster's address: as one server tells them, with all that a key may have counted."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import symbiosis
from symbiosis.cluster.router import forward
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.serving import Engine
from tests.cluster import Front, front_of
from tests.secret_files import write_secret
from tests.serving_api import Api, eventually, http_process, web

TEXTS = ["def average(numbers):", "Once upon a time", "a cat"]
KEYS = "alice alice-key-1 tokens_per_s=1\n"
ALICE = {"Authorization": "Bearer alice-key-1"}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Api]]:
    with symbiosis.Executor("demo") as executor, ExitStack() as stack:
        yield [_server(executor, stack, f"demo-server-{n}") for n in (1, 2)]


def _server(executor: symbiosis.Executor, stack: ExitStack, name: str) -> Api:
    engine = Engine(executor.endpoint, DEMO_MODEL, adapters=DEMO_MODEL / "adapters", memory=1 << 25)
    return stack.enter_context(http_process(stack.enter_context(engine), server=name))


@pytest.fixture(scope="module")
def running(servers: list[Api], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    urls = {f"demo-server-{n}": each.url for n, each in enumerate(servers, 1)}
    with front_of(tmp_path_factory.mktemp("runtime"), urls) as running:
        yield running


def told(url: str, path: str, **fields: Any) -> tuple[int, Any]:
    """The status and the answer, without what differs between two that are the same. Numbers depend in their last bits on what shares a step."""
    answer = web.post(url + path, json=fields, timeout=60)
    return answer.status_code, alike(answer.json())


def alike(answer: Any) -> Any:
    if isinstance(answer, dict):
        return {name: alike(value) for name, value in answer.items() if name not in ("id", "created", "cached_tokens")}
    if isinstance(answer, list):
        return [alike(each) for each in answer]
    return pytest.approx(answer, abs=1e-5) if isinstance(answer, float) else answer


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"model": "python", "input": TEXTS}),
        ("/v1/embeddings", {"input": [5, 6, 7]}),
        ("/score", {"model": "demo", "queries": TEXTS[0], "documents": TEXTS}),
        ("/v1/score", {"text_1": TEXTS, "text_2": TEXTS}),
        ("/v2/rerank", {"model": "python", "query": TEXTS[0], "documents": TEXTS, "top_n": 2}),
        ("/tokenize", {"model": "demo", "prompt": TEXTS[0]}),
        ("/detokenize", {"tokens": [5, 6, 7]}),
        ("/classify", {"model": "demo", "input": TEXTS[0]}),
        ("/v1/embeddings", {}),
    ],
)
def test_a_cluster_answers_as_a_server(running: Front, servers: list[Api], path: str, fields: dict[str, Any]) -> None:
    assert told(running.url, path, **fields) == told(servers[0].url, path, **fields)


def test_a_long_answer_is_handed_on_in_pieces(
    running: Front, servers: list[Api], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "WHOLE", 1 << 10)
    fields = {"model": "demo", "input": [f"text {number}" for number in range(60)]}
    assert told(running.url, "/v1/embeddings", **fields) == told(servers[0].url, "/v1/embeddings", **fields)


LETTERS = "".join(
    chr(97 + n * n % 26) for n in range(450)
)  # a token each, which is not what a front end guesses of a text
COMPLETION = {"model": "demo", "prompt": LETTERS, "ignore_eos": True}
PART = COMPLETION | {"prompt": LETTERS[:150]}


@pytest.fixture(scope="module")
def counting(servers: list[Api], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("counting")
    write_secret(folder / "keys", "alice alice-key-1 tokens_per_day=1000000\n")
    with front_of(folder, {"demo-server-1": servers[0].url}, str(folder / "keys")) as front:
        yield front


def today(front: Front) -> int:
    """How many tokens the key has had, with those reserved."""
    figure = 'symbiosis_cluster_tenant_tokens_today{tenant="alice"} '
    return int(float(web.get(f"{front.url}/metrics").text.partition(figure)[2].partition("\n")[0] or 0))


@pytest.mark.parametrize(
    ("path", "fields", "tokens"),
    [
        ("/v1/completions", COMPLETION | {"max_tokens": 8}, 458),
        ("/v1/completions", COMPLETION | {"max_tokens": 8, "n": 2}, 466),
        ("/v1/completions", COMPLETION | {"max_tokens": 20, "stream": True}, 470),
        ("/v1/completions", COMPLETION | {"max_tokens": 0, "echo": True}, 450),
        ("/v1/completions", COMPLETION | {"max_tokens": 8, "prompt_logprobs": 1}, 458),
        ("/v1/completions", COMPLETION | {"max_tokens": 8, "truncate_prompt_tokens": 3}, 11),
        ("/v1/completions", COMPLETION | {"max_tokens": 8, "top_p": 7}, 0),
        ("/v1/responses", {"input": LETTERS, "max_output_tokens": 16}, None),
        ("/v1/responses", {"input": LETTERS, "max_output_tokens": 16, "stream": True}, None),
        ("/generate", {"inputs": LETTERS, "parameters": {"max_new_tokens": 9}}, 459),
        ("/generate_stream", {"inputs": LETTERS, "parameters": {"max_new_tokens": 9}}, 459),
        ("/v1/embeddings", {"input": [LETTERS] * 3}, 1350),
    ],
)
def test_a_front_end_counts_as_its_server(
    counting: Front, path: str, fields: dict[str, Any], tokens: int | None
) -> None:
    before = today(counting)
    forged = {"X-Symbiosis-Tokens": "1"}
    answer = web.post(counting.url + path, json=fields, headers=ALICE | forged, timeout=60)
    assert answer.status_code == (400 if tokens == 0 else 200), answer.text
    assert "x-symbiosis-tokens" not in answer.headers and ": total_tokens" not in answer.text
    if tokens is None:
        tokens = int(answer.text.rpartition('"total_tokens":')[2].partition("}")[0])
        assert tokens > len(LETTERS)
    eventually(lambda: today(counting) - before == tokens)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", PART | {"max_tokens": 350}),
        ("/v1/completions", PART | {"max_tokens": 350, "stream": True}),
        ("/v1/completions", PART | {"max_tokens": 350, "prompt_logprobs": 1}),
        ("/v1/responses", {"input": LETTERS[:150], "max_output_tokens": 350}),
        ("/v1/responses", {"input": LETTERS[:150], "max_output_tokens": 350, "stream": True}),
        ("/generate", {"inputs": LETTERS[:150], "parameters": {"max_new_tokens": 350}}),
        ("/generate_stream", {"inputs": LETTERS[:150], "parameters": {"max_new_tokens": 350}}),
    ],
)
def test_who_hangs_up_pays_for_the_prompt_and_what_was_made(counting: Front, path: str, fields: dict[str, Any]) -> None:
    """The prompt as soon as a server has it, whatever a front end has taken it for; and never all that was asked for."""
    before = today(counting)
    with socket.create_connection(("127.0.0.1", urlsplit(counting.url).port or 0)) as client:
        body = json.dumps(fields).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {ALICE['Authorization']}\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        eventually(lambda: today(counting) - before == 500)  # reserved
        got = b""
        while "stream" in str((path, fields)) and got.count(b"data:") < 8:
            assert (more := client.recv(1 << 16))
            got += more
    eventually(lambda: today(counting) - before < 500)
    assert today(counting) - before >= 150 + bool(got)


def test_a_key_pays_for_the_tokens_of_texts(servers: list[Api], tmp_path: Path) -> None:
    write_secret(tmp_path / "keys", KEYS)
    with front_of(tmp_path, {"demo-server-1": servers[0].url}, str(tmp_path / "keys")) as front:
        fields = {"input": TEXTS * 20}
        first, second = (web.post(f"{front.url}/v1/embeddings", json=fields, headers=ALICE, timeout=60) for _ in "ab")
    assert (first.status_code, second.status_code) == (200, 429)
    wait_s = first.json()["usage"]["total_tokens"]
    assert 0.8 * wait_s <= int(second.headers["retry-after"]) <= wait_s
