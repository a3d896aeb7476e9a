"""A neighbour's calls beside another session's gradient through a wide matrix, in dtypes for which a CPU may have no fast kernel."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from statistics import fmean

import pytest
import torch
from torch import nn

from symbiosis.client.session import Session
from symbiosis.executor.compute.probe import seconds_by_kind
from symbiosis.executor.scheduling import costs, cutting
from symbiosis.executor.scheduling.cutting import TURN_S
from symbiosis.executor.scheduling.queue import Batch
from symbiosis.kernels.integers import modular_product, quantise
from symbiosis.protocol import Op

WIDE, HIDDEN, ROWS = 14_336, 128, 64
CALLS, PAUSE_S = 40, 2e-3  # a neighbour that thinks between its calls, so that turns begin meanwhile


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.wide = nn.Linear(HIDDEN, WIDE, bias=False)


@pytest.fixture(autouse=True)
def slow() -> Iterator[None]:
    """Without oneDNN no CPU has fast products in bfloat16 and float16. What was measured with it does not count."""
    seconds_by_kind.cache_clear()
    with torch.backends.mkldnn.flags(enabled=False):
        yield
    seconds_by_kind.cache_clear()


def gradient(session: Session, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    dy = torch.randint(-99, 99, (ROWS, WIDE), generator=torch.Generator().manual_seed(1)).to(dtype)
    return dy, session.call(Op.DGRAD, 1, dy)


@pytest.mark.alone
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64], ids=str)
def test_a_neighbour_waits_for_a_turn_and_not_for_a_product(
    serve: Callable, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell of 64 rows and these columns took a second in bfloat16. Nobody had called in that dtype before."""
    torch.manual_seed(0)
    model = Model()
    served = serve(model, integers=(16,), serve=["*"])
    neighbour, other = Session(served.endpoint), Session(served.endpoint)
    x, calls, turns, compute = torch.ones(4, HIDDEN), 0, list[float](), served.server.engine.compute
    made: list[tuple[torch.Tensor, torch.Tensor]] = []
    neighbour.call(Op.FORWARD, 0, x)

    def timed(batch: Batch) -> float:
        begun = time.thread_time()  # other programs do not count
        seconds = compute(batch)
        turns.append(time.thread_time() - begun)
        return seconds

    monkeypatch.setattr(served.server.engine, "compute", timed)
    thread = threading.Thread(target=lambda: made.append(gradient(other, dtype)))
    thread.start()
    while not made and thread.is_alive():
        neighbour.call(Op.FORWARD, 0, x)
        calls += 1
        time.sleep(PAUSE_S)
    thread.join()
    assert len(turns) > 2 * calls and fmean(turns) < 4 * TURN_S
    dy, dx = made[0]
    weight = model.wide.weight.detach()
    whole = modular_product(dy, quantise(weight.t(), 16)[0].mT) if dtype is torch.int64 else dy @ weight.to(dtype)
    assert torch.equal(dx, whole), "its bits are those of the whole product"


@pytest.mark.alone
def test_nobody_waits_for_a_joined_product(serve: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four callers of 4 rows each, through a matrix that takes milliseconds. Only calls of the same layer were cut before."""
    monkeypatch.setattr(cutting, "TURN_S", TURN_S / 5)  # so that it is long on any machine
    monkeypatch.setattr(costs, "SLOW_S", math.inf)  # so that joining pays on any
    served = serve(Model(), serve=["*"])
    engine = served.server.engine
    compute, joined = engine.compute, list[tuple[int, float]]()

    def noted(batch: Batch) -> float:
        if len(batch.slices) > 1:
            joined.append((batch.rows, batch.share))
        return compute(batch)

    monkeypatch.setattr(engine, "compute", noted)
    neighbour, others = Session(served.endpoint), [Session(served.endpoint) for _ in range(4)]
    stopped, x, together = threading.Event(), torch.randn(4, HIDDEN), threading.Barrier(len(others))
    made: list[torch.Tensor] = []

    def call(session: Session) -> None:
        while not stopped.is_set():
            together.wait()
            made.append(session.call(Op.FORWARD, 1, x))

    def end() -> None:
        stopped.set()
        together.abort()

    neighbour.call(Op.FORWARD, 0, x)
    with suppress(threading.BrokenBarrierError), ThreadPoolExecutor(len(others)) as pool:
        calls = [pool.submit(call, session) for session in others]
        deadline = time.monotonic() + 60
        while len(joined) < CALLS and time.monotonic() < deadline:
            neighbour.call(Op.FORWARD, 0, x)
            time.sleep(PAUSE_S)
        end()
        for one in calls:
            one.result()
    assert len(joined) >= CALLS and all(share < 1 for _, share in joined), "each is computed in turns"
    torch.testing.assert_close(made[0], made[-1])
