"""`local://` for clients on a GPU: the calls of steps that are captured as CUDA graphs."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from symbiosis.errors import CallError
from symbiosis.protocol import Call
from symbiosis.transport.cuda.driver import (
    WAIT_AT_LEAST,
    WAIT_EQUAL,
    WRITE_32,
    CudaError,
    DeviceMemory,
    MemOp,
    MemOps,
    allocation,
    shares_time,
)
from symbiosis.transport.cuda.handshake import CudaHandshake
from symbiosis.transport.cuda.words import (
    BELL,
    CURRENT,
    ERROR,
    ROUND_BELL,
    ROUND_REPLY,
    ROUNDS_OVER,
    ROW_ALIGNED,
    VOID,
    aligned,
)
from symbiosis.transport.tensors import TORCH_DTYPE, Shapes, cut

logger = logging.getLogger("symbiosis")
# bytes: up to so many, each call of a small step has a place of its own, and its results are not copied
MOST_APART = 64 << 20
OTHER = -1  # in place of the number of calls made: another call came than was expected


@dataclass(slots=True)
class RegisteredCall:
    """A call that the executor knows by number: where its payload and its reply lie, and how the stream makes it."""

    call: Call
    number: int
    payload: tuple[Tensor, ...]
    out: Tensor
    ring: MemOps


@dataclass(slots=True)
class StepCall:
    """A call of a step: its rows as the model has them, the place where the executor reads them, and the results."""

    number: int
    rows: Tensor
    payload: Tensor
    results: list[Tensor]


@dataclass(slots=True)
class AgreedRound:
    """Calls that the executor has agreed to answer as one round, in this order. `begin` tells it that the round begins."""

    number: int
    calls: tuple[Call, ...]
    begin: MemOps


@dataclass(eq=False)
class CapturedStep:
    """What the executor knows of one captured step, until the step is dropped.

    `place` finds a place for the next call, given its rows and the shapes of its results. `ring` makes the call; it is given the call's
    number, or in a round its position, counted from 1. `take` returns a result as the model gets it.
    """

    place: "Callable[[CapturedStep, Call, Tensor, Shapes], StepCall | None]"
    ring: Callable[[int, StepCall, int], None]
    take: Callable[[Tensor], Tensor]
    round: AgreedRound | None = None
    borrowed: tuple[int, ...] = ()  # the numbers of calls that were registered earlier, and not for this step
    made: int = 0  # how many calls were made so far
    numbers: list[int] = field(default_factory=list)  # the numbers of calls that were registered for this step alone
    segments: dict[int, int] = field(default_factory=dict)  # the numbers of the step's own segments, by address
    results: list[tuple[int, int]] = field(default_factory=list)  # where the executor writes: addresses and bytes

    @property
    def complete(self) -> bool:
        """Whether exactly the expected calls were captured."""
        return self.made != OTHER and (self.round is None or self.made == len(self.round.calls))

    def call(self, call: Call, x: Tensor, shapes: Shapes, stream: int) -> list[Tensor] | None:
        """Make the next call and return its results, or None if it is not the call that was expected."""
        placed = self.place(self, call, x, shapes) if self._expects(call) else None
        if placed is None:
            self.made = OTHER
            return None
        if self.round and not self.made:
            self.round.begin.enqueue(stream)
        self.made += 1
        self.ring(self.made if self.round else placed.number, placed, stream)
        return [self.take(result) for result in placed.results]

    def _expects(self, call: Call) -> bool:
        if self.round is None:
            return self.made != OTHER
        return 0 <= self.made < len(self.round.calls) and self.round.calls[self.made] == call


class CapturedSteps:
    """The captured steps of one process that call one executor."""

    def __init__(
        self,
        link: CudaHandshake,
        device: torch.device,
        apart: Callable[[Sequence[Call], list[int]], list[RegisteredCall]],
    ) -> None:
        """`apart` registers each call at a place of its own, of so many bytes."""
        self._link, self._device, self._apart = link, device, apart
        self._captured: list[CapturedStep] = []
        self.current: CapturedStep | None = None  # the step that is being captured
        self.dropped = deque[tuple[CapturedStep, Callable[[], None]]]()  # steps that the executor has yet to forget

    @property
    def rounds(self) -> int:
        """How many of the steps are rounds."""
        return sum(step.round is not None for step in self._captured)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Where the results of steps go: addresses and bytes."""
        gone = [step for step, _ in self.dropped]
        return [place for step in list(self._captured) if step not in gone for place in step.results]

    def begin(self, prepared: list[RegisteredCall], shares: bool, kernel: Any) -> CapturedStep | None:
        """Prepare the capture of a step that will make these calls, as a round if the executor agrees. `shares` says that the step's memory
        comes from `kernels.gpu.shareable_memory`. `kernel` is the module `kernels.gpu.doorbell`, or None where it does not work."""
        step = CapturedStep(self._shared, self._ring, _as_it_lies) if shares else None
        large = self._agreed(prepared) if kernel and not shares_time(self._device) else None
        if large is not None:
            sizes = [sum(map(aligned, p.call.parts)) + aligned(p.out.nbytes) for p in prepared]
            if not large and sum(sizes) <= MOST_APART:
                apart = self._apart([p.call for p in prepared], sizes)
                step = CapturedStep(partial(_at, apart), self._ring, _as_it_lies, numbers=[p.number for p in apart])
            elif step is None:
                borrowed = tuple(p.number for p in prepared)
                step = CapturedStep(partial(_at, prepared), self._ring, Tensor.clone, borrowed=borrowed)
            self._make_round(step, prepared, large, kernel)
        self.current = step
        return step

    def end(self) -> CapturedStep | None:
        """Note that the current step is captured, and return it."""
        step, self.current = self.current, None
        if step is None:
            return None
        self._captured.append(step)
        if step.complete and step.round:
            try:
                self._link.compose(step.round.number, step.numbers or step.borrowed)
            except CallError as error:
                logger.info("the calls of a captured step are made one by one: %s", error)
                step.made = OTHER
        return step

    def drop(self, step: CapturedStep, then: Callable[[], None]) -> None:
        """Note that a step is not made again. `then` is called when the executor knows. Callable at any time, from any thread."""
        self.dropped.append((step, then))

    def give_back(self) -> None:
        """Give back what dropped steps held. All their calls must be answered."""
        while self.dropped:
            step, then = self.dropped[0]
            rounds = [step.round.number] if step.round and step.complete else []
            self._link.forget([*rounds, *step.numbers], list(step.segments.values()))
            self._captured.remove(step)
            self.dropped.popleft()
            then()

    def _agreed(self, prepared: list[RegisteredCall]) -> bool | None:
        """Return whether these calls are a large round, or None if the executor does not answer them as a round."""
        try:
            return self._link.agrees([p.number for p in prepared]).large
        except CallError as error:
            logger.info("the calls of a captured step are made one by one: %s", error)
            return None

    def _make_round(self, step: CapturedStep, prepared: list[RegisteredCall], large: bool, kernel: Any) -> None:
        first, words, number = self._link.first, self._link.words, self._link.new_round()
        bell, reply, over = (first.tensor(at, "int32", (1,)) for at in (ROUND_BELL, ROUND_REPLY, ROUNDS_OVER))
        begin = MemOps([
            MemOp(WRITE_32, words.at(CURRENT), 0), MemOp(WRITE_32, bell.data_ptr(), 0),
            MemOp(WRITE_32, reply.data_ptr(), 0), MemOp(WRITE_32, words.at(BELL), number),
        ])  # fmt: skip
        step.round = AgreedRound(number, tuple(p.call for p in prepared), begin)
        if large:
            step.ring = partial(_ring_by_stream, bell.data_ptr(), reply.data_ptr())
            return
        kernel.load_call(self._device)
        mine = kernel.DoorbellWords(bell, reply, over, words.at(ERROR), VOID)
        # should this process stand still, it cannot say that no answer will come: the stream goes on by itself after this time
        make = partial(kernel.call, mine, 2 * self._link.longest)
        step.ring = lambda number, placed, _: make(number, placed.rows, placed.payload)

    def _ring(self, number: int, placed: StepCall, stream: int) -> None:
        """Make a call outside of a round."""
        _copy(placed)
        MemOps(doorbell(self._link, number)).enqueue(stream)

    def _shared(self, step: CapturedStep, call: Call, x: Tensor, shapes: Shapes) -> StepCall | None:
        """Place a call in the step's own memory, which the executor maps piece by piece. Return None if it cannot map this."""
        x = x.detach().to(TORCH_DTYPE[call.payload_dtype]).reshape(call.shape).contiguous()
        if (source := self._segment(step, x)) is None:
            x = x.clone()
            source = self._segment(step, x)
        outs = [torch.empty(shape, dtype=TORCH_DTYPE[call.dtype], device=x.device) for shape in shapes]
        targets = [target for out in outs if (target := self._segment(step, out))]
        if source is None or len(targets) < len(outs):
            return None
        try:
            number, _ = self._link.register(call, *source, targets)
        except CallError as error:
            logger.info("a captured step cannot use its own memory: %s", error)
            return None
        step.numbers.append(number)
        step.results += [(out.data_ptr(), out.nbytes) for out in outs]
        return StepCall(number, x, x, outs)

    def _segment(self, step: CapturedStep, tensor: Tensor) -> tuple[int, int] | None:
        """Return the segment in which a tensor lies, and where in it. A piece that is not shared yet is shared now."""
        address = tensor.data_ptr()
        found = allocation(address) if tensor.nbytes and not address % ROW_ALIGNED else None
        if found is None or address + tensor.nbytes > sum(found):
            return None
        start, nbytes = found
        if start not in step.segments:
            try:
                step.segments[start] = self._link.share(DeviceMemory.at(start, nbytes, self._device))
            except (CallError, CudaError) as error:
                logger.info("the memory of a captured step cannot be shared: %s", error)
                return None
        return step.segments[start], address - start


def doorbell(link: CudaHandshake, number: int) -> list[MemOp]:
    """Return what the stream does to make a call."""
    reply, bell = link.first.address, link.words.at(BELL)
    return [MemOp(WRITE_32, reply, 0), MemOp(WRITE_32, bell, number), MemOp(WAIT_EQUAL, reply, number)]


def _ring_by_stream(bell: int, reply: int, number: int, placed: StepCall, stream: int) -> None:
    """Make a large call of a round."""
    _copy(placed)
    MemOps([MemOp(WRITE_32, bell, number), MemOp(WAIT_AT_LEAST, reply, number)]).enqueue(stream)


def _at(prepared: list[RegisteredCall], step: CapturedStep, call: Call, x: Tensor, shapes: Shapes) -> StepCall:
    """Place a call where it was registered before."""
    its = prepared[step.made]
    return StepCall(its.number, x.reshape(call.shape), its.payload[0], cut(its.out, shapes))


def _copy(placed: StepCall) -> None:
    if placed.rows is not placed.payload:
        placed.payload.copy_(placed.rows)


def _as_it_lies(result: Tensor) -> Tensor:
    """Return a result where it lies, without autograd's record of who wrote there."""
    return result.data
