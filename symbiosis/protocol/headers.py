"""Calls and replies, and the bytes of their headers.

    >>> call = Call(op=Op.FORWARD, layer=3, dtype="float32", shape=(2, 64))
    >>> decode_call(encode_call(call, seq=7)) == (7, call)
    True

A model makes the same few calls again and again. So a header, without its number, is decoded once and then looked up, and whatever
follows from a call (checks, memory, the matrix) can be looked up by it, or is kept with it.
"""

import struct
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

import msgspec

from symbiosis.build import build
from symbiosis.errors import Code, ProtocolError
from symbiosis.protocol.ops import DTYPES, ITEMSIZE, MAX_DIM, MAX_GROUP, SEED_BYTES, VERSION, Op, Priority

MAGIC_CALL = b"SYMc"
MAGIC_REPLY = b"SYMr"
LONGEST_TEXT = 1024  # bytes of a refusal's text
_DTYPE_CODE = {name: code for code, name in enumerate(DTYPES)}


class View(NamedTuple):
    """A strided view into a layer's weight, as `torch.as_strided` takes it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


Kind = tuple[str, tuple[int, ...]]  # dtype and shape of a tensor


class Call(msgspec.Struct, frozen=True, cache_hash=True, dict=True):
    """One op on one layer, or on a group of layers, for the rows of one session. Its number is sent beside it.

    A group's members take the same rows. Each makes T rows of its own width, and in memory these lie one member after another. That is
    the reply to a FORWARD and the payload of a DGRAD, of shape (T, all widths). The reply to a DGRAD is the sum of the members'
    gradients, the last member's first, as autograd adds them.

    Rows of integers (int32, int64) are multiplied modulo 2^32 or 2^64 by the layer's weights, quantised to `WEIGHT_BITS`. If `seeded`,
    the rows are not sent: the payload is the key of the keystream that they are taken from.
    """

    op: Op
    layer: int
    dtype: str
    shape: tuple[int, ...] = ()
    bias: bool = False
    priority: Priority = Priority.PREFILL
    view: View | None = None
    groups: int = 0
    gradient: bool = False  # made by a backward pass, where loss scaling may cause infinities
    also: tuple[int, ...] = ()  # the other layers of a group
    seeded: bool = False
    columns: bool = False  # the payload's matrices lie column by column, in which order libraries round otherwise

    @cached_property
    def layers(self) -> tuple[int, ...]:
        return self.layer, *self.also

    @cached_property
    def payload_dtype(self) -> str:
        if self.seeded:
            return "uint8"
        return "int64" if self.op is Op.LOOKUP else self.dtype

    @cached_property
    def payload_shape(self) -> tuple[int, ...]:
        """The shape of the payload as it lies in memory."""
        if self.columns and len(self.shape) > 1:
            return (*self.shape[:-2], self.shape[-1], self.shape[-2])
        return (SEED_BYTES,) if self.seeded else self.shape

    @cached_property
    def payload_kinds(self) -> tuple[Kind, ...]:
        """What lies in memory as the payload: the rows, and the group offsets if there are any."""
        if not self.op.traits.has_payload:
            return ()
        rows = self.payload_dtype, self.payload_shape
        return (rows, ("int32", (self.groups,))) if self.groups else (rows,)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """The bytes of each tensor of the payload."""
        return tuple(prod(shape) * ITEMSIZE[dtype] for dtype, shape in self.payload_kinds)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the payload: the rows, then (from the next multiple of 8 on) the group offsets."""
        *rows, last = self.parts or (0,)
        return sum(-(-part // 8) * 8 for part in rows) + last

    @cached_property
    def by_rows(self) -> bool:
        """Whether each row makes one row of the reply by itself, so that rows can be computed in slices."""
        return self.op.traits.by_rows and len(self.shape) == 2 and not self.columns

    @cached_property
    def rows(self) -> int:
        return prod(self.shape[:-1]) if len(self.shape) > 1 else prod(self.shape)


_NOTHING = Call(Op.STATS, 0, DTYPES[0])  # every field of it is empty


@lru_cache(maxsize=1 << 14)
def checked(call: Call) -> Call:
    """Return the call, or raise `ProtocolError` unless the fields that its op does not use are empty.

    >>> checked(Call(Op.NORMS, layer=3, dtype="float32", groups=1))
    Traceback (most recent call last):
    symbiosis.errors.ProtocolError: NORMS does not use groups: leave it empty in the call's header [UNKNOWN_OP]
    """
    empty = (name for name in Call.__struct_fields__ if name not in ("op", "priority", *call.op.traits.uses))
    if unused := [name for name in empty if getattr(call, name) != getattr(_NOTHING, name)]:
        raise ProtocolError(
            Code.UNKNOWN_OP, f"{call.op.name} does not use {' or '.join(unused)}: leave it empty in the call's header"
        )
    if call.op is Op.GROUPED and not call.groups:
        raise ProtocolError(Code.BAD_SHAPE, "GROUPED takes one group of rows or more, not 0")
    return call


class Reply(msgspec.Struct, frozen=True):
    """The answer to the call with the same `seq`. If its code is BUSY, `wait_us` is the time after which to try again."""

    seq: int
    code: Code = Code.OK
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()
    batch: int = 1
    wait_us: int = 0
    compute_us: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEMSIZE[self.dtype]


_OPS = {int(op): op for op in Op}
_PRIORITIES = {int(p): p for p in Priority}
_CODES = {int(c): c for c in Code}
_FLAG_BIAS, _FLAG_VIEW, _FLAG_GRADIENT, _FLAG_SEEDED, _FLAG_COLUMNS = 1, 2, 4, 8, 16
_ALL_FLAGS = _FLAG_BIAS | _FLAG_VIEW | _FLAG_GRADIENT | _FLAG_SEEDED | _FLAG_COLUMNS
# magic, version, nothing, seq
_HEAD = struct.Struct("<4sHHQ")
# op, flags, dtype, priority, dims, view dims, other layers | layer, groups, other layers | shape | view size, stride, offset
_CALL = struct.Struct(f"<7Bx II {MAX_GROUP - 1}I {MAX_DIM}Q {MAX_DIM}Q{MAX_DIM}QQ")
# magic, version, nothing, seq | code, dims, dtype | batch | wait, compute | shape
_REPLY = struct.Struct(f"<4sHHQ 3BxI II {MAX_DIM}Q")
HEAD_SIZE, BODY_SIZE = _HEAD.size, _CALL.size
CALL_SIZE, REPLY_SIZE = _HEAD.size + _CALL.size, _REPLY.size
_MAX = 2**63 - 1
_EMPTY = (0,) * MAX_DIM


def _pad(numbers: tuple[int, ...], length: int = MAX_DIM) -> tuple[int, ...]:
    return numbers + (0,) * (length - len(numbers))


def encode_call(call: Call, seq: int) -> bytes:
    return _HEAD.pack(MAGIC_CALL, VERSION, 0, seq) + call_body(call)


@lru_cache(maxsize=1 << 14)
def call_body(call: Call) -> bytes:
    """Return a call's header without its number."""
    size, stride, offset = call.view if call.view is not None else ((), (), 0)
    flags = call.bias * _FLAG_BIAS | (call.view is not None) * _FLAG_VIEW
    flags |= call.gradient * _FLAG_GRADIENT | call.seeded * _FLAG_SEEDED | call.columns * _FLAG_COLUMNS
    return _CALL.pack(
        call.op, flags, _DTYPE_CODE[call.dtype], call.priority, len(call.shape), len(size), len(call.also),
        call.layer, call.groups, *_pad(call.also, MAX_GROUP - 1), *_pad(call.shape), *_pad(size), *_pad(stride), offset,
    )  # fmt: skip


def decode_call(raw: bytes) -> tuple[int, Call]:
    """Return the number and the call in `raw`. Raise `ProtocolError`, and nothing else, if it is no call."""
    seq, body = split_call(raw)
    return seq, parse_call_body(body)


def split_call(raw: bytes) -> tuple[int, bytes]:
    """Return the number of the call in `raw`, and the rest of its header."""
    if len(raw) != CALL_SIZE:
        raise ProtocolError(Code.BAD_FRAME, f"a call header has {CALL_SIZE} bytes, not {len(raw)}")
    magic, version, nothing, seq = _HEAD.unpack_from(raw)
    if magic != MAGIC_CALL or version != VERSION or nothing:
        raise _no_message(magic != MAGIC_CALL or nothing, version)
    return seq, raw[HEAD_SIZE:]


@lru_cache(maxsize=1 << 14)
def parse_call_body(body: bytes) -> Call:
    """Return the call that `call_body` wrote, or raise `ProtocolError`."""
    if len(body) != _CALL.size:
        raise ProtocolError(Code.BAD_FRAME, f"a call header has {_CALL.size} bytes, not {len(body)}")
    op, flags, dtype, priority, dims, vdims, others, layer, groups, *numbers, offset = _CALL.unpack(body)
    also, sizes = tuple(numbers[:others]), numbers[MAX_GROUP - 1 :]
    if op not in _OPS:
        raise ProtocolError(Code.UNKNOWN_OP, f"there is no op number {op}")
    if dtype >= len(DTYPES) or priority not in _PRIORITIES or flags > _ALL_FLAGS:
        raise ProtocolError(Code.BAD_FRAME, "a call header holds an unknown dtype, priority or flag")
    if others >= MAX_GROUP:
        raise ProtocolError(Code.BAD_FRAME, f"a call names at most {MAX_GROUP} layers")
    if dims > MAX_DIM or vdims > MAX_DIM or max(*sizes, offset) > _MAX:
        raise ProtocolError(Code.BAD_SHAPE, f"a shape has at most {MAX_DIM} dimensions of at most 2^63 - 1")
    shape, size, stride = (tuple(sizes[at : at + n]) for at, n in ((0, dims), (MAX_DIM, vdims), (2 * MAX_DIM, vdims)))
    view = View(size, stride, offset) if flags & _FLAG_VIEW else None
    bias, gradient = bool(flags & _FLAG_BIAS), bool(flags & _FLAG_GRADIENT)
    as_sent = bool(flags & _FLAG_SEEDED), bool(flags & _FLAG_COLUMNS)
    asked = _OPS[op], layer, DTYPES[dtype], shape, bias, _PRIORITIES[priority]
    call = checked(Call(*asked, view, groups, gradient, also, *as_sent))
    if call_body(call) != body:
        raise ProtocolError(Code.BAD_FRAME, "a call header holds numbers where it has to be empty")
    return call


def encode_reply(reply: Reply) -> bytes:
    return _REPLY.pack(
        MAGIC_REPLY, VERSION, 0, reply.seq, reply.code, len(reply.shape), _DTYPE_CODE[reply.dtype], min(reply.batch, 2**32 - 1),
        min(reply.wait_us, 2**32 - 1), min(reply.compute_us, 2**32 - 1), *reply.shape, *_EMPTY[len(reply.shape) :],
    )  # fmt: skip


def decode_reply(raw: bytes) -> Reply:
    """Return the reply in `raw`. Raise `ProtocolError`, and nothing else, if it is no reply."""
    if len(raw) != REPLY_SIZE:
        raise ProtocolError(Code.BAD_FRAME, f"a reply header has {REPLY_SIZE} bytes, not {len(raw)}")
    magic, version, nothing, seq, code, dims, dtype, batch, wait, compute, *shape = _REPLY.unpack(raw)
    if magic != MAGIC_REPLY or version != VERSION or nothing:
        raise _no_message(magic != MAGIC_REPLY or nothing, version)
    if code not in _CODES or dtype >= len(DTYPES) or dims > MAX_DIM or max(shape) > _MAX:
        raise ProtocolError(Code.BAD_FRAME, "a reply header holds an unknown code, dtype or shape")
    return Reply(seq, _CODES[code], DTYPES[dtype], tuple(shape[:dims]), batch, wait, compute)


def _no_message(other: bool, version: int) -> ProtocolError:
    """Return what is wrong with a header: it is something `other` than a message, or of another version."""
    if other:
        return ProtocolError(Code.BAD_FRAME, "these bytes are not a Symbiosis message")
    return ProtocolError(
        Code.BAD_VERSION,
        f"the peer speaks protocol version {version}, this side {VERSION} (symbiosis {build()}): install the same release on both sides",
    )
