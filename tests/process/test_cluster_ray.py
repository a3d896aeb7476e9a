"""A cluster on Ray, whose nodes are processes of this host: the same commands, and nothing is left when it has ended, however it ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import symbiosis
from symbiosis.cluster.controller.local_process import descendants
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.protocol.cluster_state import Member, executors_at
from tests.cluster import Running, cluster, wait_for_servers
from tests.secret_files import write_secret
from tests.serving_api import client, eventually, web

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
FILE = """
port: 0
frozen_s: 4
idle_s: 5
backend: ray
models:
  demo:
    executors: 2
    servers: [2, 3]
    executor: {batch-invariant: true}
    server: {memory: 64MiB, max-batch: 16}
"""
PROMPT = "def average(numbers):"


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[Any]:
    """Two nodes, the first of which has the head and is that of the tests."""
    from ray.cluster_utils import Cluster

    before = {name: os.environ.get(name) for name in ("XDG_RUNTIME_DIR", "RAY_ADDRESS", "PYTHONPATH")}
    os.environ.update(XDG_RUNTIME_DIR=str(folder), PYTHONPATH=os.pathsep.join(sys.path))
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    started.add_node(num_cpus=3)
    os.environ["RAY_ADDRESS"] = started.address
    try:
        yield started
    finally:
        started.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with two_nodes(tmp_path_factory.mktemp("ray")) as found:
        yield found


@pytest.fixture(scope="module")
def running(nodes: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with cluster(tmp_path_factory.mktemp("cluster"), FILE) as found:
        yield found


def command(*words: str, **more: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "symbiosis", "cluster", *words], capture_output=True, text=True, timeout=120, **more
    )


def pids(running: Running) -> list[int]:
    """All processes of the cluster that are not its own children."""
    members = [each.pid for each in running.told.members]
    return [*members, *(child for pid in members for child in descendants(pid))]


def are_gone(found: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in found)


def text_of(running: Running, **fields: Any) -> str:
    asked = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 40}
    answer = client(running.url).completions.create(**{**asked, **fields})
    return str(answer.choices[0].text)


def test_it_serves_from_all_nodes(running: Running) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    ids = torch.tensor([list(PROMPT.encode())])
    told = model.generate(ids, max_new_tokens=40, do_sample=False)[0, len(PROMPT) :]
    assert text_of(running) == AutoTokenizer.from_pretrained(DEMO_MODEL).decode(told)
    hosts = {each.url.partition("://")[2].rpartition(":")[0] for each in running.servers()}
    assert len(hosts) == 2 and "127.0.0.1" in hosts, "one here, and one that is reached over the network"
    told = json.loads(command("status", "--json").stdout)
    assert [each["state"] for each in told["members"]] == ["ready"] * 5


def member(running: Running, name: str) -> Member:
    return next(each for each in running.told.members if each.name == name)


def is_back(running: Running, before: Member) -> bool:
    now = [each for each in running.told.members if each.name == before.name]
    return bool(now) and now[0].state == "ready" and now[0].pid != before.pid


def actor_of(one: Member) -> int:
    """The process of Ray that has started this one."""
    return int(Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_trainer_reaches_executors_of_all_nodes(running: Running) -> None:
    here, elsewhere = sorted(executors_at("symbiosis://demo"))
    assert here.startswith("local://") and elsewhere.startswith("tcp://") and "&key=" in elsewhere
    ids = torch.tensor([list(PROMPT.encode())])
    wanted = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)(ids).logits
    for urls in (here, elsewhere, "symbiosis://demo"):
        model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
        symbiosis.wrap(model, urls, share=False)
        assert torch.equal(model(ids).logits, wanted)
    with pytest.raises(symbiosis.SymbiosisError):
        symbiosis.wrap(AutoModelForCausalLM.from_pretrained(DEMO_MODEL), elsewhere.partition("?")[0], patience=1)


def test_an_executor_is_started_again_at_its_endpoint(running: Running) -> None:
    one = next(each for each in running.told.of_kind("executor") if each.url.startswith("tcp://"))
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    ids = torch.tensor([list(PROMPT.encode())])
    wanted = model(ids).logits
    symbiosis.wrap(model, one.url)
    os.kill(one.pid, signal.SIGKILL)
    eventually(lambda: is_back(running, one), 60)
    assert member(running, one.name).url == one.url
    assert torch.equal(model(ids).logits, wanted)


@pytest.mark.fault
@pytest.mark.parametrize("how", ["kill", "freeze", "kill the actor", "freeze the actor", "roll"])
def test_a_stream_outlives_its_server(running: Running, how: str) -> None:
    wait_for_servers(running, 2)
    api = client(running.url)
    wanted, found = text_of(running, max_tokens=450), ""
    asked = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 450}
    server = None
    for number, event in enumerate(api.completions.create(stream=True, **asked)):
        found += "".join(choice.text for choice in event.choices)
        if number == 3:
            health = web.get(f"{running.url}/health", timeout=10).json()
            at = int(next(key for key, count in health["running"].items() if count))
            server = next(each for each in running.servers() if each.number == at)
            if how == "roll":
                threading.Thread(target=command, args=["roll", "--only", server.name], daemon=True).start()
            else:
                pid = actor_of(server) if "actor" in how else server.pid
                os.kill(pid, signal.SIGSTOP if "freeze" in how else signal.SIGKILL)
    assert server is not None and found == wanted
    eventually(lambda: is_back(running, server), 90)
    eventually(lambda: are_gone([server.pid]), 30)


def test_a_server_is_added_beside_its_executor(running: Running) -> None:
    wait_for_servers(running, 2)
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            text_of(running, max_tokens=450)

    asking = [threading.Thread(target=ask) for _ in range(10)]
    for thread in asking:
        thread.start()
    try:
        wait_for_servers(running, 3)
        added = member(running, "demo-server-3")
        executor = member(running, "demo-executor-2")
        assert added.url.startswith("http://127.0.0.1:") == executor.url.startswith("local://")
    finally:
        over.set()
        for thread in asking:
            thread.join()
    assert command("drain", "demo-server-3").stdout == "demo-server-3 has ended\n"
    assert are_gone([added.pid])


def test_a_model_comes_and_goes_while_it_runs(running: Running, nodes: Any, tmp_path: Path) -> None:
    """It gets room when it comes, unless there is none, and gives it back when it has gone."""
    wait_for_servers(running, 2)
    file, wanted = tmp_path / "test.yaml", text_of(running)
    more = FILE + "  other: {model: demo, servers: 1, server: {memory: 64MiB}}\n"
    for text, told in ((more.replace("servers: 1", "servers: 9"), "models.other: Ray found no room"), (more, "")):
        file.write_text(text)
        found = command("apply", str(file))
        assert found.returncode == (2 if told else 0) and told in found.stderr, found.stderr
    assert text_of(running, model="other") == text_of(running) == wanted
    file.write_text(FILE)
    assert command("apply", str(file)).stdout == "ending when nobody uses them any more: other\n"
    eventually(lambda: not running.told.of_kind("executor", "other"), 60)
    eventually(lambda: free_cpus(nodes) == 3)


def test_nothing_is_left_when_it_has_ended(running: Running, nodes: Any) -> None:
    """The last one that uses this cluster."""
    found = pids(running)
    assert command("down").returncode == 0
    assert running.process.wait(60) == 0
    assert are_gone(found)
    eventually(lambda: free_cpus(nodes) == 7)
    assert not list((Path(os.environ["XDG_RUNTIME_DIR"]) / "symbiosis" / "clusters").glob("test*"))


def free_cpus(nodes: Any) -> float:
    ray.init(nodes.address, namespace="test", log_to_driver=False)
    try:
        return float(ray.available_resources()["CPU"])
    finally:
        ray.shutdown()


KEYED = FILE.replace("backend: ray", "backend: ray\napi_keys: keys")


def test_a_program_waits_for_a_cluster_that_starts_and_keys_hold_on_all_nodes(nodes: Any, tmp_path: Path) -> None:
    """The program finds no cluster, then none that has told of itself, then executors that have no place."""
    write_secret(tmp_path / "keys", "alice alice-key-1\n")
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    ids = torch.tensor([list(PROMPT.encode())])
    wanted, asked = model(ids).logits, {"model": "demo", "prompt": PROMPT, "max_tokens": 1}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(symbiosis.wrap, model, "symbiosis://demo", patience=100, share=False)
        with cluster(tmp_path, KEYED) as found:
            assert torch.equal(waiting.result()(ids).logits, wanted)
            for url in (found.url, *(each.url for each in found.servers())):
                assert web.post(f"{url}/v1/completions", json=asked, timeout=30).status_code == 401
                assert client(url, "alice-key-1").completions.create(**asked).choices


SMALL = "port: 0\nbackend: ray\nmodels: {demo: {servers: 1, server: {memory: 64MiB}}}"


@pytest.mark.fault
def test_nothing_is_left_when_it_was_killed(nodes: Any, tmp_path: Path) -> None:
    for _ in range(2):  # the second one finds what the first has left
        with cluster(tmp_path, SMALL) as found:
            left = pids(found)
            assert "runs already" in command("up", str(tmp_path / "test.yaml")).stderr
            found.process.kill()
            found.process.wait()
            eventually(lambda left=left: are_gone(left), 30)  # type: ignore[misc]


TOO_MUCH = """
  demo: {servers: 1000}
  other: {model: demo, servers: 0, gpus: 0.5}
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (TOO_MUCH, ["models.demo: Ray found no room", "1001 CPU", "models.other: Ray found no room", "1 CPU, 0.5 GPU"]),
        ("{demo: {executor: {device: cuda}}, no-such-model: {}}", ["models.demo: --device 'cuda'", "models.no-such-"]),
        ("{demo: {server: {memory: 4000GiB}}}", ["all processes there need 400", "and node ", "GiB free"]),
        ("{demo: {server: {max-batch: 0}}}", ["models.demo: max-batch must be positive"]),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(nodes: Any, tmp_path: Path, text: str, told: list[str]) -> None:
    file = tmp_path / "test.yaml"
    file.write_text(f"port: 0\nbackend: ray\nmodels: {text}")
    found = command("up", str(file))
    assert found.returncode == 2 and "Traceback" not in found.stderr
    assert not [each for each in told if each not in found.stderr], found.stderr
    eventually(lambda: free_cpus(nodes) == 7)


@pytest.mark.parametrize(
    ("address", "told"),
    [("127.0.0.1:1", "ray start --head"), ("ray://127.0.0.1:1", "on a node of Ray")],
)
def test_where_there_is_no_ray_it_says_how_to_start_it(tmp_path: Path, address: str, told: str) -> None:
    file = tmp_path / "test.yaml"
    file.write_text(SMALL)
    found = command("up", str(file), env={**os.environ, "RAY_ADDRESS": address})
    assert found.returncode == 2 and told in found.stderr and "Traceback" not in found.stderr


@pytest.mark.fault
def test_what_ran_on_a_lost_node_is_started_on_another(nodes: Any, tmp_path: Path) -> None:
    with cluster(tmp_path, FILE) as found:
        wanted = text_of(found)
        lost = [
            each for each in found.told.members if "127.0.0.1" not in each.url and each.url[:5] in ("http:", "tcp:/")
        ]
        assert [each.kind for each in lost] == ["executor", "server"]
        (node,) = nodes.worker_nodes
        nodes.remove_node(node, allow_graceful=False)
        try:
            assert text_of(found) == wanted
            eventually(lambda: all(is_back(found, each) for each in lost), 120)
            assert text_of(found) == wanted and are_gone([each.pid for each in lost])
        finally:
            nodes.add_node(num_cpus=3)


@pytest.mark.fault
@pytest.mark.parametrize("comes_back", [True, False])
def test_without_the_head_of_ray_it_ends_and_says_so(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, comes_back: bool
) -> None:
    """Each has nodes of its own: when a new head comes, which knows nothing of what the old one did, the nodes of the old one end."""
    with two_nodes(tmp_path_factory.mktemp("ray")) as nodes, cluster(tmp_path, FILE) as found:
        left = pids(found)
        nodes.head_node.kill_gcs_server(check_alive=False)
        if comes_back:
            nodes.head_node.start_gcs_server()
        assert found.process.wait(100) == 2
        told = (tmp_path / "stderr").read_text()
        assert ("was started again, and has lost" if comes_back else "has been gone for 30 s") in told
        assert "start this cluster again once Ray runs" in told and "Traceback" not in told
        eventually(lambda: are_gone(left), 60)
