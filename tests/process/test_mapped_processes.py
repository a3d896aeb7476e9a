"""Mapped weights between processes: restarts, deaths, forks, pickles, stray writes, and what a thousand joins leave behind."""

import ctypes
import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import symbiosis
from symbiosis.client.session import Session
from symbiosis.client.weights.remote_weight import remote_weights
from symbiosis.protocol import Op
from symbiosis.transport.patience import AWAY
from tests.conftest import tiny_llama
from tests.processes import Client, Executor, Process, layer_number, save_tiny_llama, until

LAYER = "model.layers.0.mlp.up_proj"
IDS = torch.arange(3, 21).view(2, 9)


@pytest.fixture
def executor(model: Path, processes: list[Process], tmp_path: Path) -> Executor:
    listen = f"--listen=local://{tmp_path}/executor.sock"
    executor = Executor(model, listen, "--heartbeat-s=1", "--share-weights", log=tmp_path / "log")
    processes.append(executor)
    return executor


def session_of(model: nn.Module) -> Session:
    return next(remote_weights(model)).handle.session


others: set[str] = set()  # mapped by models that tests before left in some cache


@pytest.fixture(autouse=True)
def nothing_of_other_tests() -> None:
    others.clear()
    others.update(mapped_files())


def mapped_files(pid: int | str = "self") -> set[str]:
    """The files of weights that a process has mapped since the test began, by their inodes."""
    gc.collect()
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "symbiosis-weights" in line} - others


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits  # type: ignore[no-any-return]


def test_the_choice_needs_no_torch() -> None:
    program = "import sys, symbiosis.client.direct.rule, symbiosis.executor.scheduling.advice; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_weights_lie_once_in_the_memory_of_all(executor: Executor) -> None:
    """The executor has mapped the file, too, and has no other copy."""
    model = symbiosis.from_executor(executor.endpoint)
    assert torch.equal(logits(model), logits(tiny_llama()))
    assert mapped_files() and mapped_files() == mapped_files(executor.pid)
    figures = symbiosis.stats(model)
    assert figures.calls == 0 and figures.direct == 14


@pytest.mark.parametrize("how", ["kill", "drain"])
def test_a_client_goes_on_while_its_executor_is_away_and_maps_anew(
    how: str, executor: Executor, processes: list[Process], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "symbiosis")
    model, expected = symbiosis.from_executor(executor.endpoint, patience=0.0), logits(tiny_llama())
    first = mapped_files()
    executor.kill() if how == "kill" else executor.stop()
    session = session_of(model)
    for _ in range(3):
        assert torch.equal(logits(model), expected)
    until(lambda: session._connection is None, "that the client finds out")
    assert torch.equal(logits(model), expected) and symbiosis.stats(model).calls == 0
    processes.append(executor.again())
    until(lambda: session._connection is not None, "joining again")
    until(lambda: mapped_files() and not mapped_files() & first, "mapping anew")
    assert torch.equal(logits(model), expected) and symbiosis.stats(model).reconnects == 1
    said = [record.getMessage() for record in caplog.records if executor.endpoint in record.getMessage()]
    assert said == [AWAY % executor.endpoint, f"{executor.endpoint} is back"]


def test_a_call_that_is_lost_is_made_directly(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the midst of a step that is called, nobody waits for an executor that died."""
    model = symbiosis.from_executor(executor.endpoint, patience=60.0)
    session = session_of(model)
    number = layer_number(session, LAYER)
    assert session.mapped
    monkeypatch.setattr(session.mapped, "takes", lambda call: False)
    x = torch.randn(3, 64)
    expected = session.call(Op.FORWARD, number, x)
    executor.kill()
    assert torch.equal(session.call(Op.FORWARD, number, x), expected)
    assert session.stats.calls == 1 and session.mapped.calls == 1


def test_another_model_in_the_place_of_the_first_is_not_mapped(
    executor: Executor, processes: list[Process], tmp_path: Path
) -> None:
    model, expected = symbiosis.from_executor(executor.endpoint), logits(tiny_llama())
    mine = mapped_files()
    executor.kill()
    other = Executor(
        save_tiny_llama(tmp_path / "other", seed=1), f"--listen={executor.endpoint}", log=tmp_path / "log2"
    )
    processes.append(other)
    session = session_of(model)
    until(lambda: session._connection is None)
    assert not session.look_for_executor()
    assert torch.equal(logits(model), expected) and mapped_files() == mine


def test_a_provider_that_no_longer_shares_is_called(executor: Executor, processes: list[Process]) -> None:
    model, expected = symbiosis.from_executor(executor.endpoint), logits(tiny_llama())
    logits(model)
    executor.kill()
    second = executor.again("--no-share-weights")
    processes.append(second)
    session = session_of(model)
    until(lambda: session._connection is not None and not session.mapped.suffices, "joining again")
    assert torch.equal(logits(model), expected) and symbiosis.stats(model).calls > 0
    assert not session.may_read and symbiosis.stats(model).direct == 14
    second.kill()
    processes.append(second.again("--share-weights"))
    logits(model)
    until(lambda: session.mapped.suffices, "joining once more")
    before = symbiosis.stats(model).direct
    logits(model)
    assert symbiosis.stats(model).direct == before + 14 >= 28, (
        "what was multiplied by the first one's weights stays counted"
    )


def _write_to_a_weight(say: Callable[[Any], None], endpoint: str) -> None:
    session = Session(endpoint, share=True)
    number = layer_number(session, LAYER)
    assert session.mapped
    weight = session.mapped.weight_for_local_product(number, torch.float32, torch.zeros(1, 64), False)
    assert weight is not None
    say("now")
    ctypes.memset(weight.data_ptr(), 0, 4)


def test_a_stray_write_ends_the_program_that_made_it_and_harms_nobody(
    executor: Executor, processes: list[Process]
) -> None:
    bystander, expected = symbiosis.from_executor(executor.endpoint), logits(tiny_llama())
    stray = Client(_write_to_a_weight, executor.endpoint)
    processes.append(stray)
    assert stray.heard() == "now"
    assert stray.wait() == -signal.SIGSEGV
    assert torch.equal(logits(bystander), expected)
    assert torch.equal(logits(symbiosis.from_executor(executor.endpoint, share=False)), expected)


def _compute(say: Callable[[Any], None], pickled: bytes) -> Any:
    model = pickle.loads(pickled)
    first = logits(model)
    return first.numpy(), logits(model).numpy(), symbiosis.stats(model).direct, len(mapped_files())


def test_a_pickled_model_maps_by_itself(executor: Executor, processes: list[Process]) -> None:
    model, expected = symbiosis.from_executor(executor.endpoint), logits(tiny_llama())
    client = Client(_compute, pickle.dumps(model))
    processes.append(client)
    first, second, direct, files = client.result()
    assert torch.equal(torch.from_numpy(first), expected) and torch.equal(torch.from_numpy(second), expected)
    assert direct >= 14 and files == 1


def _fork(say: Callable[[Any], None], endpoint: str) -> Any:
    model = symbiosis.from_executor(endpoint)
    expected = logits(model)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        good = torch.equal(logits(model), expected) and torch.equal(logits(model), expected)
        good = good and symbiosis.stats(model).direct >= 14 and session_of(model).welcome.session == 2
        os.write(writer, b"+" if good else b"-")
        os._exit(0)
    answer = os.read(reader, 1)
    os.waitpid(child, 0)
    return answer == b"+" and torch.equal(logits(model), expected) and session_of(model).welcome.session == 1


def test_a_forked_child_joins_and_maps_by_itself(executor: Executor, processes: list[Process]) -> None:
    client = Client(_fork, executor.endpoint)
    processes.append(client)
    assert client.result()


def _join_often(say: Callable[[Any], None], endpoint: str, times: int) -> Any:
    def state() -> tuple[int, int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(mapped_files()), threading.active_count()

    def join() -> None:
        session = Session(endpoint, share=True)
        assert session.manifest and session.mapped
        session.close()

    join()
    before = state()
    for _ in range(times):
        join()
    return before, state()


@pytest.mark.full
def test_a_thousand_joins_leave_nothing_behind(executor: Executor, processes: list[Process]) -> None:
    def of_executor() -> tuple[int, int]:
        maps = Path(f"/proc/{executor.pid}/maps").read_text().count("memfd:")
        return executor.descriptors, maps

    client = Client(_join_often, executor.endpoint, 20)
    processes.append(client)
    client.result()
    before = of_executor()
    client = Client(_join_often, executor.endpoint, 1000)
    processes.append(client)
    mine, after = client.result()
    assert mine[:2] == after[:2]
    until(lambda: of_executor() <= before, "that the executor lets go")


def test_a_killed_client_leaves_nothing(executor: Executor, processes: list[Process]) -> None:
    before = executor.descriptors
    client = Client(_stay, executor.endpoint)
    processes.append(client)
    assert client.heard() == "joined" and executor.descriptors > before
    client.kill()
    until(lambda: executor.descriptors == before, "that the executor lets go")


def _stay(say: Callable[[Any], None], endpoint: str) -> None:
    model = symbiosis.wrap(tiny_llama(), endpoint)
    logits(model)
    say("joined")
    threading.Event().wait(60)


def trained(model: nn.Module, dora: bool) -> list[Tensor]:
    """Gradients of two adapters, with checkpointing."""
    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", use_dora=dora))  # type: ignore[arg-type]
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()
    found = []
    for adapter in ("default", "other"):
        model.set_adapter(adapter)
        model(input_ids=IDS, labels=IDS).loss.backward()
        found += [p.grad for p in model.parameters() if p.grad is not None]
    return found


@pytest.mark.parametrize("dora", [False, True])
def test_training_with_checkpointing_and_several_adapters(dora: bool, executor: Executor) -> None:
    split = symbiosis.wrap(tiny_llama(), executor.endpoint)
    expected, got = trained(tiny_llama(), dora), trained(split, dora)
    assert len(got) == len(expected) > 20 and all(map(torch.equal, got, expected))
    assert symbiosis.stats(split).calls == 0 < symbiosis.stats(split).direct
