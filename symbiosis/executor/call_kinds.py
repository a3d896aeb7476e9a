"""The kinds of call that the executor answers: a `HostCall`, a `DeviceCall`, and a `Round` of device calls."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from symbiosis.errors import CallError, Code
from symbiosis.executor.calls.call_plan import CallPlan, plan_of_round
from symbiosis.protocol import Call, Op
from symbiosis.transport.base import NO_MEMORY, GpuPeer, Peer, RoundWords
from symbiosis.transport.tensors import cut

ALIGNED = 16  # a GPU copies a row word by word if its bytes are a multiple of this
LATE_AT_MOST = 16  # being late more often than this makes no further difference
_serials = itertools.count()


@dataclass(slots=True, eq=False)
class HostCall:
    """A call that came through the host's memory, and is answered once."""

    peer: Peer
    seq: int
    call: Call
    payload: tuple[Tensor, ...]
    out: Tensor
    plan: CallPlan
    finite: bool = False  # whether rows that are not finite are refused
    error: Exception | None = None  # raised by one of its slices; the reply still waits for the last slice
    inputs: list[Tensor] = field(init=False)  # the rows: one tensor, or one for each member of a group's DGRAD
    outputs: list[Tensor] = field(init=False)  # where the results go: one, or one for each member of a group's FORWARD

    def __post_init__(self) -> None:
        parts, call = self.plan.parts, self.call
        as_sent = not parts or call.op is not Op.DGRAD or call.seeded
        self.inputs = [*self.payload[:1]] if as_sent else cut(self.payload[0], parts)
        self.outputs = cut(self.out, parts) if parts and call.op is Op.FORWARD else [self.out]


@dataclass(slots=True, eq=False, kw_only=True)
class Repeated:
    """A call, or a round of calls, that a GPU makes again and again with rows and results in the same places."""

    peer: GpuPeer
    plan: CallPlan
    number: int  # the client's name for it
    priority: int
    large: bool = False  # it has so many rows that other calls overtake it
    seq: int = 0  # the number of its reply, by which the peer tells which call is answered
    serial: int = field(default_factory=_serials.__next__)  # the executor's own number for it


@dataclass(slots=True, eq=False, kw_only=True)
class DeviceCall(Repeated):
    """One call that a GPU makes again and again."""

    call: Call
    payload: tuple[Tensor, ...]
    results: tuple[Tensor, ...]  # where the results go: one tensor for all, or one for each member
    addresses: "RowAddresses | None" = None  # set if other calls can be batched with it
    launches: int = 0  # how often it has run
    graph: "torch.cuda.CUDAGraph | None" = None  # everything that the stream does for it, the reply included
    error: Exception | None = None  # raised by one of its slices
    finite: bool = field(default=False, init=False)  # the CPU never looks at rows on a GPU
    out: Tensor = field(init=False)  # where the results begin
    inputs: list[Tensor] = field(init=False)  # as a host call's, below too
    outputs: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        parts, op, self.out = self.plan.parts, self.call.op, self.results[0]
        self.inputs = cut(self.payload[0], parts) if parts and op is Op.DGRAD else [*self.payload[:1]]
        in_one = parts and op is Op.FORWARD and len(self.results) == 1
        self.outputs = cut(self.out, parts) if in_one else [*self.results]

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls that one launch answers: this one."""
        return (self.call,)

    @property
    def can_be_batched(self) -> bool:
        """Whether the GPU can answer it together with others."""
        return self.addresses is not None


class RowAddresses:
    """The places of a call's rows and results, as pairs of an address and the bytes of a row, and the word that answers it."""

    def __init__(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        answer: tuple[int, int],
        at: Callable[[Tensor], int] = Tensor.data_ptr,
    ) -> None:
        """`at` returns the address of a tensor, if that is not its own."""
        self.rows, self.answer = len(inputs[0]), answer
        self.inputs, self.outputs = ([(at(part), part[0].nbytes) for part in parts] for parts in (inputs, outputs))

    @property
    def aligned(self) -> bool:
        """Whether the rows can be copied word by word."""
        return not any(nbytes % ALIGNED for _, nbytes in (*self.inputs, *self.outputs))


class RoundKey(msgspec.Struct, frozen=True, cache_hash=True):
    """Rounds of the same key can be answered together."""

    keys: tuple[Hashable, ...]


class Round(Repeated):
    """The calls of one client's captured step, in order. All have the same number of rows."""

    results: tuple[Tensor, ...] = ()  # its calls have places of their own
    can_be_batched = True

    def __init__(self, key: RoundKey, members: tuple[DeviceCall, ...], words: RoundWords, number: int = 0) -> None:
        """`words` are where the client and the device tell each other how far the round has come."""
        plan = plan_of_round(key, [member.plan for member in members])
        # calls of a training step that need no gradient look more urgent than the step is
        priority = max(member.priority for member in members)
        large = members[0].large
        super().__init__(peer=members[0].peer, plan=plan, number=number, priority=priority, large=large)
        self.key, self.members = key, members
        self.bell, self.reply, self.error = words
        self.calls: tuple[Call, ...] = tuple(member.call for member in members)
        self.rows = plan.rows
        self.goes_on, self.answered = False, 0  # whether an executor before this one began it, and how far that came
        self.left = 0  # calls of a large round that are yet to be launched
        self.launched = self.calls  # the calls that were launched last
        self.gone = False
        self.times_late = 0  # how often it kept others waiting
        self.alone_for = 0  # for so many rounds nobody waits for it
        self._seconds: dict[int, float] = {}

    def is_behind(self, answered: int) -> bool:
        """Continue after the `answered` calls of an earlier executor. Return whether any are left."""
        self.goes_on = 0 <= answered < len(self.calls)  # a larger number says that the client was let go
        self.answered = answered if self.goes_on else 0
        return self.goes_on

    def was_late(self) -> None:
        """Note that it kept others waiting: they stop waiting for it, twice as long each time."""
        self.times_late += 1
        self.alone_for = 1 << min(self.times_late, LATE_AT_MOST)

    def seconds(self, rows: int, estimate: Callable[[Call, int], float]) -> float:
        """Return how long its products of so many rows take."""
        if rows not in self._seconds:
            self._seconds[rows] = sum(estimate(call, rows) for call in self.calls)
        return self._seconds[rows]


SingleCall = HostCall | DeviceCall
DeviceWork = DeviceCall | Round
Work = HostCall | DeviceCall | Round


def addresses_of(call: DeviceCall) -> RowAddresses:
    """Return the addresses of a call with which others can be batched."""
    assert call.addresses is not None
    return call.addresses


def call_error(error: Exception) -> CallError:
    """Return what to tell the client whose call raised `error`."""
    if isinstance(error, CallError):
        return error
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error):
        return CallError(Code.RESOURCE, NO_MEMORY)
    return CallError(Code.INTERNAL, f"the call failed in the executor: {type(error).__name__} {error}".splitlines()[0])
