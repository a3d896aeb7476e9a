"""Every message between client and executor, and how each one looks in bytes. Imports neither torch nor a transport.

Three kinds of message:

* a *call*: a fixed header (`Call`) and raw tensor bytes: the rows, and for grouped products their int32 group offsets (which
  over `tcp://` go first);
* a *reply*: a fixed header (`Reply`) and raw tensor bytes, or UTF-8 text if its code is not OK;
* *control* messages at join and leave (`Hello`, `Welcome`, `Refusal`, ...): msgpack, decoded into the structs below.

Nothing is ever unpickled, and every size is checked in Python integers before anything is allocated for it.

    >>> call = Call(op=Op.FORWARD, layer=3, dtype="float32", shape=(2, 64))
    >>> decode_call(encode_call(call, seq=7)) == (7, call)
    True

A model makes the same few calls again and again, so what a header says besides its number is decoded once and then
looked up; and whatever else follows from a call (checks, memory, the matrix) can be looked up by it, too.
"""

import struct
from enum import IntEnum
from functools import lru_cache
from math import prod
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from symbiosis.errors import CallError, Code, ProtocolError

VERSION = 8
MAGIC_CALL = b"SYMc"
MAGIC_REPLY = b"SYMr"
MAX_DIM = 5  # of a convolution over video, which a client may read
MAX_GROUP = 8  # layers that one call may name
LONGEST_TEXT = 1024  # bytes of the text that says why a call was refused

DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8")
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4, "uint8": 1}
FLOATS = frozenset(("float32", "bfloat16", "float16", "float64"))
WEIGHT_BITS = {"int32": 8, "int64": 16}  # of the weights by which integers modulo 2^32 or 2^64 are multiplied
SEED_BYTES = 32
_DTYPE_CODE = {name: code for code, name in enumerate(DTYPES)}


class Op(IntEnum):
    """What is asked of a layer. `W` is its weight as the unsplit layer holds it, `V` a strided view of that."""

    FORWARD = 0  # y = x Wᵀ (+ b): what the layer computes
    DGRAD = 1  # dx = dy W: the gradient of its input
    PRODUCT = 2  # y = x V
    LEFT = 3  # y = V x
    GROUPED = 4  # y[rows of group g] = x[rows of group g] V[g]
    LOOKUP = 5  # rows of an embedding by their ids
    NORMS = 6  # squared norm of each output row of W, in float32 or wider
    READ = 7  # V itself, where the provider allows it
    ECHO = 8  # the payload comes back: a round trip with no arithmetic
    STATS = 9  # a snapshot of the executor's figures, as msgpack


BY_ROWS = frozenset((Op.FORWARD, Op.DGRAD, Op.PRODUCT))  # every row of the payload makes one of the reply
# The fields of a call that each op uses, besides `priority`; all others must be empty (`checked`).
_BY_VIEW = frozenset(("layer", "dtype", "shape", "view", "gradient"))
USES: dict[Op, frozenset[str]] = {
    Op.FORWARD: frozenset(("layer", "dtype", "shape", "bias", "gradient", "also", "seeded")),
    Op.DGRAD: frozenset(("layer", "dtype", "shape", "also", "seeded")),
    Op.PRODUCT: _BY_VIEW,
    Op.LEFT: _BY_VIEW,
    Op.GROUPED: _BY_VIEW | {"groups"},
    Op.LOOKUP: frozenset(("layer", "dtype", "shape")),
    Op.NORMS: frozenset(("layer", "dtype")),
    Op.READ: frozenset(("layer", "dtype", "view")),
    Op.ECHO: frozenset(("dtype", "shape")),
    Op.STATS: frozenset(),
}


class Priority(IntEnum):
    """Lower runs first."""

    DECODE = 0
    PREFILL = 1
    TRAIN = 2


class View(NamedTuple):
    """A strided view into a layer's weight, as `torch.as_strided` takes it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Call(msgspec.Struct, frozen=True, cache_hash=True):
    """One op on one layer, or on a group of layers, for the rows of one session. Its number travels beside it.

    A group's members take the same rows. What each of them makes of T rows is T rows of its own width, and in memory these lie
    one member after another: that is the reply to a FORWARD and the payload of a DGRAD, of shape (T, all widths). The reply to
    a DGRAD is the sum of the members' gradients, the last member's first, as autograd adds them.

    Rows of integers (int32, int64) are multiplied modulo 2^32 or 2^64 by the layer's weights, quantised to `WEIGHT_BITS`. Where
    `seeded`, they are not sent: the payload is the key of the keystream that they are.
    """

    op: Op
    layer: int
    dtype: str
    shape: tuple[int, ...] = ()
    bias: bool = False
    priority: Priority = Priority.PREFILL
    view: View | None = None
    groups: int = 0
    gradient: bool = False  # made by a backward pass, where infinities are no mistake (loss scaling)
    also: tuple[int, ...] = ()  # the other layers of a group
    seeded: bool = False

    @property
    def layers(self) -> tuple[int, ...]:
        return self.layer, *self.also

    @property
    def payload_dtype(self) -> str:
        if self.seeded:
            return "uint8"
        return "int64" if self.op is Op.LOOKUP else self.dtype

    @property
    def payload_shape(self) -> tuple[int, ...]:
        return (SEED_BYTES,) if self.seeded else self.shape

    @property
    def parts(self) -> tuple[int, ...]:
        """Bytes of each tensor of the payload: the rows, and the group offsets if there are any."""
        return _parts(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the payload: the rows, then (from the next multiple of 8 on) the group offsets."""
        return _payload_nbytes(self)

    @property
    def by_rows(self) -> bool:
        """Whether each row of a matrix makes one of the reply by itself, so that they may go in slices."""
        return self.op in BY_ROWS and len(self.shape) == 2

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1]) if len(self.shape) > 1 else prod(self.shape)


@lru_cache(maxsize=1 << 14)
def _parts(call: Call) -> tuple[int, ...]:
    if call.op in NO_PAYLOAD:
        return ()
    rows = prod(call.payload_shape) * ITEMSIZE[call.payload_dtype]
    return (rows, 4 * call.groups) if call.groups else (rows,)


@lru_cache(maxsize=1 << 14)
def _payload_nbytes(call: Call) -> int:
    *rows, last = call.parts or (0,)
    return sum(-(-part // 8) * 8 for part in rows) + last


_NOTHING = Call(Op.STATS, 0, DTYPES[0])  # every field of it is empty


@lru_cache(maxsize=1 << 14)
def checked(call: Call) -> Call:
    """The call, if what its op does not use is empty; else `ProtocolError`.

    >>> checked(Call(Op.NORMS, layer=3, dtype="float32", groups=1))
    Traceback (most recent call last):
    symbiosis.errors.ProtocolError: NORMS uses no groups: leave it empty in the call's header [UNKNOWN_OP]
    """
    empty = (name for name in Call.__struct_fields__ if name not in ("op", "priority", *USES[call.op]))
    if unused := [name for name in empty if getattr(call, name) != getattr(_NOTHING, name)]:
        raise ProtocolError(
            Code.UNKNOWN_OP, f"{call.op.name} uses no {' and no '.join(unused)}: leave it empty in the call's header"
        )
    if call.op is Op.GROUPED and not call.groups:
        raise ProtocolError(Code.BAD_SHAPE, "GROUPED takes one group of rows or more, not 0")
    return call


class Reply(msgspec.Struct, frozen=True):
    """The answer to the call with the same `seq`. Of one that is BUSY, `wait_us` is the time after which to try again."""

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


NO_PAYLOAD = frozenset(op for op, fields in USES.items() if "shape" not in fields)
_OPS = {int(op): op for op in Op}
_PRIORITIES = {int(p): p for p in Priority}
_CODES = {int(c): c for c in Code}
_FLAG_BIAS, _FLAG_VIEW, _FLAG_GRADIENT, _FLAG_SEEDED = 1, 2, 4, 8
_ALL_FLAGS = _FLAG_BIAS | _FLAG_VIEW | _FLAG_GRADIENT | _FLAG_SEEDED
# magic, version, nothing, seq
_HEAD = struct.Struct("<4sHHQ")
# op, flags, dtype, priority, dims, view dims, other layers | layer, groups, other layers | shape | view size, stride, offset
_CALL = struct.Struct(f"<7Bx II {MAX_GROUP - 1}I {MAX_DIM}Q {MAX_DIM}Q{MAX_DIM}QQ")
# code, dims, dtype | batch | wait, compute | shape
_REPLY = struct.Struct(f"<3BxI II {MAX_DIM}Q")
HEAD_SIZE = _HEAD.size
CALL_SIZE, REPLY_SIZE = _HEAD.size + _CALL.size, _HEAD.size + _REPLY.size
_MAX = 2**63 - 1


def _pad(numbers: tuple[int, ...], length: int = MAX_DIM) -> tuple[int, ...]:
    return numbers + (0,) * (length - len(numbers))


def encode_call(call: Call, seq: int) -> bytes:
    return _HEAD.pack(MAGIC_CALL, VERSION, 0, seq) + call_body(call)


@lru_cache(maxsize=1 << 14)
def call_body(call: Call) -> bytes:
    """What a call's header says besides its number."""
    size, stride, offset = call.view if call.view is not None else ((), (), 0)
    flags = call.bias * _FLAG_BIAS | (call.view is not None) * _FLAG_VIEW
    flags |= call.gradient * _FLAG_GRADIENT | call.seeded * _FLAG_SEEDED
    return _CALL.pack(
        call.op, flags, _DTYPE_CODE[call.dtype], call.priority, len(call.shape), len(size), len(call.also),
        call.layer, call.groups, *_pad(call.also, MAX_GROUP - 1), *_pad(call.shape), *_pad(size), *_pad(stride), offset,
    )  # fmt: skip


def decode_call(raw: bytes) -> tuple[int, Call]:
    """The number and the call in `raw`; `ProtocolError` if it is none, whatever the bytes are."""
    seq, body = split_call(raw)
    return seq, parse_call_body(body)


def split_call(raw: bytes) -> tuple[int, bytes]:
    """The number of the call in `raw`, and the rest of its header."""
    if len(raw) != CALL_SIZE:
        raise ProtocolError(Code.BAD_FRAME, f"a call header has {CALL_SIZE} bytes, not {len(raw)}")
    return _number(raw, MAGIC_CALL), raw[HEAD_SIZE:]


@lru_cache(maxsize=1 << 14)
def parse_call_body(body: bytes) -> Call:
    """The call that `call_body` wrote."""
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
    bias, gradient, seeded = (bool(flags & flag) for flag in (_FLAG_BIAS, _FLAG_GRADIENT, _FLAG_SEEDED))
    call = checked(
        Call(_OPS[op], layer, DTYPES[dtype], shape, bias, _PRIORITIES[priority], view, groups, gradient, also, seeded)
    )
    if call_body(call) != body:
        raise ProtocolError(Code.BAD_FRAME, "a call header holds numbers where it has to be empty")
    return call


def encode_reply(reply: Reply) -> bytes:
    return _HEAD.pack(MAGIC_REPLY, VERSION, 0, reply.seq) + _REPLY.pack(
        reply.code, len(reply.shape), _DTYPE_CODE[reply.dtype], min(reply.batch, 2**32 - 1),
        min(reply.wait_us, 2**32 - 1), min(reply.compute_us, 2**32 - 1), *_pad(reply.shape),
    )  # fmt: skip


def decode_reply(raw: bytes) -> Reply:
    """The reply in `raw`; `ProtocolError` if it is none, whatever the bytes are."""
    if len(raw) != REPLY_SIZE:
        raise ProtocolError(Code.BAD_FRAME, f"a reply header has {REPLY_SIZE} bytes, not {len(raw)}")
    seq = _number(raw, MAGIC_REPLY)
    code, dims, dtype, batch, wait, compute, *shape = _REPLY.unpack_from(raw, HEAD_SIZE)
    if code not in _CODES or dtype >= len(DTYPES) or dims > MAX_DIM or max(shape) > _MAX:
        raise ProtocolError(Code.BAD_FRAME, "a reply header holds an unknown code, dtype or shape")
    return Reply(seq, _CODES[code], DTYPES[dtype], tuple(shape[:dims]), batch, wait, compute)


def _number(raw: bytes, expected: bytes) -> int:
    magic, version, nothing, seq = _HEAD.unpack_from(raw)
    if magic != expected or nothing:
        raise ProtocolError(Code.BAD_FRAME, "these bytes are no message of Symbiosis")
    if version != VERSION:
        raise ProtocolError(
            Code.BAD_VERSION,
            f"the peer speaks protocol version {version}, this side {VERSION}: install the same release on both sides",
        )
    return int(seq)


# What a peer may say of itself is bounded: a message that says more is refused while it is read.
Word = Annotated[str, Meta(max_length=128)]
LONGEST_NAME = 512  # characters
Name = Annotated[str, Meta(max_length=LONGEST_NAME)]
# What an executor may be told to do, as a client takes it: of a limit, and of the seconds between signs of life.
LARGEST_LIMIT, SHORTEST_BEAT_S, LONGEST_BEAT_S = 1 << 62, 1e-3, 1e6
MAX_WELCOME = 16 << 20  # bytes


class Layer(msgspec.Struct, frozen=True):
    """One tensor of the base model: served (`linear`, `conv1d`, `tensor`, `embedding`) or the client's own (`client`)."""

    name: Name
    kind: Word
    shape: Annotated[tuple[int, ...], Meta(max_length=8)]
    dtype: Word
    digest: Word
    bias: bool = False


class Limits(msgspec.Struct, frozen=True):
    """What one session may ask for, and one tenant's sessions together (without keys each session is a tenant of its own).
    The executor enforces them; the client checks first, to say so earlier, and slows down when it is told to."""

    max_call_bytes: int = 1 << 30
    max_rows: int = 1 << 20
    max_in_flight: int = 8
    max_sessions: int = 256
    max_tenant_sessions: int = 64
    max_tenant_in_flight: int = 64
    max_tenant_bytes: int = 4 << 30  # of calls under way, and of replies that are not read
    max_tenant_rows_per_s: int = 0  # 0: as many as come
    max_call_multiplications: int = 10**14  # 100,000 rows by the largest matrix of a model of 400 billion parameters
    max_tenant_multiplications_per_s: int = 0
    max_tenant_bytes_per_s: int = 0

    def check(self, call: Call) -> None:
        if call.nbytes > self.max_call_bytes or call.rows > self.max_rows:
            raise CallError(
                Code.TOO_LARGE,
                f"a call may have {self.max_rows} rows and {self.max_call_bytes} bytes, this one has {call.rows} rows and "
                f"{call.nbytes} bytes: send smaller batches, or raise --max-rows / --max-call-bytes",
            )


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A client asks to join. `fingerprint` is that of the model it joined before, if it comes back; `device` the GPU (by its UUID)
    whose stream will make the calls, or where rows lie that go by NCCL of version `nccl`."""

    version: int = VERSION
    client: str = ""
    priority: Priority | None = None
    fingerprint: str | None = None
    observer: bool = False
    device: str | None = None
    nccl: int = 0


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The executor accepts: what it serves, under which limits; for integers, too, by weights of so many bits; and who runs it.
    Headers of calls whose rows go by NCCL come to `port`, where the client begins with `token` and where to meet it."""

    session: int
    fingerprint: Word
    manifest: Annotated[list[Layer], Meta(max_length=1 << 17)]
    config: Annotated[str, Meta(max_length=4 << 20)]
    model_class: Word
    limits: Limits
    allow_read: bool
    heartbeat_s: float
    executor: Name
    slab_bytes: int = 0
    integers: Annotated[tuple[int, ...], Meta(max_length=8)] = ()
    operator: Name = ""
    port: int = 0
    token: Annotated[bytes, Meta(max_length=64)] = b""


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The executor refuses a join, a growth of shared memory or a frame."""

    code: int
    message: str

    def error(self) -> CallError:
        """What the client raises."""
        return CallError.told(self.code, self.message)


class Grow(msgspec.Struct, frozen=True, tag="grow"):
    """A client on the same host asks for a larger shared memory segment."""

    nbytes: int


class Grown(msgspec.Struct, frozen=True, tag="grown"):
    """... and gets one of this size."""

    nbytes: int


class Share(msgspec.Struct, frozen=True, tag="share"):
    """A client on the same host asks for the memory in which lies what every client holds for itself."""


class Shared(msgspec.Struct, frozen=True, tag="shared"):
    """... and gets it, by descriptor."""


class Segment(msgspec.Struct, frozen=True, tag="segment"):
    """A client hands over device memory of this size, by descriptor. The one of number 0 comes first."""

    number: int
    nbytes: int


class Register(msgspec.Struct, frozen=True, tag="register"):
    """From now on the doorbell `number` is this call (a header without its number), with its payload at `start` of a segment. What
    each layer makes of it goes to one of `results` (segment and start), if these are given."""

    number: int
    call: bytes
    segment: int
    start: int
    results: tuple[tuple[int, int], ...] = ()


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    """... whose reply has this shape, and without `results` lies behind the payload."""

    shape: Annotated[tuple[int, ...], Meta(max_length=MAX_DIM)]


class Compose(msgspec.Struct, frozen=True, tag="compose"):
    """From now on the doorbell `number` begins a round: the registered `calls` one after another. Number 0 only asks. `again`: an
    executor before this one agreed to it."""

    number: int
    calls: tuple[int, ...]
    again: bool = False


class Composed(msgspec.Struct, frozen=True, tag="composed"):
    """... whose calls are large: where they are waited for, no kernel may keep a place on the GPU; or small."""

    large: bool


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """The `calls` (and rounds) of these numbers are not made any more, and the `segments` not used."""

    calls: tuple[int, ...]
    segments: tuple[int, ...] = ()


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """All is registered: look at the doorbell from now on."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """What was asked for is done."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The client lives."""


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """The client leaves."""


Control = (
    Hello
    | Welcome
    | Refusal
    | Grow
    | Grown
    | Share
    | Shared
    | Segment
    | Register
    | Registered
    | Compose
    | Composed
    | Forget
    | Resume
    | Done
    | Beat
    | Bye
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Control)


def encode_control(message: Control) -> bytes:
    return _encoder.encode(message)


def decode_control(raw: bytes | memoryview) -> Control:
    """The control message in `raw`; `ProtocolError` if it is none."""
    try:
        return _decoder.decode(raw)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise ProtocolError(Code.BAD_FRAME, f"not a control message: {error}") from None
