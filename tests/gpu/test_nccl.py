"""Clients on another GPU whose rows go by NCCL: alone, beside each other, refused, and over the death of either side."""

import copy
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import symbiosis
from symbiosis.client.session import Session
from symbiosis.client.weights.remote_weight import remote_weights
from symbiosis.errors import CallError, Code
from symbiosis.protocol import Op
from symbiosis.transport.nccl.client import NcclConnection
from tests.conftest import tiny_llama
from tests.gpu import memory
from tests.gpu.conftest import Processes
from tests.gpu.test_gpu_line import WAIT_S, lora, serve_forever, train_forever, trainer
from tests.gpu.test_multi_gpu import decode_on
from tests.processes import until, watching

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def free_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Of an executor on the first GPU."""
    started = Processes()
    _, ready = started.start(serve_forever, free_url())
    yield ready.get(timeout=WAIT_S)
    started.end()


@pytest.fixture
def start(processes: Processes) -> Callable[[], tuple[Any, str]]:
    """Starts an executor on the first GPU, always at the same endpoint."""
    url = free_url()

    def run() -> tuple[Any, str]:
        process, ready = processes.start(serve_forever, url)
        return process, ready.get(timeout=WAIT_S)

    return run


@pytest.fixture
def ids() -> Iterator[Tensor]:
    with torch.cuda.device(1):
        yield torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1)).cuda()


def session_of(model: Any) -> Session:
    return next(remote_weights(model)).handle.session


def test_calls_go_by_nccl(endpoint: str, ids: Tensor) -> None:
    model = tiny_llama().cuda()
    split = symbiosis.wrap(copy.deepcopy(model), endpoint)
    with torch.no_grad():
        for _ in range(6):
            assert torch.equal(split(ids).logits, model(ids).logits)
        assert torch.equal(split(ids[:1, :3]).logits, model(ids[:1, :3]).logits)
    assert isinstance(session_of(split)._connection, NcclConnection)
    assert symbiosis.stats(split).reconnects == 0


def test_training_on_a_gpu_that_is_not_the_current_one(endpoint: str, ids: Tensor) -> None:
    plain = trainer(lora(tiny_llama().to("cuda:1")))
    model = lora(symbiosis.wrap(tiny_llama().to("cuda:1"), endpoint))
    split = trainer(model)
    with torch.cuda.device(0):
        for turn in range(8):
            batch = (ids + turn) % 100
            assert torch.equal(split(batch), plain(batch)), turn
    assert isinstance(session_of(model)._connection, NcclConnection)


def test_calls_of_all_kinds(endpoint: str, ids: Tensor) -> None:
    """... of very many rows in several calls, of rows on the CPU, and one that the executor refuses."""
    session = session_of(symbiosis.wrap(tiny_llama().cuda(), endpoint))
    weight = tiny_llama().cuda().model.layers[0].mlp.down_proj.weight
    layer = next(n for n, layer in enumerate(session.manifest) if layer.name == "model.layers.0.mlp.down_proj")
    for rows in (1, 17, 2000, (80 << 20) // weight.shape[1] // 4):
        x = torch.randn(rows, weight.shape[1], device="cuda")
        assert torch.equal(session.call(Op.FORWARD, layer, x), torch.nn.functional.linear(x, weight)), rows
        assert torch.equal(session.call(Op.DGRAD, layer, x @ weight.t()), (x @ weight.t()) @ weight), rows
    there = session.call(Op.FORWARD, layer, x[:3].cpu())
    assert there.device.type == "cpu" and torch.equal(there, torch.nn.functional.linear(x[:3], weight).cpu())
    with pytest.raises(CallError) as error:
        session.call(Op.FORWARD, layer, x[:3, :-1])
    assert error.value.code is Code.BAD_SHAPE
    assert torch.equal(session.call(Op.FORWARD, layer, x[:5]), torch.nn.functional.linear(x[:5], weight))
    assert session.stats.retries == 0


def test_training_by_nccl(endpoint: str, ids: Tensor) -> None:
    plain = trainer(lora(tiny_llama().cuda()))
    split = trainer(lora(symbiosis.wrap(tiny_llama().cuda(), endpoint)))
    for turn in range(8):
        batch = (ids + turn) % 100
        assert torch.equal(split(batch), plain(batch)), turn


def test_a_graph_cannot_capture_them(endpoint: str, ids: Tensor) -> None:
    split = symbiosis.wrap(tiny_llama().cuda(), endpoint)
    forward = symbiosis.capture(torch.no_grad()(lambda: split(ids).logits))
    with torch.no_grad():
        expected = tiny_llama().cuda()(ids).logits
        for _ in range(2):
            assert torch.equal(forward(), expected)
        with pytest.raises(symbiosis.SymbiosisError, match="local://"):
            forward()
        assert torch.equal(split(ids).logits, expected)


def test_on_the_executors_own_gpu_rows_go_through_the_host(endpoint: str, caplog: Any) -> None:
    ids = torch.randint(3, 100, (2, 9)).cuda()
    split = symbiosis.wrap(tiny_llama().cuda(), endpoint)
    with torch.no_grad():
        assert torch.equal(split(ids).logits, tiny_llama().cuda()(ids).logits)
    assert "the same GPU" in caplog.text


def test_leaving_and_joining_again(endpoint: str, ids: Tensor) -> None:
    model = tiny_llama().cuda()
    for _ in range(4):
        split = symbiosis.wrap(copy.deepcopy(model), endpoint)
        with torch.no_grad():
            assert torch.equal(split(ids).logits, model(ids).logits)
        session_of(split).close()


def test_several_sessions_at_once(endpoint: str, processes: Processes) -> None:
    all_there = processes.context.Barrier(4)
    queues = [processes.start(decode_on, endpoint, seed, all_there, 1)[1] for seed in range(4)]
    found = [queue.get(timeout=WAIT_S) for queue in queues]
    assert max(worst for worst, _ in found) < 1e-5, "one product's rounding, in float32"


def train_on_the_other_gpu(endpoint: str, said: Any, steps: int) -> None:
    with torch.cuda.device(1):
        train_forever(endpoint, said, steps, captured=False)


@pytest.mark.fault
def test_clients_are_killed_and_their_calls_are_aborted(start: Callable, processes: Processes, ids: Tensor) -> None:
    """With calls in flight, again and again: the bystander is never held up for long, and the executor's memory comes back."""
    executor, endpoint = start()
    model = tiny_llama().cuda()
    bystander = symbiosis.wrap(copy.deepcopy(model), endpoint)
    left, longest = [], 0.0
    with torch.no_grad(), watching(endpoint) as look:
        expected = model(ids).logits
        assert torch.equal(bystander(ids).logits, expected)
        for _ in range(int(os.environ.get("SYMBIOSIS_KILLS", "3"))):
            victims = [processes.start(train_on_the_other_gpu, endpoint, 10**6) for _ in range(2)]
            for _, queue in victims:
                queue.get(timeout=WAIT_S)
            time.sleep(0.2)
            for process, _ in victims:
                os.kill(process.pid, signal.SIGKILL)
            end = time.monotonic() + 2.0
            while time.monotonic() < end:
                begun = time.monotonic()
                assert torch.equal(bystander(ids).logits, expected)
                torch.cuda.synchronize()
                longest = max(longest, time.monotonic() - begun)
            until(lambda: sum(not s.observer for s in look().sessions) == 1, "the end of their sessions", 3.0)
            for process, _ in victims:
                process.join(10)
            left.append(memory.left())
    assert executor.is_alive()
    assert longest < 5.0
    assert left[0] - left[-1] < 64 << 20, left


@pytest.mark.fault
def test_the_executor_is_killed_and_training_goes_on(start: Callable, ids: Tensor) -> None:
    """Whenever it dies, not a loss differs from the unsplit model's."""
    executor, endpoint = start()
    plain, split = trainer(lora(tiny_llama().cuda())), trainer(lora(symbiosis.wrap(tiny_llama().cuda(), endpoint)))
    with ThreadPoolExecutor(1) as other:
        replaced = None
        for turn in range(60):
            if turn in (12, 40):
                replaced = other.submit(replace_after, 0.005 * turn / 12, executor, start)
            batch = (ids + turn) % 100
            assert torch.equal(split(batch), plain(batch)), turn
            if replaced is not None and turn in (20, 50):
                executor = replaced.result()


def replace_after(seconds: float, executor: Any, start: Callable) -> Any:
    time.sleep(seconds)
    executor.kill()
    executor.join()
    assert executor.exitcode == -signal.SIGKILL
    return start()[0]


@pytest.mark.fault
def test_without_an_executor_it_says_so(start: Callable, ids: Tensor) -> None:
    executor, endpoint = start()
    split = symbiosis.wrap(tiny_llama().cuda(), endpoint)
    session_of(split).patience = 1.0
    with torch.no_grad():
        split(ids)
        executor.kill()
        executor.join()
        with pytest.raises(symbiosis.SymbiosisError, match="no executor"):
            split(ids)
