"""The three kinds of call, from their coming to their answer: a `HostCall`, a `DeviceCall`, and a `Round` of those."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from symbiosis.errors import CallError, Code
from symbiosis.executor.calls.plan import Plan, plan_of_round
from symbiosis.protocol import Call, Op
from symbiosis.transport.base import GpuPeer, Peer, RoundWords
from symbiosis.transport.tensors import cut

ALIGNED = 16  # bytes of a row that a GPU copies word by word
LATE_AT_MOST = 16  # times that a client kept others waiting which make a difference
_serials = itertools.count()


class _OneCall:
    """What the host's calls and a GPU's have in common."""

    __slots__ = ()
    call: Call
    payload: tuple[Tensor, ...]
    out: Tensor
    plan: Plan

    @property
    def calls(self) -> tuple[Call, ...]:
        """Those that are answered when this is."""
        return (self.call,)

    def inputs(self) -> list[Tensor]:
        """The rows; of a group's DGRAD those of each member."""
        parts = self.plan.parts if self.call.op is Op.DGRAD else ()
        return cut(self.payload[0], parts) if parts else [self.payload[0]]

    def outputs(self) -> list[Tensor]:
        """Where the results go; of a group's FORWARD that of each member."""
        parts = self.plan.parts if self.call.op is Op.FORWARD else ()
        return cut(self.out, parts) if parts else [self.out]


@dataclass(slots=True, eq=False)
class HostCall(_OneCall):
    """A call that came through the host's memory. It is answered once."""

    peer: Peer
    seq: int
    call: Call
    payload: tuple[Tensor, ...]
    out: Tensor
    plan: Plan
    finite: bool = False  # whether rows that are not finite are refused
    error: Exception | None = None  # what a slice of it ran into; the reply waits for the last slice


@dataclass(slots=True, eq=False, kw_only=True)
class Repeated:
    """What a GPU asks for again and again from the same places: a call, or a round of calls."""

    peer: GpuPeer
    plan: Plan
    number: int  # by which its client knows it
    priority: int
    large: bool = False  # so many rows that others overtake it
    seq: int = 0  # by which the peer knows that it is this which is answered
    serial: int = field(default_factory=_serials.__next__)  # by which we do


@dataclass(slots=True, eq=False, kw_only=True)
class DeviceCall(Repeated, _OneCall):
    """One call that a GPU makes again and again."""

    call: Call
    payload: tuple[Tensor, ...]
    results: tuple[Tensor, ...]  # where they go: all in one tensor, or each member's in one
    addresses: "RowAddresses | None" = None  # where its rows lie and go, if others can join it
    launches: int = 0  # so often did it run
    graph: "torch.cuda.CUDAGraph | None" = None  # of all that the stream does for it, reply included
    error: Exception | None = None  # what a slice of it ran into
    finite: bool = field(default=False, init=False)  # a CPU looks at no rows of a GPU
    out: Tensor = field(init=False)  # where the results begin

    def __post_init__(self) -> None:
        self.out = self.results[0]

    @property
    def joins(self) -> bool:
        """Whether the GPU can answer it together with others."""
        return self.addresses is not None

    def outputs(self) -> list[Tensor]:
        """Where the results go; of a group's FORWARD that of each member."""
        if len(self.results) > 1:
            return list(self.results)
        return _OneCall.outputs(self)  # `super()` does not work in a class with slots that dataclasses made


class RowAddresses:
    """Where a call's rows lie and its results go (addresses, and the bytes of a row there), and the word that answers it."""

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], answer: tuple[int, int]) -> None:
        self.rows, self.answer = len(inputs[0]), answer
        self.inputs, self.outputs = (
            [(part.data_ptr(), part[0].nbytes) for part in parts] for parts in (inputs, outputs)
        )

    @property
    def aligned(self) -> bool:
        """Whether they can be copied word by word."""
        return not any(nbytes % ALIGNED for _, nbytes in (*self.inputs, *self.outputs))


class RoundKey(msgspec.Struct, frozen=True, cache_hash=True):
    """Rounds of one key can be answered together."""

    keys: tuple[Hashable, ...]


class Round(Repeated):
    """What one client's captured step calls, in order. All calls have the same number of rows."""

    results: tuple[Tensor, ...] = ()  # those of its calls are nobody's to spoil
    joins = True

    def __init__(self, key: RoundKey, members: tuple[DeviceCall, ...], words: RoundWords, number: int = 0) -> None:
        """`words`: by which the client and the device tell each other how far it has come."""
        plan = plan_of_round(key, [member.plan for member in members])
        # those calls of a training step that need no gradient look more urgent than it is
        priority = max(member.priority for member in members)
        large = members[0].large
        super().__init__(peer=members[0].peer, plan=plan, number=number, priority=priority, large=large)
        self.key, self.members = key, members
        self.bell, self.reply, self.error = words
        self.calls: tuple[Call, ...] = tuple(member.call for member in members)
        self.rows = plan.rows
        self.goes_on, self.answered = False, 0  # whether somebody else began it, and the calls that were answered then
        self.left = 0  # of a large one: calls that are yet to be launched
        self.launched = self.calls  # ... and those that were last
        self.gone = False
        self.times_late = 0  # so often it kept others waiting
        self.alone_for = 0  # rounds, because of that
        self._seconds: dict[int, float] = {}

    def is_behind(self, answered: int) -> bool:
        """Whether there are calls left when so many were answered: then it goes on from there."""
        self.goes_on = 0 <= answered < len(self.calls)  # more: it was let go
        self.answered = answered if self.goes_on else 0
        return self.goes_on

    def was_late(self) -> None:
        """Others do not wait for it again soon, and the more often it happens, the longer not."""
        self.times_late += 1
        self.alone_for = 1 << min(self.times_late, LATE_AT_MOST)

    def seconds(self, rows: int, estimate: Callable[[Call, int], float]) -> float:
        """What its products of so many rows take."""
        if rows not in self._seconds:
            self._seconds[rows] = sum(estimate(call, rows) for call in self.calls)
        return self._seconds[rows]


SingleCall = HostCall | DeviceCall
DeviceWork = DeviceCall | Round
Work = HostCall | DeviceCall | Round


def addresses_of(call: DeviceCall) -> RowAddresses:
    """Of a call that others can join."""
    assert call.addresses is not None
    return call.addresses


def call_error(error: Exception) -> CallError:
    """What to tell the client whose call ran into `error`."""
    if isinstance(error, CallError):
        return error
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error):
        return CallError(Code.RESOURCE, "the executor has no memory for this call: send fewer rows at once")
    return CallError(Code.INTERNAL, f"the call failed in the executor: {type(error).__name__} {error}".splitlines()[0])
