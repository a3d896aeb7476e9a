"""Calls that come as frames: their sizes are checked, and their rows joined into tensors."""

from collections import deque
from collections.abc import Sequence
from enum import Enum

import torch
import zmq
from torch import Tensor

from symbiosis.errors import CallError, Code, ProtocolError
from symbiosis.protocol import Call, parse_call_body, split_call
from symbiosis.transport.base import NO_MEMORY, ServerPort, refuse
from symbiosis.transport.tcp.peer import TcpPeer
from symbiosis.transport.tcp.sockets import PIECE, cut, hold
from symbiosis.transport.tensors import empty, tensor_at, tensor_of_frame

JOINED_AT_ONCE = 512 << 10  # bytes of payloads that are copied between two products


class FrameJoiner:
    """Copies the frames of a payload into one piece of memory for each tensor, some at a time."""

    def __init__(self, call: Call, frames: Sequence[zmq.Frame], for_gpu: bool) -> None:
        """The frames are let go as they are copied."""
        self._memory = [empty((nbytes,), torch.uint8, for_gpu) for nbytes in call.parts]
        self.payload: tuple[Tensor, ...] = tuple(
            tensor_at(memory, 0, *kind) for memory, kind in zip(self._memory, call.payload_kinds, strict=True)
        )
        self._frames, self._targets = deque(frames), deque[memoryview]()
        for memory in reversed(self._memory):
            self._targets += cut(memory.numpy().data, encrypted=True)

    def some(self) -> bool:
        """Copy as much as there is time for between two products. Return whether all is copied."""
        left = JOINED_AT_ONCE
        while self._frames and left > 0:
            frame, target = self._frames.popleft(), self._targets.popleft()
            target[:] = frame.buffer
            left -= len(target)
        return not self._frames


class Message(list[zmq.Frame]):
    """One message. The first frame names the connection."""

    __slots__ = ("joining", "nbytes")

    def __init__(self) -> None:
        super().__init__()
        self.joining: FrameJoiner | None = None  # what is made of its rows' frames, once that has begun
        self.nbytes = 0  # of all its frames, when it had come


class CallOutcome(Enum):
    """What became of a message that was read."""

    TAKEN = 0
    BEGUN = 1  # there is more to do for it
    REFUSED = 2  # it came in vain


def take_call(inbox: ServerPort, peer: TcpPeer, message: Message, encrypted: bool, room: bool) -> CallOutcome:
    """Hand a call over to the executor, or refuse it: also if there is no `room`, because too many wait to be read."""
    seq, body = split_call(message[1].bytes)
    try:
        call = parse_call_body(body)
        if not room:
            inbox.turns_away(peer, seq, call)
            return CallOutcome.REFUSED
        if message.joining is None:
            check_sizes(call, message[2:], encrypted)
        if not inbox.admits(peer, seq, call):
            return CallOutcome.REFUSED
        payload = payload_of(call, message, inbox.device.type == "cuda")
        if payload is None:
            return CallOutcome.BEGUN
        return CallOutcome.TAKEN if inbox.arrived(peer, seq, call, payload) else CallOutcome.REFUSED
    except CallError as error:
        refuse(peer, seq, error)
        return CallOutcome.REFUSED


def check_sizes(call: Call, frames: list[zmq.Frame], encrypted: bool) -> None:
    """Raise `ProtocolError` unless the frames of a payload are as large as the header says."""
    found, parts = tuple(map(len, frames)), call.parts[::-1]
    if not hold(found, parts, encrypted):
        cut_up = f" in pieces of {PIECE}" if encrypted else ""
        raise ProtocolError(
            Code.BAD_FRAME,
            f"the header promises frames of {parts} bytes{cut_up}, {found[:3]} came ({len(found)} in all)",
        )


def payload_of(call: Call, message: Message, for_gpu: bool) -> tuple[Tensor, ...] | None:
    """Return the tensors of a payload: the rows, whose frames come last, and the ends of groups; or None if more of its frames must be
    joined first."""
    kinds = zip(reversed(message[2:]), call.payload_kinds, strict=False)
    try:
        if message.joining is None and len(message) > 2 + len(call.parts):
            message.joining = FrameJoiner(call, message[2:], for_gpu)
            del message[2:]
        if message.joining is not None:
            return message.joining.payload if message.joining.some() else None
        return tuple(tensor_of_frame(frame.buffer, dtype, shape, for_gpu) for frame, (dtype, shape) in kinds)
    except CallError:  # the shape is larger than any memory
        raise
    except (RuntimeError, MemoryError):
        raise CallError(Code.RESOURCE, NO_MEMORY) from None
