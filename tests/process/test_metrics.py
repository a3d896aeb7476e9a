"""The daemon's Prometheus metrics and its log tell what happened: sizes, names and codes, never what calls hold."""

import json
import os
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

from symbiosis import transport
from symbiosis.client.session import Session
from symbiosis.errors import CallError
from symbiosis.executor.call_kinds import DeviceCall, Round, RoundKey
from symbiosis.executor.calls.call_plan import make_plan
from symbiosis.executor.ledger import Ledger
from symbiosis.executor.model.store import Store
from symbiosis.executor.observe.prometheus import PrometheusCollector
from symbiosis.executor.options import Options
from symbiosis.protocol import Call, Hello, Op, Reply
from symbiosis.transport.base import RoundWords
from tests.processes import WAIT_S, Executor, until

LAYER = "model.layers.0.self_attn.q_proj"
Sample = dict[tuple[str, ...], float]


@dataclass
class Daemon:
    """A running `symbiosis-executor demo`."""

    process: Executor
    metrics_port: int
    log: list[str] = field(default_factory=list)

    def scrape(self) -> dict[str, Sample]:
        """Metric name -> label values -> value."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=WAIT_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        found: dict[str, Sample] = {}
        for sample in (sample for family in families for sample in family.samples):
            values = found.setdefault(sample.name, {})
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            assert labels not in values, f"{sample.name} has two values for {labels}"
            values[labels] = sample.value
        return found

    def stop(self) -> list[dict[str, Any]]:
        """End it; its log, if that is JSON."""
        status, written = self.process.stop(), self.process.log.read_text()
        assert status == 0, written
        self.log = [line for line in written.splitlines() if "Loading weights" not in line]
        return [json.loads(line) for line in self.log if line.startswith("{")]


@contextmanager
def daemon(tmp_path: Path, *options: str) -> Iterator[Daemon]:
    listen = ["--listen", f"local://{tmp_path}/executor.sock", "--listen", "tcp://127.0.0.1:0"]
    process = Executor("demo", *listen, "--metrics-port", "0", *options, log=tmp_path / "executor.log")
    try:
        assert process.line.startswith("symbiosis-executor ready"), process.log.read_text()
        (port,) = re.findall(r"http://127.0.0.1:(\d+)/metrics", process.log.read_text())
        yield Daemon(process, int(port))
    finally:
        process.kill()


def test_prometheus(tmp_path: Path) -> None:
    with daemon(tmp_path) as executor:
        idle = executor.scrape()
        local, tcp = (Session(endpoint) for endpoint in executor.process.endpoints)
        layer = next(index for index, entry in enumerate(local.manifest) if entry.name == LAYER)
        width = local.manifest[layer].shape[1]
        for rows in (3, 5):
            local.call(Op.FORWARD, layer, torch.ones(rows, width))
        tcp.call(Op.DGRAD, layer, torch.ones(2, local.manifest[layer].shape[0]))
        tcp.call(Op.ECHO, 0, torch.ones(1, 4))
        with pytest.raises(CallError):
            tcp.call(Op.FORWARD, layer, torch.ones(1, width + 1))
        seen = executor.scrape()
        local.close()
        tcp.close()
        until(lambda: sum(executor.scrape()["symbiosis_sessions"].values()) == 0, "the end of the sessions")
    forward, backward = (LAYER, "FORWARD"), (LAYER, "DGRAD")
    assert "symbiosis_calls_total" not in idle
    assert seen["symbiosis_calls_total"] == {forward: 2, backward: 1, ("", "ECHO"): 1}
    assert seen["symbiosis_rows_total"] == {forward: 8, backward: 2, ("", "ECHO"): 1}
    assert seen["symbiosis_batches_total"] == {forward: 2, backward: 1, ("", "ECHO"): 1}
    assert (
        seen["symbiosis_compute_seconds_total"].keys()
        == seen["symbiosis_wait_seconds_total"].keys()
        == {forward, backward, ("", "ECHO")}
    )
    assert 0 < seen["symbiosis_compute_seconds_total"][forward] < 10
    out = local.manifest[layer].shape[0]
    assert seen["symbiosis_bytes_total"] == {
        ("local",): 4 * 8 * (width + out),
        ("tcp",): 4 * 2 * (width + out) + 2 * 16,
    }
    assert seen["symbiosis_errors_total"] == {("BAD_SHAPE",): 1}
    assert seen["symbiosis_sessions"] == {("local",): 1, ("tcp",): 1}
    assert seen["symbiosis_dropped_sessions_total"] == {(): 0}
    assert seen["symbiosis_queue_depth"] == {(): 0}
    assert idle["symbiosis_sessions"] == {("local",): 0, ("tcp",): 0}
    assert set(seen["symbiosis_batch_size_bucket"].values()) == {4}
    assert seen["symbiosis_batch_size_count"] == seen["symbiosis_batch_size_sum"] == {(): 4}
    assert seen["symbiosis_weights_bytes"] == {(): 4 * sum(torch.Size(entry.shape).numel() for entry in local.manifest)}
    assert seen["symbiosis_resident_bytes"][()] > seen["symbiosis_weights_bytes"][()]
    assert seen["symbiosis_uptime_seconds"][()] > idle["symbiosis_uptime_seconds"][()]


def test_the_histogram_counts_calls_per_product(llama: nn.Module, serve: Callable) -> None:
    """It says the same as the replies, each of which tells its client with how many calls it ran."""
    executor = serve(llama, policy="lockstep")
    clients = [Session(executor.endpoint) for _ in range(3)]
    layer = next(index for index, entry in enumerate(clients[0].manifest) if entry.name == LAYER)

    together = threading.Barrier(3)

    def run(client: Session) -> None:
        together.wait(60)
        for _ in range(100):  # so many that none is through before the others have begun
            client.call(Op.FORWARD, layer, torch.ones(2, 64))
        client.close()

    threads = [threading.Thread(target=run, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    families = {family.name: family for family in PrometheusCollector(executor.server.snapshot).collect()}
    samples = families["symbiosis_batch_size"].samples
    up_to = {sample.labels["le"]: sample.value for sample in samples if sample.name.endswith("_bucket")}
    products = {1: up_to["1"], 2: up_to["2"] - up_to["1"], 3: up_to["4"] - up_to["2"]}
    assert products[2] + products[3] > 0
    assert up_to["+Inf"] == up_to["64"] == up_to["4"]
    assert sum(size * count for size, count in products.items()) == 300
    assert [sample.value for sample in samples if sample.name.endswith("_sum")] == [300]
    assert sum(size**2 * count for size, count in products.items()) == sum(c.stats.batched_calls for c in clients)


def test_the_log_tells_who_came_left_and_was_refused(tmp_path: Path) -> None:
    with daemon(tmp_path, "--log-format", "json") as executor:
        local, tcp = executor.process.endpoints
        with pytest.raises(CallError):
            assert Session(tcp, fingerprint="of another model").welcome
        client = Session(tcp)
        layer = next(index for index, entry in enumerate(client.manifest) if entry.name == LAYER)
        width = client.manifest[layer].shape[1]
        client.call(Op.FORWARD, layer, torch.full((2, width), 0.123456))
        for _ in range(5):
            with pytest.raises(CallError):
                client.call(Op.FORWARD, layer, torch.full((2, width + 1), 0.123456))
        number = client.welcome.session
        client.close()
        until(lambda: sum(executor.scrape()["symbiosis_sessions"].values()) == 0, "the end of the sessions")
        log = executor.stop()
    events = {event: [entry for entry in log if entry["event"] == event] for event in {entry["event"] for entry in log}}
    assert events.keys() == {
        "pages",
        "memory",
        "join refused",
        "session joined",
        "call refused",
        "session left",
        "stopped",
    }
    (plan,) = events["memory"]
    assert plan["weights_mib"] == 7 and plan["session_at_most_mib"] == 2048 and plan["sessions"] == 256
    assert 0 < plan["free_mib"] < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    assert [(e["code"], e["transport"], e["level"]) for e in events["join refused"]] == [
        ("WRONG_MODEL", "tcp", "warning")
    ]
    assert [(e["session"], e["client"], e["observer"]) for e in events["session joined"]] == [
        (number, f"pid {os.getpid()}", False)
    ]
    refused = events["call refused"]
    assert [entry["refused"] for entry in refused] == [1, 2, 4]
    assert {(e["code"], e["op"], e["layer"], tuple(e["shape"])) for e in refused} == {
        ("BAD_SHAPE", "FORWARD", LAYER, (2, width + 1))
    }
    (left,) = events["session left"]
    assert (left["calls"], left["rows"], left["bytes"], left["refused"]) == (1, 2, 2 * width * 4, 5)
    assert "0.123" not in "".join(executor.log)


def test_a_silent_client_is_dropped_and_that_is_logged(tmp_path: Path) -> None:
    with daemon(tmp_path, "--heartbeat-s", "0.5") as executor:
        connection = transport.connect(
            executor.process.endpoints[0], Hello(client="mute\n12:00:00 INFO forged"), WAIT_S
        )
        until(lambda: executor.scrape()["symbiosis_dropped_sessions_total"] == {(): 1}, "the end of a silent client")
        connection.close()
        executor.stop()
    lines = [line for line in executor.log if " session " in line]
    assert [re.sub(r"^\d\d:\d\d:\d\d ", "", line).partition(" session=")[0] for line in lines] == [
        "INFO session joined", "WARNING session dropped", "INFO session left",
    ]  # fmt: skip
    assert 'client="mute?12:00:00 INFO forged"' in lines[0]  # no control characters, and no line of its own


def test_each_call_of_a_round_counts() -> None:
    """Of two sessions whose steps make the same three calls, together and alone."""
    store = Store(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2))))
    ledger = Ledger(store, lambda peer, act, *words: act(*words))
    calls = tuple(Call(Op.FORWARD, layer, "float32", (2, 8)) for layer in (0, 1, 0))
    peer: Any = SimpleNamespace(transport="cuda", session=None, count=lambda together, calls: None)
    rows = (torch.empty(2, 8),)
    members = tuple(
        DeviceCall(
            peer=peer,
            plan=make_plan(call, store, Options()),
            number=1,
            priority=0,
            call=call,
            payload=rows,
            results=rows,
        )
        for call in calls
    )
    work = Round(RoundKey(("round",)), members, RoundWords(torch.zeros(1), torch.zeros(1), 0))
    plan = work.plan
    assert (plan.rows, plan.calls, plan.nbytes, plan.moved) == (2, 3, 3 * 2 * 8 * 4, 3 * 2 * 2 * 8 * 4)
    ledger.together([work, work], wait_s=0.5, seconds=3.0)
    ledger.answered_alone(work, Reply(0))
    ledger.answered(work, Reply(0, wait_us=500_000))
    totals = {layer: ledger.totals[layer, Op.FORWARD] for layer in (0, 1)}
    assert [(totals[n].calls, totals[n].rows, totals[n].batches) for n in (0, 1)] == [(8, 16, 4), (4, 8, 2)]
    assert totals[0].compute_s == 2 * totals[1].compute_s == 2.0 and totals[0].wait_s == 1.0
    assert ledger.batch_sizes == {2: 3, 1: 3}
    assert ledger.bytes == {"cuda": 4 * plan.moved}
