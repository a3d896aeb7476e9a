"""Takes in what a ROUTER socket receives, within bounds, and hands it out tenant by tenant."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

import torch
import zmq
from torch import Tensor

from symbiosis.errors import CallError, Code, ProtocolError
from symbiosis.protocol import Call, Limits, parse_call_body, split_call
from symbiosis.transport.base import NO_MEMORY, ServerPort, refuse
from symbiosis.transport.reactor import Reactor
from symbiosis.transport.tcp.discard import Discard
from symbiosis.transport.tcp.peer import TcpPeer
from symbiosis.transport.tcp.sockets import cut, most_frames, sizes
from symbiosis.transport.tcp.unread import Unread
from symbiosis.transport.tensors import empty, tensor_at, tensor_of_frame

MOST_FRAMES = 64  # frames of a message without keys; a valid one has at most 3
BESIDES = 3  # frames of a valid message besides its rows
JOINED_AT_ONCE = 512 << 10  # bytes of payloads that are copied between two products
FRAMES_AT_ONCE = 256  # most frames that are received in one pass of the loop
MOST_UNREAD = 256 << 20  # bytes of a tenant's unread messages, unless it is a single one


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


class Frames(list[zmq.Frame]):
    """One message. The first frame names the connection."""

    __slots__ = ("joining", "nbytes")

    def __init__(self) -> None:
        super().__init__()
        self.joining: FrameJoiner | None = None  # what is made of its rows' frames, once that has begun
        self.nbytes = 0  # of all its frames, when it had come


class Outcome(Enum):
    """What became of a message that was read."""

    TAKEN = 0
    BEGUN = 1  # there is more to do for it
    REFUSED = 2  # it came in vain


class Intake:
    """Keeps unread messages by tenant, because ZeroMQ hands them out by connection. Of a message with too many frames, the first are
    reported at once and the rest is thrown away in pieces: what others have sent lies behind it."""

    def __init__(
        self,
        socket: Any,
        reactor: Reactor,
        limits: Limits,
        whose: Callable[[Frames], str | bytes],
        is_too_much: Callable[[Frames], object],
        encrypted: bool,
    ) -> None:
        """`whose` tells the tenant of a message. `is_too_much` is called with a message that cannot be kept."""
        self._socket, self._reactor, self._whose, self._is_too_much = socket, reactor, whose, is_too_much
        self._discard = Discard(socket)
        self.most_frames = BESIDES + most_frames(limits.max_call_bytes, encrypted) if encrypted else MOST_FRAMES
        self._begun: Frames | None = None  # a message of which some frames are received
        self.unread = Unread[str | bytes, Frames](limits.max_in_flight, min(MOST_UNREAD, limits.max_tenant_bytes))

    @property
    def blocked(self) -> bool:
        """Whether the rest of a message must be received, or thrown away, before another can be."""
        return self._discard.going or self._begun is not None

    def unblock(self) -> None:
        """Receive, or throw away, some more of a long message, if there is one."""
        if self._discard.going:
            self._discard.some()
        elif self._begun is not None:
            self._take()

    def take_in(self, most: int) -> int:
        """Take in at most `most` messages, and return how many came. They are kept unread, which takes a tenth of the time of reading
        them. A connection that has sent too much is told at once."""
        taken = 0
        with suppress(zmq.Again):
            while taken < most and not self.blocked:
                self._take()
                taken += 1
        return taken

    def _take(self) -> None:
        if frames := self._receive():
            self._reactor.attempt(None, self._keep, frames)

    def _receive(self) -> Frames | None:
        """Receive the next message, or the first frames of one that has too many. Return None if more of it is to be received in the next
        pass."""
        frames, self._begun = self._begun or Frames(), None
        for _ in range(FRAMES_AT_ONCE):
            frames.append(self._socket.recv(zmq.NOBLOCK, copy=False))
            if not frames[-1].more:
                return frames
            if len(frames) > self.most_frames:
                self._discard.begin()
                return frames
        self._begun = frames
        return None

    def _keep(self, frames: Frames) -> None:
        frames.nbytes = sum(map(len, frames))
        if self._discard.going or not self.unread.put(self._whose(frames), frames[0].bytes, frames, frames.nbytes):
            self._is_too_much(frames)


def take_call(inbox: ServerPort, peer: TcpPeer, message: Frames, encrypted: bool, room: bool) -> Outcome:
    """Hand a call over to the executor, or refuse it: also if there is no `room`, because too many wait to be read."""
    seq, body = split_call(message[1].bytes)
    try:
        call = parse_call_body(body)
        if not room:
            inbox.turns_away(peer, seq, call)
            return Outcome.REFUSED
        if message.joining is None:
            check_sizes(call, message[2:], encrypted)
        if not inbox.admits(peer, seq, call):
            return Outcome.REFUSED
        payload = payload_of(call, message, inbox.device.type == "cuda")
        if payload is None:
            return Outcome.BEGUN
        return Outcome.TAKEN if inbox.arrived(peer, seq, call, payload) else Outcome.REFUSED
    except CallError as error:
        refuse(peer, seq, error)
        return Outcome.REFUSED


def check_sizes(call: Call, frames: list[zmq.Frame], encrypted: bool) -> None:
    """Raise `ProtocolError` unless the frames of a payload are as large as the header says."""
    found = tuple(map(len, frames))
    promised = tuple(size for part in call.parts[::-1] for size in sizes(part, encrypted))
    if found != promised:
        raise ProtocolError(
            Code.BAD_FRAME,
            f"the header promises frames of {promised[:3]} bytes, {found[:3]} came ({len(found)} of {len(promised)})",
        )


def payload_of(call: Call, message: Frames, for_gpu: bool) -> tuple[Tensor, ...] | None:
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
