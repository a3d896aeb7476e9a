"""The process of `cluster up` is killed: what its processes have begun is finished, and then they end."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Running, cluster
from tests.serving_api import client, eventually

FILE = """
port: 0
drain_s: 100
models:
  demo:
    servers: 2
    executor: {share-weights: false, batch-invariant: true}
    server: {memory: 64MiB, max-batch: 4}
"""
LONG: dict[str, Any] = {"model": "demo", "prompt": "def average(numbers):", "max_tokens": 120, "temperature": 0, "extra_body": {"ignore_eos": True}}  # fmt: skip
STREAMS = 10  # more than both servers run at once
pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]


@pytest.fixture
def running(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:  # fmt: skip
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("up")))  # the paths of sockets are short
    with cluster(tmp_path, FILE, forked=True) as found:
        yield found


def test_streams_outlive_cluster_up(running: Running, tmp_path: Path) -> None:
    """Those under way, and those that wait for a server; executors, whose clients map nothing here, are there until the end."""
    wanted = client(running.url).completions.create(**LONG).choices[0].text
    found: list[str] = [""] * STREAMS
    problems: list[Exception] = []

    def read(number: int) -> None:
        try:
            for event in client(running.url).completions.create(**LONG, stream=True):
                found[number] += event.choices[0].text
        except Exception as error:
            problems.append(error)

    reading = [threading.Thread(target=read, args=[number]) for number in range(STREAMS)]
    for thread in reading:
        thread.start()
    eventually(lambda: sum(map(bool, found)) >= 4)
    pids = [each.pid for each in running.told.members]
    running.process.kill()
    running.process.wait()
    for thread in reading:
        thread.join(100)
    log = (tmp_path / "stderr").read_text()
    assert not problems and found == [wanted] * STREAMS, (problems, log)
    eventually(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()])
    assert len(re.findall("is gone", log)) == 4 and "ended at once" not in (tmp_path / "stderr").read_text()
