"""What the clients of a soak do: work of one kind, again and again, every result compared with the one that it must be."""

import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import symbiosis
from symbiosis.audit.unmasked import Unmasked
from symbiosis.cli.pad_files import make
from symbiosis.client.session import Session
from symbiosis.protocol import Op, Priority
from tests.conftest import tiny_llama
from tests.processes import Say, layer_number
from tests.programs import generate_tokens

IDS = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1))
LENGTH = 12  # of what is generated
STEPS_OF_A_FILE = 40  # for which its pads are enough
PAUSE_S = (
    0.05  # between two pieces of work, and of those who wait for their turn: people's programs do other things, too
)
PROBE_PAUSE_S = 5e-3


class Place(NamedTuple):
    """Where a client works: two executors of different operators, their checkpoint, and a folder for its files."""

    here: str
    there: str
    checkpoint: Path
    folder: Path


def lora(model: Any) -> nn.Module:
    torch.manual_seed(7)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))  # type: ignore[return-value]


def step(model: nn.Module) -> list[Tensor]:
    """The logits and every gradient of a training step."""
    model.zero_grad()
    result = model(input_ids=IDS, labels=IDS)
    result.loss.backward()
    return [result.logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def close_to(right: list[Tensor], share: float) -> Callable[[list[Tensor]], None]:
    """Company changes how a sum is rounded, and noise even more."""

    def check(found: list[Tensor]) -> None:
        assert len(found) == len(right) > 10
        for mine, theirs in zip(found, right, strict=True):
            torch.testing.assert_close(mine, theirs, atol=share * float(theirs.abs().max()), rtol=0)

    return check


def equal_to(right: list[Tensor]) -> Callable[[list[Tensor]], None]:
    def check(found: list[Tensor]) -> None:
        assert len(found) == len(right) > 10
        assert all(map(torch.equal, found, right))

    return check


def integer_step(place: Place) -> list[Tensor]:
    """What a step gives without masks and without executors."""
    model = symbiosis.wrap(tiny_llama(), place.here, privacy=Unmasked())
    result = step(lora(model))
    leave(model)
    return result


def leave(model: nn.Module) -> None:
    symbiosis.unwrap(model, tiny_llama().state_dict())


def train(place: Place) -> Iterator[None]:
    check = close_to(step(lora(tiny_llama())), 1e-5)
    model = lora(symbiosis.wrap(tiny_llama(), place.here))
    while True:
        check(step(model))
        yield


def decode(place: Place) -> Iterator[None]:
    right = generate_tokens(tiny_llama(), LENGTH, seed=1)
    model = symbiosis.from_executor(place.here)
    while True:
        assert generate_tokens(model, LENGTH, seed=1) == right
        yield


def split(place: Place) -> Iterator[None]:
    check = equal_to(integer_step(place))
    model = lora(symbiosis.wrap(tiny_llama(), place.here, privacy=symbiosis.Split(place.there)))
    while True:
        check(step(model))
        yield


def pads(place: Place) -> Iterator[None]:
    check, file = equal_to(integer_step(place)), place.folder / "x.pads"
    while True:
        make(str(place.checkpoint), STEPS_OF_A_FILE * IDS.numel(), file, training=True)
        model = symbiosis.wrap(tiny_llama(), place.here, privacy=symbiosis.Pads(file), verify=True)
        adapted = lora(model)
        try:
            for _ in range(STEPS_OF_A_FILE):
                check(step(adapted))
                yield
            leave(model)
        finally:  # also of who goes earlier
            file.unlink()


def noise(place: Place) -> Iterator[None]:
    check = close_to(step(lora(tiny_llama())), 2e-3)
    model = lora(symbiosis.wrap(tiny_llama(), place.here, privacy=symbiosis.Noise(scale=16.0), verify=True))
    while True:
        check(step(model))
        yield


LOADS: dict[str, Callable[[Place], Iterator[None]]] = {
    "train": train, "decode": decode, "split": split, "pads": pads, "noise": noise,
}  # fmt: skip


def stay(say: Say, load: str, place: Place, enough: Any) -> int:
    """Work until `enough` (a semaphore) is released. How often it was done."""
    work, done = LOADS[load](place), 1
    next(work)
    say("ready")
    while not enough.acquire(timeout=PAUSE_S):
        next(work)
        done += 1
    return done


def visit(say: Say, load: str, place: Place) -> None:
    """Join, work a little, leave."""
    work = LOADS[load](place)
    for _ in range(3):
        next(work)


class Timed(NamedTuple):
    """Seconds of a small call and of a round trip to another process, and when that was."""

    at: float
    call: float
    control: float


def probe(say: Say, endpoint: str, echo: Connection, enough: Any) -> list[Timed]:
    """A small call at a time. How long each took; and how long the machine takes to wake another process and be woken by it."""
    session = Session(endpoint)
    layer = layer_number(session, "model.layers.0.mlp.up_proj")
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(7))
    right, times = x @ tiny_llama().get_parameter("model.layers.0.mlp.up_proj.weight").t(), []
    say("ready")
    while not enough.acquire(timeout=PROBE_PAUSE_S):
        begun = time.perf_counter()
        y = session.call(Op.FORWARD, layer, x, priority=Priority.DECODE)
        called = time.perf_counter()
        torch.testing.assert_close(y, right, rtol=1e-4, atol=1e-5)
        asked = time.perf_counter()
        echo.send_bytes(b"x")
        echo.recv_bytes()
        times.append(Timed(time.monotonic(), called - begun, time.perf_counter() - asked))
    assert session.stats.reconnects == 0
    echo.close()
    return times


def answer(say: Say, echo: Connection) -> None:
    """The other process."""
    try:
        while True:
            echo.send_bytes(echo.recv_bytes())
    except EOFError:
        pass
