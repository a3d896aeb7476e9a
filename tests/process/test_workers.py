"""Several workers on a CPU: products at the same time, each call answered once and by its own rows, whoever comes and goes."""

import copy
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import symbiosis
from symbiosis.client.weights.remote_weight import remote_weights
from symbiosis.errors import CallError, ConfigError, SymbiosisError
from symbiosis.executor import loop
from symbiosis.executor.model.store import Store
from symbiosis.executor.options import Options
from symbiosis.executor.scheduling.queue import Batch, Item, Slice
from tests.conftest import tiny_llama
from tests.processes import until

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def every_product_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LONG_S", -1.0)
    monkeypatch.setattr(loop, "MOST_ROWS", 0)  # ... and of many rows


@pytest.fixture
def linear() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48)).requires_grad_(False)


def leave(model: nn.Module) -> None:
    next(remote_weights(model)).handle.session.close()


def in_the_background(model: nn.Module, x: Tensor, results: list[Tensor]) -> None:
    """An answer that may never come."""

    def ask() -> None:
        with suppress(SymbiosisError):
            results.append(model(x))

    threading.Thread(target=ask, daemon=True).start()


def two_at_once(executor: symbiosis.Executor) -> list[int]:
    """From now on a product waits until another one has begun; how many were under way."""
    engine, meet, met = executor.server.engine, threading.Barrier(2), []
    compute = engine.slices.compute

    def wait_and_compute(slices: Any) -> None:
        meet.wait(WAIT_S)
        met.append(1)
        compute(slices)

    engine.slices.compute = wait_and_compute  # type: ignore[method-assign]
    return met


def test_products_are_computed_at_the_same_time(serve: Callable, url: str, linear: nn.Sequential) -> None:
    executor = serve(linear, workers=2, policy="immediate", listen=[url])
    models = [symbiosis.wrap(copy.deepcopy(linear), executor.endpoint) for _ in range(2)]
    met = two_at_once(executor)
    xs = [torch.randn(5, 32) for _ in models]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda pair: pair[0](pair[1]), zip(models, xs, strict=True)))
    assert len(met) == 2
    for x, y in zip(xs, results, strict=True):
        assert torch.equal(y, linear(x))


@pytest.mark.parametrize("policy", ["immediate", "opportunistic", "lockstep"])
def test_everybody_trains_as_without_an_executor(policy: str, serve: Callable, ids: Tensor) -> None:
    base = tiny_llama()
    executor = serve(base, workers=3, policy=policy, max_batch_tokens=64 if policy == "immediate" else 4096)

    def adapted(model: nn.Module, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        return get_peft_model(model, config).train()

    def train(model: nn.Module) -> dict[str, Tensor]:
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def train_and_leave(model: nn.Module) -> dict[str, Tensor]:
        grads = train(model)
        leave(model)
        return grads

    expected = [train(adapted(copy.deepcopy(base), seed)) for seed in range(4)]
    clients = [adapted(symbiosis.wrap(copy.deepcopy(base), executor.endpoint), seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(train_and_leave, clients))
    for mine, plain in zip(got, expected, strict=True):
        for name in plain:
            if policy == "immediate":
                assert torch.equal(mine[name], plain[name]), name
            else:
                torch.testing.assert_close(mine[name], plain[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("policy", "rows", "leaves"), [("opportunistic", 4, False), ("opportunistic", 5, True), ("immediate", 4, True)]
)
def test_while_few_rows_are_multiplied_calls_gather(
    policy: Any, rows: int, leaves: bool, linear: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "MOST_ROWS", 4)
    worker = loop.ExecutorLoop(Store(linear), Options(workers=2, policy=policy))
    item = Item(1, "a key", rows, 0, 0.0)
    assert worker._leaves_time(Batch("a key", [Slice(item, 0, rows)], 0.0)) == leaves


def test_slices_of_one_call_at_the_same_time(serve: Callable, linear: nn.Sequential) -> None:
    executor = serve(linear, workers=2, max_batch_tokens=8)
    model, x = symbiosis.wrap(copy.deepcopy(linear), executor.endpoint), torch.randn(16, 32)
    met = two_at_once(executor)
    assert torch.equal(model(x)[:8], linear(x[:8]))
    assert len(met) == 2


@pytest.mark.parametrize("slow", [0, 8])
def test_a_call_is_answered_when_its_last_row_is_there(slow: int, serve: Callable, linear: nn.Sequential) -> None:
    """Also if slices end in another order than they began, and one of them fails."""
    executor = serve(linear, workers=2, max_batch_tokens=8)
    model, x = symbiosis.wrap(copy.deepcopy(linear), executor.endpoint), torch.randn(16, 32)
    engine = executor.server.engine
    compute, failing = engine.slices.compute, []

    def late(slices: Any) -> None:
        if slices[0].start == slow:
            time.sleep(0.2)
            if failing:
                raise ValueError("on purpose")
        compute(slices)

    engine.slices.compute = late  # type: ignore[method-assign]
    assert torch.allclose(model(x), linear(x), atol=1e-6)
    failing.append(1)
    with pytest.raises(CallError, match="on purpose"):
        model(x)
    failing.clear()
    assert torch.allclose(model(x), linear(x), atol=1e-6)


def test_a_client_leaves_while_its_product_is_computed(serve: Callable, linear: nn.Sequential) -> None:
    executor = serve(linear, workers=2, listen=["tcp://127.0.0.1:0"])
    gone, other = (symbiosis.wrap(copy.deepcopy(linear), executor.endpoint, timeout=0.3) for _ in range(2))
    engine, begun, go_on = executor.server.engine, threading.Event(), threading.Event()
    compute = engine.slices.compute

    def held(slices: Any) -> None:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(WAIT_S)
        compute(slices)

    engine.slices.compute = held  # type: ignore[method-assign]
    x = torch.randn(4, 32)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(gone, x)
        assert begun.wait(WAIT_S)
        assert torch.equal(other(x), linear(x)), "nobody waits for that product"
        until(lambda: symbiosis.stats(gone).reconnects > 0, "the client to give up waiting, and to come again")
        go_on.set()
        assert torch.equal(answer.result(WAIT_S), linear(x))
    assert torch.equal(other(x), linear(x))


@pytest.mark.parametrize("drain", [True, False])
def test_the_end_waits_for_products_under_way(drain: bool, linear: nn.Sequential) -> None:
    executor = symbiosis.Executor(copy.deepcopy(linear), workers=3)
    model, x = symbiosis.wrap(copy.deepcopy(linear), executor.endpoint), torch.randn(4, 32)
    engine, begun = executor.server.engine, threading.Event()
    compute = engine.slices.compute

    def slow(slices: Any) -> None:
        begun.set()
        time.sleep(0.3)
        compute(slices)

    engine.slices.compute = slow  # type: ignore[method-assign]
    results: list[Tensor] = []
    in_the_background(model, x, results)
    assert begun.wait(WAIT_S)
    executor.close(drain=drain)
    assert not executor._thread.is_alive()
    if drain:
        until(lambda: bool(results), "the answer")
        assert torch.equal(results[0], linear(x))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_fails_ends_the_executor_and_is_heard_of(
    linear: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = symbiosis.Executor(copy.deepcopy(linear), workers=3)
    model = symbiosis.wrap(copy.deepcopy(linear), executor.endpoint)

    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(executor.server.batcher, "done", fail)
    in_the_background(model, torch.ones(3, 32), [])
    executor._thread.join(WAIT_S)
    assert not executor._thread.is_alive()
    assert str(executor.server._failure) == "on purpose"


def test_workers_are_for_cpus() -> None:
    on_gpu: Any = SimpleNamespace(on_gpu=True)
    with pytest.raises(ConfigError, match="workers"):  # whatever the options say of the device
        loop.ExecutorLoop(on_gpu, Options(workers=2))
    with pytest.raises(ConfigError, match="workers"):
        symbiosis.Executor("demo", workers=0)


@pytest.fixture(params=[1, 2])
def torch_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("workers", [1, 2])
def test_products_use_as_many_threads_as_the_callers_own(
    workers: int, serve: Callable[..., symbiosis.Executor]
) -> None:
    """Else BLAS may cut them otherwise, and round otherwise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 192, bias=False)).requires_grad_(False)
    split = symbiosis.wrap(copy.deepcopy(model), serve(model, workers=workers).endpoint)
    x = torch.randn(36, 64)
    assert [rows for rows in range(1, 37) if not torch.equal(split(x[:rows]), model(x[:rows]))] == []
