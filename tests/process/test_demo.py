"""`symbiosis demo`: it runs, its verdict is earned, and it leaves nothing behind."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from symbiosis.base import procs
from symbiosis.base.procs import exit_at
from symbiosis.cli.top import snapshot
from symbiosis.client.session import Session
from symbiosis.demo.compare import Comparison, Result, hold_against, same_bits
from symbiosis.demo.enlarge import enlarge
from symbiosis.demo.processes import Participant, ProcessError, clients, executor
from symbiosis.demo.programs import TRAINER, DemoResults, report
from symbiosis.demo.trainer import BATCH, HELD_OUT, LENGTH, examples
from symbiosis.executor.model.load import DEMO_MODEL, load_model
from tests.forked import Symbiosis, Template
from tests.processes import Process, Program, killed_at_the_end, run, until

STEPS, TOKENS = 6, 12


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the demo's processes have: threads decide how a product rounds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("one_thread")
def test_demo(tmp_path: Path) -> None:
    words = ("--layers", "5", "--steps", str(STEPS), "--tokens", str(TOKENS), "--keep", str(tmp_path))
    demo = Symbiosis("demo", *words, errors=tmp_path / "stderr")
    with closing(demo.stdout) as stdout:
        told = stdout.read()
    assert demo.wait() == 0, told + (tmp_path / "stderr").read_text()
    assert "\x1b" not in told
    report = json.loads((tmp_path / "report.json").read_text())
    figures = report["figures"]
    assert report["script"] == "demo" and all(bar["holds"] for bar in report["bars"])
    compared = {(c["model"], c["what"]): c for c in figures["comparisons"]}
    assert compared.keys() == {(model, what) for model in ("base", "lora") for what in ("logits", "tokens")} | {
        ("lora", "gradients")
    }
    assert all(c["identical"] and c["difference"] == 0 and c["values"] > 30 for c in compared.values())
    trainer, *writers = figures["clients"].values()
    assert trainer["done"] == STEPS and trainer["held_out_after"] < trainer["held_out_before"]
    assert [writer["done"] for writer in writers] == [TOKENS, TOKENS]
    base = figures["executor"]["weights_bytes"]
    assert figures["executor"]["calls"] == sum(client["calls"] for client in figures["clients"].values())
    assert all(client["base_bytes"] < base / 100 for client in figures["clients"].values())
    assert base > 300 << 20 and figures["copied_bytes"] - figures["shared_bytes"] > base / 2
    assert f"{figures['copied_bytes'] / 2**30:.1f} GiB, and" in told
    assert len(set(figures["texts"].values())) == 2


@pytest.mark.full
def test_the_base_is_larger_and_writes_the_same(tmp_path: Path) -> None:
    enlarge(tmp_path, 6)
    small, large = load_model("demo"), load_model(str(tmp_path))
    ids = AutoTokenizer.from_pretrained(tmp_path)("The statement raises", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(large(ids).logits, small(ids).logits, rtol=1e-3, atol=1e-3)
    tokens = [model.generate(ids, max_new_tokens=20, do_sample=False).tolist() for model in (small, large)]
    assert tokens[0] == tokens[1]
    added = large.model.layers[5].mlp.gate_proj.weight
    assert large.num_parameters() > 50 * small.num_parameters() and added.count_nonzero() > 0.99 * added.numel()


@pytest.mark.full
@pytest.mark.timeout(200)
def test_sigterm_ends_all_its_processes() -> None:
    """Also when it comes twice, as from `timeout N make demo`."""
    with killed_at_the_end() as processes:
        processes.append(Program("demo", "--layers", "5", "--steps", "1000"))
        demo = psutil.Process(processes[0].pid)
        until(lambda: len(demo.children()) == 4, "a start of all", 100)
        children = demo.children()
        processes[0].signal(signal.SIGTERM)
        time.sleep(0.05)  # the first one is being answered
        processes[0].signal(signal.SIGTERM)
        assert processes[0].wait() == 143
        assert not any(child.is_running() for child in children)


def test_a_client_that_fails_is_shown(tmp_path: Path) -> None:
    failing = ["-c", "import sys; print('{\"done\": 1}'); sys.exit('the reason')"]
    with (
        clients({"failing": failing}, tmp_path) as (child,),
        pytest.raises(ProcessError, match="status 1.*\n.*the reason"),
    ):
        while child.still_runs():
            time.sleep(0.01)
    assert child.ready


def test_a_client_that_is_killed_is_shown(tmp_path: Path) -> None:
    killed = {"killed": ["-c", "import os; os.kill(os.getpid(), 9)"]}
    with clients(killed, tmp_path) as (child,), pytest.raises(ProcessError, match="killed was killed by SIGKILL"):
        while child.still_runs():
            time.sleep(0.01)


def test_an_executor_that_does_not_start_is_shown(tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("no socket")
    with (
        pytest.raises(ProcessError, match="exists and is not a socket"),
        executor(tmp_path, "demo", "--listen", f"local://{tmp_path}/occupied"),
    ):
        pass


SLOW = """
import pathlib, signal, sys, time
def end(*_):
    pathlib.Path("told").touch()
    time.sleep(3)
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("here", flush=True)
time.sleep(60)
"""


def ends_what_it_started(folder: Path) -> None:
    exit_at(signal.SIGTERM)
    os.chdir(folder)
    with clients({"slow": ["-c", SLOW]}, folder) as (child,):
        (folder / "pid").write_text(str(child.pid))
        until(lambda: child.lines, "a start")


def test_sigterm_during_an_ordinary_end_leaves_nothing(tmp_path: Path, processes: list) -> None:
    processes.append(Process(ends_what_it_started, tmp_path))
    until((tmp_path / "told").exists, "the end of the child")
    processes[0].signal(signal.SIGTERM)
    assert processes[0].wait() == 143
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_what_it_has_started_ends_when_it_is_killed(tmp_path: Path, processes: list) -> None:
    """A client that waits for its start, and an executor."""
    processes.append(Process(runs_until_it_is_killed, tmp_path))
    until((tmp_path / "pids").exists, "that all run")
    pids = list(map(int, (tmp_path / "pids").read_text().split()))
    processes[0].signal(signal.SIGKILL)
    until(lambda: not any(map(psutil.pid_exists, pids)), "that they end")


def runs_until_it_is_killed(folder: Path) -> None:
    procs.Popen = Template().popen  # type: ignore[assignment, misc]
    waiting = "from symbiosis.demo.events import EventOutput; EventOutput().wait_for_start()"
    with (
        executor(folder, "demo", "--listen", f"local://{folder}/x") as daemon,
        clients({"waiting": ["-c", waiting]}, folder) as (child,),
    ):
        until(lambda: child.ready, "a client")
        (folder / "new").write_text(f"{daemon.pid} {child.pid}")
        (folder / "new").rename(folder / "pids")
        time.sleep(600)


def test_a_child_waits_for_its_start(tmp_path: Path) -> None:
    waiting = "from symbiosis.demo.events import EventOutput; e = EventOutput(); e.wait_for_start(step=1); print('x'); e.send(step=2)"
    child = Participant("waiting", ["-c", waiting], tmp_path)
    try:
        while child.still_runs() and not child.ready:
            time.sleep(0.01)
        time.sleep(0.3)
        assert child.state["step"] == 1
        child.start()
        while child.still_runs():
            time.sleep(0.01)
        assert child.state["step"] == 2 and child.state["rss_bytes"] > 1 << 20
        assert not child.lines and (tmp_path / "waiting.stderr").read_text().endswith("x\n")
    finally:
        child.close()


def test_one_bit_is_a_difference() -> None:
    expected = Result({"logits": [torch.ones(4)], "gradients": [torch.zeros(2), torch.ones(3)]}, "")
    changed = torch.ones(3)
    changed.view(torch.int32)[1] += 1
    got = Result({"logits": [torch.ones(4)], "gradients": [torch.zeros(2), changed]}, "")
    logits, gradients = hold_against("model", expected, got)
    assert (logits.identical, logits.values, logits.difference) == (True, 4, 0.0)
    assert (gradients.identical, gradients.values) == (False, 5)
    assert 0 < gradients.difference < 1e-6
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(3))
    assert same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))


@pytest.mark.parametrize(
    ("identical", "after", "status"), [(True, 0.9, 0), (False, 0.9, 1), (True, 1.1, 1), (True, 1.0, 1)]
)
def test_the_exit_status_is_the_verdict(
    identical: bool, after: float, status: int, capsys: pytest.CaptureFixture[str], llama: nn.Module, serve: Callable
) -> None:
    session = Session(serve(llama).endpoint, observer=True)
    client = {"held_out_before": 1.0, "held_out_after": after, "rss_bytes": 2, "base_bytes": 1}
    comparison = Comparison("lora", "logits", 5, identical, 0.0 if identical else 1e-7)
    outcome = DemoResults({TRAINER: client}, snapshot(session), [comparison], {})
    session.close()
    assert report(outcome, 1.0).finish() == status
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["figures"]["identical"] == float(identical)
    assert all(bar["holds"] for bar in last["bars"]) == (status == 0)


def test_held_out_text_is_held_out() -> None:
    train, held_out = examples(AutoTokenizer.from_pretrained(DEMO_MODEL), 200 * BATCH)
    assert len(train) == 200 * BATCH and len(held_out) == HELD_OUT
    assert {len(example["input_ids"]) for example in (*train, *held_out)} == {LENGTH}
    seen = {bytes(example["input_ids"]) for example in train}
    assert not any(bytes(example["input_ids"]) in seen for example in held_out)


def test_help_tells_the_options() -> None:
    result = run("demo", "--help", COLUMNS="120")
    assert all(option in result.stdout for option in ("--layers", "--steps", "--tokens", "--keep"))
