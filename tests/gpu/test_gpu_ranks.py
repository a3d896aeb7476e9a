"""A service whose ranks are on two GPUs, or both on one: clients on either get the results of the unsplit model, bit for bit."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import symbiosis
from symbiosis.client.weights.remote_weight import remote_weights
from tests.conftest import tiny_llama
from tests.gpu.test_gpu_line import lora, trainer
from tests.processes import Executor, killed_at_the_end, until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("nobody_else"),
]
ON_TWO = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
STEPS = 6


def model() -> nn.Module:
    """Tensors are large enough to be cut at pages of a GPU's memory, and there are small ones."""
    return tiny_llama(1024, 2048, 8, 4, layers=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model().save_pretrained(folder)
    return folder


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("0-1", "layers"), marks=ON_TWO),
        pytest.param(("0-1", "fsdp"), marks=ON_TWO),
        ("0", "layers"),
        ("0", "fsdp"),
    ],
    ids=lambda param: "-".join(param),
)
def service(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Executor]:
    """Two ranks, whose weights may be mapped."""
    folder, (devices, shard) = tmp_path_factory.mktemp("service"), request.param
    words = [f"--devices={devices}", "--ranks=2", f"--shard={shard}", "--share-weights", "--heartbeat-s=2"]
    words += [f"--gather-buffers={64 << 20}"] if shard == "fsdp" else []
    with killed_at_the_end() as processes:
        started = Executor(checkpoint, *words, f"--listen=local://{folder}/a.sock", log=folder / "log")
        processes.append(started)
        assert started.line, started.log.read_text()
        yield started


@pytest.fixture(params=[pytest.param(1, marks=ON_TWO), 0], ids=["second", "first"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the client computes."""
    with torch.cuda.device(request.param):
        yield torch.device("cuda", request.param)


def batch(device: torch.device) -> Tensor:
    return torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("share", [False, True], ids=["called", "mapped"])
def test_training_is_that_of_the_unsplit_model(
    service: Executor, device: torch.device, share: bool, captured: bool
) -> None:
    """Each side is eager, or captured. What lies on the client's GPU is multiplied there, if it may be mapped."""
    split = symbiosis.wrap(model().to(device), service.endpoint, share=share)
    steps: list[Callable[[Tensor], Tensor]] = [trainer(lora(one).train()) for one in (model().to(device), split)]
    whole, mine = (symbiosis.capture(step) if captured else step for step in steps)
    ids = batch(device)
    for turn in range(STEPS):
        given = (ids + turn) % 100
        assert torch.equal(whole(given).clone(), mine(given).clone()), turn
    torch.cuda.synchronize()
    sessions = {weight.handle.session for weight in remote_weights(split)}
    assert all(session.lines for session in sessions)
    figures = symbiosis.stats(split)
    if "--shard=fsdp" in service.options:
        assert len(sessions) == 1 and figures.calls > 0
        if "--devices=0-1" in service.options:  # the rank beside it
            assert next(iter(sessions)).endpoint.endswith(".rank1") is (device.index == 1)
        return
    assert len(sessions) == 2
    ranks = 1 if "--devices=0-1" in service.options else 2 if device.index == 0 else 0  # that are on the client's GPU
    assert sum(session.mapped is not None for session in sessions) == (ranks if share else 0)
    assert (figures.direct > 0) is (share and ranks > 0)
    assert (figures.calls > 0) is (not share or ranks < 2)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_many_rows_are_multiplied_by_gathered_weights(service: Executor, device: torch.device, captured: bool) -> None:
    """With the bits of the unsplit model, forward and backward, again and again. The executor does not capture them, if the client does."""
    if "--shard=fsdp" not in service.options:
        pytest.skip("whole layers are not gathered")
    assert "gather_buffers_mib=64" in service.log.read_text()
    split = symbiosis.wrap(model().to(device), service.endpoint)
    steps: list[Callable[[Tensor], Tensor]] = [trainer(lora(one).train()) for one in (model().to(device), split)]
    whole, mine = (symbiosis.capture(step) if captured else step for step in steps)
    ids = torch.randint(3, 100, (4, 128), generator=torch.Generator().manual_seed(1)).to(device)
    with sdpa_kernel(SDPBackend.MATH):  # that of long masked prompts adds gradients in any order
        for turn in range(STEPS):
            assert torch.equal(whole((ids + turn) % 100).clone(), mine((ids + turn) % 100).clone()), turn


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_decoding_is_that_of_the_unsplit_model(service: Executor, device: torch.device, captured: bool) -> None:
    """A captured step that is advised to go another way begins anew, with eager runs, which round otherwise where the unsplit model's do."""
    split, whole = symbiosis.from_executor(service.endpoint, device=str(device)), model().to(device)
    with torch.no_grad():
        eager = [lambda ids: split(ids).logits, lambda ids: whole(ids).logits]
        mine, theirs = (symbiosis.capture(run) if captured else run for run in eager)
        for turn in range(STEPS):
            for rows in (1, 3):
                ids = (batch(device)[:, :rows] + turn) % 100
                got, expected = mine(ids), [theirs(ids), eager[1](ids)]
                assert any(torch.equal(got, one) for one in expected), (turn, rows)


def test_clients_of_both_gpus_at_once(service: Executor) -> None:
    """Calls of a GPU that another one answers too, and both captured."""
    devices = [torch.device("cuda", number) for number in range(min(2, torch.cuda.device_count()))]
    pairs = []
    for device in devices:
        with torch.cuda.device(device):
            split = symbiosis.wrap(model().to(device), service.endpoint, share=False)
            steps = [trainer(lora(one).train()) for one in (model().to(device), split)]
            pairs.append([symbiosis.capture(step) for step in steps])
    for turn in range(STEPS):
        for device, (whole, mine) in zip(devices, pairs, strict=True):
            with torch.cuda.device(device):
                given = (batch(device) + turn) % 100
                assert torch.equal(whole(given), mine(given)), (turn, device)


@pytest.fixture(scope="module", params=[pytest.param("0-1", marks=ON_TWO), "0"])
def spreading(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Executor]:
    """Two ranks, each of which makes what lies in its memory."""
    folder = tmp_path_factory.mktemp("spreading")
    words = [f"--devices={request.param}", "--ranks=2", "--shard=fsdp", "--spread-rows=4096"]
    with killed_at_the_end() as processes:
        started = Executor(checkpoint, *words, f"--listen=local://{folder}/a.sock", log=folder / "log")
        processes.append(started)
        assert started.line, started.log.read_text()
        yield started


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_rows_that_all_ranks_multiply(spreading: Executor, device: torch.device, captured: bool) -> None:
    """Losses and gradients are those of the unsplit model but for rounding, and both ranks make as many products."""
    split = symbiosis.wrap(model().to(device), spreading.endpoint)
    steps: list[Callable[[Tensor], Tensor]] = [trainer(lora(one).train()) for one in (model().to(device), split)]
    whole, mine = (symbiosis.capture(step) if captured else step for step in steps)
    for turn in range(STEPS):
        for tokens in (9, 5):
            given = (batch(device)[:, :tokens] + turn) % 100
            assert torch.allclose(whole(given), mine(given), rtol=1e-4), (turn, tokens)
    spread = next(iter(remote_weights(split))).handle.session.spread
    assert spread is not None
    first, second = (caller.stats.by_op for caller in spread.callers)
    assert first == second and first.keys() == {"PRODUCT"} and first["PRODUCT"] > 0
    assert all(len(caller.lines) == 1 for caller in spread.callers)


def pid_of(service: Executor, rank: int) -> int:
    """The process of a rank, as the service's log told it last."""
    lines = [line for line in service.log.read_text().splitlines() if f"rank ready rank={rank} " in line]
    return int(lines[-1].partition("pid=")[2].split()[0])


@pytest.mark.fault
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_rank_is_killed_and_the_client_goes_on(service: Executor, device: torch.device, captured: bool) -> None:
    split = symbiosis.wrap(model().to(device), service.endpoint, share=False)
    steps: list[Callable[[Tensor], Tensor]] = [trainer(lora(one).train()) for one in (model().to(device), split)]
    whole, mine = (symbiosis.capture(step) if captured else step for step in steps)
    ids = batch(device)
    for turn in range(8):
        given = (ids + turn) % 100
        assert torch.equal(whole(given).clone(), mine(given).clone()), turn
        if turn in (3, 5):
            rank = int(turn == 5)
            pid = pid_of(service, rank)
            torch.cuda.synchronize()
            os.kill(pid, signal.SIGKILL)
            until(lambda rank=rank, pid=pid: pid_of(service, rank) != pid, "that the rank is ready again")
