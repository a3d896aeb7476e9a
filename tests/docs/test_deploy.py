"""What operators start from names what there is: metrics, labels, codes, options, files. No container is run here."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn
from typer.main import get_command

import symbiosis
from symbiosis.build import STAMP
from symbiosis.cli.main import app, executor_app
from symbiosis.cluster.router.app import _Collected as CollectedByFront
from symbiosis.cluster.router.router_state import RouterState
from symbiosis.cluster.router.server_registry import ServerRegistry
from symbiosis.errors import Code
from symbiosis.executor.observe.prometheus import PrometheusCollector
from symbiosis.executor.options import load_options
from symbiosis.server.api_keys import Keys
from symbiosis.server.metrics import Collected
from symbiosis.server.observer import Observer
from symbiosis.serving.engine.engine_stats import EngineStats
from tests.prometheus import PROMTOOL, needs_prometheus, panels

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
RULES = [rule for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
DASHBOARDS = ("grafana.json", "grafana-serving.json")
QUERIES = [query for file in DASHBOARDS for panel in panels(file) for query in (t["expr"] for t in panel["targets"])]
QUERIES += [rule["expr"] for rule in RULES]
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
OF_PROMETHEUS = {
    "instance",
    "job",
    "le",
    "process",
    "kind",
    "cluster",
    "member",
}  # the last three: of a cluster's targets


@pytest.fixture
def metrics(llama: nn.Module, serve: Callable) -> dict[str, set[str]]:
    """Every series of an executor that has answered something, of a server and of a front end, with its labels."""
    executor = serve(llama)
    model = symbiosis.from_executor(executor.endpoint)
    model(model.dummy_inputs["input_ids"])
    collectors = (
        PrometheusCollector(executor.server.snapshot), Collected(EngineStats(), Observer(), 0, {}, Keys(None)),
        CollectedByFront(RouterState(ServerRegistry("none", {}), None)),
    )  # fmt: skip
    found: dict[str, set[str]] = {}
    for family in (family for collector in collectors for family in collector.collect()):
        labels = {label for sample in family.samples for label in sample.labels} | set(
            getattr(family, "_labelnames", ())
        )
        found |= {family.name + suffix: labels for suffix in SUFFIXES.get(family.type, [""])}
    return found


@pytest.mark.parametrize("query", QUERIES)
def test_queries_name_metrics_and_labels_that_there_are(query: str, metrics: dict[str, set[str]]) -> None:
    named = set(re.findall(r"\b(?:symbiosis|process)_\w+", re.sub(r'"[^"]*"', '""', query)))
    assert named or "up{" in query
    assert named <= metrics.keys()
    labels = {label for inside in re.findall(r"\{([^}]*)\}", query) for label in re.findall(r"(\w+)\s*[=!]~?", inside)}
    labels |= {label.strip() for inside in re.findall(r"\bby \(([^)]*)\)", query) for label in inside.split(",")}
    assert labels - OF_PROMETHEUS <= set().union(*(metrics[name] for name in named))
    for codes in re.findall(r'code[=!]~?"([^"]*)"', query):
        assert set(codes.split("|")) <= Code.__members__.keys()


def test_the_check_of_queries_would_notice_a_wrong_name(metrics: dict[str, set[str]]) -> None:
    assert "symbiosis_calls" not in metrics and metrics["symbiosis_calls_total"] == {"layer", "op"}
    assert len(metrics) > 50


# For each alert, series that wake somebody, and series that do not: 60 values, one a minute, written as promtool reads them.
FIRING = {
    "SymbiosisExecutorDown": {'up{job="symbiosis-cluster",kind="executor"}': ("0x60", "0 1x59")},
    "SymbiosisInternalErrors": {'symbiosis_errors_total{code="INTERNAL"}': ("0+6x60", "6x60")},
    "SymbiosisRefusals": {'symbiosis_errors_total{code="BAD_SHAPE"}': ("0+120x60", "0+30x60")},
    "SymbiosisCallsWait": {"symbiosis_wait_seconds_total": ("0+20x60", "0+5x60"), "symbiosis_calls_total": ("0+100x60",) * 2},
    "SymbiosisQueueGrows": {"symbiosis_queue_depth": ("100x60", "100x49 0 100x9")},
    "SymbiosisSessionsDropped": {"symbiosis_dropped_sessions_total": ("0+1x60", "0x30 5x30")},
    "SymbiosisMemoryGrows": {
        "symbiosis_resident_bytes": ("9000000000+10000000x120", "9000000000x120"), "symbiosis_weights_bytes": ("0x120",) * 2,
    },
    "SymbiosisStrangers": {'symbiosis_refused_handshakes_total{reason="x"}': ("0+120x60", "0+30x60")},
    "SymbiosisServerDown": {'up{job="symbiosis-cluster",kind="front"}': ("1x50 0x9", "0 1x59")},
    "SymbiosisNoServerReady": {
        'symbiosis_cluster_member_ready{kind="server",model="m",member="a"}': ("0x60",) * 2,
        'symbiosis_cluster_member_ready{kind="server",model="m",member="b"}': ("1x50 0x9", "1x60"),
    },
    "SymbiosisOtherBase": {'symbiosis_cluster_other_base{model="m",member="a"}': ("1x60", "1x4 0x4 1x4 0x47")},
    "SymbiosisMemberNotReady": {'symbiosis_cluster_member_ready{kind="executor",member="a"}': ("0x60", "0x9 1 0x9 1 0x9 1x30")},
    "SymbiosisRequestsFail": {
        'symbiosis_serve_http_requests_total{path="/v1/completions",status="200"}': ("0+60x60",) * 2,
        'symbiosis_serve_http_requests_total{path="/v1/completions",status="500"}': ("0+6x60", "6x60"),
    },
    "SymbiosisRequestsRefused": {
        'symbiosis_serve_http_requests_total{path="/v1/completions",status="200"}': ("0+60x60",) * 2,
        'symbiosis_serve_http_requests_total{path="/v1/completions",status="503"}': ("0+30x60", "0+1x60"),
    },
    "SymbiosisRequestsWait": {"symbiosis_serve_num_requests_waiting": ("20x60", "20x49 0 20x9")},
    "SymbiosisClusterIsFull": {'symbiosis_cluster_waiting{model="m"}': ("20x60", "20x49 0 20x9")},
    "SymbiosisFirstTokenLate": {
        'symbiosis_serve_time_to_first_token_seconds_bucket{le="10"}': ("0+30x60", "0+60x60"),
        'symbiosis_serve_time_to_first_token_seconds_bucket{le="20"}': ("0+60x60",) * 2,
        'symbiosis_serve_time_to_first_token_seconds_bucket{le="+Inf"}': ("0+60x60",) * 2,
    },
    "SymbiosisPagesUsedUp": {
        "symbiosis_serve_kv_cache_usage_perc": ("1x60", "1x60"), "symbiosis_serve_num_preemptions_total": ("0+30x60", "30x60"),
    },
    "SymbiosisKeyWantsMore": {
        'symbiosis_cluster_refused_requests_total{reason="tokens_of_key",status="429",tenant="x"}': ("0+120x60", "0+6x60"),
    },
    "SymbiosisUnknownKeys": {
        'symbiosis_serve_refused_requests_total{reason="no_key",status="401",tenant="unauthenticated"}': ("0+120x60", "0+6x60"),
        'symbiosis_serve_refused_requests_total{reason="no_such_model",status="404",tenant="x"}': ("0+120x60",) * 2,
    },
    "SymbiosisBuildsDiffer": {
        'symbiosis_build_info{job="symbiosis-cluster",instance="a",version="1",commit="x",protocol="14"}': ("1x150",) * 2,
        'symbiosis_build_info{job="symbiosis-cluster",instance="b",version="1",commit="y",protocol="14"}': ("1x150", "1x100"),
    },
    "SymbiosisLogLinesLost": {'symbiosis_unwritten_log_lines_total{log="audit"}': ("0+1x60", "5x60")},
    "SymbiosisAdaptersThrash": {"symbiosis_serve_adapter_evictions_total": ("0+120x60", "0+6x60")},
    "SymbiosisRestarts": {'process_start_time_seconds{job="symbiosis-cluster"}': ("1x40 2x5 3x5 4x10", "1x40 2x20")},
    "SymbiosisFewDescriptors": {'process_open_fds{job="symbiosis"}': ("90x60", "50x60"), 'process_max_fds{job="symbiosis"}': ("100x60",) * 2},
    "SymbiosisLittleMemory": {"symbiosis_memory_free_bytes": ("1x60", "90x60"), "symbiosis_memory_bytes": ("100x60",) * 2},
}  # fmt: skip


@needs_prometheus
def test_alerts_wake_somebody_for_what_they_are_for_and_not_else(tmp_path: Path) -> None:
    def case(alert: str, which: int) -> dict[str, Any]:
        minutes = max(59, *(int(n) for n in re.findall(r"x(1\d\d)\b", str(FIRING[alert]))), 59)
        series = [{"series": name, "values": values[which]} for name, values in FIRING[alert].items()]
        samples = [] if which else [{"labels": f'{{alertname="{alert}"}}', "value": 1}]
        asked = f'count by (alertname) (ALERTS{{alertname="{alert}",alertstate="firing"}})'
        test = {"expr": asked, "eval_time": f"{minutes}m", "exp_samples": samples}
        return {"interval": "1m", "input_series": series, "promql_expr_test": [test]}

    tests = [case(alert, which) for alert in FIRING for which in (0, 1)]
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(DEPLOY / "alerts.yml")], "tests": tests}))
    done = subprocess.run([str(PROMTOOL), "test", "rules", file], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_tried() -> None:
    assert FIRING.keys() == {rule["alert"] for rule in RULES}


@needs_prometheus
def test_prometheus_takes_what_it_is_given() -> None:
    for words in (["check", "rules", DEPLOY / "alerts.yml"], ["check", "config", DEPLOY / "prometheus.yml"]):
        done = subprocess.run([str(PROMTOOL), *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_say_what_to_look_at() -> None:
    assert len(RULES) > 5 and len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "look") and "{{ $labels." in rule["annotations"]["summary"]
    (file,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["rule_files"]
    assert (DEPLOY / file).is_file()


@pytest.mark.parametrize("file", DASHBOARDS)
def test_panels_lie_beside_each_other_and_not_one_on_another(file: str) -> None:
    dashboard = json.loads((DEPLOY / file).read_text())
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(dashboard))) <= variables | {"__rate_interval", "__all"}


@pytest.mark.skipif(not shutil.which("nft"), reason="no nft here")
def test_nftables_takes_the_limits_of_new_connections() -> None:
    done = subprocess.run(["nft", "-c", "-f", DEPLOY / "nftables.conf"], capture_output=True, text=True, timeout=60)
    if "Operation not permitted" in done.stderr:
        pytest.skip("this user may not ask the kernel")
    assert done.returncode == 0, done.stderr


STAGES = {
    head.split()[-1]: body for head, body in re.findall(r"^FROM (.*)\n((?:(?!FROM ).*\n)*)", DOCKERFILE, re.MULTILINE)
}


def instructions(name: str, stage: str | None = None) -> list[str]:
    return re.findall(rf"^ *{name} (.*)$", STAGES[stage] if stage else DOCKERFILE, re.MULTILINE)


def test_the_image_is_made_of_what_there_is() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    sources = [name for copy in instructions("COPY") if "--from" not in copy for name in copy.split()[:-1]]
    assert len(sources) > 5
    for name in sources:
        assert (ROOT / name).exists() and f"!{name}" in ignored
    assert instructions("USER") == ["symbiosis"], "nothing of it runs as root"
    assert 'install --no-cache-dir "$@" ".[serve]"' in STAGES["build"]
    assert f'echo "$COMMIT" > symbiosis/{STAMP.name}' in STAGES["build"], "there is no .git to ask"


@pytest.mark.parametrize(
    ("stage", "entry", "port"),
    [("executor", ["symbiosis-executor"], 9400), ("serve", ["symbiosis", "serve"], 8000), ("cluster", ["symbiosis", "cluster", "up"], 8000)],
)  # fmt: skip
def test_each_image_runs_a_command_that_there_is(stage: str, entry: list[str], port: int) -> None:
    (told,), (health,), (command,) = (
        instructions(name, stage) for name in ("ENTRYPOINT", "HEALTHCHECK", "CMD(?= \\[.[a-z/])")
    )
    assert json.loads(told) == entry
    found: Any = get_command(executor_app if stage == "executor" else app)
    for word in entry[1:]:
        found = found.commands[word]
    known = {name for parameter in found.params for name in parameter.opts}
    words = json.loads(command)
    assert {word for word in words if word.startswith("--")} <= known
    assert f"127.0.0.1:{port}/health" in health, "where it answers"
    if stage != "cluster":  # its file says where
        assert words[words.index("--port" if stage == "serve" else "--metrics-port") + 1] == str(port)
        assert stage != "serve" or words[words.index("--host") + 1] == "0.0.0.0", "it can be published"


def test_the_image_without_a_target_is_that_of_an_executor() -> None:
    assert list(STAGES)[-1] == "executor" and {"FROM installed AS serve", "FROM installed AS cluster"} <= set(
        DOCKERFILE.splitlines()
    )


def test_the_composition_is_one_of_these_images() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    executor, client, server = (compose["services"][name] for name in ("executor", "client", "serve"))
    for service, image in ((executor, "symbiosis"), (client, "symbiosis"), (server, "symbiosis-serve")):
        assert service["image"] == image and service["read_only"] and service["cap_drop"] == ["ALL"]
        mounts = [volume.split(":")[0] for volume in service.get("volumes", [])]
        assert all(mount in compose["volumes"] or (DEPLOY / mount).is_dir() for mount in mounts)
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).samefile(
                DEPLOY / "Dockerfile"
            )
            assert service["build"]["target"] in STAGES
    assert f"{instructions('VOLUME')[0]}" in executor["volumes"][0]
    assert (ROOT / client["entrypoint"][1].lstrip("/")).is_file()
    uid = re.findall(r"useradd --uid (\d+)", DOCKERFILE)[0]
    assert f"/work:uid={uid}" in client["tmpfs"] and any(f"uid={uid}" in each for each in server["tmpfs"])
    assert instructions("EXPOSE", "serve")[0] == server["ports"][0].rpartition(":")[2]


UNITS = {"executor": "symbiosis-executor", "serve": "symbiosis serve", "cluster": "symbiosis cluster up"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("name", UNITS)
def test_units_are_those_of_systemd_and_leave_little_open(name: str, tmp_path: Path) -> None:
    unit = tmp_path / f"symbiosis-{name}.service"
    text = (DEPLOY / unit.name).read_text()
    unit.write_text(re.sub(r"/opt/symbiosis/bin/\S+", shutil.which("true") or "", text))
    check = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=60)
    assert (check.returncode, check.stdout + check.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=true", unit]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert float(re.findall(r"exposure level.*: ([\d.]+)", told)[0]) < 3


@pytest.mark.parametrize(("name", "command"), UNITS.items())
def test_units_start_and_end_as_the_commands_do(name: str, command: str) -> None:
    text = (DEPLOY / f"symbiosis-{name}.service").read_text()
    assert f"ExecStart=/opt/symbiosis/bin/{command} " in text
    assert "RestartPreventExitStatus=2" in text, "as wrong options end it"
    assert ("KillMode=mixed" in text) == (name != "executor"), (
        "those that have started others tell them to end, in their order"
    )


def test_the_configuration_file_of_the_docs_is_right(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```yaml\n(model: .*?)```", (ROOT / "docs/install.md").read_text(), re.DOTALL)
    file = tmp_path / "executor.yaml"
    file.write_text(shown)
    options: Any = load_options({}, file)
    assert options.model and len(options.listen) == 2 and options.key and options.metrics_port
