"""A neighbour's calls beside another session's gradient through a wide matrix, in dtypes for which a CPU may have no fast kernel."""

import threading
import time
from collections.abc import Callable, Iterator
from statistics import fmean

import pytest
import torch
from torch import nn

from symbiosis.client.session import Session
from symbiosis.executor.compute.probe import seconds_by_kind
from symbiosis.executor.scheduling.cutting import TURN_S
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
def test_a_neighbour_waits_for_a_turn_and_not_for_a_product(serve: Callable, dtype: torch.dtype) -> None:
    """A cell of 64 rows and these columns took a second in bfloat16. Nobody had called in that dtype before."""
    torch.manual_seed(0)
    model = Model()
    served = serve(model, integers=(16,), serve=["*"])
    neighbour, other = Session(served.endpoint), Session(served.endpoint)
    x, times = torch.ones(4, HIDDEN), []
    made: list[tuple[torch.Tensor, torch.Tensor]] = []
    neighbour.call(Op.FORWARD, 0, x)
    thread = threading.Thread(target=lambda: made.append(gradient(other, dtype)))
    thread.start()
    while (len(times) < CALLS or not made) and thread.is_alive():
        begun = time.perf_counter()
        neighbour.call(Op.FORWARD, 0, x)
        times.append(time.perf_counter() - begun)
        time.sleep(PAUSE_S)
    thread.join()
    assert fmean(times) < 10 * TURN_S
    dy, dx = made[0]
    weight = model.wide.weight.detach()
    whole = modular_product(dy, quantise(weight.t(), 16)[0].mT) if dtype is torch.int64 else dy @ weight.to(dtype)
    assert torch.equal(dx, whole), "its bits are those of the whole product"
