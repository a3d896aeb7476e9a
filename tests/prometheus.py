"""A real Prometheus for tests: Debian's package, started on a configuration, and asked by its API."""

import contextlib
import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.serving_api import eventually

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(None in (PROMETHEUS, PROMTOOL), reason="needs Debian's package prometheus")
DEPLOY = Path(__file__).parents[1] / "deploy"


@dataclass
class Prometheus:
    """One that runs."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an expression now: their labels under `metric`, and their `value`, which no result lacks."""
        with urllib.request.urlopen(
            f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}", timeout=10
        ) as answer:
            told = json.load(answer)["data"]
        assert told["resultType"] == "vector", expression
        return [each for each in told["result"] if each["value"][1] != "NaN"]

    def value(self, expression: str) -> float | None:
        """Return the one value of an expression, None while there is none."""
        found = self.query(expression)
        assert len(found) < 2, found
        return float(found[0]["value"][1]) if found else None


@contextlib.contextmanager
def prometheus(folder: Path, configuration: dict[str, Any]) -> Iterator[Prometheus]:
    """Run a Prometheus until the end of the block."""
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(configuration))
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [
        str(PROMETHEUS), f"--config.file={file}", f"--storage.tsdb.path={folder}/tsdb", f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        running = Prometheus(f"http://127.0.0.1:{port}")
        eventually(lambda: is_ready(running.url) or process.poll() is not None)
        assert process.poll() is None, (folder / "prometheus.log").read_text()
        yield running
    finally:
        process.terminate()
        process.wait(30)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def panels(file: str) -> list[dict[str, Any]]:
    """Return the panels of a dashboard."""
    return list(json.loads((DEPLOY / file).read_text())["panels"])


def filled_in(query: str, instance: str = ".*") -> str:
    """Return a dashboard's query as Grafana would ask it."""
    return query.replace("$__rate_interval", "10s").replace("$instance", instance)
