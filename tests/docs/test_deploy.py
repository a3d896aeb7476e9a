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
from symbiosis.cli import executor_app
from symbiosis.config import load_options
from symbiosis.errors import Code
from symbiosis.executor.observe.prometheus import PrometheusCollector

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text())
RULES = [rule for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]] + [r["expr"] for r in RULES]
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
OF_PROMETHEUS = {"instance", "job", "le"}


@pytest.fixture
def metrics(llama: nn.Module, serve: Callable) -> dict[str, set[str]]:
    """Every series of an executor that has answered something, with its labels."""
    executor = serve(llama)
    model = symbiosis.from_executor(executor.endpoint)
    model(model.dummy_inputs["input_ids"])
    found: dict[str, set[str]] = {}
    for family in PrometheusCollector(executor.server.snapshot).collect():
        labels = {label for sample in family.samples for label in sample.labels} | set(
            getattr(family, "_labelnames", ())
        )
        found |= {family.name + suffix: labels for suffix in SUFFIXES.get(family.type, [""])}
    return found


@pytest.mark.parametrize("query", QUERIES)
def test_queries_name_metrics_and_labels_that_there_are(query: str, metrics: dict[str, set[str]]) -> None:
    named = set(re.findall(r"\bsymbiosis_\w+", query))
    assert named or "up{" in query
    assert named <= metrics.keys()
    labels = {label for inside in re.findall(r"\{([^}]*)\}", query) for label in re.findall(r"(\w+)\s*[=!]~?", inside)}
    labels |= {label.strip() for inside in re.findall(r"\bby \(([^)]*)\)", query) for label in inside.split(",")}
    for name in named:
        assert labels - OF_PROMETHEUS <= metrics[name]
    for codes in re.findall(r'code[=!]~?"([^"]*)"', query):
        assert set(codes.split("|")) <= Code.__members__.keys()


def test_the_check_of_queries_would_notice_a_wrong_name(metrics: dict[str, set[str]]) -> None:
    assert "symbiosis_calls" not in metrics and metrics["symbiosis_calls_total"] == {"layer", "op"}
    assert len(metrics) > 12


def test_alerts_say_what_to_look_at() -> None:
    assert len(RULES) > 5 and len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "look") and "$labels.instance" in rule["annotations"]["summary"]
    (file,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["rule_files"]
    assert (DEPLOY / file).is_file()


@pytest.mark.parametrize("file", ["grafana.json", "grafana-serving.json"])
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


def instructions(name: str) -> list[str]:
    return re.findall(rf"^ *{name} (.*)$", DOCKERFILE, re.MULTILINE)


def test_the_image_is_made_of_what_there_is() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    sources = [name for copy in instructions("COPY") if "--from" not in copy for name in copy.split()[:-1]]
    assert len(sources) > 5
    for name in sources:
        assert (ROOT / name).exists() and f"!{name}" in ignored
    assert instructions("USER") == ["symbiosis"], "nothing of it runs as root"
    known = {name for parameter in get_command(executor_app).params for name in parameter.opts}
    (command,) = map(json.loads, [c for c in instructions("CMD") if "demo" in c])
    assert {word for word in command if word.startswith("--")} <= known
    port = command[command.index("--metrics-port") + 1]
    assert f"127.0.0.1:{port}/" in instructions("HEALTHCHECK")[0], "the health check asks where metrics are"
    assert json.loads(instructions("ENTRYPOINT")[0]) == ["symbiosis-executor"]


def test_the_composition_is_one_of_this_image() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    executor, client = compose["services"]["executor"], compose["services"]["client"]
    assert (DEPLOY / executor["build"]["context"] / executor["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    for service in (executor, client):
        assert service["image"] == "symbiosis" and service["read_only"] and service["cap_drop"] == ["ALL"]
        mounts = [volume.split(":")[0] for volume in service["volumes"]]
        assert all(mount in compose["volumes"] or (DEPLOY / mount).is_dir() for mount in mounts)
    assert f"{instructions('VOLUME')[0]}" in executor["volumes"][0]
    assert (ROOT / client["entrypoint"][1].lstrip("/")).is_file()
    uid = re.findall(r"useradd --uid (\d+)", DOCKERFILE)[0]
    assert f"/work:uid={uid}" in client["tmpfs"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_unit_is_one_of_systemds_and_leaves_little_open(tmp_path: Path) -> None:
    unit = tmp_path / "symbiosis-executor.service"
    text = (DEPLOY / unit.name).read_text()
    unit.write_text(text.replace("/opt/symbiosis/bin/symbiosis-executor", shutil.which("true") or ""))
    check = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=60)
    assert (check.returncode, check.stdout + check.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=true", unit]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert float(re.findall(r"exposure level.*: ([\d.]+)", told)[0]) < 3


def test_the_unit_ends_as_the_command_does() -> None:
    text = (DEPLOY / "symbiosis-executor.service").read_text()
    assert "RestartPreventExitStatus=2" in text, "as wrong options end it"
    assert "/opt/symbiosis/bin/symbiosis-executor --config" in text


def test_the_configuration_file_of_the_docs_is_right(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```yaml\n(model: .*?)```", (ROOT / "docs/install.md").read_text(), re.DOTALL)
    file = tmp_path / "executor.yaml"
    file.write_text(shown)
    options: Any = load_options({}, file)
    assert options.model and len(options.listen) == 2 and options.key and options.metrics_port
