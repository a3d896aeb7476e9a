"""Kills, freezes and restarts, at random moments: what must hold is that nobody's results change, and nothing is left behind.

The executor keeps nothing between calls, so a client sends again what was not answered. Each test runs in a short form;
the long one (marker `soak`) is the same with more of everything.
"""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from symbiosis.client.connection.reconnect import LONGEST_PAUSE_S
from symbiosis.client.session import Session
from symbiosis.errors import CallError, Code
from symbiosis.protocol import Call, Hello, Op
from symbiosis.transport import connect
from tests import programs
from tests.conftest import tiny_llama
from tests.processes import (
    Bystander,
    Client,
    Executor,
    both_transports,
    layer_number,
    p99,
    snapshot,
    turns,
    until,
    watching,
)

pytestmark = pytest.mark.fault
STEPS = 30
KILLS = 100  # over each transport
MANY_STEPS = KILLS + 10
LENGTH, SEED = 40, 1  # of what is generated
STEP_S = 0.05  # about what a training step takes; kills fall anywhere within a few of them
SLOWER, BUSY_S = 3.0, 0.02  # others' p99 beside killed clients: over that beside a living one; and a busy machine's
RECOVERY_S = LONGEST_PAUSE_S + 0.2 + STEP_S  # from the executor's return to the end of the step, in 99 cases of 100


tcp_always_local_when_full = pytest.mark.parametrize("scheme", [pytest.param("local", marks=pytest.mark.full), "tcp"])


def frozen_for(short: float, long: float) -> pytest.MarkDecorator:
    """For how many seconds somebody hangs."""
    return pytest.mark.parametrize(
        "seconds", [short, pytest.param(long, marks=(pytest.mark.soak, pytest.mark.timeout(300)))]
    )


@pytest.fixture(scope="module")
def calm(model: Path) -> dict[str, Any]:
    """What training gives when nothing happens to anybody."""
    return programs.undisturbed(model, STEPS)


@pytest.fixture(scope="module")
def calm_for_long(model: Path) -> dict[str, Any]:
    return programs.undisturbed(model, MANY_STEPS)


@pytest.fixture
def start(processes: list, model: Path, tmp_path: Path, scheme: str) -> Callable[..., Executor]:
    """Starts an executor at an endpoint of the test's `scheme`."""
    listen = f"--listen=local://{tmp_path}/x.sock" if scheme == "local" else "--listen=tcp://127.0.0.1:0"

    def run(*options: str) -> Executor:
        # Everybody alone in the product, so that bits can be compared: company changes how a sum is rounded.
        processes.append(Executor(model, listen, "--policy=immediate", *options, log=tmp_path / "executor.log"))
        assert processes[-1].line, processes[-1].log.read_text()
        return processes[-1]

    return run


# ---------------------------------------------------------------- the executor dies


def train_while_the_executor_is_killed(
    start: Callable[..., Executor], processes: list, steps: int, kills: int, seed: int
) -> dict[str, Any]:
    """A training during which the executor is killed `kills` times, each time at a random moment of another step; somebody
    generates at the same time, the right tokens only."""
    chance = random.Random(seed)
    deadly = set(chance.sample(range(1, steps - 1), kills))  # not the last: who is done leaves
    back_at, recoveries = 0.0, []
    executor = start()
    turn, enough = turns(), turns()
    trainer = Client(programs.train, executor.endpoint, steps, turn)
    generator = Client(programs.generate_until, executor.endpoint, LENGTH, SEED, enough)
    processes += [trainer, generator]
    assert generator.heard() == "ready"
    for step in range(steps):
        assert trainer.heard() == step
        if step - 1 in deadly:
            recoveries.append(time.monotonic() - back_at)
        turn.release()
        if step in deadly:
            until_clients(executor, 2, "the clients' return")
            time.sleep(chance.uniform(0, STEP_S))
            executor.kill()
            executor = executor.again()
            back_at = time.monotonic()
            assert executor.line, executor.log.read_text()
            processes.append(executor)
    assert len(recoveries) == kills and p99(recoveries) <= RECOVERY_S, sorted(recoveries)[-kills // 50 :]
    enough.release()
    assert generator.result() == [programs.generate_tokens(tiny_llama(), LENGTH, SEED)]
    return trainer.result()


@pytest.mark.alone
@pytest.mark.timeout(300)
@tcp_always_local_when_full
def test_training_survives_kills_of_the_executor(
    start: Callable, processes: list, calm_for_long: dict[str, Any], scheme: str
) -> None:
    """The client reconnects by itself and sends again, and ends with the adapter of the undisturbed run."""
    result = train_while_the_executor_is_killed(start, processes, MANY_STEPS, KILLS, seed=1)
    programs.assert_same(result, calm_for_long)
    assert result["reconnects"] >= KILLS - 1  # the last one may come after its last call


@pytest.mark.soak
@pytest.mark.timeout(3600)
@both_transports
def test_training_survives_many_kills_of_the_executor(
    start: Callable, processes: list, model: Path, scheme: str
) -> None:
    steps, kills = 1100, 1000
    result = train_while_the_executor_is_killed(start, processes, steps, kills, seed=2)
    programs.assert_same(result, programs.undisturbed(model, steps))
    assert result["reconnects"] >= kills - 1


@both_transports
def test_a_rolling_restart_loses_no_call(start: Callable, processes: list, calm: dict[str, Any], scheme: str) -> None:
    """The old executor answers what has come and goes, while its successor starts at the same endpoint."""
    executor = start()
    trainer = Client(programs.train, executor.endpoint, STEPS)
    processes.append(trainer)
    with Bystander(executor.endpoint, tiny_llama()) as bystander:
        for step in range(STEPS):
            assert trainer.heard() == step
            if step % 10 == 5:
                executor.retire()
                successor = executor.again()
                assert executor.wait() == 0
                assert successor.line, successor.log.read_text()
                processes.append(successor)
                executor = successor
        programs.assert_same(trainer.result(), calm)
        calls = bystander.calls
        until(lambda: bystander.calls > calls + 3 or bystander.problem)
        assert bystander.problem is None
        assert bystander.session.stats.reconnects >= 1


@frozen_for(1.0, 30.0)
@both_transports
def test_a_frozen_executor_is_waited_for(
    start: Callable, processes: list, calm: dict[str, Any], scheme: str, seconds: float
) -> None:
    """Frozen for less than a call may take: work goes on where it was."""
    executor = start()
    trainer = Client(programs.train, executor.endpoint, STEPS)
    processes.append(trainer)
    with Bystander(executor.endpoint, tiny_llama()) as bystander:
        for step in range(STEPS):
            assert trainer.heard() == step
            if step in (5, 15):
                executor.signal(signal.SIGSTOP)
                time.sleep(seconds)  # how long it is frozen, and no wait for anything
                executor.signal(signal.SIGCONT)
        result = trainer.result()
        bystander.goes_on()
        assert bystander.slowest_s > 0.9 * seconds
    programs.assert_same(result, calm)
    assert result["reconnects"] == 0


@pytest.mark.parametrize("times", [20, pytest.param(100, marks=pytest.mark.soak)])
@both_transports
def test_a_call_for_which_there_is_no_memory_is_refused_and_the_next_served(
    start: Callable, scheme: str, times: int
) -> None:
    """The executor's address space is limited for real; a reply of 256 MB does not fit, and nothing but its call fails."""
    import resource

    executor = start("--serve=*")
    session = Session(executor.endpoint)
    number = layer_number(session, "model.embed_tokens")
    session.close()
    with Bystander(executor.endpoint, tiny_llama()) as bystander:
        used = int(Path(f"/proc/{executor.pid}/statm").read_text().split()[0]) * 4096
        resource.prlimit(executor.pid, resource.RLIMIT_AS, (used + (96 << 20),) * 2)
        resident = []
        for _ in range(times):
            connection = connect(executor.endpoint, Hello(client="greedy"), 10.0)
            ids = torch.zeros(1 << 20, dtype=torch.int64)
            with pytest.raises(CallError, match="memory") as error:
                reply, (text,) = connection.call(1, Call(Op.LOOKUP, number, "float32", tuple(ids.shape)), (ids,), 60.0)
                raise CallError(reply.code, bytes(text.numpy()).decode())
            assert error.value.code is Code.RESOURCE
            connection.close()
            bystander.goes_on()
            resident.append(executor.resident_bytes)
        # four payloads, as many as were held at once in 200 calls; one lost by each call would be 15
        assert max(resident[5:]) < max(resident[:5]) + (32 << 20), resident


# ---------------------------------------------------------------- clients die


def kill_clients(executor: Executor, processes: list, kills: int, rows: int, chance: random.Random) -> None:
    """Clients that call for ever, each killed at a random moment of a call."""
    for _ in range(kills):
        client = Client(programs.call_for_ever, executor.endpoint, rows)
        processes.append(client)
        assert client.heard() == "calling"
        time.sleep(chance.uniform(0, 0.03))
        client.kill()


def p99_beside_one_who_lives(executor: Executor, processes: list, bystander: Bystander, rows: int) -> float:
    """Of the bystander's calls."""
    company = Client(programs.call_for_ever, executor.endpoint, rows)
    processes.append(company)
    assert company.heard() == "calling"
    begun = len(bystander.times)
    until(lambda: len(bystander.times) > begun + 500 or bystander.problem, "the bystander's calls")
    company.end()
    until_clients(executor, 1, "leaving of the company")
    return p99(bystander.times[begun:])


def kills_of_clients_leave_nothing_behind(start: Callable[..., Executor], processes: list, kills: int) -> None:
    rows = 1 << 15  # of 64 floats: 8 MiB there, 8 MiB back
    executor = start("--heartbeat-s=0.5")
    chance = random.Random(3)
    with Bystander(executor.endpoint, tiny_llama()) as bystander:
        kill_clients(executor, processes, 3, rows, chance)  # the allocator's first stock
        until_clients(executor, 1, "leaving of the first clients")
        memory, descriptors = executor.resident_bytes, executor.descriptors
        beside_one = p99_beside_one_who_lives(executor, processes, bystander, rows)
        begun = len(bystander.times)
        kill_clients(executor, processes, kills, rows, chance)
        assert p99(bystander.times[begun:]) <= SLOWER * beside_one + BUSY_S, beside_one
        until_clients(executor, 1, "leaving of the killed clients")
        until(lambda: executor.descriptors <= descriptors, "closing of their descriptors")
        assert executor.resident_bytes - memory < 10 * (8 << 20)  # a few payloads, however many were killed
        bystander.goes_on()
    until_clients(executor, 0, "leaving of the bystander")


def until_clients(executor: Executor, number: int, what: str) -> None:
    """Returns when the executor knows so many."""
    with watching(executor.endpoint) as look:
        until(lambda: sum(not session.observer for session in look().sessions) == number, what)


@pytest.mark.alone
@pytest.mark.timeout(300)
@tcp_always_local_when_full
def test_kills_of_clients_leave_nothing_behind(start: Callable, processes: list, scheme: str) -> None:
    kills_of_clients_leave_nothing_behind(start, processes, KILLS)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@both_transports
def test_many_kills_of_clients_leave_nothing_behind(start: Callable, processes: list, scheme: str) -> None:
    kills_of_clients_leave_nothing_behind(start, processes, kills=1000)


@both_transports
def test_a_killed_client_is_noticed_by_its_connection(start: Callable, processes: list, scheme: str) -> None:
    """... long before its heartbeat is missed, also in the middle of a large call."""
    executor = start("--heartbeat-s=600")
    with Bystander(executor.endpoint, tiny_llama()) as bystander:
        kill_clients(executor, processes, 3, 1 << 15, random.Random(6))
        until_clients(executor, 1, "leaving of the killed clients")
        bystander.goes_on()


def memory_of_clients_that_read_nothing(start: Callable[..., Executor], processes: list, rounds: int) -> list[int]:
    """By how many bytes the executor has grown after each of several such clients, who are frozen and then killed."""
    executor = start("--heartbeat-s=1")
    grown = []
    with Bystander(executor.endpoint, tiny_llama()) as bystander:
        before = executor.resident_bytes
        for _ in range(rounds):
            client = Client(programs.read_nothing, executor.endpoint, UNREAD, UNREAD_BYTES)
            processes.append(client)
            assert client.heard() == "asked"
            client.signal(signal.SIGSTOP)
            until_clients(executor, 1, "dropping it")
            bystander.goes_on()
            grown.append(executor.resident_bytes - before)
            client.kill()
    return grown


UNREAD, UNREAD_BYTES = 400, 1 << 20
QUEUED = 64  # messages that the executor keeps for a client, in each direction


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rounds", [3, pytest.param(30, marks=pytest.mark.soak)])
@pytest.mark.parametrize("scheme", ["tcp"])
def test_a_client_that_reads_nothing_costs_a_full_queue_and_no_more(
    start: Callable, processes: list, scheme: str, rounds: int
) -> None:
    """400 replies of 1 MiB, of which nobody takes one: it is dropped, others go on, and its memory serves the next."""
    grown = memory_of_clients_that_read_nothing(start, processes, rounds)
    bound = (
        2 * QUEUED + 8 + 64
    ) * UNREAD_BYTES  # calls and replies in queues, those in flight, and something for others
    assert max(grown) < bound, grown


@frozen_for(0.0, 60.0)
@both_transports
def test_a_hung_client_is_dropped_and_may_come_back(
    start: Callable, processes: list, scheme: str, seconds: float
) -> None:
    executor = start("--heartbeat-s=1")
    client = Client(programs.call_when_told, executor.endpoint, 2.0)
    processes.append(client)
    with Bystander(executor.endpoint, tiny_llama()) as bystander:
        client.heard()
        client.signal(signal.SIGSTOP)
        until_clients(executor, 1, "dropping the hung client")
        assert snapshot(executor.endpoint).dropped == 1
        time.sleep(seconds)  # how long it stays frozen, and no wait for anything
        bystander.goes_on()
        client.signal(signal.SIGCONT)
        assert client.result() == 1  # it found out, and joined again
        bystander.goes_on()


def train_with_a_client_that_is_killed(
    start: Callable[..., Executor], processes: list, directory: Path, steps: int, kills: int
) -> dict[str, Any]:
    """A training by clients of which all but the last are killed, each at a random moment after some steps of its own."""
    executor, chance = start(), random.Random(4)
    for last in sorted(chance.sample(range(1, steps), kills)):
        client = Client(programs.train_resumably, executor.endpoint, steps, directory / "checkpoint")
        processes.append(client)
        while client.heard() < last:
            pass
        time.sleep(chance.uniform(0, STEP_S))
        client.kill()
    processes.append(Client(programs.train_resumably, executor.endpoint, steps, directory / "checkpoint"))
    return processes[-1].result()


@both_transports
def test_a_killed_client_resumes_from_its_checkpoint(
    start: Callable, processes: list, calm: dict[str, Any], tmp_path: Path, scheme: str
) -> None:
    """Adapter, optimizer, random numbers and the place in the data are the client's own: it ends as if never killed."""
    programs.assert_same(train_with_a_client_that_is_killed(start, processes, tmp_path, STEPS, kills=6), calm)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@both_transports
def test_a_client_killed_often_resumes_from_its_checkpoint(
    start: Callable, processes: list, model: Path, tmp_path: Path, scheme: str
) -> None:
    result = train_with_a_client_that_is_killed(start, processes, tmp_path, steps=150, kills=100)
    programs.assert_same(result, programs.undisturbed(model, 150))


@both_transports
def test_an_idle_client_that_lives_is_not_dropped(start: Callable, processes: list, scheme: str) -> None:
    executor = start("--heartbeat-s=0.8")
    client = Client(programs.call_when_told, executor.endpoint, 2.5)
    processes.append(client)
    assert client.result() == 0
    assert snapshot(executor.endpoint).dropped == 0
