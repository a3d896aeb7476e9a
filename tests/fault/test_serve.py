"""What goes wrong around a server: clients that hang up, read nothing, flood or stay silent; processes that are killed."""

import contextlib
import json
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import symbiosis
from symbiosis.base.pulse import SILENT_S
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.serving import Engine
from tests.secret_files import write_secret
from tests.serving_api import Api, Command, client, eventually, http_process, web

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
    return write_secret(tmp_path / "keys", "anna key-of-anna requests=1\nbert key-of-bert tokens_per_s=20\n")


@pytest.fixture(scope="module")
def api(engine: Engine) -> Iterator[Api]:
    with http_process(engine) as api:
        yield api


def raw(api: Api | Command, text: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(api.url.rpartition(":")[2])), timeout=60)
    connection.sendall(text.encode())
    return connection


def posted(body: dict[str, Any]) -> str:
    data = json.dumps(body)
    return f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n{data}"


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
        "max_tokens": 150,
        "n": 16,
        "logprobs": 20,
        "stream": True,
        "ignore_eos": True,
    }
    with raw(api, "") as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that the kernel does not take it all
        connection.sendall(posted(body).encode())
        eventually(lambda: api.running)
        assert api.client.completions.create(**SHORT).usage.completion_tokens == 8
        eventually(lambda: not api.running)  # it is computed, and waits to be read


def test_a_thousand_silent_connections_and_half_a_body_hold_nobody(api: Api) -> None:
    silent = [raw(api, "") for _ in range(700)]
    half = [
        raw(api, "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{") for _ in range(300)
    ]
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
        assert web.post(f"{api.url}/v1/completions", content=endless(), timeout=60).status_code == 413
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
        assert web.get(f"{api.url}/health").status_code == 200
        anna, bert = client(api.url, "key-of-anna"), client(api.url, "key-of-bert")
        with anna.completions.create(**LONG, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError, match="1 requests"):
                anna.completions.create(**SHORT)
        eventually(lambda: not api.running)
        assert bert.completions.create(**SHORT | {"max_tokens": 100}).usage.total_tokens > 20
        with pytest.raises(openai.RateLimitError, match="20 tokens"):
            bert.completions.create(**SHORT)
        write_secret(keys, "anna another-key\n")
        eventually(lambda: _is_let_in(api, "another-key"))
        assert not _is_let_in(api, "key-of-bert")


def _is_let_in(api: Api, key: str) -> bool:
    return web.get(f"{api.url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200


def test_an_engine_survives_the_process_that_speaks_http(engine: Engine) -> None:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 450, "n": 8, "ignore_eos": True}
    with http_process(engine) as api, raw(api, posted(body)):
        eventually(lambda: api.running)
        os.kill(api.http.child.pid, signal.SIGKILL)
        eventually(lambda: not api.running)
    assert engine.generate(PROMPT, max_tokens=4).tokens


@pytest.fixture(scope="module")
def command() -> Iterator[Command]:
    command = Command()
    yield command
    command.close()


def test_a_killed_http_process_is_started_again(command: Command) -> None:
    wanted = client(command.url).completions.create(**SHORT).choices[0].text
    os.kill(command.child("http_process"), signal.SIGKILL)
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
        os.kill(command.child("executor_main"), signal.SIGKILL)
        assert sum(1 for _ in events) > 50
    assert _text(command) == wanted
    eventually(lambda: any("executor died" in line for line in command.errors))


def test_figures_are_told_of_all_three_processes(command: Command) -> None:
    """Those of the executor that runs now, which is not the first one."""
    text = web.get(f"{command.url}/metrics").text
    assert re.findall(r'^process_open_fds{process="(.*)"} [1-9]', text, re.MULTILINE) == ["http", "engine", "executor"]


def test_a_trainer_uses_the_servers_executor(command: Command) -> None:
    eventually(lambda: Path(command.executor.removeprefix("local://")).is_socket())
    model = symbiosis.from_executor(command.executor)
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
        web.get(command.url)


# ---------------------------------------------------------------- processes that hang, and what they leave behind


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where servers have their temporary folders; its path is short enough for a socket's."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setenv("XDG_RUNTIME_DIR", f"{folder}/none")
        yield Path(folder)


IMPATIENT = """
from symbiosis.base import pulse
from symbiosis.server.launch import serve_processes

pulse.SILENT_S = 6.0

def http_words(*given, code=serve_processes.http_words):
    _, module, started = code(*given)
    quick = "from symbiosis.base import pulse; pulse.SILENT_S = 6.0"
    return ["-c", f"import runpy; {quick}; runpy.run_module({module!r}, run_name='__main__')", started]

serve_processes.http_words = http_words
"""


@pytest.fixture
def own(folders: Path) -> Iterator[Command]:
    """A server that a test may end, whose processes take one another for hung after six seconds."""
    command = Command(before=IMPATIENT, forked=True, forked_http=False)
    yield command
    command.close()


def test_an_http_process_that_hangs_is_started_again(own: Command) -> None:
    wanted, hung = _text(own), own.child("http_process")
    os.kill(hung, signal.SIGSTOP)
    eventually(lambda: any("HTTP process has said nothing" in line for line in own.errors))
    eventually(lambda: not Path(f"/proc/{hung}").exists())
    eventually(lambda: _text(own) == wanted)


def test_an_engine_that_hangs_ends_the_server(own: Command) -> None:
    children = [own.child("http_process"), own.child("executor_main")]
    os.kill(own.process.pid, signal.SIGSTOP)
    eventually(lambda: _health(own) == (503, "the engine does not answer"))
    assert own.process.wait(60) == -signal.SIGKILL
    eventually(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    assert any("the engine's process" in line and "the server ends" in line for line in own.errors)


def _health(command: Command) -> tuple[int, str]:
    answer = web.get(f"{command.url}/health", timeout=60)
    return answer.status_code, answer.json()["status"]


def test_a_step_that_takes_too_long_ends_the_server() -> None:
    command = Command("--max-step-s", "0.001", forked=True)
    try:
        executor = command.child("executor_main")
        with pytest.raises(openai.APIConnectionError):
            client(command.url).completions.create(**LONG, n=32)
        assert command.process.wait(60) == 1
        assert any("longer than --max-step-s 0.001" in line for line in command.errors)
        eventually(lambda: not Path(f"/proc/{executor}").exists())
    finally:
        command.close()


STARVES = """
import resource
from symbiosis.serving.runner.model_runner import ModelRunner

def forward(self, step, forward=ModelRunner.forward):
    if b"x" * 8 not in bytes(step.segments[0].sequence.tokens):
        return forward(self, step)
    {limit}
    raise MemoryError

ModelRunner.forward = forward
"""
LIMIT = "resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))"


LATE = """
from symbiosis.server.launch import serve_processes

def http_words(*given, code=serve_processes.http_words):
    _, module, started = code(*given)
    return ["-c", f"import runpy, time; time.sleep(4); runpy.run_module({module!r}, run_name='__main__')", started]

serve_processes.http_words = http_words
"""


@pytest.mark.full
def test_a_server_says_that_it_is_ready_when_it_answers() -> None:
    """The process that speaks HTTP may come up after the engine."""
    Command(before=LATE).close()


@pytest.mark.parametrize(
    "limit", [pytest.param("", marks=pytest.mark.soak, id="a large request"), pytest.param(LIMIT, id="nothing left")]
)
def test_a_server_that_has_no_memory_left_ends(limit: str) -> None:
    """Else it would say that it works, and fail at one request after the other. Where there is memory, only the request has failed."""
    command = Command(before=STARVES.format(limit=limit), forked=True)
    try:
        executor, api = command.child("executor_main"), client(command.url)
        with pytest.raises(openai.APIError):
            api.completions.create(**{**SHORT, "prompt": "x" * 8})
        if not limit:
            assert api.completions.create(**SHORT).usage.completion_tokens == 8
            return
        assert command.process.wait(60) == 1
        assert any("no memory left" in line for line in command.errors)
        eventually(lambda: not Path(f"/proc/{executor}").exists())
    finally:
        command.close()


@pytest.mark.soak
def test_servers_that_freeze_together_go_on(own: Command) -> None:
    wanted = _text(own)
    frozen = [own.process.pid, own.child("http_process"), own.child("executor_main")]
    for process in frozen:
        os.kill(process, signal.SIGSTOP)
    time.sleep(SILENT_S + 5)
    for process in frozen:
        os.kill(process, signal.SIGCONT)
    assert _text(own) == wanted and own.end() == 0
    assert not any("said nothing" in line for line in own.errors)


def test_what_a_killed_server_leaves_behind_the_next_one_removes(own: Command, folders: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    living = set(folders.rglob("serve-*"))
    assert len(living) == 2
    upload = raw(own, "PUT /v1/adapters/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n.")
    eventually(lambda: list(folders.rglob("symbiosis-adapter-*")))
    os.killpg(own.process.pid, signal.SIGKILL)
    own.process.wait(60)
    upload.close()
    eventually(lambda: not _serves(own))
    second = Command("--log-format", "json", "--adapters", str(tmp_path), forked=True)
    try:
        eventually(lambda: any("'broken' has no adapter_config.json" in line for line in second.errors))
        left = {path for path in folders.rglob("*") if not path.is_dir() or path.name.startswith("serve-")}
        assert not left & living and len([path for path in left if path.is_dir()]) == 2
        assert not list(folders.rglob("symbiosis-adapter-*"))
        assert second.end() == 0
        assert {path for path in folders.rglob("*") if not path.is_dir()} == set()
    finally:
        second.close()
    told = [json.loads(line) for line in second.errors]
    assert {"engine", "executor"} <= {line["process"] for line in told} <= {"engine", "executor", "http"}
    assert all({"time", "level", "event"} <= line.keys() for line in told)


def _serves(command: Command) -> bool:
    try:
        return bool(web.get(f"{command.url}/health", timeout=60))
    except httpx.TransportError:
        return False
