"""`local://` for clients on a GPU: the calls of a step that is being captured as a CUDA graph."""

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
from symbiosis.transport.cuda.link import Link
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
MOST_APART = 64 << 20  # bytes: what the calls of a small step may take so that their results need not be copied
OTHER = -1  # instead of how many calls were made: they were not what was expected


@dataclass(slots=True)
class RegisteredCall:
    """A registered call: where its payload and its reply lie, and what the stream does in between."""

    call: Call
    number: int
    payload: tuple[Tensor, ...]
    out: Tensor
    ring: MemOps


@dataclass(slots=True)
class Placed:
    """A call of a step: the rows as the model has them, where the executor looks for them, and where it leaves what it makes of them."""

    number: int
    rows: Tensor
    payload: Tensor
    results: list[Tensor]


@dataclass(slots=True)
class AgreedRound:
    """What the executor agreed to answer as one: these calls, in this order. `begin` tells it that they come."""

    number: int
    calls: tuple[Call, ...]
    begin: MemOps


@dataclass(eq=False)
class Step:
    """What the executor knows of one captured step, until that is dropped.

    `place` finds a place for its next call, with these rows and results of these shapes; `ring` makes a call, given its number, or if
    there is a round, how many were made with it; `take` says what becomes of results.
    """

    place: "Callable[[Step, Call, Tensor, Shapes], Placed | None]"
    ring: Callable[[int, Placed, int], None]
    take: Callable[[Tensor], Tensor]
    round: AgreedRound | None = None
    borrowed: tuple[int, ...] = ()  # calls that were registered before it, and not for it
    made: int = 0
    numbers: list[int] = field(default_factory=list)  # registered for it alone
    segments: dict[int, int] = field(default_factory=dict)  # of its memory, by address
    results: list[tuple[int, int]] = field(default_factory=list)  # what the executor writes there: addresses and bytes

    @property
    def complete(self) -> bool:
        """Whether what was captured is what was to be."""
        return self.made != OTHER and (self.round is None or self.made == len(self.round.calls))

    def call(self, call: Call, x: Tensor, shapes: Shapes, stream: int) -> list[Tensor] | None:
        """Its results, if it is one that was expected."""
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


class Steps:
    """The captured steps of one process that call one executor."""

    def __init__(
        self, link: Link, device: torch.device, apart: Callable[[Sequence[Call], list[int]], list[RegisteredCall]]
    ) -> None:
        """`apart` registers calls at places of their own, which take so many bytes."""
        self._link, self._device, self._apart = link, device, apart
        self._captured: list[Step] = []
        self.current: Step | None = None  # that is being captured
        self.dropped = deque[tuple[Step, Callable[[], None]]]()  # of which the executor is yet to be told

    @property
    def rounds(self) -> int:
        """Of how many the executor answers all calls at once."""
        return sum(step.round is not None for step in self._captured)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Where results go: addresses, and how many bytes."""
        gone = [step for step, _ in self.dropped]
        return [place for step in list(self._captured) if step not in gone for place in step.results]

    def begin(self, prepared: list[RegisteredCall], shares: bool, kernel: Any) -> Step | None:
        """A step that made these calls is about to be captured; `shares`: its memory comes from `kernels.gpu.shareable_memory`. The calls will be
        a round, if the executor agrees. `kernel`: the module `kernels.gpu.doorbell`, where there is one."""
        step = Step(self._shared, self._ring, _as_it_lies) if shares else None
        large = self._agreed(prepared) if kernel and not shares_time(self._device) else None
        if large is not None:
            sizes = [sum(map(aligned, p.call.parts)) + aligned(p.out.nbytes) for p in prepared]
            if not large and sum(sizes) <= MOST_APART:
                apart = self._apart([p.call for p in prepared], sizes)
                step = Step(partial(_at, apart), self._ring, _as_it_lies, numbers=[p.number for p in apart])
            elif step is None:
                borrowed = tuple(p.number for p in prepared)
                step = Step(partial(_at, prepared), self._ring, Tensor.clone, borrowed=borrowed)
            self._make_round(step, prepared, large, kernel)
        self.current = step
        return step

    def end(self) -> Step | None:
        """It is captured."""
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

    def drop(self, step: Step, then: Callable[[], None]) -> None:
        """It is not made again. `then`: when the executor knows. Callable at any time, from any thread."""
        self.dropped.append((step, then))

    def give_back(self) -> None:
        """What dropped ones held. All that they called is answered."""
        while self.dropped:
            step, then = self.dropped[0]
            rounds = [step.round.number] if step.round and step.complete else []
            self._link.forget([*rounds, *step.numbers], list(step.segments.values()))
            self._captured.remove(step)
            self.dropped.popleft()
            then()

    def _agreed(self, prepared: list[RegisteredCall]) -> bool | None:
        """Whether such a round is large; None if the executor does not answer it as one."""
        try:
            return self._link.agrees([p.number for p in prepared]).large
        except CallError as error:
            logger.info("the calls of a captured step are made one by one: %s", error)
            return None

    def _make_round(self, step: Step, prepared: list[RegisteredCall], large: bool, kernel: Any) -> None:
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
        # if this process does not say that there will be no answer, because it stands still, the stream goes on at some time
        make = partial(kernel.call, mine, 2 * self._link.longest)
        step.ring = lambda number, placed, _: make(number, placed.rows, placed.payload)

    def _ring(self, number: int, placed: Placed, stream: int) -> None:
        """A call that is none of a round."""
        _copy(placed)
        MemOps(doorbell(self._link, number)).enqueue(stream)

    def _shared(self, step: Step, call: Call, x: Tensor, shapes: Shapes) -> Placed | None:
        """In the memory of the step, which the executor maps as it is met; None if it turns out that it cannot."""
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
        return Placed(number, x, x, outs)

    def _segment(self, step: Step, tensor: Tensor) -> tuple[int, int] | None:
        """The one in which it lies, and where there."""
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


def doorbell(link: Link, number: int) -> list[MemOp]:
    """How a stream makes a call."""
    reply, bell = link.first.address, link.words.at(BELL)
    return [MemOp(WRITE_32, reply, 0), MemOp(WRITE_32, bell, number), MemOp(WAIT_EQUAL, reply, number)]


def _ring_by_stream(bell: int, reply: int, number: int, placed: Placed, stream: int) -> None:
    """A large call of a round."""
    _copy(placed)
    MemOps([MemOp(WRITE_32, bell, number), MemOp(WAIT_AT_LEAST, reply, number)]).enqueue(stream)


def _at(prepared: list[RegisteredCall], step: Step, call: Call, x: Tensor, shapes: Shapes) -> Placed:
    """In a place that was registered before."""
    its = prepared[step.made]
    return Placed(its.number, x.reshape(call.shape), its.payload[0], cut(its.out, shapes))


def _copy(placed: Placed) -> None:
    if placed.rows is not placed.payload:
        placed.payload.copy_(placed.rows)


def _as_it_lies(result: Tensor) -> Tensor:
    """It is used in its place, and nobody knows who else wrote there."""
    return result.data
