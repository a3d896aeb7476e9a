"""An executor whose operator writes down everything that it is sent. It can also lose calls, so that they are sent again."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from symbiosis.base.keystream import keystream
from symbiosis.executor.dispatch import Dispatch
from symbiosis.executor.embedded import Executor
from symbiosis.executor.loop import ExecutorLoop
from symbiosis.executor.model.store import Store
from symbiosis.protocol import Call, Op
from symbiosis.transport import Peer
from symbiosis.transport.tensors import TORCH_DTYPE

ROWS = frozenset((Op.FORWARD, Op.DGRAD))
BYTE = 256


@dataclass(frozen=True)
class Sent:
    """One call as it arrived: its header, its payload, the part of the owner's work that it belongs to, and whether it got no answer."""

    call: Call
    payload: Tensor
    phase: str
    session: int
    lost: bool = False

    @property
    def rows(self) -> Tensor:
        """The rows that the executor multiplies. A seed is expanded, as its operator can do, too."""
        if not self.call.seeded:
            return self.payload
        shape: tuple[int, int] = self.call.shape  # type: ignore[assignment]
        return keystream(self.payload.numpy().tobytes(), shape, TORCH_DTYPE[self.call.dtype])


@dataclass
class Bytes:
    """Counts the values of the top and the low byte of integers, or of all bytes of seeds."""

    top: Tensor = field(default_factory=lambda: torch.zeros(BYTE, dtype=torch.int64))
    low: Tensor = field(default_factory=lambda: torch.zeros(BYTE, dtype=torch.int64))

    def count(self, payload: Tensor) -> None:
        bytes_NB = payload.contiguous().view(torch.uint8).view(-1, payload.element_size())
        self.top += torch.bincount(bytes_NB[:, -1], minlength=BYTE)
        self.low += torch.bincount(bytes_NB[:, 0], minlength=BYTE)


class RecordingDispatch(Dispatch):
    """Writes calls with rows down before it does anything else with them."""

    def __init__(self, store: Store, *arguments: Any) -> None:
        super().__init__(store, *arguments)
        self.store = store
        self.log: list[Sent] = []
        self.bytes = {False: Bytes(), True: Bytes()}  # by whether it was a seed
        self.phase: str | None = None  # None: only the bytes are counted, as the memory of this machine is small
        self.only: frozenset[str] | None = None  # calls forward of these layers are written down; None: all calls
        self.lose = 0  # so many of the next calls

    def arrived(self, peer: Peer, seq: int, call: Call, payload: tuple[Tensor, ...]) -> bool:
        if call.op not in ROWS:
            return super().arrived(peer, seq, call, payload)
        lost, self.lose = self.lose > 0, max(0, self.lose - 1)
        if payload[0].dtype.is_floating_point is False:
            self.bytes[call.seeded].count(payload[0])
        if self.phase is not None and self._wanted(call):
            self.log.append(Sent(call, payload[0].clone(), self.phase, peer.session.number, lost))
        if lost:
            peer.close()
            return True
        return super().arrived(peer, seq, call, payload)

    def _wanted(self, call: Call) -> bool:
        names = {self.store.manifest[number].name for number in call.layers}
        return self.only is None or (call.op is Op.FORWARD and not names.isdisjoint(self.only))


class RecordingServer(ExecutorLoop):
    """A server with a `RecordingDispatch`."""

    dispatch_class = RecordingDispatch
    dispatch: RecordingDispatch


class Recorder(Executor):
    """An embedded executor that records."""

    server_class = RecordingServer
    server: RecordingServer
