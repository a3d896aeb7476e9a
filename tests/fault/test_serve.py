"""What goes wrong around a server: clients that hang up, read nothing, flood or stay silent; processes that are killed."""

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import symbiosis
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.serving import Engine
from tests.serving_api import Api, Command, client, eventually, http_process

pytestmark = pytest.mark.fault

PROMPT = "def average(numbers):"
LONG: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
SHORT: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with (
        symbiosis.Executor("demo") as executor,
        Engine(executor.endpoint, DEMO_MODEL, adapters=DEMO_MODEL / "adapters", memory=1 << 25) as engine,
    ):
        yield engine


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("anna key-of-anna requests=1\nbert key-of-bert tokens_per_s=20\n")
    return file


@pytest.fixture(scope="module")
def api(engine: Engine) -> Iterator[Api]:
    with http_process(engine) as api:
        yield api


def raw(api: Api, text: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(api.url.rpartition(":")[2])), timeout=60)
    connection.sendall(text.encode())
    return connection


def posted(body: dict[str, Any]) -> str:
    data = json.dumps(body)
    return f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n{data}"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_cancels(api: Api, stream: bool) -> None:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 450, "n": 8, "ignore_eos": True, "stream": stream}
    before = api.engine.figures().generated_tokens
    with raw(api, posted(body)) as connection:
        eventually(lambda: api.running)
        if stream:
            connection.recv(1000)
    eventually(lambda: not api.running)
    assert api.engine.figures().generated_tokens - before < 8 * 450


def test_a_reader_that_reads_nothing_holds_nobody(api: Api) -> None:
    body = {
        "model": "demo",
        "prompt": PROMPT,
        "max_tokens": 400,
        "n": 16,
        "logprobs": 20,
        "stream": True,
        "ignore_eos": True,
    }
    with raw(api, posted(body)):
        eventually(lambda: api.running)
        assert api.client.completions.create(**SHORT).usage.completion_tokens == 8
        eventually(lambda: not api.running)  # it is computed, and waits to be read


def test_a_thousand_silent_connections_and_half_a_body_hold_nobody(api: Api) -> None:
    silent = [raw(api, "") for _ in range(700)]
    half = [raw(api, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{") for _ in range(300)]
    try:
        assert api.client.completions.create(**SHORT).usage.completion_tokens == 8
    finally:
        for connection in silent + half:
            connection.close()


def test_a_body_without_end_is_refused(api: Api) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(1 << 10):
            yield b" " * (1 << 16)

    with contextlib.suppress(httpx.WriteError):  # it hangs up while more is sent
        assert httpx.post(f"{api.url}/v1/completions", content=endless(), timeout=60).status_code == 413
    assert api.client.completions.create(**SHORT).usage.completion_tokens == 8


def test_a_flood_is_answered_or_refused(engine: Engine) -> None:
    with http_process(engine, max_requests=40) as api, ThreadPoolExecutor(60) as pool:

        def ask(number: int) -> int:
            try:
                return len(api.client.completions.create(**SHORT | {"seed": number}).choices)
            except openai.APIStatusError as error:
                return error.status_code

        found = list(pool.map(ask, range(200)))
        assert set(found) <= {1, 503} and found.count(1) >= 40
        assert not api.running


def test_keys_let_in_and_limit(engine: Engine, keys: Path) -> None:
    with http_process(engine, api_keys=str(keys)) as api:
        for key in ("nobody", "key-of-ann"):
            with pytest.raises(openai.AuthenticationError):
                client(api.url, key).models.list()
        assert httpx.get(f"{api.url}/health").status_code == 200
        anna, bert = client(api.url, "key-of-anna"), client(api.url, "key-of-bert")
        with anna.completions.create(**LONG, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError, match="1 requests"):
                anna.completions.create(**SHORT)
        eventually(lambda: not api.running)
        assert bert.completions.create(**SHORT).usage.total_tokens > 20
        with pytest.raises(openai.RateLimitError, match="20 tokens"):
            bert.completions.create(**SHORT)
        keys.write_text("anna another-key\n")
        eventually(lambda: _is_let_in(api, "another-key"))
        assert not _is_let_in(api, "key-of-bert")


def _is_let_in(api: Api, key: str) -> bool:
    return httpx.get(f"{api.url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200


def test_an_engine_survives_the_process_that_speaks_http(engine: Engine) -> None:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 450, "n": 8, "ignore_eos": True}
    with http_process(engine) as api, raw(api, posted(body)):
        eventually(lambda: api.running)
        os.kill(api.http.pid, signal.SIGKILL)
        eventually(lambda: not api.running)
    assert engine.generate(PROMPT, max_tokens=4).tokens


@pytest.fixture(scope="module")
def command() -> Iterator[Command]:
    command = Command()
    yield command
    command.close()


def test_a_killed_http_process_is_started_again(command: Command) -> None:
    wanted = client(command.url).completions.create(**SHORT).choices[0].text
    os.kill(command.child("serving.http.process"), signal.SIGKILL)
    eventually(lambda: _text(command) == wanted)
    assert any("HTTP process died" in line for line in command.errors)


def _text(command: Command) -> str | None:
    try:
        return client(command.url).completions.create(**SHORT).choices[0].text
    except openai.APIConnectionError:
        return None


def test_requests_go_on_when_a_killed_executor_is_back(command: Command) -> None:
    wanted = _text(command)
    with client(command.url).completions.create(**LONG | {"temperature": 0}, stream=True) as stream:
        events = iter(stream)
        next(events)
        os.kill(command.child("serve.executor"), signal.SIGKILL)
        assert sum(1 for _ in events) > 50
    assert _text(command) == wanted
    eventually(lambda: any("executor died" in line for line in command.errors))


def test_a_trainer_uses_the_servers_executor(command: Command) -> None:
    eventually(lambda: Path(command.executor.removeprefix("local://")).is_socket())
    model = symbiosis.from_executor(command.executor, wait=60)
    ids = model.dummy_inputs["input_ids"][:1]
    assert model(ids).logits.isfinite().all()
    symbiosis.unwrap(model)
    assert _text(command)


def test_what_is_under_way_is_finished_on_sigterm(command: Command) -> None:
    """The last one of this server."""
    ended: list[int] = []
    with client(command.url).completions.create(**LONG, stream=True) as stream:
        events = iter(stream)
        next(events)
        ending = threading.Thread(target=lambda: ended.append(command.end()))
        ending.start()
        reasons = [choice.finish_reason for event in events for choice in event.choices]
    ending.join()
    assert reasons[-1] == "length" and ended == [0]
    with pytest.raises(httpx.ConnectError):
        httpx.get(command.url)
