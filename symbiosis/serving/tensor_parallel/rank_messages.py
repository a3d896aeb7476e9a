"""What the first rank and the others tell each other: msgpack in frames over sockets, some with a descriptor of memory."""

import os
import socket
import struct
from typing import Any, Literal

import msgspec

LENGTH = struct.Struct("<I")


class RankOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank hears first: which one it is, of which base, and the sockets by which it hears the rest."""

    endpoint: str
    rank: int
    ranks: int
    device: str
    memory: float | None  # as of `Engine`
    pages: int | None = None  # instead: so many
    max_batch: int
    prefill_tokens: int
    compiles: bool
    wait: float | None
    steps: int = -1  # descriptors of the sockets
    adapters: int = -1
    log_format: str = "text"


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """A rank has its part, and room for so many pages."""

    pages: int
    weight_bytes: int
    page_bytes: int


class RankBeat(msgspec.Struct, frozen=True, tag=True):
    """A rank still runs. It says so every second."""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank ends, and why."""

    why: str


class MeetRanks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """By what all ranks are connected, and where they meet: at a file of gloo, in a folder, or by the bytes by which NCCL finds them."""

    by: Literal["gloo", "memory", "nccl"]
    at: bytes


class AdapterPages(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An adapter comes to these pages."""

    number: int
    pages: list[int]


class AdapterGone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A version of an adapter is on the devices no more."""

    version: int


class SequenceRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one sequence in a step: `tokens` from `position` on. Of its blocks the first `kept` are as before, and others have these pages."""

    sequence: int
    adapter: int  # the number by which ranks know it; 0: none
    position: int
    tokens: list[int]
    kept: int
    blocks: list[tuple[int, ...]]


class FedRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows whose tokens come from the step before, which has chosen so many: they are told on the devices."""

    rows: list[int]
    sources: list[int]
    count: int


class RankStep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A step, and what happened since the one before: sequences that were released, adapters that came and went, and those that nobody has any more."""

    parts: list[SequenceRows]
    kept: list[int]  # rows whose logits are wanted
    fed: FedRows | None = None
    released: list[int] = []
    adapters: list[AdapterPages | AdapterGone] = []
    unwanted: list[int] = []


class EndRank(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine closes."""


class AdapterPiece(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank's piece of an adapter, whose tensors come in a descriptor."""

    number: int
    name: str
    kind: str
    version: int


class PieceTaken(msgspec.Struct, frozen=True, tag=True):
    """A rank has prepared its piece, which takes so many pages."""

    pages: int


class PieceRefused(msgspec.Struct, frozen=True, tag=True):
    why: str


encoder = msgspec.msgpack.Encoder()
from_rank: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    RankReady | RankBeat | RankFailed | PieceTaken | PieceRefused
)
to_rank: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(MeetRanks | RankStep | EndRank | AdapterPiece)


def send(connection: socket.socket, message: msgspec.Struct, descriptors: tuple[int, ...] = ()) -> int:
    """Send a message, and return how many bytes it has."""
    body = encoder.encode(message)
    if descriptors:
        socket.send_fds(connection, [LENGTH.pack(len(body))], descriptors)
        connection.sendall(body)
    else:
        connection.sendall(LENGTH.pack(len(body)) + body)
    return LENGTH.size + len(body)


def receive(connection: socket.socket, decoder: "msgspec.msgpack.Decoder[Any]") -> tuple[Any, list[int]]:
    """Return the next message and the descriptors that came with it, or None if the other side is gone.

    >>> one, other = socket.socketpair()
    >>> send(one, AdapterPiece(1, "mine", "LORA", 7), (one.fileno(),)) < 50
    True
    >>> message, descriptors = receive(other, to_rank)
    >>> message.name, len(descriptors)
    ('mine', 1)
    """
    head, descriptors = b"", list[int]()
    while len(head) < LENGTH.size:
        more, came, _, _ = socket.recv_fds(connection, LENGTH.size - len(head), 8, socket.MSG_CMSG_CLOEXEC)
        descriptors += came
        if not more:
            return None, descriptors
        head += more
    (size,) = LENGTH.unpack(head)
    body = bytearray()
    while len(body) < size:
        more = connection.recv(size - len(body))
        if not more:
            return None, descriptors
        body += more
    return decoder.decode(body), descriptors


def close(descriptors: list[int]) -> None:
    for each in descriptors:
        os.close(each)
