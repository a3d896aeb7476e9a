"""The process of a front end by itself, as it starts and ends."""

import os
import signal
import socket
from pathlib import Path
from subprocess import PIPE

import msgspec

from symbiosis.base.procs import Child, program
from symbiosis.cluster.router.router_options import RouterOptions
from tests.serving_api import WAIT_S, web

EXPORTER = """
import os
class ToFile:
    def export(self, spans):
        with open(os.environ["SPANS"], "a") as file:
            file.writelines(f"{span.context.trace_id:032x} {span.name}\\n" for span in spans)
    def shutdown(self):
        pass
"""
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_spans_are_sent_before_it_ends_and_no_sighup_ends_it(tmp_path: Path) -> None:
    (tmp_path / "spans_to_file.py").write_text(EXPORTER)
    (tmp_path / "spans_to_file-1.dist-info").mkdir()
    entry = "[opentelemetry_traces_exporter]\nto_file = spans_to_file:ToFile\n"
    (tmp_path / "spans_to_file-1.dist-info" / "entry_points.txt").write_text(entry)
    (tmp_path / "spans_to_file-1.dist-info" / "METADATA").write_text("Name: spans_to_file\nVersion: 1\n")
    asked = {
        "XDG_RUNTIME_DIR": str(tmp_path), "PYTHONPATH": str(tmp_path), "SPANS": str(tmp_path / "spans"),
        "OTEL_TRACES_EXPORTER": "to_file", "OTEL_BSP_SCHEDULE_DELAY": "60000",
    }  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as listener:
        started = RouterOptions(cluster="alone", listener=listener.fileno())
        words = program("symbiosis.cluster.router.router_process:main", msgspec.json.encode(started).decode())
        child = Child(words, descriptors=[listener.fileno()], environment={**os.environ, **asked}, stdout=PIPE)
        try:
            with child.stdout:
                url = child.stdout.readline().decode().split(" at ")[1].strip()
                child.signal(signal.SIGHUP)
                headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
                assert web.get(f"{url}/v1/models", headers=headers, timeout=WAIT_S).status_code == 200
        finally:
            child.stop(WAIT_S)
    assert (tmp_path / "spans").read_text() == f"{TRACE} GET /v1/models\n"
