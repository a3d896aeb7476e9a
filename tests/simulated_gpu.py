"""A GPU without one: what is enqueued on its streams runs in order, and waits where a GPU would.

For the executor's rounds, which are plain Python between CUDA and Triton: their order of things, who waits for whom, and who is
answered when somebody dies, is late or fails, can be tried on any machine. Products and copies move real bytes; the kernels
themselves are tested on GPUs.
"""

import ctypes
import importlib
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

WITH_TRITON = [f"symbiosis.{name}" for name in (
    "kernels.gpu.gather", "kernels.gpu.doorbell", "kernels.gpu.few_rows", "executor.gpu.gathered", "executor.gpu.playback",
    "executor.gpu.rounds",
)]  # fmt: skip
Step = Callable[[], bool]  # something enqueued: false as long as it waits


class Stream:
    def __init__(self, gpu: "Gpu") -> None:
        self.steps, self.gpu = deque[Step](), gpu
        self.ended = self.enqueued = 0
        gpu.streams.append(self)
        self.cuda_stream = len(gpu.streams)

    def enqueue(self, step: Step) -> None:
        if self.gpu.captures is not None:
            self.gpu.captures.append(step)
        else:
            self.steps.append(step)
            self.enqueued += 1

    def wait_stream(self, other: "Stream") -> None:
        number = other.enqueued
        self.enqueue(lambda: other.ended >= number)

    def synchronize(self) -> None:
        self.gpu.run()
        assert not self.steps, "it would wait for a client"


class Event:
    gpu: "Gpu"

    def record(self) -> None:
        self._stream = self.gpu.current[-1]
        self._number = self._stream.enqueued

    def query(self) -> bool:
        self.gpu.run()
        return self._stream.ended >= self._number

    def synchronize(self) -> None:
        assert self.query(), "it would wait for a client"


class Gpu:
    """All that is simulated. `now` is its clock, by hand."""

    def __init__(self) -> None:
        self.now, self.streams, self.captures = 0.0, list[Stream](), None
        self.words: dict[int, tuple[Tensor, int]] = {}
        self.current = [Stream(self)]
        self.begun, self.busy = list[Any](), False  # products; whether they take their time

    def run(self) -> None:
        """All that need not wait."""
        moved = True
        while moved:
            moved = False
            for stream in self.streams:
                while stream.steps and stream.steps[0]():
                    stream.steps.popleft()
                    stream.ended += 1
                    moved = True

    def clock(self) -> float:
        """Whoever looks takes a moment."""
        self.now += 1e-3
        return self.now

    def new_words(self, count: int) -> Tensor:
        words = torch.zeros(count, dtype=torch.int32)
        self.words.update({words.data_ptr() + 4 * at: (words, at) for at in range(count)})
        return words

    def write(self, address: int, value: int) -> None:
        words, at = self.words[address]
        words[at] = value

    def read(self, address: int) -> int:
        words, at = self.words[address]
        return int(words[at])

    def enqueue(self, do: Callable[[], object]) -> None:
        """Something that waits for nobody."""
        self.current[-1].enqueue(lambda: (do(), True)[1])

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()

    def captured(self, enqueue: Callable[[], object], pool: object) -> Any:
        self.captures = []
        try:
            enqueue()
            steps = self.captures
        finally:
            self.captures = None
        return SimpleNamespace(replay=lambda: [self.current[-1].enqueue(step) for step in steps])

    def multiply(self, call: Any, x: list[Tensor], y: list[Tensor]) -> None:
        """Each result is as many times the rows as its place among them, and one more."""
        self.begun.append(call)
        for at, part in enumerate(y):
            self.current[-1].enqueue(lambda part=part, at=at: not self.busy and part.copy_(x[0] * (at + 2) + 1) is part)

    def mem_ops(self, ops: list[Any]) -> Any:
        def step(op: Any) -> Step:
            (operation, flags), address, value = op
            if operation == 2:
                return lambda: (self.write(address, value), True)[1]
            return lambda: self.read(address) == value if flags else self.read(address) >= value

        steps = [step(op) for op in ops]
        enqueue = lambda stream: [self.streams[stream - 1].enqueue(one) for one in steps]  # noqa: E731
        return SimpleNamespace(enqueue=enqueue)

    # ------------------------------------------------------------------ kernels

    def wait(
        self,
        table: Tensor,
        turn: Tensor,
        stop: Tensor,
        late: Tensor,
        behind: int,
        seconds: float,
        error: int,
        void: int,
    ) -> None:
        begun: list[float] = []

        def look() -> bool:
            now = int(turn)
            waited_for = [(reply, number) for reply, number in self._answers(table, now)]
            if all(self.read(reply + behind) == number for reply, number in waited_for):
                return not begun.clear()
            begun.append(self.now)
            if not stop[0] and self.now - begun[0] <= seconds:
                return False
            if error:
                self.write(error, void)
                for reply, _ in waited_for:
                    self.write(reply, 1 << 30)
            table[now:] = 0
            late[0] = 1
            return not begun.clear()

        self.current[-1].enqueue(look)

    def answer_at(self, table: Tensor, turn: Tensor, at: int) -> None:
        def answer() -> None:
            for reply, number in self._answers(table, at):
                self.write(reply, number)
            turn[0] = at + 1

        self.enqueue(answer)

    def copy(self, table: Tensor, turn: Tensor, first: int, copies: int, nbytes: int) -> None:
        def copy() -> None:
            for source, target, count in table[int(turn), first : first + 3 * copies].view(-1, 3).tolist():
                ctypes.memmove(target, source, 8 * count) if count else None

        self.enqueue(copy)

    @staticmethod
    def _answers(table: Tensor, at: int) -> list[tuple[int, int]]:
        return [(reply, number) for reply, number in table[at, :64].view(-1, 2).tolist() if reply]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """With it, `rounds()` makes the executor's rounds, on a machine with or without Triton."""
    simulated = Gpu()
    for name in ("triton", "triton.language", "triton.language.extra", "triton.language.extra.cuda"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    for name in WITH_TRITON:
        monkeypatch.delitem(sys.modules, name, raising=False)
    zeros, event = torch.zeros, type("SimulatedEvent", (Event,), {"gpu": simulated})
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **how: zeros(*size, **how))
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: simulated.current[-1])
    monkeypatch.setattr(torch.cuda, "stream", simulated.on)
    monkeypatch.setattr(torch.cuda, "synchronize", simulated.run)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    before = {name: importlib.import_module(name.rpartition(".")[0]) for name in WITH_TRITON}
    kept = {name: vars(package).get(name.rpartition(".")[2]) for name, package in before.items()}
    runs = importlib.import_module("symbiosis.executor.gpu.playback")
    rounds = importlib.import_module("symbiosis.executor.gpu.rounds")
    monkeypatch.setattr(runs, "captured", simulated.captured)
    monkeypatch.setattr(runs, "MemOps", simulated.mem_ops)
    monkeypatch.setattr(runs, "kernel", SimpleNamespace(wait=simulated.wait, load_wait=lambda *how: None))
    monkeypatch.setattr(runs.rows, "answer_at", simulated.answer_at)
    monkeypatch.setattr(runs.rows, "copy", simulated.copy)
    monkeypatch.setattr(rounds, "new_stream", lambda device, priority: Stream(simulated))
    monkeypatch.setattr(rounds, "perf_counter", simulated.clock)
    yield simulated
    for name, package in before.items():  # nobody finds modules that were made without Triton
        short = name.rpartition(".")[2]
        sys.modules.pop(name, None)
        vars(package).pop(short, None)
        if kept[name] is not None:
            setattr(package, short, kept[name])
