"""Clients on the CPU of the host whose executor computes on a GPU: their shared memory is pinned, and no answer comes too early.

Weights and rows are such that no sum is ever rounded, so results are known bit by bit, whoever else was in the product.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import symbiosis
from symbiosis.client.session import Session
from symbiosis.protocol import Op
from symbiosis.transport.local import segment as slab
from symbiosis.transport.local.peer import FIRST_SLAB
from tests.conftest import tiny_llama
from tests.gpu.conftest import Processes
from tests.gpu.test_gpu_line import WAIT_S
from tests.processes import layer_number, until

DEVICE = "cuda"
INPUTS, OUTPUTS = 64, 96
ROWS = (1, 20_000, 3, 100_000, 40)  # the second and the fourth need a larger segment
LLAMA_LAYER = "model.layers.0.mlp.up_proj"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def exact_layer() -> nn.Linear:
    layer, random = nn.Linear(INPUTS, OUTPUTS), torch.Generator().manual_seed(0)
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-127, 128, layer.weight.shape, generator=random) / 128)
        layer.bias.copy_(torch.randint(-9, 9, layer.bias.shape, generator=random))
    return layer


def serve_exact_layer(path: str, ready: Any, device: str, policy: Any) -> None:
    model = nn.Sequential(exact_layer()).to(device)
    with symbiosis.Executor(model, listen=[f"local://{path}"], policy=policy, heartbeat_s=2.0) as executor:
        ready.put(executor.endpoint)
        while os.getppid() != 1:
            time.sleep(0.1)


@pytest.fixture
def started() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.end()


@pytest.mark.parametrize("policy", ["immediate", "opportunistic", "lockstep"])
def test_every_answer_is_there_when_it_is_told(policy: str, started: Processes, tmp_path: Path) -> None:
    """Several sessions at once, back and forth, with small and large calls."""
    _, ready = started.start(serve_exact_layer, f"{tmp_path}/executor.sock", DEVICE, policy)
    endpoint, layer = ready.get(timeout=WAIT_S), exact_layer()
    weight, bias = layer.weight.detach(), layer.bias.detach()

    def run(seed: int) -> float:
        session, random = Session(endpoint), torch.Generator().manual_seed(seed)
        number = next(n for n, served in enumerate(session.manifest) if served.kind == "linear")
        try:
            for turn in range(60):
                rows = ROWS[turn // 2 % len(ROWS)] if turn < 20 else 1 + turn % 5
                x = torch.randint(-8, 9, (rows, INPUTS), generator=random).float()
                y = session.call(Op.FORWARD, number, x, bias=True)
                assert torch.equal(y, x @ weight.t() + bias), (seed, turn)
                dy = torch.randint(-8, 9, (rows, OUTPUTS), generator=random).float()
                assert torch.equal(session.call(Op.DGRAD, number, dy), dy @ weight), (seed, turn)
            return session.stats.mean_batch
        finally:
            session.close()

    with ThreadPoolExecutor(4) as pool:
        batches = list(pool.map(run, range(4)))
    assert policy != "lockstep" or max(batches) > 1.5, batches


def segments(executor: symbiosis.Executor) -> list[slab.Slab]:
    """Those of the sessions there are."""
    return [peer._slab for peer in executor.server.listeners[0]._peers if peer._slab is not None]


def whole(segment: slab.Slab) -> Tensor:
    """As a tensor, which outlives it."""
    return segment.tensor(0, "uint8", (segment.nbytes,))


def call_forever(endpoint: str, said: Any) -> None:
    session, turn = Session(endpoint), 0
    number = layer_number(session, LLAMA_LAYER)
    while True:
        session.call(Op.FORWARD, number, torch.ones(1000, 64))
        turn += 1
        if turn == 10:
            said.put(turn)


@pytest.fixture
def executor(serve: Callable, tmp_path: Path) -> symbiosis.Executor:
    return serve(tiny_llama().to(DEVICE), listen=[f"local://{tmp_path}/executor.sock"])


def test_results_are_those_of_the_gpu_bit_by_bit(executor: symbiosis.Executor) -> None:
    session, layer = Session(executor.endpoint), tiny_llama().to(DEVICE).get_submodule(LLAMA_LAYER)
    number = layer_number(session, LLAMA_LAYER)
    with torch.no_grad():
        for rows in (1, 7, 300, 4096):
            x = torch.randn(rows, 64)
            assert torch.equal(session.call(Op.FORWARD, number, x), layer(x.to(DEVICE)).cpu())
    session.close()


def test_segments_are_pinned_while_they_are_used(executor: symbiosis.Executor) -> None:
    session = Session(executor.endpoint)
    number = layer_number(session, LLAMA_LAYER)
    session.call(Op.FORWARD, number, torch.ones(2, 64))
    (first,) = segments(executor)
    before = whole(first)
    assert first.nbytes == FIRST_SLAB and before.is_pinned()
    session.call(Op.FORWARD, number, torch.ones(50_000, 64))  # grows
    (second,) = segments(executor)
    after = whole(second)
    assert second.nbytes > FIRST_SLAB and after.is_pinned() and not before.is_pinned()
    session.close()
    until(lambda: not after.is_pinned(), "the end of the second segment")


def test_segments_that_are_too_large_are_not_pinned(
    executor: symbiosis.Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab, "PINNED_AT_MOST", FIRST_SLAB)
    session, weight = Session(executor.endpoint), tiny_llama().get_submodule(LLAMA_LAYER).weight.detach().to(DEVICE)
    number = layer_number(session, LLAMA_LAYER)
    x = torch.randn(4000, 64)
    session.call(Op.FORWARD, number, x.repeat(20, 1))
    assert [whole(segment).is_pinned() for segment in segments(executor)] == [False]
    assert torch.equal(session.call(Op.FORWARD, number, x), (x.to(DEVICE) @ weight.t()).cpu())
    session.close()


@pytest.mark.fault
def test_what_a_killed_client_had_is_not_pinned_any_more(executor: symbiosis.Executor, started: Processes) -> None:
    session = Session(executor.endpoint)
    number, x = layer_number(session, LLAMA_LAYER), torch.randn(5, 64)
    expected = session.call(Op.FORWARD, number, x)
    (mine,) = segments(executor)
    clients = [started.start(call_forever, executor.endpoint) for _ in range(3)]
    for _, said in clients:
        said.get(timeout=WAIT_S)
    theirs = [whole(segment) for segment in segments(executor) if segment is not mine]
    assert len(theirs) == len(clients) and all(memory.is_pinned() for memory in theirs)
    for left, (process, _) in enumerate(clients, 1):
        process.kill()
        process.join(10)
        until(lambda: sum(memory.is_pinned() for memory in theirs) == len(theirs) - left, "the end of a segment")  # noqa: B023
    assert segments(executor) == [mine] and whole(mine).is_pinned()
    assert torch.equal(session.call(Op.FORWARD, number, x), expected)
    session.close()
