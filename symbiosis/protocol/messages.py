"""Control messages, sent at join and leave and to agree on shared memory: msgpack, decoded into the structs below.

Every text, list and number of bytes is bounded, and unknown fields are refused while a message is read. Only a `Hello` and a `Refusal`
may hold fields of another release: through these, programs of different releases find out that they differ.
"""

from contextlib import suppress
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from symbiosis.build import build
from symbiosis.errors import CallError, Code, ProtocolError
from symbiosis.protocol.headers import BODY_SIZE, LONGEST_TEXT, Call
from symbiosis.protocol.ops import MAX_DIM, MAX_GROUP, VERSION, Op, Priority
from symbiosis.text import shown

Word = Annotated[str, Meta(max_length=128)]
LONGEST_NAME = 512  # characters
Name = Annotated[str, Meta(max_length=LONGEST_NAME)]
# The bounds that a client accepts for an executor's limits and for the seconds between heartbeats.
LARGEST_LIMIT, SHORTEST_BEAT_S, LONGEST_BEAT_S = 1 << 62, 0.1, 1e6
MAX_WELCOME = 4 << 20  # bytes, for some 25,000 layers; decoding them can take 32 times as many
MAX_CONTROL = 1 << 14  # bytes of any other message
Numbers = Annotated[tuple[int, ...], Meta(max_length=MAX_CONTROL)]  # of calls or segments; more do not fit a message


class Closed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message between programs of the same release: an unknown field is an error."""


ELSEWHERE = "elsewhere"
MOST_RANKS = 64


class Layer(Closed, frozen=True):
    """One tensor of the base model: served (`linear`, `conv1d`, `tensor`, `embedding`), the client's own (`client`), or held by another
    rank of the service (`elsewhere`), which says what it is. `packed`: the format in which the executor holds it, if it is not whole, and
    the digest of what it holds; `digest` is that of the whole tensor, if that was packed when it was loaded."""

    name: Name
    kind: Word
    shape: Annotated[tuple[int, ...], Meta(max_length=8)]
    dtype: Word
    digest: Word
    bias: bool = False
    packed: Word = ""
    packed_digest: Word = ""

    def transposes(self, op: Op) -> bool:
        """Whether `op` multiplies rows by the transpose of this weight."""
        return op.traits.of_whole_layers and op.traits.by_transpose == (self.kind != "conv1d")


class Limits(Closed, frozen=True):
    """What one session may ask for, and a tenant's sessions together (without keys each session is a tenant of its own). The executor
    enforces them. The client checks first, to fail earlier, and slows down when it is told to."""

    max_call_bytes: int = 1 << 30
    max_rows: int = 1 << 20
    max_in_flight: int = 8
    max_sessions: int = 256
    max_tenant_sessions: int = 64
    max_tenant_in_flight: int = 64
    max_tenant_bytes: int = 4 << 30  # of calls in flight, and of replies that are not read
    max_tenant_rows_per_s: int = 0  # 0 means no limit, here and below
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
    """A client asks to join. `fingerprint` is that of the model it joined before, if it comes back. `device` is the GPU (by its UUID)
    whose stream will make the calls, or whose rows go by NCCL of version `nccl`. `build` is the client's."""

    version: int = VERSION
    client: Word = ""
    priority: Priority | None = None
    fingerprint: Word | None = None
    observer: bool = False
    device: Word | None = None
    nccl: int = 0
    build: Word = ""


class Welcome(Closed, frozen=True, tag="welcome"):
    """The executor accepts, and says what it serves, under which limits, for which bits of `integers`, who operates it, and whether it
    shares its weights with clients that can map them. It is one `rank` of a service of so many `ranks`, which
    share the model as `shard` says; `begins` tells with which output the part of each rank begins, by layer. With NCCL, the client sends the headers of its calls to `port`, beginning with `token` and where to meet it. `build` is the executor's, `gpu` the UUID of the one GPU
    that it computes on; `batch_invariant`: nobody's results depend on other sessions."""

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
    shares_weights: bool = False
    port: int = 0
    token: Annotated[bytes, Meta(max_length=64)] = b""
    rank: int = 0
    ranks: int = 1
    shard: Word = ""
    spread_rows: int = 0
    shares: Annotated[tuple[float, ...], Meta(max_length=MOST_RANKS)] = ()
    gpus: Annotated[tuple[Name, ...], Meta(max_length=MOST_RANKS)] = ()
    hosts: Annotated[tuple[Name, ...], Meta(max_length=MOST_RANKS)] = ()
    begins: Annotated[dict[int, Annotated[tuple[int, ...], Meta(max_length=MOST_RANKS)]], Meta(max_length=1 << 17)] = {}
    build: Word = ""
    gpu: Word = ""
    batch_invariant: bool = False

    @property
    def is_part(self) -> bool:
        """Whether other ranks hold layers that this one does not."""
        return self.shard == "layers"

    @property
    def has_twins(self) -> bool:
        """Whether other ranks can answer every call of this one."""
        return self.shard == "fsdp"


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The executor refuses a join, a growth of shared memory or a frame."""

    code: int
    message: Annotated[str, Meta(max_length=LONGEST_TEXT)]

    @classmethod
    def of(cls, error: Exception) -> "Refusal":
        """Return the refusal that tells of `error`, cut to the longest text."""
        code = error.code if isinstance(error, CallError) else Code.RESOURCE
        return cls(code, getattr(error, "message", str(error))[:LONGEST_TEXT])

    def error(self) -> CallError:
        """Return what the client raises."""
        return CallError.told(self.code, self.message)


class Grow(Closed, frozen=True, tag="grow"):
    """A client on the same host asks for a larger shared memory segment."""

    nbytes: int


class Grown(Closed, frozen=True, tag="grown"):
    """The executor's answer to `Grow`: the new segment has this size."""

    nbytes: int


class Share(Closed, frozen=True, tag="share"):
    """A client on the same host asks for the file with the tensors that every client holds for itself, or for that of the served
    `weights` and a page for advice."""

    weights: bool = False


class Shared(Closed, frozen=True, tag="shared"):
    """The executor's answer to `Share`. The memory comes as a descriptor; there is none if it is not shared with this client."""


class Segment(Closed, frozen=True, tag="segment"):
    """A client hands over device memory of this size, by descriptor. Number 0 comes first."""

    number: int
    nbytes: int


class Register(Closed, frozen=True, tag="register"):
    """From now on the doorbell `number` means this call (a header without its number), with its payload at `start` of a segment. If
    `results` (segment and start) are given, each layer's result goes to one of them."""

    number: int
    call: Annotated[bytes, Meta(max_length=BODY_SIZE)]
    segment: int
    start: int
    results: Annotated[tuple[tuple[int, int], ...], Meta(max_length=MAX_GROUP)] = ()


class Registered(Closed, frozen=True, tag="registered"):
    """The executor's answer to `Register`: the reply has this shape, and lies behind the payload unless `results` were given."""

    shape: Annotated[tuple[int, ...], Meta(max_length=MAX_DIM)]


class Compose(Closed, frozen=True, tag="compose"):
    """From now on the doorbell `number` begins a round: the registered `calls` one after another. Number 0 only asks whether that can
    be. `again` says that an earlier executor agreed to it."""

    number: int
    calls: Numbers
    again: bool = False


class Composed(Closed, frozen=True, tag="composed"):
    """The executor's answer to `Compose`: whether the round's calls are large. No kernel may occupy the GPU while it waits for large
    calls."""

    large: bool


class Forget(Closed, frozen=True, tag="forget"):
    """The `calls` (and rounds) of these numbers will not be made any more, and the `segments` not be used."""

    calls: Numbers
    segments: Numbers = ()


class Resume(Closed, frozen=True, tag="resume"):
    """Everything is registered: look at the doorbell from now on."""


class Done(Closed, frozen=True, tag="done"):
    """The executor has done what was asked."""


class Beat(Closed, frozen=True, tag="beat"):
    """The client is alive."""


class Bye(Closed, frozen=True, tag="bye"):
    """The client leaves."""


FromClient = Hello | Grow | Share | Segment | Register | Compose | Forget | Resume | Beat | Bye
FromExecutor = Welcome | Refusal | Grown | Shared | Registered | Composed | Done
Control = FromClient | FromExecutor
_encoder = msgspec.msgpack.Encoder()
_of_client = msgspec.msgpack.Decoder(FromClient)
_of_executor = msgspec.msgpack.Decoder(FromExecutor)


def encode_control(message: Control) -> bytes:
    if isinstance(message, Welcome):  # its manifest is long, and the same for everybody: encode it once
        message = replace(message, manifest=_encoded(message.manifest))
    return _encoder.encode(message)


_last: tuple[list[Layer], msgspec.Raw] = [], msgspec.Raw()


def _encoded(manifest: list[Layer]) -> msgspec.Raw:
    global _last
    if _last[0] is not manifest:
        _last = manifest, msgspec.Raw(_encoder.encode(manifest))
    return _last[1]


def decode_from_client(raw: bytes | memoryview) -> FromClient:
    """Return the client's message in `raw`, or raise `ProtocolError`."""
    try:
        return _of_client.decode(raw)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise _no_message(error) from None


def decode_from_executor(raw: bytes | memoryview) -> FromExecutor:
    """Return the executor's message in `raw`, or raise `ProtocolError`."""
    try:
        return _of_executor.decode(raw)
    except (ValueError, RecursionError) as error:
        _must_be_alike(raw)
        raise _no_message(error) from None


class _Sent(msgspec.Struct):
    """What a message of any release tells of it."""

    type: str = ""
    build: Word = ""


def _must_be_alike(raw: bytes | memoryview) -> None:
    """Raise `ProtocolError` if these bytes are the welcome of an executor of another build."""
    with suppress(ValueError, RecursionError):
        sent = msgspec.msgpack.decode(raw, type=_Sent)
        if sent.type == "welcome" and sent.build != build():
            raise ProtocolError(Code.BAD_VERSION, differ(build(), sent.build))


def differ(client: str, executor: str, protocols: tuple[int, int] | None = None) -> str:
    """Say that a client and an executor do not understand each other, which builds they are, and which protocols they speak.

    >>> differ("0.2.0", "", (15, 14))
    'the client is symbiosis 0.2.0 (protocol 15), the executor another release (protocol 14): install the same release on both sides'
    """
    known = [f"symbiosis {shown(one)}" if one else "another release" for one in (client, executor)]
    if protocols is not None:
        known = [f"{one} (protocol {number})" for one, number in zip(known, protocols, strict=True)]
    return f"the client is {known[0]}, the executor {known[1]}: install the same release on both sides"


def _no_message(error: Exception) -> ProtocolError:
    return ProtocolError(Code.BAD_FRAME, f"not a control message: {error}")
