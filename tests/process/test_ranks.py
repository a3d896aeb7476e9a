"""A service of several ranks as it is started by users: one name, one page of metrics, one life."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import symbiosis
from symbiosis.client.weights.remote_weight import remote_weights
from symbiosis.executor.ranks.rendezvous import Rendezvous, launched_store
from tests.conftest import tiny_llama
from tests.processes import Executor, killed_at_the_end, until
from tests.ranks import free_port

EXECUTOR = "from symbiosis.cli.main import executor_main; executor_main()"
IDS = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1))
STEPS = 6


def pid_of(service: Executor, rank: int) -> int:
    """The process of a rank, as the service's log told it last."""
    lines = [line for line in service.log.read_text().splitlines() if f"rank ready rank={rank} " in line]
    return int(lines[-1].partition("pid=")[2].split()[0])


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_gone(pid: int) -> bool:
    """Whether there is no such process, or only what its parent has yet to hear of."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture(scope="module", params=["layers", "fsdp"])
def service(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Executor]:
    """Two ranks, whose weights may be mapped."""
    folder = tmp_path_factory.mktemp("service")
    options = ["--ranks=2", f"--shard={request.param}", "--share-weights", "--metrics-port=0"]
    with killed_at_the_end() as processes:
        service = Executor(model, *options, f"--listen=local://{folder}/a.sock", log=folder / "log")
        processes.append(service)
        yield service


def parts_mapped(pid: int) -> set[str]:
    """The files with parts of all tensors that a process has mapped, by their inodes."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "symbiosis-weights-part" in line}


def trained(model: Any, meanwhile: Callable[[int], None] = lambda step: None) -> list[Tensor]:
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=1e-2)
    for step in range(STEPS):
        meanwhile(step)
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in own]


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


def page(service: Executor, name: str, query: str = "") -> str:
    url = service.log.read_text().partition(f'{name}="')[2].partition('"')[0]
    with urlopen(url + query, timeout=10) as answer:
        return str(answer.read().decode())


def test_a_service_has_one_name_and_one_page(service: Executor) -> None:
    assert "(14 layers, 0 MiB, 2 ranks) at local://" in service.line and len(service.endpoints) == 1
    for _ in range(2):  # at either rank, where each answers all
        split = symbiosis.from_executor(service.endpoint, share=False)
        assert torch.equal(split(IDS).logits, tiny_llama()(IDS).logits)
    assert '"ready"' in page(service, "health")
    figures = page(service, "metrics")
    for rank in (0, 1):
        calls = [
            line
            for line in figures.splitlines()
            if line.startswith("symbiosis_tenant_calls_total") and f'rank="{rank}"' in line
        ]
        assert len(calls) == 1 and float(calls[0].split()[-1]) > 0
    assert figures.count("# TYPE symbiosis_weights_bytes ") == 1
    one = page(service, "metrics", "?name[]=symbiosis_weights_bytes")
    assert one.count("\nsymbiosis_weights_bytes{") == 2 and "symbiosis_queue_depth" not in one


@pytest.mark.parametrize("share", [False, True], ids=["called", "mapped"])
def test_clients_go_on_when_a_rank_is_killed_and_started_again(service: Executor, share: bool) -> None:
    """Training ends with the adapter that the unsplit model gets."""
    expected, parts = trained(tiny_llama()), parts_mapped(pid_of(service, 0))

    def kill(step: int) -> None:
        if step in (1, 3):
            rank = step // 2
            pid = pid_of(service, rank)
            os.kill(pid, signal.SIGKILL)
            if not share:
                until(lambda: pid_of(service, rank) != pid, "that the rank is ready again")

    assert same(trained(symbiosis.from_executor(service.endpoint, share=share), kill), expected)
    assert service.log.read_text().count("a rank died, and is started again") >= 2
    until(lambda: '"ready"' in _health(service), "that all are ready")
    assert all(parts_mapped(pid_of(service, rank)) == parts for rank in (0, 1))  # no second copy


def test_what_a_library_writes_to_stdout_is_for_the_log(service: Executor) -> None:
    with Path(f"/proc/{pid_of(service, 1)}/fd/1").open("a") as stdout:
        stdout.write("NCCL version 2.27\n")
    until(lambda: "NCCL version" in service.log.read_text(), "its line")
    assert torch.equal(symbiosis.from_executor(service.endpoint)(IDS).logits, tiny_llama()(IDS).logits)


def test_a_rank_may_be_killed_while_it_is_started_again(service: Executor) -> None:
    for _ in range(3):
        rank = children(service.pid)[-1]
        os.kill(rank, signal.SIGKILL)
        until(lambda rank=rank: children(service.pid)[-1] != rank and len(children(service.pid)) == 2, "a new rank")
    until(lambda: '"ready"' in _health(service), "that all are ready")
    assert service.alive


@pytest.mark.parametrize("spread", [False, True], ids=["at one rank", "spread"])
def test_a_rank_that_is_frozen_keeps_up_those_that_called_it_only(
    model: Path, tmp_path: Path, processes: list, spread: bool
) -> None:
    """Its part of every tensor is read without it. A client in the midst of its call to that rank goes on at another one, when the call has taken as long as it
    may; and the rank answers again when it wakes."""
    options = ["--ranks=2", "--shard=fsdp", *(["--spread-rows=64"] if spread else [])]
    service = Executor(model, *options, f"--listen=local://{tmp_path}/a.sock", log=tmp_path / "log")
    processes.append(service)
    frozen = pid_of(service, 1)
    clients = [symbiosis.from_executor(service.endpoint, share=False, timeout=1.0) for _ in range(2)]
    expected = tiny_llama()(IDS).logits
    assert all(torch.allclose(client(IDS).logits, expected, atol=1e-5) for client in clients)
    os.kill(frozen, signal.SIGSTOP)
    try:
        for client in clients:
            assert torch.allclose(client(IDS).logits, expected, atol=1e-5)
        assert sum(symbiosis.stats(client).retries for client in clients) >= 1
    finally:
        os.kill(frozen, signal.SIGCONT)
    late = symbiosis.from_executor(f"{service.endpoint}.rank1", share=False)
    assert torch.allclose(late(IDS).logits, expected, atol=1e-5)


def launch(model: Path, launcher: list[str], *options: str) -> "subprocess.Popen[str]":
    """Ranks under torch's own launcher."""
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, "--no-python"]
    words = [sys.executable, "-c", EXECUTOR, str(model), *options]
    return subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines_until(process: "subprocess.Popen[str]", text: str) -> str:
    """What it writes, up to a line with this text."""
    seen = ""
    assert process.stdout
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(seen)


@pytest.mark.soak  # the launcher and what it starts take long to import torch
def test_ranks_may_be_started_by_torchrun(model: Path, tmp_path: Path) -> None:
    """And again, when one of them was killed."""
    launcher = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    with launch(model, launcher, "--shard=fsdp", f"--listen=local://{tmp_path}/a.sock") as process:
        try:
            assert "2 ranks) at local://" in lines_until(process, "symbiosis-executor ready")
            os.kill(children(process.pid)[-1], signal.SIGKILL)
            lines_until(process, "symbiosis-executor ready")
            for share in (False, True):
                split = symbiosis.from_executor(f"local://{tmp_path}/a.sock", share=share)
                assert torch.equal(split(IDS).logits, tiny_llama()(IDS).logits)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert not list(tmp_path.iterdir())


def test_each_attempt_of_the_launcher_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the store that it brings is the same."""
    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**words, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        store, rank = launched_store()
        assert rank == 1 and not store.check(["checked0"])
        Rendezvous(store, 0, 2).note("checked")
        Rendezvous(store, rank, 2).wait_for("checked", 0)


@pytest.mark.soak
def test_ranks_may_be_on_several_hosts(model: Path) -> None:
    """Two addresses of this machine stand for them."""
    hosts = ["127.0.0.1", "127.0.0.2"]
    port, meet = free_port(*hosts), free_port(hosts[0])
    with ExitStack() as running:
        launched = []
        for node, host in enumerate(hosts):
            launcher = [
                "--nnodes=2",
                f"--node-rank={node}",
                f"--master-addr={hosts[0]}",
                f"--master-port={meet}",
                "--nproc-per-node=1",
            ]
            words = [*(f"--hosts={one}" for one in hosts), f"--listen=tcp://{host}:{port}"]
            launched.append(running.enter_context(launch(model, launcher, *words)))
            running.callback(launched[-1].kill)
        assert "2 ranks) at tcp://127.0.0.1" in lines_until(launched[0], "symbiosis-executor ready")
        for host in hosts:
            split = symbiosis.from_executor(f"tcp://{host}:{port}?hosts={','.join(hosts)}")
            assert torch.equal(split(IDS).logits, tiny_llama()(IDS).logits)
            assert {weight.handle.session.endpoint.partition("?")[0] for weight in remote_weights(split)} == {
                f"tcp://{one}:{port}" for one in hosts
            }
        for process in launched:
            process.send_signal(signal.SIGTERM)
        for process in launched:
            process.communicate(timeout=60)


def _health(service: Executor) -> str:
    try:
        return page(service, "health")
    except OSError:  # 503 is an error to urllib
        return ""


def test_a_service_ends_as_a_whole_and_leaves_nothing(model: Path, tmp_path: Path, processes: list) -> None:
    service = Executor(model, "--ranks=2", f"--listen=local://{tmp_path}/a.sock", log=tmp_path / "log")
    processes.append(service)
    ranks = children(service.pid)
    assert len(ranks) == 2 and (tmp_path / "a.sock.rank1").exists()
    assert service.stop() == 0
    assert all(map(is_gone, ranks)) and {file.name for file in tmp_path.iterdir()} == {"log"}


def test_a_service_that_is_told_twice_to_end_does_not_wait_for_a_frozen_rank(
    model: Path, tmp_path: Path, processes: list
) -> None:
    service = Executor(model, "--ranks=2", f"--listen=local://{tmp_path}/a.sock", log=tmp_path / "log")
    processes.append(service)
    ranks = children(service.pid)
    os.kill(pid_of(service, 1), signal.SIGSTOP)
    service.signal(signal.SIGTERM)
    until(lambda: is_gone(pid_of(service, 0)), "that the other rank ends")
    assert service.alive
    service.signal(signal.SIGINT)
    assert service.wait() == 1
    assert all(map(is_gone, ranks)) and {file.name for file in tmp_path.iterdir()} == {"log"}
    assert "a rank has not ended, and is killed rank=1" in service.log.read_text()


def test_ranks_end_with_a_service_that_is_killed(model: Path, tmp_path: Path, processes: list) -> None:
    service = Executor(model, "--ranks=2", f"--listen=local://{tmp_path}/a.sock", log=tmp_path / "log")
    processes.append(service)
    ranks = children(service.pid)
    service.kill()
    until(lambda: all(map(is_gone, ranks)), "that the ranks end")


def test_what_only_a_rank_can_find_wrong_ends_the_service(model: Path, tmp_path: Path, processes: list) -> None:
    begun = time.monotonic()
    service = Executor(
        model, "--ranks=2", "--serve=nothing", f"--listen=local://{tmp_path}/a.sock", log=tmp_path / "log"
    )
    processes.append(service)
    assert service.line == "" and service.wait() == 2 and time.monotonic() - begun < 60
    told = service.log.read_text()  # by the rank that finds it first; the other is ended
    assert re.search(r"error: rank [01]: --serve 'nothing' matches no layer", told), told


def test_wrong_options_are_told_before_anything_starts(model: Path, tmp_path: Path, processes: list) -> None:
    for options, text in (
        (["--ranks=2", "--listen=tcp://127.0.0.1:0"], "cannot listen at tcp://127.0.0.1:0 with 2 ranks: name a port"),
        (["--ranks=2", "--listen=tcp://127.0.0.1:65535"], "rank 1 of the service would answer at port 65536"),
        (["--devices=0-3"], "has no CUDA"),
    ):
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        wrong = Executor(model, *options, log=log)
        processes.append(wrong)
        assert wrong.line == "" and wrong.wait() == 2 and text in log.read_text()
