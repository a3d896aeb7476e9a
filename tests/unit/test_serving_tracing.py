"""Whether traces are followed: only where the environment asks for them, and what keeps them from it is said."""

import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from symbiosis.server import tracing
from symbiosis.server.request_record import RequestRecord

EXPORTER = '''"""An exporter of spans, as a package of somebody's would have it."""
told = []
class Kept:
    def export(self, spans):
        told.extend((span.name, span.resource.attributes["service.name"]) for span in spans)
    def shutdown(self):
        pass
'''


@pytest.fixture(autouse=True)
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*tracing.WANTED, "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("given", [{}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"}])  # fmt: skip
def test_nothing_is_loaded_where_nobody_asks_for_traces(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert tracing.opened("symbiosis-test") is None
    assert not [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]


@pytest.mark.parametrize("given", [{"OTEL_TRACES_EXPORTER": "nobodys"}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "nobodys"}])  # fmt: skip
def test_what_keeps_traces_from_being_sent_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: dict[str, str]
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert tracing.opened("symbiosis-test") is None
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "[otel]" in record.getMessage() and "nobodys" in record.getMessage()


@pytest.mark.parametrize(
    ("given", "service"), [({}, "symbiosis-test"), ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine"}, "mine")]
)
def test_spans_go_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], service: str
) -> None:
    name = f"kept_{service.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(EXPORTER)
    (tmp_path / f"{name}-1.dist-info").mkdir()
    entry = f"[opentelemetry_traces_exporter]\n{name} = {name}:Kept\n"
    (tmp_path / f"{name}-1.dist-info" / "entry_points.txt").write_text(entry)
    (tmp_path / f"{name}-1.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for variable, value in {"OTEL_TRACES_EXPORTER": name, "OTEL_BSP_SCHEDULE_DELAY": "10", **given}.items():
        monkeypatch.setenv(variable, value)
    made = tracing.opened("symbiosis-test")
    assert made is not None
    record, scope = RequestRecord(status=200), {"method": "GET", "path": "/v1/models"}
    made.end(record, made.begin(record, scope), "/v1/models")
    assert record.trace_headers["traceparent"]
    told: Any = sys.modules[name].__dict__["told"]
    ends = time.monotonic() + 10
    while not told and time.monotonic() < ends:
        time.sleep(0.01)
    assert told == [("GET /v1/models", service)]
