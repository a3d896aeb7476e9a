"""What operators see and are woken by, with a real Prometheus: every panel shows something, and what is started again is found again."""

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import symbiosis
from symbiosis.cluster.controller.local_process import descendants
from symbiosis.cluster.controller.preflight import footprint_of, is_free
from symbiosis.cluster.plan import Plan, load
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from tests.cluster import Running, cluster_at
from tests.processes import Executor
from tests.prometheus import DEPLOY, Prometheus, filled_in, needs_prometheus, panels, prometheus
from tests.secret_files import write_secret
from tests.serving_api import client, eventually, web

pytestmark = [needs_prometheus, pytest.mark.full, pytest.mark.timeout(300)]
FILE = """
port: 0
metrics_port: {base}
api_keys: keys
models: {{demo: {{adapters: adapters, server: {{memory: 64MiB}}}}}}
"""
KEY = "alice-key-1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    shutil.copytree(DEMO_MODEL / "adapters", folder / "adapters")
    write_secret(folder / "keys", f"alice {KEY} admin\nbob bob-key-22\n")
    with cluster_at(folder, FILE.format(base=free_ports(3))) as found:
        yield found


def free_ports(count: int) -> int:
    """Return the first of so many free ports, one behind another, below those that the system gives to programs."""
    return next(
        base for base in range(12000, 32000, count) if all(is_free("127.0.0.1", base + n) for n in range(count))
    )


@pytest.fixture(scope="module")
def called(folder: Path) -> Iterator[Executor]:
    """An executor whose clients send their rows."""
    log = folder / "called.log"
    executor = Executor("demo", "--listen", "tcp://127.0.0.1:0", "--metrics-port", "0", log=log)
    try:
        yield executor
    finally:
        executor.kill()


def target_of(executor: Executor) -> str:
    return executor.log.read_text().partition("http://")[2].partition("/")[0]


@pytest.fixture(scope="module")
def watching(running: Running, called: Executor, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus with the configuration that operators start from, but for addresses and times."""
    configuration = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    jobs = {job["job_name"]: {**job, "scrape_interval": "1s"} for job in configuration["scrape_configs"]}
    jobs["symbiosis"]["static_configs"] = [{"targets": [target_of(called)]}]
    (found,) = jobs["symbiosis-cluster"]["http_sd_configs"]
    found |= {"url": f"{running.url}/cluster/targets", "refresh_interval": "1s"}
    found["authorization"] = {"type": "Bearer", "credentials": KEY}
    far = {"http_sd_configs": [{**found, "url": f"{found['url']}?relayed"}], "authorization": found["authorization"]}
    jobs["relayed"] = {"job_name": "relayed", "scrape_interval": "1s", **far}
    del jobs["symbiosis-serve"]
    rules = [str(DEPLOY / name) for name in configuration["rule_files"]]
    with prometheus(folder, {"scrape_configs": list(jobs.values()), "rule_files": rules}) as watching:
        yield watching


def use(running: Running) -> None:
    api = client(running.url, KEY)
    for model in ("demo", "shout"):
        api.completions.create(model=model, prompt="def average(numbers):" * 4, max_tokens=20)


@pytest.fixture(scope="module")
def program(called: Executor) -> Any:
    return symbiosis.from_executor(called.endpoint)


def train(program: Any) -> None:
    embedded = program.get_input_embeddings()(torch.arange(8).unsqueeze(0)).requires_grad_()
    program(inputs_embeds=embedded).logits.sum().backward()


def test_what_doctor_tells_is_what_a_cluster_takes(running: Running, folder: Path) -> None:
    """The first test of this file: nothing has been asked of it."""
    plan = plan_of(folder)
    told = sum(n for (_, what), n in footprint_of(plan, plan.models).items() if what != "pages")
    processes = [running.process.pid, *descendants(running.process.pid)]
    taken = sum(own_memory(pid) for pid in processes) + shared_files(processes[1:])
    assert len(processes) == 5 and 0.75 * told < taken < 1.25 * told, (told >> 20, taken >> 20)


def plan_of(folder: Path) -> Plan:
    return load(folder / "test.yaml")


def own_memory(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.findall(r"Private_Dirty: +(\d+) kB", rollup)[0]) << 10


def shared_files(processes: list[int]) -> int:
    """The resident memory of files that they have mapped, which lies there once for all."""
    return max(
        int(re.findall(r"RssFile:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0]) << 10 for pid in processes
    )


@pytest.mark.parametrize("kind", ["mapped", "called", "serving"])
def test_every_panel_shows_something(
    kind: str, running: Running, called: Executor, program: Any, watching: Prometheus
) -> None:
    """Where clients have mapped the weights, too, and multiply by themselves: then nothing is called."""
    file = "grafana-serving.json" if kind == "serving" else "grafana.json"
    instance = {"mapped": "demo-executor-1", "called": target_of(called), "serving": ".*"}[kind]

    def empty() -> list[str]:
        train(program) if kind == "called" else use(running)
        asked = {each["title"]: [filled_in(t["expr"], instance) for t in each["targets"]] for each in panels(file)}
        return [title for title, queries in asked.items() if not any(watching.query(query) for query in queries)]

    eventually(lambda: not empty())


def test_what_is_started_again_is_found_again(running: Running, watching: Prometheus, folder: Path) -> None:
    """By its name, whatever its address is: no series of it ends, and nobody is woken for an address that has gone."""
    names = {each.name: each.kind for each in running.told.members}
    pages = {each.name: each.pages for each in running.told.members}
    first = plan_of(folder).metrics_port
    assert sorted(int(each.rpartition(":")[2]) for each in pages.values()) == [first, first + 1, first + 2]
    assert set(names.values()) == {"executor", "server", "front"}
    for name, kind in names.items():
        labels = f'{{instance="{name}",member="{name}",kind="{kind}",cluster="test",job="symbiosis-cluster"}}'
        eventually(lambda labels=labels: watching.value(f"up{labels}") == 1)  # type: ignore[misc]
        began = watching.value(f"max(process_start_time_seconds{labels})") if kind != "server" else None
        pid = next(each.pid for each in running.told.members if each.name == name)
        os.kill(pid, signal.SIGKILL)
        eventually(
            lambda name=name, pid=pid: any(  # type: ignore[misc]
                each.name == name and each.pid not in (0, pid) and each.state == "ready"
                for each in running.told.members
            )
        )
        eventually(lambda labels=labels: watching.value(f"up{labels}") == 1)  # type: ignore[misc]
        if began is not None:
            eventually(
                lambda labels=labels, began=began: watching.value(f"max(process_start_time_seconds{labels})") > began
            )  # type: ignore[misc,operator]
    eventually(lambda: watching.value("min(symbiosis_cluster_member_ready)") == 1)
    assert pages == {each.name: each.pages for each in running.told.members}
    assert watching.value('count(count by (instance) (up{job="symbiosis-cluster"}))') == len(names)


def test_one_address_is_enough_for_a_prometheus_elsewhere(running: Running, watching: Prometheus) -> None:
    """The front end answers for each process, with its labels and its figures."""
    for name, metric in (
        ("demo-executor-1", "symbiosis_uptime_seconds"), ("demo-server-1", "symbiosis_serve_pages"), ("front-1", "symbiosis_cluster_running"),
    ):  # fmt: skip
        eventually(lambda name=name, metric=metric: watching.query(f'{metric}{{job="relayed",instance="{name}"}}'))  # type: ignore[misc]
    keyed = {"Authorization": f"Bearer {KEY}"}
    assert web.get(f"{running.url}/cluster/metrics/front-1").status_code == 401
    assert (
        web.get(f"{running.url}/cluster/metrics/front-1", headers={"Authorization": "Bearer bob-key-22"}).status_code
        == 403
    )
    assert web.get(f"{running.url}/cluster/metrics/nothing", headers=keyed).status_code == 404


@pytest.mark.parametrize(
    ("name", "process"),
    [("demo-executor-1", ""), ("front-1", ""), ("demo-server-1", "http"), ("demo-server-1", "engine")],
)
def test_what_runs_out_is_told_of_each_process(name: str, process: str, watching: Prometheus) -> None:
    """As the client libraries of Prometheus tell it. A server has several processes, and one page."""
    page = f'job="symbiosis-cluster",instance="{name}"'
    labels = f'{{{page},process="{process}"}}'
    eventually(lambda: watching.value(f"process_open_fds{labels} / process_max_fds{labels}"))
    resident = watching.value(f"process_resident_memory_bytes{labels}") or 0
    machine, free = (watching.value(f"symbiosis_memory_{each}{{{page}}}") or 0 for each in ("bytes", "free_bytes"))
    assert 10 << 20 < resident < machine and 0 < free < machine
