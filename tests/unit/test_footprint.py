"""What a cluster takes is added up over all its processes, on the host and on each GPU, before any of them is started."""

from collections.abc import Callable
from pathlib import Path

import pytest

from symbiosis.cli import cluster_findings
from symbiosis.cluster.controller import preflight
from symbiosis.cluster.controller.preflight import bundle_of, footprint_of
from symbiosis.cluster.plan import ModelPlan, Plan
from symbiosis.errors import ConfigError
from symbiosis.server.launch import preflight as of_server
from symbiosis.server.launch.footprint import (
    CONTEXT,
    ENGINE,
    EXECUTOR,
    HOST,
    HTTP,
    WITH_CUDA,
    Footprint,
    lacking,
    total,
)
from symbiosis.serving.serve_options import ServeOptions

G = 1 << 30
SMALL = {"memory": "64MiB", "adapter-memory": "64MiB"}


def plan(**models: ModelPlan) -> Plan:
    return Plan(name="lab", port=0, models=models)


def demo(**fields: object) -> ModelPlan:
    return ModelPlan(model="demo", **{"server": SMALL, **fields})  # type: ignore[arg-type]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has so many bytes free on the host, and on GPUs."""

    def has(host: int, **gpus: int) -> None:
        monkeypatch.setattr(preflight, "free_memory", lambda: host)
        monkeypatch.setattr(preflight, "free_gpu_memory", lambda device: gpus[device.replace(":", "")])

    return has


def findings(tmp_path: Path, text: str) -> dict[str, str]:
    (tmp_path / "lab.yaml").write_text(f"port: 0\n{text}")
    return {each.state: each.text for each in cluster_findings.findings(tmp_path / "lab.yaml")}


@pytest.mark.parametrize(
    "text",
    [
        "models: {demo: {servers: 80, server: {memory: 40GiB}}}",
        "models: {demo: {servers: 80, server: {adapter-memory: 40GiB}}}",
        "models: {demo: {servers: [1, 2], server: {memory: 40GiB}}}",
        "models: {demo: {servers: 80}}",  # 28 GiB of processes
        "models: {demo: {executors: 90, servers: 0}}",
        "models: {a: {model: demo, executors: 30}, b: {model: demo, executors: 30}, c: {model: demo, executors: 30}}",
    ],
)
def test_a_cluster_that_is_too_large_is_not_approved(text: str, tmp_path: Path, machine: Callable) -> None:
    machine(24 * G)
    found = findings(tmp_path, text)
    assert found.keys() == {"FAIL"} and f"{HOST} has 24.0 GiB free" in found["FAIL"]
    machine(4000 * G)
    assert "ok" in findings(tmp_path, text)


def test_what_may_come_later_is_a_warning(tmp_path: Path, machine: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(24 * G)
    monkeypatch.setattr(cluster_findings, "usable_cores", lambda: 4.0)
    small = "server: {memory: 64MiB, adapter-memory: 64MiB, max-batch: 16}"
    assert findings(tmp_path, f"models: {{demo: {{servers: 2, {small}}}}}").keys() == {"ok"}
    for more, told in (
        ("servers: [1, 80], " + small, "with all their pages in use"),
        ("servers: 2", "with all their pages in use"),  # a quarter of what is free, each, and another one for adapters
        ("threads: 5, " + small, "5 threads of a process have the time of 4 cores"),
        ("servers: [1, 30], server: {memory: 1MiB, adapter-memory: 1MiB, max-batch: 100000}", "file descriptors"),
    ):
        found = findings(tmp_path, f"models: {{demo: {{{more}}}}}")
        assert found.keys() == {"warn", "ok"} and told in found["warn"]


def test_each_gpu_has_what_uses_it(machine: Callable) -> None:
    on = [{"device": "cuda"}, {"device": "cuda:0"}, {"device": "cuda:1"}]
    found = footprint_of(plan(**{f"m{n}": demo(executor=each, servers=2) for n, each in enumerate(on)}), ["m0", "m1"])
    assert {place for place, _ in found} == {HOST, "cuda:0"}
    assert found["cuda:0", "processes"] == 2 * 3 * CONTEXT and found["cuda:0", "pages"] == 4 * (64 << 20)
    assert found[HOST, "processes"] == 2 * (EXECUTOR + 2 * (ENGINE + HTTP) + 3 * WITH_CUDA)
    assert found[HOST, "pages"] == 4 * (64 << 20) and not found[HOST, "weights"], (
        "adapters lie on the host, weights do not"
    )
    assert found["cuda:0", "weights"] == 2 * footprint_of(plan(a=demo(), b=demo()), ["a"])[HOST, "weights"] > 0
    machine(100 * G, cuda0=4 * G)
    (line,) = lacking("they", found, preflight.free_memory_of(found))
    assert "they need 4.5 GiB" in line and "cuda:0 has 4.0 GiB free" in line


def test_what_a_node_gives_is_what_the_cluster_takes_there() -> None:
    """All bundles of Ray together are the models without what there is once."""
    both = plan(a=demo(executors=3, servers=(4, 9)), b=demo(executors=2, servers=1))
    bundles = Footprint()
    for name, count in (("a", 3), ("b", 2)):
        for executor in range(count):
            bundles.update(bundle_of(both, name, executor))
    assert bundles == footprint_of(both, ["a"]) + footprint_of(both, ["b"])
    assert total(bundle_of(both, "b", 0), HOST) < total(bundle_of(both, "b", 1), HOST), "the first server goes there"


@pytest.mark.parametrize(
    "more", [{"memory": "40GiB"}, {"adapter_memory": "40GiB"}, {"memory": "12GiB", "adapter_memory": "12GiB"}]
)
def test_a_server_alone_is_added_up_too(more: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_server, "free_memory", lambda: 24 * G)
    of_server.check_memory(ServeOptions(model="demo", memory="8GiB", adapter_memory="8GiB"))
    of_server.check_memory(
        ServeOptions(model="demo", executor="local:///executor", **more)
    )  # its memory may be a GPU's
    with pytest.raises(ConfigError, match="the server and its executor need .* and this machine has 24.0 GiB free"):
        of_server.check_memory(ServeOptions(model="demo", **more))
