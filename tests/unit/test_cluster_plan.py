"""The file of a cluster: what is wrong with it is said before anything is started, with the place where it is."""

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from symbiosis.cluster.controller.backend import Local
from symbiosis.cluster.controller.preflight import check
from symbiosis.cluster.plan import ModelPlan, Plan, load
from symbiosis.cluster.router.progress import Progress
from symbiosis.errors import ConfigError
from symbiosis.server.openai_protocol import Continuation

BOMB = (
    "[&a [1,1,1,1,1,1,1,1,1]," + ",".join(f"&{b} [{','.join([f'*{a}'] * 9)}]" for a, b in pairwise("abcdefghij")) + "]"
)
EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster.yaml"


def plan_of(tmp_path: Path, text: str) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text("port: 0\n" + text)
    check(load(file)).close()


def test_the_example_is_a_plan() -> None:
    plan = load(EXAMPLE)
    assert plan.name == "cluster" and (plan.models["demo"].least, plan.models["demo"].most) == (1, 3)


def test_what_an_alias_brings_may_be_replaced(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text("models: {a: &a {model: demo, threads: 2}, b: {<<: *a, threads: 3}}")
    assert [each.threads for each in load(file).models.values()] == [2, 3]


def test_the_example_for_kubernetes_has_room_for_its_cluster(tmp_path: Path) -> None:
    """Its file is a plan, the pods have what that needs, and what is mounted and selected is there."""
    settings, cluster, service = yaml.safe_load_all((EXAMPLE.parent / "kuberay.yaml").read_text())
    file = tmp_path / "cluster.yaml"
    file.write_text(settings["data"]["cluster.yaml"].replace("/etc/symbiosis-keys", str(tmp_path)))
    plan = load(file)
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    (worker,) = workers["template"]["spec"]["containers"]
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    limits = worker["resources"]["limits"]
    (model,) = plan.models.values()
    assert plan.backend == "ray" and len(model.bundles) == workers["replicas"]
    assert all(each == {"CPU": float(limits["cpu"]), "GPU": float(limits["nvidia.com/gpu"])} for each in model.bundles)
    for spec in (head, workers["template"]["spec"]):
        mounted = {each["name"] for each in spec["containers"][0]["volumeMounts"]}
        assert mounted == {each["name"] for each in spec["volumes"]}
        assert spec["securityContext"]["fsGroup"], "by which the pods' user reads the keys"
    assert head["volumes"][1]["secret"]["defaultMode"] == 0o440
    assert head["volumes"][0]["configMap"]["name"] == settings["metadata"]["name"]
    assert service["spec"]["selector"]["ray.io/cluster"] == cluster["metadata"]["name"]
    assert service["spec"]["ports"][0]["targetPort"] == plan.port


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("models: {}", "name at least one"),
        ("models: {demo: {train: true, servers: [1, 2]}}", "servers: NUMBER"),
        ("models: {demo: {server: {train: true}}}", "train is given by the cluster itself"),
        ("checkpoints: x\nmodels: {demo: {}}", "checkpoints is for a model that trains"),
        ("models: [demo]", "lab.yaml: models: Expected `object`"),
        ("models: {demo: {", "lab.yaml is no YAML"),
        (
            "models: {demo: {serverz: 2}}",
            "models.demo.serverz: there is no such key: there are model, executors, servers",
        ),
        ("models: {demo: {}, demo: {executors: 2}}", "'demo' is there twice"),
        ("port: 8000\nmodels: {demo: {}}", "'port' is there twice"),
        ("models: " + "{a: " * 3000 + "1" + "}" * 3000, "nested too deeply"),
        ("models: &m {demo: *m}", "nested too deeply|found undefined alias|no such key"),
        ("models: {demo: {executor: {max-rows: &r {a: *r}}}}", "nested too deeply"),
        ("name: 2026-99-99\nmodels: {demo: {}}", "is no YAML: a value in it is none"),
        ("models: !!timestamp x", "is no YAML: a value in it is none"),
        (f"models: {{demo: {{executor: {{max-rows: {BOMB}}}}}}}", "stands for more than 100000 values"),
        ("#" * (1 << 20) + "\nmodels: {demo: {}}", "more than 1048576 bytes"),
        ("models: {demo: {servers: 1000000000}}", "executors and 4096 servers"),
        ("models: {demo: {}}\nfront_ends: 100000", "front_ends must be from 1 to 256"),
        ("models: {demo: {}}\nhost: ..", "cannot listen at '..:0'"),
        ("models: {demo: {servers: 0.5}}", r"models.demo.servers: Expected `int \| array`, got `float`"),
        ("models: {demo: {servers: [3, 1]}}", "models.demo: at least one executor"),
        ("models: {a/b: {}}", "'a/b' is no name"),
        ("models: {demo: {}}\nbackend: cloud", "write local or ray"),
        ("models: {demo: {gpus: 0.5}}", "gpus is for backend: ray"),
        ("models: {demo: {gpus: 0.33333}}\nbackend: ray", "with four decimals"),
        ("models: {demo: {gpus: 0.4, servers: [0, 2]}}\nbackend: ray", "gpus gives them 1.2"),
        ("models: {no-such-model: {}}", "models.no-such-model: "),
        ("models: {demo: {server: {max-batch: 0}}}", "models.demo: max-batch must be positive"),
        ("models: {demo: {server: {port: 80}}}", "models.demo.server: port is given by the cluster"),
        (
            "models: {demo: {executor: {metrics_port: 80}}}",
            "models.demo.executor: metrics-port is given by the cluster",
        ),
        ("models: {demo: {executor: {nothing: 1}}}", "models.demo: unknown option nothing"),
        ("models: {demo: {adapters: nowhere}}", "there is no such folder"),
        ("models: {demo: {executors: 1000000}}", "all processes need"),
        ("models: {demo: {}}\naliases: {demo: {demo: 1}}", "is the name of a model"),
        ("models: {demo: {}}\naliases: {chat: {other: 1}}", "aliases.chat: there is no model 'other'"),
        ("models: {demo: {}}\naliases: {chat: {demo: -1}}", "shares are numbers that are not negative"),
        ("models: {demo: {}}\naliases: {chat: {}}", "not all 0"),
        ("models: {demo: {}}\napi_keys: nowhere", "cannot read the API keys"),
        (
            "models: {demo: {executors: 10, servers: [1, 9]}}\nmetrics_port: 65520",
            "metrics_port: from 1024 to 65516, since 20",
        ),
        ("models: {demo: {}}\nmetrics_port: 80", "metrics_port: from 1024 to"),
        ("models: {demo: {}}\nmetrics_port: 9400\nbackend: ray", "metrics_port is for backend: local"),
        ("models: {demo: {}}\nmetrics-port: 9600", "Did you mean metrics_port?"),
        ("models: {demo: {}}\nfrontends: 2", "frontends: there is no such key: there are models, name, backend"),
        ("models: {demo: }", "models.demo: write keys and values, or {}, not None"),
        ("models: {1: {model: demo}}", "models.1: a name is text: write '1'"),
        ("models: {demo: {}}\nlimits: {anna: -3}", "limits.anna: at least 1 sequence, not -3"),
        ("models: {demo: {}}\nfrozen_s: -1", "frozen_s: a number of seconds, at least 1, not -1"),
        ("models: {demo: {}}\nidle_s: .nan", "idle_s: a number of seconds, at least 0, not nan"),
        ("models: {demo: {}}\ndrain_s: .inf", "drain_s: a number of seconds, at least 0.1, not inf"),
        ("models: {demo: {}}\ndecision_log: nowhere/log", "decision_log: cannot write to .*/nowhere/log: No such file"),
    ],
)
def test_what_is_wrong_is_said_at_once(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plan_of(tmp_path, text)


def test_a_file_without_anything_says_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text("# nothing yet\n")
    with pytest.raises(ConfigError, match="lab.yaml is empty: write at least"):
        load(tmp_path / "lab.yaml")


def test_all_that_is_wrong_is_said_together(tmp_path: Path) -> None:
    for text, told in (
        ("models: {demo: {executors: 0}, a/b: {}}\nlimits: {anna: 0}", ("models.demo", "'a/b'", "limits.anna")),
        (
            "models: {demo: {executor: {devcie: cuda}, server: {max_bach: 3}}}\ndecision_log: no/log\napi_keys: none",
            ("devcie", "max-bach|max_bach", "decision_log"),
        ),
        (
            "models: {demo: {serverz: 2, threads: many}, other: []}\nhost: 4\nfront-ends: 2",
            (
                "demo.serverz",
                "demo.threads: Expected `int`",
                "models.other",
                "host: Expected",
                "front-ends: there is no",
            ),
        ),
    ):
        with pytest.raises(ConfigError) as raised:
            plan_of(tmp_path, text)
        assert all(re.search(each, str(raised.value)) for each in told), str(raised.value)


def test_a_plan_that_is_right_is_taken(tmp_path: Path) -> None:
    plan_of(tmp_path, "models: {demo: {servers: [1, 2], threads: 2}, other: {model: demo}}")


def test_a_plan_takes_away_nothing_that_another_has_brought(tmp_path: Path) -> None:
    """A model ends in one thread while another one adds its successor."""
    old, both = (Plan(name="lab", models={name: ModelPlan(model="demo") for name in names}) for names in ("a", "ab"))
    here = Local(old, tmp_path)
    here.take(both)
    here.take(old)
    assert here.executor("b", 1).name == "b-executor-1"


def test_what_is_together_on_a_node_of_ray() -> None:
    """Each executor with its servers: on a GPU with all that it may have, else with those that are always there."""
    assert ModelPlan(executors=2, servers=(1, 4)).bundles == [{"CPU": 1}, {"CPU": 2}]
    assert ModelPlan(executors=2, servers=(1, 4), gpus=0.3).bundles == [{"CPU": 3, "GPU": 0.9}, {"CPU": 3, "GPU": 0.9}]


def test_events_are_handed_on_without_their_comments() -> None:
    progress = Progress(Continuation("chatcmpl-1", 0), choices=2)
    assert progress.take(b'data: {"first": 1}') == b'data: {"first": 1}'
    assert progress.take(b": 1 7 8\ndata: {}") == b"data: {}" and progress.take(b": 0 .\ndata: {}") == b"data: {}"
    assert (progress.told.tokens, progress.told.ended, progress.told.opened) == ([[], [7, 8]], [0], 1)
    assert progress.count == 2


def test_the_ports_of_pages_have_to_be_free() -> None:
    plan = Plan(models={"demo": ModelPlan()}, port=9402, metrics_port=9400)
    with pytest.raises(ConfigError, match="9402 is taken, and all ports from 9400 to 9402 are needed"):
        check(plan)


def plan_with(backend: str = "local", **fields: Any) -> Plan:
    """A plan of one model that is right, but for what is said."""
    model = ModelPlan(**{name: fields.pop(name) for name in list(fields) if name in ModelPlan.__struct_fields__})
    return Plan(models={"demo": model}, backend=backend, **fields)


@pytest.mark.parametrize(
    ("field", "right", "wrong", "told"),
    [
        ("front_ends", [1, 256], [0, 257], "front_ends must be from 1 to 256"),
        ("port", [0, 65535], [-1, 65536], "port from 0 to 65535"),
        ("metrics_port", [0, 1024, 65533], [1, 1023, 65534], "metrics_port: from 1024 to 65533, since 3 processes"),
        ("frozen_s", [1.0, 1e9], [0.99, math.inf, math.nan], "frozen_s: a number of seconds, at least 1, not"),
        ("idle_s", [0.0], [-0.1, math.inf], "idle_s: a number of seconds, at least 0, not"),
        ("drain_s", [0.1], [0.09], "drain_s: a number of seconds, at least 0.1, not"),
        ("limits", [{"x": 1}], [{"x": 0}], "limits.x: at least 1 sequence, not 0"),
        ("executors", [1, 1 << 20], [0, -1, (1 << 20) + 1], "executor"),
        ("servers", [0, 4096, (0, 0), (2, 2), (0, 4096)], [-1, 4097, (2, 1), (-1, 1), (0, 4097)], "servers"),
        ("threads", [1], [0], "thread"),
        ("gpus", [0, 0.5, 0.1234], [-0.1, 1.1, 0.12345], "gpus is a share of one GPU"),
        ("aliases", [{"a": {"demo": 1}}], [{"demo": {"demo": 1}}, {"a/b": {"demo": 1}}], "the name of a model, or none"),
        ("aliases", [{"a": {"demo": 0.1}}], [{"a": {"demo": 0}}, {"a": {"demo": -1}}, {"a": {}}], "not all 0"),
        ("aliases", [{"a": {"demo": 1e9}}], [{"a": {"demo": math.inf}}], "not negative"),
        ("aliases", [], [{"a": {"other": 1}}], "there is no model 'other'"),
        ("name", ["x", "x" * 64], [".", "x" * 65, "a/b"], "is no name"),
    ],
)  # fmt: skip
def test_bounds_of_a_plan(field: str, right: list[Any], wrong: list[Any], told: str) -> None:
    for value in right:
        plan_with(**{field: value})
    for value in wrong:
        with pytest.raises(ConfigError, match=told):
            plan_with(**{field: value})


def test_one_gpu_is_shared_by_an_executor_and_its_servers() -> None:
    assert plan_with(gpus=0.25, servers=(1, 3)).models["demo"].bundles == [{"CPU": 4.0, "GPU": 1.0}]
    with pytest.raises(ConfigError, match=r"share one GPU, and gpus gives them 1\.25"):
        plan_with(gpus=0.25, servers=(1, 4))
    plan_with(backend="ray", servers=2)
    with pytest.raises(ConfigError, match="metrics_port is for backend: local"):
        plan_with(backend="ray", metrics_port=2000)
    with pytest.raises(ConfigError, match="backend: write local or ray"):
        plan_with(backend="slurm")
    with pytest.raises(ConfigError, match="name at least one"):
        Plan()


def test_how_many_there_are() -> None:
    plan = Plan(
        models={"a": ModelPlan(executors=2, servers=(3, 5), threads=3), "b": ModelPlan(servers=0)}, front_ends=4
    )
    a, b = plan.models.values()
    assert (a.least, a.most, a.reserved, b.least, b.most, plan.most_processes) == (3, 5, 3, 0, 0, 4 + 2 + 5 + 1)
    assert [a.servers_of(place) for place in (0, 1)] == [1, 2] and b.servers_of(0) == 0
    assert a.bundles == [{"CPU": 6.0}, {"CPU": 9.0}] and b.bundles == [{"CPU": 1.0}]
    assert msgspec.structs.replace(a, gpus=0.1).reserved == 5
    assert (ModelPlan().executors, ModelPlan().servers, ModelPlan().threads, ModelPlan().gpus) == (1, 1, 1, 0)
    plain = plan_with()
    assert (plain.port, plain.front_ends, plain.metrics_port, plain.is_for_this_machine) == (8000, 1, 0, True)
    assert (plain.frozen_s, plain.idle_s, plain.drain_s) == (10.0, 60.0, 30.0)
    assert not plan_with(host="0.0.0.0").is_for_this_machine
