"""A cluster on Ray, whose nodes are processes of this host: the same commands, and nothing is left when it has ended, however it ends."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.tools.cluster.process import descendants
from tests.cluster import Running, cluster
from tests.serving_api import client

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
FILE = """
port: 0
frozen_s: 4
backend: ray
models:
  demo:
    executors: 2
    servers: [2, 3]
    executor: {batch-invariant: true}
    server: {memory: 64MiB, max-batch: 16}
"""
PROMPT = "def average(numbers):"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two nodes, the first of which has the head and is that of the tests."""
    from ray.cluster_utils import Cluster

    folder = tmp_path_factory.mktemp("ray")
    before = {name: os.environ.get(name) for name in ("XDG_RUNTIME_DIR", "RAY_ADDRESS", "PYTHONPATH")}
    os.environ.update(XDG_RUNTIME_DIR=str(folder), PYTHONPATH=os.pathsep.join(sys.path))
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    started.add_node(num_cpus=3)
    os.environ["RAY_ADDRESS"] = started.address
    try:
        yield started
    finally:
        started.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(scope="module")
def running(nodes: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with cluster(tmp_path_factory.mktemp("cluster"), FILE) as found:
        yield found


def command(*words: str, **more: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "symbiosis", "cluster", *words], capture_output=True, text=True, timeout=120, **more
    )


def pids(running: Running) -> list[int]:
    """All processes of the cluster that are not its own children."""
    members = [each.pid for each in running.told.members]
    return [*members, *(child for pid in members for child in descendants(pid))]


def are_gone(found: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in found)


def text_of(running: Running, **fields: Any) -> str:
    answer = client(running.url).completions.create(
        model="demo", prompt=PROMPT, temperature=0, **{"max_tokens": 40, **fields}
    )
    return str(answer.choices[0].text)


def test_it_serves_from_all_nodes(running: Running) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    ids = torch.tensor([list(PROMPT.encode())])
    told = model.generate(ids, max_new_tokens=40, do_sample=False)[0, len(PROMPT) :]
    assert text_of(running) == AutoTokenizer.from_pretrained(DEMO_MODEL).decode(told)
    hosts = {each.url.partition("://")[2].rpartition(":")[0] for each in running.servers()}
    assert len(hosts) == 2 and "127.0.0.1" in hosts, "one here, and one that is reached over the network"
    told = json.loads(command("status", "--json").stdout)
    assert [each["state"] for each in told["members"]] == ["ready"] * 5
