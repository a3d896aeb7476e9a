"""A bad network between client and executor: cut, half-open, refused, late, slow, lossy. Nobody's results change.

A proxy does it (tests/fault_proxy.py), so that nothing here needs root.
"""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from symbiosis.client.session import Session
from symbiosis.protocol import Op
from tests import programs
from tests.fault_proxy import FaultProxy
from tests.processes import Client, Executor, killed_at_the_end, save_tiny_llama, turns, until

pytestmark = pytest.mark.fault
STEPS = 6
RECOVERY_S = 3.0  # from when the network is well again to the end of the step that it broke
long = (pytest.mark.soak, pytest.mark.timeout(1800))


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    directory = tmp_path_factory.mktemp("model")
    model = save_tiny_llama(directory)
    with killed_at_the_end() as processes:
        # Everybody alone in the product, so that bits can be compared.
        options = ("--listen=tcp://127.0.0.1:0", "--policy=immediate")
        processes.append(Executor(model, *options, log=directory / "log"))
        yield processes[0]


@pytest.fixture(scope="module")
def calm(executor: Executor) -> dict[str, Any]:
    """What training gives over a good network."""
    return train(executor.endpoint)


@pytest.fixture
def proxy(executor: Executor) -> Iterator[FaultProxy]:
    with FaultProxy(executor.endpoint, seed=1) as proxy:
        yield proxy


def train(
    endpoint: str,
    disturb: Callable[[int], None] = lambda _: None,
    timeout: float = 60.0,
    steps: int = STEPS,
    patience: float = 60.0,
) -> dict[str, Any]:
    """A training in a process of its own, with `disturb(step)` in the middle of each step."""
    with killed_at_the_end() as processes:
        turn = turns()
        trainer = Client(programs.train, endpoint, steps, turn, timeout, patience)
        processes.append(trainer)
        for step in range(steps):
            assert trainer.heard(patience) == step
            turn.release()
            disturb(step)
        return trainer.result()


def test_a_good_network_changes_nothing(proxy: FaultProxy, calm: dict[str, Any]) -> None:
    result = train(proxy.endpoint)
    programs.assert_same(result, calm)
    assert (result["reconnects"], proxy.accepted) == (0, 1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [1.0, *(pytest.param(seconds, marks=pytest.mark.soak) for seconds in (10.0, 60.0))])
def test_a_cut(seconds: float, proxy: FaultProxy, calm: dict[str, Any]) -> None:
    """Connections are reset and new ones refused, as when a cable is pulled in a rack that says so."""
    healed: dict[int, float] = {}
    recoveries = []

    def cut(step: int) -> None:
        if step in (1, 3):
            proxy.refuse()
            proxy.cut()
            time.sleep(seconds)  # how long it is cut, and no wait for anything
            proxy.accept()
            healed[step] = time.monotonic()
        if step - 1 in healed:
            recoveries.append(time.monotonic() - healed[step - 1])

    result = train(proxy.endpoint, cut, patience=120.0)
    programs.assert_same(result, calm)
    assert result["reconnects"] >= 1
    assert len(recoveries) == 2 and max(recoveries) <= RECOVERY_S, recoveries


@pytest.mark.parametrize("steps", [STEPS, pytest.param(200, marks=long)])
def test_a_storm_of_resets(steps: int, proxy: FaultProxy, executor: Executor) -> None:
    chance = random.Random(2)

    def storm(step: int) -> None:
        for _ in range(10):
            time.sleep(chance.uniform(0, 0.02))
            proxy.cut()

    result = train(proxy.endpoint, storm, steps=steps)
    programs.assert_same(result, train(executor.endpoint, steps=steps))
    assert result["reconnects"] >= steps


@pytest.mark.parametrize("steps", [20, pytest.param(1000, marks=long)])
def test_a_lossy_line(steps: int, proxy: FaultProxy, executor: Executor) -> None:
    """One chunk in a hundred has to be sent again, and what is behind it waits."""
    proxy.loss = 0.01
    result = train(proxy.endpoint, steps=steps)
    programs.assert_same(result, train(executor.endpoint, steps=steps))
    assert result["reconnects"] == 0
    assert proxy.lost >= steps // 10


def test_a_half_open_connection_is_given_up(proxy: FaultProxy, calm: dict[str, Any]) -> None:
    """Nothing comes through and nobody says so: the call takes too long, and is sent again over another connection."""
    proxy.hang()
    with killed_at_the_end() as processes:
        trainer = Client(programs.train, proxy.endpoint, STEPS, None, 1.0)
        processes.append(trainer)
        until(lambda: proxy.accepted == 1, "a connection")
        proxy.resume()
        assert trainer.heard() == 0
        proxy.hang()
        until(lambda: proxy.accepted > 1, "another connection")
        proxy.resume()
        result = trainer.result()
    programs.assert_same(result, calm)
    assert result["reconnects"] >= 1


def test_a_short_hang_is_waited_for(proxy: FaultProxy, calm: dict[str, Any]) -> None:
    def hang(step: int) -> None:
        proxy.hang()
        time.sleep(0.3)  # how long it hangs, and no wait for anything
        proxy.resume()

    result = train(proxy.endpoint, hang)
    programs.assert_same(result, calm)
    assert result["reconnects"] == 0


def test_a_long_way(proxy: FaultProxy, calm: dict[str, Any]) -> None:
    """20 ms in each direction, give or take 10."""
    proxy.delay_s, proxy.jitter_s = 0.02, 0.01
    result = train(proxy.endpoint)
    programs.assert_same(result, calm)
    assert result["reconnects"] == 0


@pytest.mark.full
def test_a_thin_line(proxy: FaultProxy, executor: Executor) -> None:
    """1 Mbit/s in each direction."""
    proxy.bits_per_s = 1e6
    result = train(proxy.endpoint, steps=2)
    programs.assert_same(result, train(executor.endpoint, steps=2))
    assert result["reconnects"] == 0


def test_a_call_that_takes_long_to_go_through_is_not_taken_for_lost(proxy: FaultProxy) -> None:
    """1 MiB over 1.2 Mbit/s: seven seconds in which nothing comes back."""
    session = Session(proxy.endpoint)
    ids = torch.arange(1 << 20, dtype=torch.uint8).view(1, -1)
    assert session.welcome
    proxy.bits_per_s = 1.2e6
    try:
        assert torch.equal(session.call(Op.ECHO, 0, ids), ids)
        assert session.stats.reconnects == 0
    finally:
        proxy.bits_per_s = 0.0
        session.close()
