"""Vectors, scores and tokens of texts at a cluster's address: as one server tells them, with all that a key may have counted."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import symbiosis
from symbiosis.cluster.router import forward
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.serving import Engine
from tests.cluster import Front, front_of
from tests.secret_files import write_secret
from tests.serving_api import Api, http_process, web

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


def test_a_key_pays_for_the_tokens_of_texts(servers: list[Api], tmp_path: Path) -> None:
    write_secret(tmp_path / "keys", KEYS)
    with front_of(tmp_path, {"demo-server-1": servers[0].url}, str(tmp_path / "keys")) as front:
        fields = {"input": TEXTS * 20}
        first, second = (web.post(f"{front.url}/v1/embeddings", json=fields, headers=ALICE, timeout=60) for _ in "ab")
    assert (first.status_code, second.status_code) == (200, 429)
    wait_s = first.json()["usage"]["total_tokens"]
    assert 0.8 * wait_s <= int(second.headers["retry-after"]) <= wait_s
