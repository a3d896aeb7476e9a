"""A GPU that programs have filled: who is served goes on being served, under MPS."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import symbiosis
from symbiosis.errors import CallError
from tests.conftest import wide_llama
from tests.gpu.conftest import Processes
from tests.gpu.test_gpu_line import WAIT_S, lora, trainer
from tests.gpu.test_gpu_rounds import LARGE, served, shared_gpu

__all__ = ["shared_gpu"]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STEPS, CLIENTS = 20, 3
LEFT = 16 << 20  # bytes of a GPU that is full: less than torch takes for a piece, and than cuBLAS wants for a stream


def train(endpoint: str, said: Any, captured: bool, turn: Any, full: Any) -> None:
    """By itself until it is captured, and again with everybody when the GPU is full: the losses, and those of the unsplit model."""
    as_it_is: Callable[[Any], Any] = symbiosis.capture if captured else lambda step: step
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1)).cuda()
    plain = as_it_is(trainer(lora(wide_llama().cuda())))
    expected = [plain(ids).item() for _ in range(STEPS)]
    split = lora(symbiosis.wrap(wide_llama().cuda(), endpoint))
    step = as_it_is(trainer(split))
    with turn:
        losses = [step(ids).item() for _ in range(4)]
    said.put("ready")
    assert full.wait(WAIT_S)
    try:
        losses += [step(ids).item() for _ in range(STEPS - 4)]
    except CallError as error:
        said.put(str(error))
    else:
        said.put((losses, expected))


def fill() -> list[Tensor]:
    """The GPU, until nothing is left."""
    held, nbytes = [], 1 << 30
    while nbytes >= LEFT:
        try:
            held.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            nbytes //= 2
    assert torch.cuda.mem_get_info()[0] < 2 * LEFT
    return held


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("how", [{}, LARGE], ids=["small", "large"])
def test_who_is_served_goes_on(how: Any, captured: bool, processes: Processes, tmp_path: Path) -> None:
    _, endpoint = served(processes, tmp_path, "opportunistic", "wide", torch.float32, **how)
    turn, full = processes.context.Lock(), processes.context.Event()
    queues = [processes.start(train, endpoint, captured, turn, full)[1] for _ in range(CLIENTS)]
    assert [said.get(timeout=WAIT_S) for said in queues] == ["ready"] * CLIENTS
    held = fill()
    try:
        full.set()
        found = [said.get(timeout=WAIT_S) for said in queues]
    finally:
        del held
        torch.cuda.empty_cache()
    assert all(isinstance(of_one, tuple) for of_one in found), found
    for losses, expected in found:
        assert losses == (expected if how else pytest.approx(expected, rel=1e-3)), "large calls are never batched"
