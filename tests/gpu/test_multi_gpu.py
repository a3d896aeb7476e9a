"""An executor on one GPU, clients on another one of the same host: eager, captured, beside each other, over the executor's death."""

import copy
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import symbiosis
from tests.conftest import tiny_llama
from tests.gpu.conftest import Processes
from tests.gpu.test_gpu_line import (
    WAIT_S,
    decode_forever,
    holds_no_more,
    line_of,
    lora,
    serve_forever,
    train_forever,
    trainer,
)
from tests.processes import until, watching

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture
def start(processes: Processes, tmp_path: Path) -> Callable[[], tuple[Any, str]]:
    """Starts an executor on the first GPU, always at the same endpoint."""

    def run() -> tuple[Any, str]:
        process, ready = processes.start(serve_forever, f"{tmp_path}/executor.sock")
        return process, ready.get(timeout=WAIT_S)

    return run


@pytest.fixture
def ids() -> Iterator[Tensor]:
    with torch.cuda.device(1):
        yield torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1)).cuda()


def test_calls_of_the_other_gpu(start: Callable, ids: Tensor) -> None:
    model = tiny_llama().cuda()
    split = symbiosis.wrap(copy.deepcopy(model), start()[1])
    with torch.no_grad():
        for _ in range(6):
            assert torch.equal(split(ids).logits, model(ids).logits)
        assert torch.equal(split(ids[:1, :3]).logits, model(ids[:1, :3]).logits)
    assert line_of(split).device == torch.device("cuda:1")


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_training_on_the_other_gpu(captured: bool, start: Callable, ids: Tensor) -> None:
    plain = trainer(lora(tiny_llama().cuda()))
    split: Callable[[Tensor], Tensor] = trainer(lora(symbiosis.wrap(tiny_llama().cuda(), start()[1])))
    if captured:
        split = symbiosis.capture(split)
    for turn in range(8):
        batch = (ids + turn) % 100
        assert torch.equal(split(batch), plain(batch)), turn


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_the_other_gpu_need_not_be_the_current_one(captured: bool, start: Callable) -> None:
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1)).to("cuda:1")
    plain = trainer(lora(tiny_llama().to("cuda:1")))
    model = lora(symbiosis.wrap(tiny_llama().to("cuda:1"), start()[1]))
    split: Callable[[Tensor], Tensor] = trainer(model)
    if captured:
        split = symbiosis.capture(split)
    for turn in range(8):
        batch = (ids + turn) % 100
        assert torch.equal(split(batch), plain(batch)), turn
    assert torch.cuda.current_device() == 0
    assert line_of(model).device == torch.device("cuda:1")


def decode_on(endpoint: str, said: Any, seed: int, all_there: Any, device: int) -> None:
    with torch.cuda.device(device):
        decode_forever(endpoint, said, seed, 200, all_there)


@pytest.mark.parametrize("policy", ["opportunistic", "lockstep"])
@pytest.mark.parametrize("homes", [(0, 1, 0, 1), (1, 1, 1, 1)], ids=["both", "other"])
def test_decoders_are_joined_wherever_they_are(
    homes: tuple[int, ...], policy: str, processes: Processes, tmp_path: Path
) -> None:
    _, ready = processes.start(serve_forever, f"{tmp_path}/executor.sock", policy)
    endpoint, all_there = ready.get(timeout=WAIT_S), processes.context.Barrier(len(homes))
    queues = [processes.start(decode_on, endpoint, seed, all_there, home)[1] for seed, home in enumerate(homes)]
    found = [queue.get(timeout=WAIT_S) for queue in queues]
    assert max(worst for worst, _ in found) < 1e-5, "one product's rounding, in float32"
    assert policy != "lockstep" or min(batch for _, batch in found) > 1.5, found


def test_the_executor_is_killed_and_the_other_gpu_goes_on(start: Callable, ids: Tensor) -> None:
    process, endpoint = start()
    plain, split = trainer(lora(tiny_llama().cuda())), trainer(lora(symbiosis.wrap(tiny_llama().cuda(), endpoint)))
    for turn in range(24):
        batch = (ids + turn) % 100
        assert torch.equal(split(batch), plain(batch)), turn
        if turn in (7, 15):
            process.kill()
            process.join(10)
            assert process.exitcode == -signal.SIGKILL
            process, _ = start()


def train_on_the_other_gpu(endpoint: str, said: Any, captured: bool) -> None:
    with torch.cuda.device(1):
        train_forever(endpoint, said, 10**6, captured)


@pytest.mark.fault
def test_clients_of_the_other_gpu_are_killed_and_leave_nothing(
    start: Callable, processes: Processes, ids: Tensor
) -> None:
    executor, endpoint = start()
    bystander = symbiosis.wrap(tiny_llama().cuda(), endpoint)
    held: list[tuple[int, int]] = []
    with torch.no_grad(), watching(endpoint) as look:
        expected = bystander(ids).logits
        for _ in range(3):
            victims = [processes.start(train_on_the_other_gpu, endpoint, captured) for captured in (False, True)]
            for process, queue in victims:
                while queue.get(timeout=WAIT_S)[0] < 3:
                    pass
                process.kill()
                process.join(10)
                assert process.exitcode == -signal.SIGKILL
            until(lambda: sum(not session.observer for session in look().sessions) == 1, "the end of their sessions")
            assert torch.equal(bystander(ids).logits, expected)
            holds_no_more(executor, held)
