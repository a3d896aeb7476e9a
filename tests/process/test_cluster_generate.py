"""`/generate` of text-generation-inference and LoRAX at a cluster's address: as one server answers it."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import symbiosis
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.serving import Engine
from tests.cluster import Front, front_of
from tests.secret_files import write_secret
from tests.serving_api import Api, http_process, web

PROMPT = "def average(numbers):"
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


def asked(url: str, path: str, **parameters: Any) -> Any:
    return web.post(url + path, json={"inputs": PROMPT, "parameters": parameters}, timeout=60)


@pytest.mark.parametrize(
    "parameters",
    [
        {"max_new_tokens": 8},
        {"max_new_tokens": 8, "adapter_id": "python"},
        {"max_new_tokens": 8, "adapter_id": "demo", "do_sample": True, "seed": 3},
        {"max_new_tokens": 8, "adapter_id": "nobody"},
        {"max_new_tokens": 8, "watermark": True},
        {"max_new_tokens": 100_000},
    ],
)
@pytest.mark.parametrize("path", ["/generate", "/"])
def test_a_cluster_answers_as_a_server(
    running: Front, servers: list[Api], path: str, parameters: dict[str, Any]
) -> None:
    ours, alone = (asked(url, path, **parameters) for url in (running.url, servers[0].url))
    assert (ours.status_code, ours.json()) == (alone.status_code, alone.json())
    assert ours.headers.get("x-total-tokens") == alone.headers.get("x-total-tokens")


def test_a_stream_is_handed_on(running: Front) -> None:
    expected = asked(running.url, "/generate", max_new_tokens=8, adapter_id="python").json()["generated_text"]
    body = {"inputs": PROMPT, "parameters": {"adapter_id": "python", "max_new_tokens": 8}}
    for path, more in (("/generate_stream", {}), ("/", {"stream": True})):
        with web.stream("POST", running.url + path, json={**body, **more}, timeout=60) as answer:
            events = [json.loads(line.removeprefix("data:")) for line in answer.iter_lines() if line]
        assert len(events) == 8 and events[-1]["generated_text"] == expected


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_a_key_pays_for_the_tokens_of_a_text(servers: list[Api], tmp_path: Path, path: str) -> None:
    write_secret(tmp_path / "keys", "alice alice-key-1 tokens_per_s=1\n")
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 40, "details": True}}
    with front_of(tmp_path, {"demo-server-1": servers[0].url}, str(tmp_path / "keys")) as front:
        first, second = (web.post(front.url + path, json=body, headers=ALICE, timeout=60) for _ in "ab")
    assert (first.status_code, second.status_code) == (200, 429)
    told = first.json() if path == "/generate" else json.loads(first.text.strip().rpartition("data:")[2])
    wait_s = told["details"]["prompt_tokens"] + told["details"]["generated_tokens"]
    assert wait_s == 61 and 0.8 * wait_s <= int(second.headers["retry-after"]) <= wait_s
