"""What clients were told, checked afterwards: every call answered once, in order, with what the unsplit model makes of its rows.

Each client writes down the number of a call and the digests of what it sent and of what it got, while executors are killed and
connections cut. A call's rows follow from its number, so the checker can make them again.
"""

import hashlib
import random
import time
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from symbiosis.client.session import Session
from symbiosis.protocol import Op
from tests import tally
from tests.fault_proxy import FaultProxy
from tests.processes import Client, Executor, Say

pytestmark = pytest.mark.fault
THREADS = 2  # of each client, over one session


class Entry(msgspec.Struct, frozen=True):
    """One call, as its client saw it."""

    thread: int
    number: int
    sent: str
    got: str


def sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def asked(client: int, thread: int, number: int, layers: list[tuple[int, tuple[int, ...]]]) -> tuple[Op, int, Tensor]:
    """What a client asks for in its call of this number."""
    chance = random.Random(f"{client} {thread} {number}")
    layer, (out, into) = chance.choice(layers)
    op = chance.choice((Op.FORWARD, Op.DGRAD))
    generator = torch.Generator().manual_seed(chance.getrandbits(60))
    return op, layer, torch.randn(chance.randrange(1, 20), into if op is Op.FORWARD else out, generator=generator)


def linear_layers(session: Session) -> list[tuple[int, tuple[int, ...]]]:
    return [(number, layer.shape) for number, layer in enumerate(session.manifest) if layer.kind == "linear"]


def call_and_write_down(say: Say, endpoints: list[str], client: int, calls: int, path: Path) -> tuple[int, int]:
    """Two threads that call. How often the client had to call again, and to join again."""
    session = Session(endpoints, timeout=10.0)
    layers, writing = linear_layers(session), Lock()
    with path.open("ab", buffering=0) as file:

        def run(thread: int) -> None:
            for number in range(calls):
                op, layer, x = asked(client, thread, number, layers)
                y = session.call(op, layer, x)
                with writing:
                    file.write(msgspec.json.encode(Entry(thread, number, sha(x), sha(y))) + b"\n")

        threads = [Thread(target=run, args=(thread,)) for thread in range(THREADS)]
        for thread in threads:
            thread.start()
        say("calling")
        for thread in threads:
            thread.join()
    return session.stats.retries, session.stats.reconnects


def read(path: Path) -> list[Entry]:
    return [msgspec.json.decode(line, type=Entry) for line in path.read_bytes().splitlines()]


def count(path: Path, calls: int) -> None:
    """For the last line of the run: how many calls have no answer, and how many more than one."""
    history = read(path)
    once = len({(entry.thread, entry.number) for entry in history})
    tally.done.update({tally.CHECKED: once, tally.LOST: THREADS * calls - once, tally.DUPLICATED: len(history) - once})


def check(
    path: Path, client: int, calls: int, model: nn.Module, layers: dict[int, tuple[str, tuple[int, ...]]]
) -> None:
    """Recompute every call of a client's history."""
    history = read(path)
    shapes = [(number, shape) for number, (_, shape) in layers.items()]
    for thread in range(THREADS):
        assert [entry.number for entry in history if entry.thread == thread] == list(range(calls))
    for entry in history:
        op, layer, x = asked(client, entry.thread, entry.number, shapes)
        weight: Tensor = model.get_submodule(layers[layer][0]).weight.detach()  # type: ignore[assignment]
        assert entry.sent == sha(x), entry
        assert entry.got == sha(nn.functional.linear(x, weight) if op is Op.FORWARD else x @ weight), entry


def histories(model: Path, processes: list, directory: Path, clients: int, calls: int, kills: int) -> list[Any]:
    """Clients of two replicas: half of them by shared memory, the others over a network that is cut; either is killed in turn."""
    options = (f"--listen=local://{directory}/{{}}.sock", "--listen=tcp://127.0.0.1:0", "--policy=immediate")
    replicas = [Executor(model, options[0].format(n), *options[1:], log=directory / f"{n}.log") for n in range(2)]
    processes += replicas
    session = Session(replicas[0].endpoint)
    layers = {number: (session.manifest[number].name, shape) for number, shape in linear_layers(session)}
    session.close()
    by_memory = [replica.endpoints[0] for replica in replicas]
    with FaultProxy(replicas[0].endpoints[1], seed=3) as first, FaultProxy(replicas[1].endpoints[1], seed=4) as second:
        by_network = [first.endpoint, second.endpoint]
        running = [
            Client(call_and_write_down, [by_memory, by_network][n % 2], n, calls, directory / f"{n}.history")
            for n in range(clients)
        ]
        processes += running
        for client in running:
            assert client.heard() == "calling"
        chance = random.Random(5)
        for kill in range(kills):
            time.sleep(chance.uniform(0, 0.1))  # so that the moment is any
            chance.choice((first, second)).cut()
            replicas[kill % 2].kill()
            replicas[kill % 2] = replicas[kill % 2].again()
            processes.append(replicas[kill % 2])
        told = [client.result(1000) for client in running]
    unsplit = AutoModelForCausalLM.from_pretrained(model)
    for n in range(clients):
        count(directory / f"{n}.history", calls)
        check(directory / f"{n}.history", n, calls, unsplit, layers)
    return told


def test_every_answer_is_right_and_comes_once(model: Path, processes: list, tmp_path: Path) -> None:
    told = histories(model, processes, tmp_path, clients=4, calls=1500, kills=6)
    assert all(retries >= 1 for retries, _ in told), told  # else nothing happened to it


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_one_of_many_answers_is_right_and_comes_once(model: Path, processes: list, tmp_path: Path) -> None:
    told = histories(model, processes, tmp_path, clients=6, calls=30_000, kills=200)
    assert all(retries >= 20 for retries, _ in told), told


def test_a_wrong_history_is_told_from_a_right_one(model: Path, processes: list, tmp_path: Path) -> None:
    """The checker sees an answer that is missing, one that came twice, and one that is not right."""
    processes.append(Executor(model, f"--listen=local://{tmp_path}/x.sock", "--policy=immediate", log=tmp_path / "log"))
    session = Session(processes[0].endpoint)
    layers = {number: (session.manifest[number].name, shape) for number, shape in linear_layers(session)}
    session.close()
    path = tmp_path / "history"
    call_and_write_down(lambda _: None, [processes[0].endpoint], 0, 5, path)
    unsplit = AutoModelForCausalLM.from_pretrained(model)
    check(path, 0, 5, unsplit, layers)
    lines = path.read_bytes().splitlines(keepends=True)
    wrong = msgspec.structs.replace(msgspec.json.decode(lines[0], type=Entry), got="0" * 64)
    for changed in (lines[1:], lines + lines[:1], [msgspec.json.encode(wrong) + b"\n", *lines[1:]]):
        path.write_bytes(b"".join(changed))
        with pytest.raises(AssertionError):
            check(path, 0, 5, unsplit, layers)
