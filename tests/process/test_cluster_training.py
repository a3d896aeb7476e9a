"""Tinker's API at a cluster's address: a session lives on one server, which all of its ids tell, and goes on when that is started again."""

import importlib.util
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import symbiosis
from symbiosis.cluster.controller.control_socket import send_order
from symbiosis.errors import ConfigError
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.serving import Engine
from tests.cluster import Front, cluster_at, front_of
from tests.secret_files import write_secret
from tests.serving_api import Api, eventually, http_process, web

if importlib.util.find_spec("tinker") is None:
    pytest.skip("needs the package tinker, for its descriptor", allow_module_level=True)

from symbiosis.server.server_marks import mark_of
from symbiosis.server.tinker import tinker_service, wire
from tests.process.test_tinker import KEYS, TEXT, Client, datum, error_of

NAMES = ("demo-server-1", "demo-server-2")
TEACHER = "teacher-server-1"
COUNTED = "bob"  # whose key has a limit at the front end
OPENAI = {"Authorization": f"Bearer {KEYS['anna']}"}


@contextmanager
def trained_at(executor: symbiosis.Executor, name: str, folder: Path, model: str = "demo") -> Iterator[Api]:
    """One server of a cluster that trains."""
    checkpoints = folder / "checkpoints"
    with (
        Engine(executor.endpoint, DEMO_MODEL, memory=1 << 25, name=model) as engine,
        symbiosis.training.Engine(executor.endpoint, state=tinker_service.runs_folder(checkpoints, name)) as trainer,
    ):
        training = tinker_service.TrainingService(engine, trainer, checkpoints, model, str(DEMO_MODEL), name)
        try:
            with http_process(engine, training, api_keys=str(folder / "keys"), server=name, model=model) as api:
                yield api
        finally:
            training.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Api]]:
    folder = tmp_path_factory.mktemp("training")
    write_secret(folder / "keys", "".join(f"{name} {key}\n" for name, key in KEYS.items()))
    with symbiosis.Executor("demo") as executor, ExitStack() as stack:
        models = dict.fromkeys(NAMES, "demo") | {TEACHER: "teacher"}
        yield {name: stack.enter_context(trained_at(executor, name, folder, model)) for name, model in models.items()}


@pytest.fixture(scope="module")
def api(servers: dict[str, Api], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("runtime")
    lines = [f"{name} {key}{' tokens_per_day=10000' if name == COUNTED else ''}\n" for name, key in KEYS.items()]
    write_secret(folder / "keys", "".join(lines))
    urls = {name: each.url for name, each in servers.items()}
    with front_of(folder, urls, str(folder / "keys"), trains=True) as running:
        yield running


def two_sessions(api: Front) -> list[Client]:
    """Two that live on two servers."""
    clients = {client.session[:8]: client for client in (Client(api) for _ in range(20))}
    return [clients[mark_of(name)] for name in NAMES]


def test_a_session_lives_on_one_server_and_new_ones_on_both(api: Front, servers: dict[str, Api]) -> None:
    for client in two_sessions(api):
        run = client.run()
        losses = [client.trained(run, 1).metrics["loss:sum"]]
        client.step(run, 2)
        losses.append(client.trained(run, 3).metrics["loss:sum"])
        assert losses[1] < losses[0]
        saved = client.wait(client.told("save_weights_for_sampler", model_id=run, seq_id=4, sampling_session_seq_id=0))
        assert len(client.sample(saved["sampling_session_id"]).sequences[0].tokens) == 4 * 6
        here, elsewhere = (servers[name] for name in sorted(NAMES, key=lambda n: mark_of(n) != client.session[:8]))
        for server, status in ((here, 200), (elsewhere, 410)):
            told = web.post(f"{server.url}/api/v1/get_info", json={"model_id": run}, headers=client.headers)
            assert told.status_code == status, told.text
        listed = client.get("sessions?limit=100").json()["sessions"]
        assert client.session in listed and client.get("sessions?limit=1&offset=1").json()["sessions"] == listed[1:2]
        assert client.get(f"sessions/{client.session}").json()["training_run_ids"] == [run]
        shown = web.get(f"{api.url}/figures", headers=OPENAI).json()["runs"]
        assert [each["steps"] for each in shown if each["id"] == run] == [1]


def test_checkpoints_lie_where_all_servers_see_them(api: Front) -> None:
    one, other = two_sessions(api)
    run = one.run()
    one.trained(run, 1), one.step(run, 2)
    path = one.wait(one.told("save_weights", model_id=run, seq_id=3, path="first"))["path"]
    fields = {"path": path, "optimizer": True, "session_id": other.session, "model_seq_id": 0}
    gone_on = other.wait(other.told("load_weights", **fields))["model_id"]
    assert other.trained(gone_on, 1).metrics["loss:sum"] == pytest.approx(
        one.trained(run, 4).metrics["loss:sum"], rel=1e-6
    )
    assert {each["training_run_id"] for each in other.get("training_runs").json()["training_runs"]} >= {run, gone_on}
    saved = one.wait(one.told("save_weights_for_sampler", model_id=run, seq_id=5, path="now"))["path"]
    body = {"model": saved, "prompt": TEXT[:9], "max_tokens": 4, "temperature": 0}
    asked = [web.post(f"{api.url}/v1/completions", json=body | each, headers=OPENAI) for each in ({}, {"model": run})]
    assert asked[0].json()["choices"] == asked[1].json()["choices"], asked[0].text
    kept = one.wait(one.told("save_weights_external", model_id=run, seq_id=6, path="mine"))["path"]
    at = kept.removeprefix("tinker://").replace("/", "/checkpoints/", 1)
    urls = one.get(f"training_runs/{at}/external_weights_urls").json()["urls"]
    assert all(url.startswith(api.url) for url in urls.values())
    assert web.get(urls["adapter_model.safetensors"]).content[8:].lstrip()[:1] == b"{"


@pytest.mark.parametrize("stream", [False, True])
def test_a_key_pays_at_the_front_end_for_what_its_run_computes(api: Front, stream: bool) -> None:
    """As many tokens as the server says, and no guess."""
    client = Client(api, COUNTED)
    body = {
        "model": client.run(),
        "prompt": bytes(TEXT).decode(),
        "max_tokens": 20,
        "ignore_eos": True,
        "stream": stream,
    }
    headers = {"Authorization": f"Bearer {KEYS[COUNTED]}"}
    before = today(api)
    answer = web.post(f"{api.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200 and ("data: [DONE]" in answer.text) == stream, answer.text
    eventually(lambda: today(api) - before == len(TEXT) + 20)


def today(api: Front) -> float:
    """How many tokens the key has had, with those reserved."""
    figure = f'symbiosis_cluster_tenant_tokens_today{{tenant="{COUNTED}"}} '
    return float(web.get(f"{api.url}/metrics").text.partition(figure)[2].partition("\n")[0] or 0)


def test_a_session_has_a_server_of_each_base_that_it_asks_for(api: Front) -> None:
    one, other = two_sessions(api)
    models = one.get("get_server_capabilities").json()["supported_models"]
    assert sorted(each["model_name"] for each in models) == ["demo", "teacher"]
    for client in (one, other):
        asked = {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": "teacher"}
        teacher = client.told("create_sampling_session", **asked)["sampling_session_id"]
        assert (
            teacher.startswith(mark_of(TEACHER)) and client.get(f"samplers/{teacher}").json()["base_model"] == "teacher"
        )
        assert client.sample(teacher).sequences
    lora = {"rank": 4, "seed": 0}
    made = one.wait(
        one.told("create_model", session_id=one.session, model_seq_id=5, base_model="teacher", lora_config=lora)
    )
    run = made["model_id"]
    assert run.startswith(mark_of(TEACHER)) and one.trained(run, 1).metrics["loss:sum"] > 0
    assert one.told("session_heartbeat", session_id=one.session)
    path = one.wait(one.told("save_weights_for_sampler", model_id=run, seq_id=2, path="mine"))["path"]
    fields = {"session_id": other.session, "sampling_session_seq_id": 1, "model_path": path}
    assert other.told("create_sampling_session", **fields)["sampling_session_id"].startswith(mark_of(TEACHER))
    one.post(f"sessions/{one.session}/finish")
    assert one.post("get_info", model_id=run).status_code == 410


def test_what_no_server_has_is_said(api: Front) -> None:
    client = Client(api)
    for run, status in (
        ("f" * 32 + ":train:0", 410),
        (f"{Client(api, 'bob').session}:train:0", 410),
        ("nonsense", 410),
    ):
        assert client.post("get_info", model_id=run).status_code == status
    assert client.send_bytes(b"\n\x7fcut off").status_code == 400
    assert client.send_pass(client.run(), 0, datum()).status_code == 400
    assert web.get(f"{api.url}/api/v1/training_runs").status_code == 401
    unknown = client.get("nowhere")
    assert unknown.status_code == 404 and "no such route" in error_of(unknown)


FILE = """
port: 0
checkpoints: {folder}/checkpoints
models:
  demo:
    servers: 2
    train: true
    server: {{memory: 64MiB}}
"""


@pytest.mark.timeout(300)
def test_a_session_goes_on(tmp_path: Path) -> None:
    """When its server is killed or rolled, what was promised is there again, and each request is done once."""
    with cluster_at(tmp_path, FILE.format(folder=tmp_path), forked=True) as running:
        client = Client(running)
        run = client.run()
        client.trained(run, 1), client.step(run, 2)
        server = next(each for each in running.servers() if mark_of(each.name) == client.session[:8])
        promise = client.send_pass(run, 3).json()
        os.kill(server.pid, signal.SIGKILL)
        eventually(lambda: client.post("get_info", model_id=run).status_code == 503)
        other = Client(running)  # at the server that is left
        same = other.run()
        assert other.session[:8] != client.session[:8]
        eventually(lambda: client.post("get_info", model_id=run).status_code == 200)
        with pytest.raises(ConfigError, match="has the sessions of those who train"):
            send_order("test", "drain", server.name)
        send_order("test", "roll", server.name)
        eventually(lambda: client.post("get_info", model_id=run).status_code == 200)
        losses = [wire.messages().ForwardBackwardOutput.FromString(client.wait(promise)).metrics["loss:sum"]]
        losses += [client.step(run, 4)["metrics"]["grad_norm:mean"], client.trained(run, 5).metrics["loss:sum"]]
        other.trained(same, 1), other.step(same, 2)
        undisturbed = [other.trained(same, 3).metrics["loss:sum"]]
        undisturbed += [other.step(same, 4)["metrics"]["grad_norm:mean"], other.trained(same, 5).metrics["loss:sum"]]
        assert losses == pytest.approx(undisturbed, rel=1e-4)
