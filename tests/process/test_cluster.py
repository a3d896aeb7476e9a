"""A cluster on this host: one address for all servers, one name for all executors, and streams that outlive their servers."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import symbiosis
from symbiosis.build import build
from symbiosis.cluster.controller.control_socket import send_order
from symbiosis.cluster.controller.local_process import descendants
from symbiosis.errors import ConfigError
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.protocol.cluster_state import executors_at
from tests.browser import browser, is_installed
from tests.cluster import AS_FRONT, Running, cluster, cluster_at, wait_for_servers
from tests.processes import run
from tests.secret_files import write_secret
from tests.serving_api import client, eventually, web

FILE = """
port: 0
frozen_s: 4
api_keys: keys
decision_log: {folder}/decisions
models:
  demo:
    servers: 2
    adapters: adapters
    executor: {{batch-invariant: true}}
    server: {{memory: 64MiB, max-batch: 16}}
"""
PROMPT = "def average(numbers):"
pytestmark = pytest.mark.timeout(300)  # processes are started again and again


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    shutil.copytree(DEMO_MODEL / "adapters", folder / "adapters")
    write_secret(folder / "keys", "alice alice-key-1 admin\nbob bob-key-22 requests=1\n")
    with cluster_at(folder, FILE.format(folder=folder), forked=True, forked_http=False) as found:
        yield found


@pytest.fixture
def api(running: Running) -> openai.OpenAI:
    wait_for_servers(running, 2)
    made = client(running.url, "alice-key-1")
    eventually(lambda: list(made.models.list()))  # the front end has heard of those that were started again, too
    return made


def ask(api: openai.OpenAI, **fields: Any) -> Any:
    return api.completions.create(**{"model": "demo", "prompt": PROMPT, "max_tokens": 300, "temperature": 0, **fields})


def serving(running: Running) -> int:
    """The number of the server that has a request, once one has."""

    def found() -> list[str]:
        health = web.get(f"{running.url}/health", timeout=10).json()
        return [number for number, count in health["running"].items() if count]

    eventually(found)
    return int(found()[0])


def member(running: Running, number: int) -> Any:
    return next(each for each in running.told.members if each.number == number and each.kind == "server")


def test_the_front_end_knows_all_servers_when_the_cluster_says_that_it_is_up(running: Running) -> None:
    """The first test of this file: nobody has waited for anything."""
    health = web.get(f"{running.url}/health", timeout=10)
    assert health.status_code == 200 and sorted(health.json()["ready"]) == [1, 2]
    keyed = {"Authorization": "Bearer alice-key-1"}
    assert len(web.get(f"{running.url}/v1/models", headers=keyed, timeout=10).json()["data"]) == 4


def test_nothing_of_a_body_is_read_before_its_key(running: Running) -> None:
    parts = urlsplit(running.url)
    with socket.create_connection((str(parts.hostname), parts.port), 10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
        )  # and no more
        assert connection.recv(100).startswith(b"HTTP/1.1 401")


def test_it_answers_as_a_server_does(api: openai.OpenAI, running: Running) -> None:
    assert {each.id for each in api.models.list()} == {"demo", "python", "shout", "whisper"}
    assert api.models.retrieve("shout").id == "shout"
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    ids = torch.tensor([list(PROMPT.encode())])
    told = model.generate(ids, max_new_tokens=40, do_sample=False)[0, len(PROMPT) :]
    wanted = AutoTokenizer.from_pretrained(DEMO_MODEL).decode(told)
    whole = ask(api, max_tokens=40)
    assert whole.choices[0].text == wanted and whole.usage.completion_tokens == 40
    events = list(ask(api, max_tokens=40, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.text for e in events for c in e.choices) == wanted and events[-1].usage.completion_tokens == 40
    chat = api.chat.completions.create(model="python", messages=[{"role": "user", "content": "def f("}], max_tokens=8)
    assert chat.choices[0].message.content
    assert web.get(f"{running.url}/version").json() == {"version": symbiosis.__version__, "build": build()}


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"model": "demo", "prompt": "a", "nothing": 1}, 400, "nothing"),
        ({"model": "nobody", "prompt": "a"}, 404, "no model 'nobody': there are 'demo' and adapters"),
        ([], 400, "not a JSON object"),
        ({"model": "demo"}, 400, "prompt is missing"),
        ({"model": "demo", "prompt": [0] * 600}, 400, "this model's maximum context length is 512 tokens"),
        ({"model": "demo", "prompt": "a", "n": 99999}, 400, "n must be"),
    ],
)
def test_what_is_wrong_is_said(api: openai.OpenAI, running: Running, body: Any, status: int, told: str) -> None:
    keyed = {"Authorization": "Bearer alice-key-1"}
    answer = web.post(f"{running.url}/v1/completions", json=body, headers=keyed, timeout=30)
    assert answer.status_code == status and told in answer.json()["error"]["message"]


def test_a_request_that_names_no_model_gets_the_only_one(api: openai.OpenAI, running: Running) -> None:
    keyed = {"Authorization": "Bearer alice-key-1"}
    for path, body in (("completions", {"prompt": "a", "max_tokens": 4}), ("responses", {"input": "a", "model": None})):
        answer = web.post(f"{running.url}/v1/{path}", json=body, headers=keyed, timeout=60)
        assert answer.status_code == 200 and answer.json()["model"] == "demo", answer.text


def is_let_in(api: openai.OpenAI) -> bool:
    try:
        return bool(ask(api, max_tokens=1).choices)
    except openai.RateLimitError:
        return False


def test_keys_hold_for_the_whole_cluster(api: openai.OpenAI, running: Running) -> None:
    assert web.post(f"{running.url}/v1/completions", json={"model": "demo", "prompt": "a"}).status_code == 401
    bob = client(running.url, "bob-key-22")
    with ask(bob, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError):
            ask(bob, max_tokens=1)
    eventually(lambda: web.get(f"{running.url}/health").json()["requests"] == 0)
    eventually(lambda: is_let_in(bob))  # the server behind it, which counts as well, hears of it a moment later


def ports_of(running: Running) -> set[int]:
    """Where processes of a cluster listen, those that they have started included."""
    ours = [pid for each in running.told.members for pid in (each.pid, *descendants(each.pid))]
    sockets = {file.readlink().name for pid in ours for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


def test_nobody_goes_round_the_front_ends(api: openai.OpenAI, running: Running) -> None:
    """Bob may have one request, and each server would take one. All that other ports answer is for probes and Prometheus."""
    fronts = {urlsplit(url).port for url in (running.url, running.told.of_kind("front")[0].url)}
    others = ports_of(running) - fronts
    assert others >= {urlsplit(each.url).port for each in running.servers()} and len(others) == 3
    body, key = {"model": "demo", "prompt": "a", "max_tokens": 1}, {"Authorization": "Bearer bob-key-22"}
    for port in others:
        for shown in ({}, {"X-Symbiosis-Cluster": "x"}, {"X-Symbiosis-Cluster": "\u00e9"}):
            url = f"http://127.0.0.1:{port}"
            headers = [(name, value.encode()) for name, value in {**key, **shown}.items()]
            assert web.post(f"{url}/v1/completions", json=body, headers=headers).status_code in (403, 405)
            for path in ("/", "/v1/models", "/figures", "//health", "/health/..", "/v1/%2e%2e/figures"):
                assert web.get(url + path, headers=headers).status_code in (403, 404), path
            for method, path in (("PUT", "/v1/adapters/x"), ("POST", "/v1/load_lora_adapter"), ("POST", "/health")):
                assert web.request(method, url + path, content=b"{}", headers=headers).status_code in (403, 404, 405)
        assert web.get(f"{url}/health").status_code == web.get(f"{url}/metrics").status_code == 200
    assert ask(client(running.url, "bob-key-22"), max_tokens=1, extra_headers={"X-Symbiosis-Cluster": "x"}).choices


def test_addresses_are_told_to_administrators_only(running: Running) -> None:
    for key, status in ((None, 401), ("bob-key-22", 403), ("alice-key-1", 200)):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = web.get(f"{running.url}/cluster/targets", headers=headers)
        assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json" and answer.json()


def test_other_users_of_the_host_cannot_read_the_secret(running: Running) -> None:
    """They can read command lines. No child finds it in its environment, which others of its user inherit and print."""
    for pid in (pid for each in running.told.members for pid in (each.pid, *descendants(each.pid))):
        for file in ("cmdline", "environ"):
            assert AS_FRONT["X-Symbiosis-Cluster"].encode() not in Path(f"/proc/{pid}/{file}").read_bytes()


def counted(running: Running) -> float:
    """How many tokens of Alice's the front end has counted."""
    told = web.get(f"{running.url}/metrics").text
    found = re.search(r'^symbiosis_cluster_tokens_total{model="demo",tenant="alice"} (\S+)$', told, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("way", [{}, {"stream": True}, {"stream": False}, {"stream_options": None}, {"continuation": None}], ids=str)  # fmt: skip
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_every_token_is_counted_whichever_way_an_answer_takes(
    api: openai.OpenAI, running: Running, way: dict[str, Any], path: str
) -> None:
    asked = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = {"model": "demo", "n": 2, "max_tokens": 20, "ignore_eos": True, **asked, **way}
    before, keyed = counted(running), {"Authorization": "Bearer alice-key-1"}
    assert web.post(f"{running.url}/v1/{path}", json=body, headers=keyed, timeout=30).status_code == 200
    eventually(lambda: counted(running) > before)
    assert counted(running) - before == 40


@pytest.mark.parametrize("stream", [True, False])
def test_a_text_that_another_base_has_begun_is_not_gone_on_with(running: Running, stream: bool) -> None:
    """The client says which base it was, and has no token of this front end yet."""
    before = {"id": "cmpl-1", "created": 0, "tokens": [[17]], "base": "0" * 64}
    body = {"model": "demo", "prompt": "a", "max_tokens": 4, "seed": 1, "stream": stream, "continuation": before}
    answer = web.post(
        f"{running.url}/v1/completions", json=body, headers={"Authorization": "Bearer alice-key-1"}, timeout=30
    )
    assert answer.status_code == 409 and "another base" in answer.json()["error"]["message"]


def test_one_key_leaves_others_their_share_of_the_batches(api: openai.OpenAI, running: Running) -> None:
    """Alice fills the batches of both servers. They make room for Bob, and so does the front end."""
    fields = {"n": 16, "max_tokens": 450, "stream": True, "extra_body": {"ignore_eos": True}}
    with ask(api, **fields) as one, ask(api, **fields) as other:
        next(iter(one)), next(iter(other))
        assert all(count == 16 for count in web.get(f"{running.url}/health").json()["running"].values())
        assert ask(client(running.url, "bob-key-22"), max_tokens=1).choices
        assert sum(web.get(f"{running.url}/health").json()["running"].values()) == 32, "Alice's are still under way"


@pytest.mark.fault
@pytest.mark.parametrize(
    ("how", "draws"),
    [
        ("kill", {"temperature": 1.0, "seed": 7, "n": 2}),
        pytest.param("freeze", {"temperature": 0}, marks=pytest.mark.soak),
        pytest.param("roll", {"temperature": 1.5, "top_p": 0.9}, marks=pytest.mark.soak),
    ],
)
def test_a_stream_outlives_its_server(
    api: openai.OpenAI, running: Running, folder: Path, how: str, draws: dict[str, Any]
) -> None:
    draws = {"seed": 3, "max_tokens": 200, **draws}
    wanted = {choice.index: choice.text for choice in ask(api, **draws).choices}
    found: dict[int, str] = dict.fromkeys(wanted, "")
    moved, id = web.get(f"{running.url}/health").json()["moved"], f"req-{how}-{len(wanted)}"
    stream = ask(api, stream=True, extra_headers={"X-Request-Id": id}, **draws)
    assert stream.response.headers["x-request-id"] == id
    for number, event in enumerate(stream):
        assert event.id == f"cmpl-{id}"
        for choice in event.choices:
            found[choice.index] += choice.text
        if number == 3:
            server = member(running, serving(running))
            if how == "roll":
                threading.Thread(target=send_order, args=["test", "roll", server.name], daemon=True).start()
            else:
                os.kill(server.pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    assert found == wanted
    assert web.get(f"{running.url}/health").json()["moved"] == moved + 1
    decisions = [json.loads(line) for line in (folder / "decisions").read_text().splitlines()]
    assert len([each for each in decisions if each["request"] == id]) == 2
    assert f'request="{id}"' in (folder / "stderr").read_text(), "the line that says that it leaves its server"
    eventually(lambda: server.pid not in {each.pid for each in running.told.members}, 60)
    wait_for_servers(running, 2)


PLAIN = [
    ("completions", {"prompt": PROMPT, "seed": 5, "temperature": 1.2, "n": 3, "logprobs": 2, "echo": True}),
    ("completions", {"prompt": [list(b"class"), list(b"def f(")], "temperature": 0, "stop": "\n", "best_of": 1}),
    ("completions", {"prompt": ["a \\\"text\\\", [1", "é\\"], "max_tokens": 0, "echo": True, "logprobs": 1}),
    ("chat/completions", {"messages": [{"role": "user", "content": "def f("}], "seed": 5, "n": 2, "logprobs": True, "top_logprobs": 2}),
]  # fmt: skip


def assert_same(found: Any, wanted: Any) -> None:
    """Log probabilities may round otherwise: what is computed together rounds as it is joined."""
    if isinstance(wanted, float):
        assert found == pytest.approx(wanted, abs=1e-4)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert_same(found[name], value)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted


@pytest.mark.parametrize(("path", "body"), PLAIN, ids=["many", "tokens", "echo", "chat"])
def test_an_answer_that_is_no_stream_is_what_a_server_would_say(
    api: openai.OpenAI, running: Running, path: str, body: dict[str, Any]
) -> None:
    keyed, told = {"Authorization": "Bearer alice-key-1", **AS_FRONT}, []
    for url in (running.servers()[0].url, running.url):
        answer = web.post(
            f"{url}/v1/{path}", json={"model": "python", "max_tokens": 30, **body}, headers=keyed, timeout=30
        )
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
        told.append(answer.json())
    kept = [{**each, "id": "", "created": 0, "usage": {**each["usage"], "prompt_tokens_details": 0}} for each in told]
    assert_same(kept[1], kept[0])
    assert told[1]["id"][:5] == told[0]["id"][:5]


def generated(server: Any) -> float:
    """How many tokens a server has made."""
    found = re.search(
        r"^symbiosis_serve_generation_tokens_total (\S+)$", web.get(f"{server.url}/metrics").text, re.MULTILINE
    )
    assert found
    return float(found[1])


def test_the_log_of_decisions_is_rotated_under_a_cluster_that_goes_on(
    api: openai.OpenAI, running: Running, folder: Path
) -> None:
    """A SIGHUP to all of its processes, as whoever rotates logs may send it, ends none."""
    ask(api, max_tokens=1)
    pids = {each.pid for each in running.told.members}
    (folder / "decisions").rename(folder / "decisions.1")
    for pid in (*pids, running.process.pid):
        os.kill(pid, signal.SIGHUP)
    ask(api, max_tokens=1)
    assert len((folder / "decisions").read_text().splitlines()) == 1
    time.sleep(0.5)  # in which whoever had ended would be missed
    assert {each.pid for each in running.told.members} == pids and running.process.poll() is None


@pytest.mark.fault
def test_a_model_all_of_whose_processes_died_is_still_known(api: openai.OpenAI, running: Running) -> None:
    """Servers wait for the executor before they start again. Requests wait for them."""
    wanted = ask(api, max_tokens=4, temperature=0).choices[0].text
    died = [each for each in running.told.members if each.kind != "front"]
    for each in died:
        os.kill(each.pid, signal.SIGKILL)
    eventually(lambda: not {each.pid for each in died} & {each.pid for each in running.told.members})
    assert running.told.models == ["demo"]
    time.sleep(0.3)  # until the front end has read it
    assert ask(api, max_tokens=4, temperature=0).choices[0].text == wanted


@pytest.mark.full
@pytest.mark.fault
@pytest.mark.parametrize("how", ["kill", pytest.param("drain", marks=pytest.mark.soak)])
def test_an_answer_that_is_no_stream_goes_on_at_another_server(api: openai.OpenAI, running: Running, how: str) -> None:
    """It is not made again: the other server makes what is left, with the same draws."""
    draws = {"seed": 3, "max_tokens": 450, "temperature": 1.5, "n": 4, "logprobs": 1, "ignore_eos": True}
    fields = {"extra_body": {"ignore_eos": draws.pop("ignore_eos")}, **draws}
    wanted, found = [choice.to_dict() for choice in ask(api, **fields).choices], []
    asking = threading.Thread(target=lambda: found.append(ask(api, **fields)))
    before = {each.number: generated(each) for each in running.servers()}
    moved = web.get(f"{running.url}/health").json()["moved"]
    asking.start()
    server = member(running, serving(running))
    eventually(lambda: generated(server) > before[server.number] + 300)
    if how == "drain":
        threading.Thread(target=send_order, args=["test", "roll", server.name], daemon=True).start()
    else:
        os.kill(server.pid, signal.SIGKILL)
    asking.join(60)
    assert_same([choice.to_dict() for choice in found[0].choices], wanted)
    assert found[0].usage.completion_tokens == 1800
    assert web.get(f"{running.url}/health").json()["moved"] == moved + 1
    (other,) = [each for each in running.servers() if each.number != server.number]
    assert generated(other) - before[other.number] < 1550
    eventually(lambda: server.pid not in {each.pid for each in running.told.members}, 60)


@pytest.mark.parametrize(
    "prompt",
    [
        b"[" + b"[]," * (5 << 20) + b"[]]",
        pytest.param(b"[" + b'"",' * (5 << 20) + b'""]', marks=pytest.mark.full),
        b"[" + b"0," * (7 << 20) + b"0]",
        pytest.param(b"[" + b"{}," * (5 << 20) + b"{}]", marks=pytest.mark.full),
        b"[" * (15 << 20),
    ],
    ids=["lists", "texts", "tokens", "objects", "deep"],
)
def test_what_is_costly_to_read_leaves_others_their_pace(api: openai.OpenAI, running: Running, prompt: bytes) -> None:
    keyed = {"Authorization": "Bearer alice-key-1"}
    body = b'{"model": "demo", "max_tokens": 1, "prompt": ' + prompt + b"}"
    statuses: list[int] = []

    def harm() -> None:
        for _ in range(3):
            statuses.append(web.post(f"{running.url}/v1/completions", content=body, headers=keyed, timeout=60).status_code)  # fmt: skip

    attack, slowest = threading.Thread(target=harm), 0.0
    attack.start()
    while attack.is_alive():
        begun = time.monotonic()
        assert web.get(f"{running.url}/version", timeout=30).status_code == 200
        slowest = max(slowest, time.monotonic() - begun)
    assert set(statuses) == {400} and slowest < 0.5


def test_requests_for_a_name_go_to_the_models_that_share_it(api: openai.OpenAI, running: Running) -> None:
    with pytest.raises(openai.NotFoundError):
        ask(api, model="chat", max_tokens=1)
    refused = command("shift", "chat", "demo=1").stderr
    assert "no alias 'chat' (there are: none): --new makes one" in refused, "it may be mistyped"
    assert command("shift", "--new", "chat", "demo=1").stdout == "chat: 100 % demo\n"
    eventually(lambda: "chat" in {each.id for each in api.models.list()})
    listed = {each.id: each.to_dict() for each in api.models.list()}
    assert listed["chat"]["max_model_len"] == listed["demo"]["max_model_len"] > 0, "clients cut prompts by it"
    with pytest.raises(openai.NotFoundError, match="no model 'caht': there are 'demo', 'chat' and adapters"):
        ask(api, model="caht", max_tokens=1)
    assert "no alias 'caht' (there are: chat)" in command("shift", "caht", "demo=1").stderr
    answer = ask(api, model="chat", max_tokens=5)
    assert answer.model == "demo" and answer.choices[0].text == ask(api, max_tokens=5).choices[0].text
    assert "no model 'other'" in command("shift", "chat", "other=1").stderr
    assert "write MODEL=SHARE" in command("shift", "chat", "demo").stderr


def test_a_program_finds_an_executor_by_the_models_name(running: Running) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    ids = torch.tensor([list(PROMPT.encode())])
    wanted = model(ids).logits
    symbiosis.wrap(model, "symbiosis://demo")
    assert torch.equal(model(ids).logits, wanted)
    assert executors_at("symbiosis://test/demo") == executors_at("symbiosis://demo")
    with pytest.raises(ConfigError, match="there are: symbiosis://demo"):
        symbiosis.from_executor("symbiosis://other")


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_an_adapter_that_is_sent_is_served_by_all(api: openai.OpenAI, running: Running, folder: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    model = PeftModel.from_pretrained(base, DEMO_MODEL / "adapters" / "shout", is_trainable=True)
    wanted = ask(api, model="shout", max_tokens=20).choices[0].text
    for _ in range(2):
        symbiosis.publish(model, "mine", running.url, key="alice-key-1")
        assert ask(api, model="mine", max_tokens=20).choices[0].text == wanted
        assert "mine" in {each.id for each in api.models.list()}
        for server in running.servers():
            told = ask(client(server.url, "alice-key-1"), model="mine", max_tokens=20, extra_headers=AS_FRONT)
            assert told.choices[0].text == wanted
    assert len(list((folder / "adapters" / ".sent").iterdir())) == 1, "the old version is gone"
    for url, key, status in (
        ("v1/adapters/mine", "bob-key-22", 403),
        ("v1/adapters/demo", "alice-key-1", 400),
        ("v1/adapters/.x", "alice-key-1", 400),
        ("v1/adapters/mine", "alice-key-1", 400),
    ):
        keyed = {"Authorization": f"Bearer {key}"}
        assert web.put(f"{running.url}/{url}", content=b"nothing", headers=keyed).status_code == status
    assert ask(api, model="mine", max_tokens=20).choices[0].text == wanted
    keyed = {"Authorization": "Bearer alice-key-1"}
    assert [web.delete(f"{running.url}/v1/adapters/mine", headers=keyed).status_code for _ in "ab"] == [204, 404]
    with pytest.raises(openai.NotFoundError):
        ask(api, model="mine")


def command(*words: str) -> "subprocess.CompletedProcess[str]":
    return run("cluster", *words, seconds=120, **os.environ)


@pytest.mark.full
def test_a_roll_says_how_far_it_is(api: openai.OpenAI, running: Running) -> None:
    told = command("roll", "--only", "demo-server-2").stdout
    assert re.fullmatch(r"1 of 1: demo-server-2 is replaced, after \d+ s\n1 process was replaced\n", told), told


def test_doctor_looks_at_it(api: openai.OpenAI, running: Running, folder: Path) -> None:
    told = run("doctor", "--cluster", str(folder / "test.yaml"), seconds=120, **os.environ)
    assert f"test runs at {running.url}/v1: 4 of 4 processes are ready" in told.stdout and told.returncode == 0


def test_its_state_is_shown(api: openai.OpenAI, running: Running, folder: Path) -> None:
    assert ask(api, max_tokens=1).choices
    told = json.loads(command("status", "--json").stdout)
    assert [each["name"] for each in told["members"]] == [
        "demo-executor-1",
        "demo-server-1",
        "demo-server-2",
        "front-1",
    ]
    assert "demo-server-2" in command("status", "test").stdout
    shown = command("top", "--once", "--interval", "0.2").stdout
    assert re.search(r"demo-server-1 +demo +ready +\d+ +0 of 16 +\d+ % +[\d.]+ +0 ", shown), shown
    assert re.search(r"demo-executor-1 +demo +ready +\d+ +[2-9] clients ", shown), shown
    assert "no process 'x': drain one of demo-executor-1" in command("drain", "x").stderr
    assert "roll --only demo-executor-1` replaces it" in command("drain", "demo-executor-1").stderr
    assert "no cluster 'x' of yours" in command("status", "x").stderr
    assert "no model or process 'x' runs: name one of demo, demo-executor-1" in command("roll", "--only", "x").stderr
    lines = [json.loads(line) for line in (folder / "decisions").read_text().splitlines()]
    assert {line["tenant"] for line in lines} <= {"alice", "bob"} and {line["why"] for line in lines} >= {"new"}
    assert {line["server"] for line in lines} <= {"demo-server-1", "demo-server-2"}
    metrics = web.get(f"{running.url}/metrics").text
    assert 'symbiosis_cluster_ready{model="demo",server="demo-server-1"} 1.0' in metrics
    assert 'symbiosis_cluster_completions_total{model="demo",tenant="alice"}' in metrics
    keyed = {"Authorization": "Bearer alice-key-1"}
    shown = web.get(f"{running.url}/cluster", headers=keyed).json()
    assert [server["batch"] for server in shown["servers"]] == [16, 16]
    assert shown["decisions"][-1]["tenant"] == "alice" and shown["decisions"][-1]["why"] == "new"
    figures = web.get(f"{running.url}/figures", headers=keyed).json()
    assert figures["figures"]["generated_tokens"] >= 1 and {"demo", "shout"} <= set(figures["names"])
    assert "servers" not in web.get(f"{running.url}/figures", headers={"Authorization": "Bearer bob-key-22"}).json()["cluster"]  # fmt: skip
    assert web.get(f"{running.url}/cluster", headers={"Authorization": "Bearer bob-key-22"}).status_code == 403


@pytest.mark.browser
@pytest.mark.skipif(not is_installed(), reason="needs Debian's chromium and chromium-driver: make test-browser")
def test_its_page_shows_servers_and_decisions_and_writes(api: openai.OpenAI, running: Running) -> None:
    def text(id: str) -> str:
        return str(page.run(f"document.getElementById('{id}').innerText"))

    with browser() as page:
        page.open(running.url)
        page.run("(document.getElementById('key').value = 'bob-key-22', document.getElementById('key').onchange())")
        eventually(lambda: text("state") == "serving")
        assert page.run("document.getElementById('cluster').hidden"), "what is about all tenants is for administrators"
        page.run("(document.getElementById('key').value = 'alice-key-1', document.getElementById('key').onchange())")
        eventually(lambda: "demo-server-2" in text("servers") and "0 of 16" in text("servers"))
        page.run("(document.getElementById('complete').click(), document.getElementById('most').value = '8')")
        page.run("document.getElementById('go').click()")
        eventually(lambda: re.search(r"8 output tokens in .*, the first after", text("speed")))
        eventually(lambda: "demo of alice" in text("decisions") and "new" in text("decisions"))
        assert text("model") == "test" and all("401" in each for each in page.errors())


def test_nothing_is_left_when_it_has_ended(running: Running) -> None:
    """The last test of this file: it ends the cluster."""
    pids = [each.pid for each in running.told.members]
    assert command("down").returncode == 0
    assert running.process.wait(60) == 0
    assert not alive(pids)


@pytest.mark.full
def test_processes_that_import_for_themselves_are_a_cluster(tmp_path_factory: pytest.TempPathFactory) -> None:
    """As a user's do: those above are forked from one that has imported everything."""
    with cluster_at(tmp_path_factory.mktemp("imports"), "port: 0\nmodels: {demo: {servers: 1}}") as found:
        answer = ask(client(found.url), max_tokens=8, extra_body={"ignore_eos": True})
        assert answer.usage.completion_tokens == 8
        pids = [each.pid for each in found.told.members]
    assert len(pids) == 3 and not alive(pids)


@pytest.mark.full
@pytest.mark.fault
def test_nothing_is_left_when_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = tmp_path.with_name("killed")  # whose paths are short
    sockets.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(sockets))
    for _ in range(2):  # the second one finds what the first has left
        with cluster(tmp_path, "port: 0\nmodels: {demo: {servers: 0}}") as found:
            pids = [each.pid for each in found.told.members]
            assert len(pids) == 2
            assert "runs already" in command("up", str(tmp_path / "test.yaml")).stderr
            found.process.kill()
            found.process.wait()
            eventually(lambda left=pids: not alive(left))  # type: ignore[misc]
            with pytest.raises(ConfigError, match="no cluster 'test'"):
                _ = found.told


def test_a_path_that_is_too_long_for_a_socket_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    file = tmp_path / "test.yaml"
    file.write_text("port: 0\nmodels: {demo: {servers: 0}}")
    told = command("up", str(file))
    assert told.returncode == 2 and "XDG_RUNTIME_DIR" in told.stderr and "Traceback" not in told.stderr
