"""Several executors that serve one model: clients go from one to the next when it is killed, drains or hangs.

Every call is answered right, once, after at most one retry as long as another replica is well.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import symbiosis
from symbiosis.client.session import Session
from symbiosis.errors import CallError, Code, ConfigError, ExecutorUnavailable, WrapError
from symbiosis.protocol import Op
from tests import programs
from tests.conftest import tiny_llama
from tests.fault_proxy import FaultProxy
from tests.processes import (
    WAIT_S,
    Bystander,
    Client,
    Executor,
    both_transports,
    layer_number,
    turns,
    until,
)

pytestmark = pytest.mark.fault
STEPS = 20
LAYER = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def calm(model: Path) -> dict[str, Any]:
    """What training gives when nothing happens to anybody."""
    return programs.undisturbed(model, STEPS)


@pytest.fixture
def scheme() -> str:
    return "tcp"


@pytest.fixture
def start(processes: list, model: Path, tmp_path: Path, scheme: str) -> Callable[..., Executor]:
    """Starts a replica at an endpoint of its own."""

    def run(*options: str, of: Path = model) -> Executor:
        number = len(processes)
        listen = f"--listen=local://{tmp_path}/{number}.sock" if scheme == "local" else "--listen=tcp://127.0.0.1:0"
        # Everybody alone in the product, so that bits can be compared.
        processes.append(Executor(of, listen, "--policy=immediate", *options, log=tmp_path / f"{number}.log"))
        assert processes[-1].line, processes[-1].log.read_text()
        return processes[-1]

    return run


class Asker:
    """Makes calls whose answers it knows, each with rows of its own: an answer to any other call would be a wrong one."""

    def __init__(self, weight: Tensor, *endpoints: str, timeout: float = WAIT_S, **options: float) -> None:
        self.session = Session(endpoints, timeout=timeout, **options)
        self._number = layer_number(self.session, LAYER)
        self._weight = weight
        self._random = torch.Generator().manual_seed(5)

    def ask(self, rows: int = 3) -> int:
        """Makes a call, and returns how often it had to be sent again."""
        retries = self.session.stats.retries
        x = torch.randn(rows, self._weight.shape[1], generator=self._random)
        assert torch.equal(self.session.call(Op.FORWARD, self._number, x), nn.functional.linear(x, self._weight))
        return self.session.stats.retries - retries


@pytest.fixture(scope="module")
def weight(model: Path) -> Tensor:
    """From the file, as the executor has it: where a tensor begins in memory changes how products of one row round."""
    return AutoModelForCausalLM.from_pretrained(model).get_submodule(LAYER).weight.detach()


@pytest.fixture
def asker(weight: Tensor) -> Iterator[Callable[..., Asker]]:
    made: list[Asker] = []

    def make(*endpoints: str, **options: float) -> Asker:
        made.append(Asker(weight, *endpoints, **options))
        return made[-1]

    yield make
    for one in made:
        one.session.close()


# ---------------------------------------------------------------- who is asked


@both_transports
def test_a_call_goes_to_the_next_replica_without_a_pause(start: Callable, asker: Callable, scheme: str) -> None:
    first, second = start(), start()
    client = asker(first.endpoint, second.endpoint)
    assert client.ask() == 0
    assert client.session.endpoint == first.endpoint
    first.kill()
    assert client.ask() == 1
    assert client.session.endpoint == second.endpoint
    assert client.ask() == 0  # it stays there
    successor = first.again()
    try:
        second.kill()
        assert client.ask() == 1  # and comes back
        assert client.session.endpoint == first.endpoint
    finally:
        successor.kill()


def test_pauses_come_when_all_were_asked(
    start: Callable, asker: Callable, processes: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are lost and one is well: no pause. All are lost: the call waits until one is back."""
    first, second, third = start(), start(), start()
    client = asker(first.endpoint, second.endpoint, third.endpoint)
    client.ask()
    first.kill()
    second.kill()
    with monkeypatch.context() as patched:
        # the test would not survive a pause
        patched.setattr("symbiosis.client.connection.reconnect.FIRST_PAUSE_S", 10 * WAIT_S)
        assert client.ask() == 2
    third.kill()
    asking = threading.Thread(target=client.ask)
    asking.start()
    until(lambda: client.session.stats.retries > 5, "a second round")
    processes.append(second.again())
    asking.join(WAIT_S)
    assert not asking.is_alive()
    assert client.session.endpoint == second.endpoint


def test_the_first_replica_that_answers_is_joined(start: Callable, asker: Callable, tmp_path: Path) -> None:
    running = start()
    nobody = f"local://{tmp_path}/nobody.sock"
    client = asker(nobody, running.endpoint)
    assert client.session.endpoint == running.endpoint
    assert client.ask() == 0
    with pytest.raises(ExecutorUnavailable, match="nobody.sock .* or .*nowhere.sock .*--listen .*nobody.sock"):
        _ = Session([nobody, f"local://{tmp_path}/nowhere.sock"]).welcome
    with pytest.raises(ConfigError, match="name at least one"):
        Session([])


def test_replicas_come_from_the_environment(start: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = start(), start()
    monkeypatch.setenv("SYMBIOSIS_ENDPOINT", f"{first.endpoint}, {second.endpoint}")
    model = symbiosis.from_executor()
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        first.kill()
        assert torch.equal(model(input_ids=ids).logits, before)
    assert symbiosis.stats(model).retries == 1


# ---------------------------------------------------------------- kills, hangs, restarts


@both_transports
def test_training_goes_from_replica_to_replica(
    start: Callable, processes: list, calm: dict[str, Any], scheme: str
) -> None:
    """One of two is killed in every other step, and back before the other is."""
    replicas, turn = [start(), start()], turns()
    trainer = Client(programs.train, [replica.endpoint for replica in replicas], STEPS, turn)
    processes.append(trainer)
    kills = 0
    for step in range(STEPS):
        assert trainer.heard() == step
        turn.release()
        if step % 2:
            at = kills % 2  # where the trainer is
            replicas[at].kill()
            kills += 1
            replicas[at] = replicas[at].again()
            processes.append(replicas[at])
    result = trainer.result()
    programs.assert_same(result, calm)
    assert result["retries"] <= kills


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [0.0, pytest.param(30.0, marks=pytest.mark.soak)])
@both_transports
def test_a_frozen_replica_is_left_and_its_late_answer_meets_nobody(
    start: Callable, asker: Callable, scheme: str, seconds: float
) -> None:
    """The call's time is over, and the next replica answers. What the frozen one says when it thaws is not taken for the
    answer to a later call, also when the client is back there."""
    first, second = start(), start()
    client = asker(first.endpoint, second.endpoint, timeout=1.0)
    client.ask()
    for frozen, other in [(first, second), (second, first)] * 2:
        frozen.signal(signal.SIGSTOP)
        assert client.ask() == 1
        assert client.session.endpoint == other.endpoint
        time.sleep(seconds)  # how long it stays frozen, and no wait for anything
        assert client.ask() == 0
        frozen.signal(signal.SIGCONT)
        for _ in range(20):
            assert client.ask() == 0


@both_transports
def test_the_late_answer_of_the_only_executor_meets_nobody(start: Callable, asker: Callable, scheme: str) -> None:
    """Thawed, it answers the first attempt, which nobody waits for any more, and then the second one."""
    only = start()
    client = asker(only.endpoint, timeout=0.5)
    client.ask()
    for rows in (1, 5):
        only.signal(signal.SIGSTOP)
        thaw = threading.Timer(1.0, only.signal, (signal.SIGCONT,))  # in the middle of the second attempt
        thaw.start()
        assert client.ask(rows) >= 1
        thaw.join(WAIT_S)
        for more in range(1, 20):
            client.ask(more)


def test_signs_of_life_that_nobody_takes_do_not_block_the_next_call(start: Callable, asker: Callable) -> None:
    """An idle client whose executor died long ago: its queue is full, and the call must not wait for room in it."""
    first, second = start(), start()
    client = asker(first.endpoint, second.endpoint)
    client.ask()
    first.kill()
    for _ in range(1000):
        client.session.beat()
    asking = threading.Thread(target=client.ask, daemon=True)
    asking.start()
    asking.join(WAIT_S)
    assert not asking.is_alive()
    assert client.session.endpoint == second.endpoint


def roll(start: Callable[..., Executor], processes: list, rounds: int) -> None:
    """Two replicas are restarted in turn, `rounds` times each, while clients call all the time."""
    replicas = [start(), start()]
    endpoints = [replica.endpoint for replica in replicas]
    with Bystander(endpoints, tiny_llama()) as one, Bystander(endpoints[::-1], tiny_llama()) as other:
        for _ in range(rounds):
            for at, replica in enumerate(replicas):
                replica.signal(signal.SIGTERM)
                assert replica.wait() == 0  # it has answered what had come
                replicas[at] = replica.again()
                processes.append(replicas[at])
                for bystander in (one, other):
                    calls = bystander.calls
                    until(lambda b=bystander, n=calls: b.calls > n + 3 or b.problem, "another call")  # type: ignore[misc]
                    assert bystander.problem is None, bystander.problem
    for bystander in (one, other):
        stats = bystander.session.stats
        assert rounds <= stats.reconnects <= 2 * rounds
        assert stats.retries <= 2 * rounds  # each restart costs a client one retry at most
        assert bystander.most_retries <= 1


@both_transports
def test_a_rolling_restart_fails_no_call(start: Callable, processes: list, scheme: str) -> None:
    roll(start, processes, rounds=3)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@both_transports
def test_many_rolling_restarts_fail_no_call(start: Callable, processes: list, scheme: str) -> None:
    roll(start, processes, rounds=20)


def test_a_replica_behind_a_dead_network_is_left(start: Callable, asker: Callable) -> None:
    """Half-open: nothing comes back, and nobody says so."""
    first, second = start(), start()
    with FaultProxy(first.endpoint) as proxy:
        client = asker(proxy.endpoint, second.endpoint, timeout=0.5)
        assert client.ask() == 0
        proxy.hang()
        assert client.ask() == 1
        assert client.ask() == 0


# ---------------------------------------------------------------- another model is no replica


def with_a_flipped_bit(model: Path, directory: Path) -> Path:
    """The same checkpoint, but for one bit of one weight."""
    tensors = load_file(model / "model.safetensors")
    tensors[f"{LAYER}.weight"].view(torch.int32)[3, 5] ^= 1
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        (directory / name).write_bytes((model / name).read_bytes())
    return directory


def test_one_wrong_bit_of_a_weight_is_refused(start: Callable, asker: Callable, model: Path, tmp_path: Path) -> None:
    """By a client with weights of its own when it joins, and by the executor when a client comes from a true replica."""
    spoilt = start(of=with_a_flipped_bit(model, tmp_path / "spoilt"))
    client_model: nn.Module = tiny_llama()
    with pytest.raises(WrapError, match=f"{LAYER}: the weights differ"):
        symbiosis.wrap(client_model, spoilt.endpoint)
    true = start()
    client = asker(true.endpoint, spoilt.endpoint, patience=1.0)
    client.ask()
    true.kill()
    with pytest.raises(CallError, match="another model") as error:
        client.ask()
    assert error.value.code is Code.WRONG_MODEL


def test_a_replica_of_another_model_is_passed_by(
    start: Callable, asker: Callable, processes: list, model: Path, tmp_path: Path
) -> None:
    """While the true one is away, and when it is back."""
    true, spoilt = start(), start(of=with_a_flipped_bit(model, tmp_path / "spoilt"))
    client = asker(true.endpoint, spoilt.endpoint)
    client.ask()
    true.kill()
    processes.append(true.again())
    client.ask()


@pytest.mark.parametrize("none", [[], "", None, 3, [None], ["local:///a", 7], "local:/a", ["local:///a", "b"]])
def test_what_is_no_endpoint_is_refused_by_name(none: Any) -> None:
    with pytest.raises(ConfigError, match="is not an endpoint|empty list"):
        Session(none)
