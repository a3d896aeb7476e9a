"""Captures of one thread, and the random numbers that others draw meanwhile."""

import threading

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout

from symbiosis.kernels.gpu.graphs import captured
from tests.processes import WAIT_S

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("nobody_else"),
]


def drawn(times: int) -> list[Tensor]:
    return [dropout(torch.ones(64, device="cuda"), 0.5) for _ in range(times)]


def test_others_draw_random_numbers_during_a_capture() -> None:
    """A training with dropout runs in the program of an executor or an engine, which captures when it likes."""
    torch.manual_seed(1)
    alone = drawn(4)
    memory = torch.zeros(64, device="cuda")
    under_way, drew = threading.Event(), threading.Event()
    graphs = []

    def work() -> None:
        memory.add_(1)
        under_way.set()
        assert drew.wait(WAIT_S)
        memory.add_(1)

    def capture() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            graphs.append(captured(work, torch.cuda.graph_pool_handle()))

    torch.manual_seed(1)
    before = drawn(1)
    thread = threading.Thread(target=capture)
    thread.start()
    try:
        assert under_way.wait(WAIT_S)
        meanwhile = drawn(1)
    finally:
        drew.set()
        thread.join(WAIT_S)
    after = drawn(1)
    graphs[0].replay()
    torch.cuda.synchronize()
    assert memory.tolist() == [2] * 64
    for one, other in zip(before + meanwhile + after + drawn(1), alone, strict=True):
        assert one.equal(other)


def test_what_is_captured_may_draw_random_numbers() -> None:
    results: list[Tensor] = []
    with torch.cuda.stream(torch.cuda.Stream()):
        graph = captured(lambda: results.extend(drawn(1)), torch.cuda.graph_pool_handle(), draws=True)
    assert graph is not None
    masks = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        masks.append(results[0].clone())
    assert not masks[0].equal(masks[1])
