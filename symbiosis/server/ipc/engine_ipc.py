"""What the process that speaks HTTP and the engine's process tell each other: msgpack in frames, over a pair of sockets."""

import struct

import msgspec

from symbiosis.server.cors import Cors
from symbiosis.server.tinker.tinker_messages import AnyAsked
from symbiosis.serving.request import Output, PoolingKind, Request

LENGTH = struct.Struct("<I")


class FrontOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the process that speaks HTTP is told when it starts."""

    model: str  # the name of the base, for clients
    folder: str  # where its tokenizer is
    api_keys: str | None = None
    chat_template: str | None = None  # itself; None: the tokenizer's
    pooling: PoolingKind = "last"  # what vectors of texts are made of
    tool_parser: str | None = None  # the format in which the model calls tools; None: what the template tells of it
    adapters: str | None = None  # the folder from which clients may load
    max_body_bytes: int = 16 << 20
    max_adapter_bytes: int = 1 << 30
    max_requests: int = 4096  # under way
    uploads: str | None = None  # the folder for adapters that are sent; None: the system's for what is temporary
    host: str = "127.0.0.1"  # where it listens
    allowed_hosts: tuple[str, ...] = ()
    cors: Cors = Cors()
    root_path: str = ""
    log_format: str = "text"
    predicts: bool = False  # whether a chat's prediction makes drafts
    trains: bool = False  # whether Tinker's API is there, too
    server: str | None = None  # its name among those of a cluster
    engine: int = 0  # the process that is to end if it hangs; 0: none


class Started(msgspec.Struct, frozen=True):
    """The only argument of the process that speaks HTTP."""

    listener: int  # file descriptors
    link: int
    options: FrontOptions


class EngineBeat(msgspec.Struct, tag=True, frozen=True):
    """From either side, every second: it runs."""

    step_s: float = 0.0  # from the engine: for how long it has computed its present step
    room: int = 0  # ... how many more tokens its memory holds
    tokens: int = 0  # ... how many it holds when nothing else is in it
    sessions: int = 0  # ... of those who train


class Submit(msgspec.Struct, tag=True, frozen=True):
    """To the engine: begin this request."""

    request: Request


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """To the engine: end this request, because nobody wants it any more."""

    id: int


class StopCompletion(msgspec.Struct, tag=True, frozen=True):
    """To the engine: end this completion, because its text has come to a stop string."""

    id: int
    completion: int


class Ask(msgspec.Struct, tag=True, frozen=True):
    """To the engine: call one of its other methods. The answer has the same number."""

    number: int
    method: str
    arguments: tuple[str, ...] = ()
    request_id: str = ""  # for whom it is
    tenant: str = ""


class AskTraining(msgspec.Struct, tag=True, frozen=True):
    """To the engine's process: ask the training service. The answer has the same number, and may take a while."""

    number: int
    tenant: str
    asked: AnyAsked
    request_id: str = ""


class EngineReady(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """From the engine, once: what is served."""

    model: str  # the name that clients ask for
    longest: int  # positions
    most_tokens: int  # of them, those for which there is memory
    vocabulary: int
    width: int = 0  # of vectors of texts
    ends: tuple[int, ...] = ()  # tokens that end answers
    fingerprint: str = ""  # of the base
    secret: str = ""  # of the cluster, whose front ends alone may ask
    build: str = ""


class Outputs(msgspec.Struct, tag=True, frozen=True):
    """From the engine: what has come since the last such message."""

    outputs: list[Output]


class ReceivedOutput(Output, frozen=True):
    """An output where it is received: of a long prompt's log probabilities nothing is made before they are told."""

    prompt_logprobs: msgspec.Raw = msgspec.Raw()  # type: ignore[assignment]


class ReceivedOutputs(msgspec.Struct, tag="Outputs", frozen=True):
    outputs: list[ReceivedOutput]


class Refused(msgspec.Struct, tag=True, frozen=True):
    """From the engine: this request was not begun."""

    id: int
    error: str
    status: int  # of HTTP
    param: str | None = None  # what of the request is wrong


class Answer(msgspec.Struct, tag=True, frozen=True):
    """From the engine, to an `Ask` or an `AskTraining`."""

    number: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")  # msgpack's nil
    error: str = ""
    status: int = 200


class Drain(msgspec.Struct, tag=True, frozen=True):
    """From the engine: take no new requests, finish the others, and end."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter, as clients are told of it."""

    name: str
    kind: str = ""
    rank: int = 0
    bytes: int = 0
    version: int = 0


ToEngine = Submit | Cancel | StopCompletion | Ask | AskTraining | EngineBeat
Others = EngineReady | Refused | Answer | Drain | EngineBeat
FromEngine = Others | Outputs
encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(Others | ReceivedOutputs)


def framed(message: ToEngine | FromEngine) -> bytes:
    """Return a message as it travels: its length, and then itself.

    >>> frame = framed(Cancel(7))
    >>> int.from_bytes(frame[:4], "little") == len(frame) - 4
    True
    """
    body = encoder.encode(message)
    return LENGTH.pack(len(body)) + body
