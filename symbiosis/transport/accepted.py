"""What a client takes from an executor, and nothing else: who it is at each join, and what the reply to a call must look like."""

from collections.abc import Sequence

import msgspec

from symbiosis.errors import CallError, Code, ProtocolError
from symbiosis.fingerprint import model_fingerprint
from symbiosis.protocol import (
    LARGEST_LIMIT,
    LONGEST_BEAT_S,
    LONGEST_TEXT,
    SHORTEST_BEAT_S,
    Call,
    Hello,
    Layer,
    Op,
    Refusal,
    Reply,
    Welcome,
)

KINDS = frozenset(("linear", "conv1d", "tensor", "embedding", "client"))
LARGEST, LAST_PORT = 1 << 48, 65535
MOST_KNOWN = 1 << 14  # calls whose answers are looked up
MOST_FIGURES = 16 << 20  # bytes of a snapshot of an executor's figures, whose size nobody knows before


def accepted(answer: object, url: str, hello: Hello) -> Welcome:
    """The executor's welcome, if it is one, and of the model that this client joined before: it is not the executor alone who
    says so."""
    if isinstance(answer, Refusal):
        raise answer.error()
    if not isinstance(answer, Welcome):
        raise ProtocolError(Code.BAD_FRAME, f"{url} answers a join with a {type(answer).__name__}")
    said = (answer.fingerprint, answer.model_class, answer.executor, answer.operator.strip())
    for text in (*said, *(text for layer in answer.manifest for text in (layer.name, layer.dtype, layer.digest))):
        if not text.isprintable():
            raise ProtocolError(Code.BAD_FRAME, f"{url} names something {text[:64]!r}: that is no name")
    if unknown := next((layer for layer in answer.manifest if layer.kind not in KINDS), None):
        raise ProtocolError(Code.BAD_FRAME, f"{url}: {unknown.name} is of no kind that this release knows")
    sizes = (
        answer.session,
        answer.slab_bytes,
        *answer.integers,
        *(n for layer in answer.manifest for n in layer.shape),
    )
    limits = msgspec.structs.astuple(answer.limits)
    if not (all(0 <= size <= LARGEST for size in sizes) and all(0 <= limit <= LARGEST_LIMIT for limit in limits)):
        raise ProtocolError(Code.BAD_FRAME, f"{url} tells of sizes that nothing has")
    if not 0 <= answer.port <= LAST_PORT:
        raise ProtocolError(Code.BAD_FRAME, f"{url} names port {answer.port}")
    if not SHORTEST_BEAT_S <= answer.heartbeat_s <= LONGEST_BEAT_S:
        raise ProtocolError(Code.BAD_FRAME, f"{url} asks for a sign of life every {answer.heartbeat_s} s")
    try:
        msgspec.json.decode(answer.config, type=dict)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        raise ProtocolError(Code.BAD_FRAME, f"{url} tells of a model by what is no configuration") from None
    fingerprint = model_fingerprint(answer.config, answer.manifest)
    if fingerprint != answer.fingerprint:
        raise ProtocolError(
            Code.BAD_FRAME, f"the fingerprint that {url} tells is not that of the model that it describes"
        )
    if hello.fingerprint not in (None, fingerprint):
        raise CallError(
            Code.WRONG_MODEL,
            f"{url} now serves another model than the one this client joined: start the executor with the same checkpoint, or wrap "
            "the client's model again",
        )
    return answer


class MoreRoom(Exception):
    """A connection takes no message that is as large as the reply to a call will be: join anew, with room for it."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


class Answers:
    """The dtype and shape that the reply to a call must have, as it follows from the call and from what is served."""

    def __init__(self, told: Welcome) -> None:
        self._manifest: Sequence[Layer] = told.manifest
        self._most = told.limits.max_call_bytes
        self._known: dict[Call, tuple[str, tuple[int, ...]]] = {}

    def check(self, call: Call, reply: Reply) -> None:
        """`ProtocolError` if `reply` cannot be the answer to `call`. To be asked before anything is allocated for it."""
        if reply.code is Code.OK and call.op is not Op.STATS:
            right = (reply.dtype, reply.shape) == (self._known.get(call) or self.of(call))
        else:
            most = MOST_FIGURES if reply.code is Code.OK else LONGEST_TEXT
            right = reply.dtype == "uint8" and len(reply.shape) == 1 and reply.shape[0] <= most
        if not right:
            raise ProtocolError(
                Code.BAD_FRAME, f"the reply to {call.op.name} of {call.shape} came as {reply.shape} of {reply.dtype}"
            )

    def of(self, call: Call) -> tuple[str, tuple[int, ...]]:
        """What `check` expects of a call that is answered."""
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        try:
            known = self._known[call] = call.dtype, self._shape(call)
        except IndexError:
            raise ProtocolError(Code.BAD_FRAME, f"there is no answer to {call.op.name} of {call.shape}") from None
        return known

    def nbytes(self, call: Call) -> int:
        """At most, of the reply."""
        if call.op is Op.STATS:
            return MOST_FIGURES
        try:
            dtype, shape = self._known.get(call) or self.of(call)
        except ProtocolError:
            return LONGEST_TEXT
        nbytes = Reply(0, Code.OK, dtype, shape).nbytes
        return (
            nbytes if LONGEST_TEXT < nbytes <= self._most else LONGEST_TEXT
        )  # else the executor says what is wrong with the call

    def _shape(self, call: Call) -> tuple[int, ...]:
        if call.op is Op.ECHO:
            return call.shape
        first, *others = (self._manifest[layer] for layer in call.layers)
        if call.op is Op.FORWARD:
            return *call.shape[:-1], sum(map(width, (first, *others)))
        if call.op is Op.DGRAD:
            return *call.shape[:-1], first.shape[0 if first.kind == "conv1d" else 1]
        if call.op is Op.NORMS:
            return (width(first),)
        if call.op is Op.LOOKUP:
            return call.shape[0], first.shape[1]
        matrix = first.shape if call.view is None else call.view.size
        if call.op is Op.READ:
            return matrix
        if call.op is Op.LEFT:
            return *matrix[:-1], call.shape[-1]
        return *call.shape[:-1], matrix[-1]


def width(layer: Layer) -> int:
    """Values in a row that a linear layer makes."""
    return layer.shape[1 if layer.kind == "conv1d" else 0]
