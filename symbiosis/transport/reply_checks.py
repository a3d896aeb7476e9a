"""What a client accepts from an executor: checks its welcome at each join, and the dtype and shape of each reply."""

from collections.abc import Sequence

import msgspec

from symbiosis.errors import CallError, Code, ProtocolError
from symbiosis.protocol import (
    ELSEWHERE,
    LARGEST_LIMIT,
    LONGEST_BEAT_S,
    LONGEST_TEXT,
    MOST_RANKS,
    SHORTEST_BEAT_S,
    VERSION,
    Call,
    Hello,
    Layer,
    Refusal,
    Reply,
    Welcome,
    shape_of_reply,
)
from symbiosis.protocol.endpoints import FIRST_OPEN_PORT, HOST, LAST_PORT
from symbiosis.transport.fingerprint import model_fingerprint

KINDS = frozenset(("linear", "conv1d", "tensor", "embedding", "client", ELSEWHERE))
LARGEST = 1 << 48
MOST_KNOWN = 1 << 14  # calls whose expected replies are remembered
MOST_FIGURES = 16 << 20  # bytes of a snapshot of figures, whose size does not follow from the call


def accepted(answer: object, url: str, hello: Hello) -> Welcome:
    """Return the executor's welcome, or raise if it is a refusal, no valid welcome, or of another model than the one that this client
    joined before."""
    if isinstance(answer, Refusal):
        if answer.code == Code.BAD_VERSION and hello.build not in answer.message:  # of a release that does not tell
            raise CallError.told(
                answer.code, f"{answer.message} (the client is symbiosis {hello.build}, protocol {VERSION})"
            )
        raise answer.error()
    if not isinstance(answer, Welcome):
        raise ProtocolError(Code.BAD_FRAME, f"{url} answers a join with a {type(answer).__name__}")
    said = (
        answer.fingerprint, answer.model_class, answer.executor, answer.operator.strip(), answer.build, answer.gpu,
    )  # fmt: skip
    for text in (*said, *(text for layer in answer.manifest for text in (layer.name, layer.dtype, layer.digest))):
        if not text.isprintable():
            raise ProtocolError(Code.BAD_FRAME, f"{url} names something {text[:64]!r}: that is not a name")
    if unknown := next((layer for layer in answer.manifest if layer.kind not in KINDS), None):
        raise ProtocolError(Code.BAD_FRAME, f"{url}: {unknown.name} is of a kind that this release does not know")
    _check_ranks(answer, url)
    sizes = (
        answer.session,
        answer.slab_bytes,
        *answer.integers,
        *(n for layer in answer.manifest for n in layer.shape),
    )
    limits = msgspec.structs.astuple(answer.limits)
    if not (all(0 <= size <= LARGEST for size in sizes) and all(0 <= limit <= LARGEST_LIMIT for limit in limits)):
        raise ProtocolError(Code.BAD_FRAME, f"{url} states impossible sizes")
    if answer.port and not FIRST_OPEN_PORT <= answer.port <= LAST_PORT:
        raise ProtocolError(Code.BAD_FRAME, f"{url} names port {answer.port}")
    if not SHORTEST_BEAT_S <= answer.heartbeat_s <= LONGEST_BEAT_S:
        raise ProtocolError(Code.BAD_FRAME, f"{url} asks for a heartbeat every {answer.heartbeat_s} s")
    try:
        msgspec.json.decode(answer.config, type=dict)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        raise ProtocolError(
            Code.BAD_FRAME, f"{url} describes its model with something that is not a configuration"
        ) from None
    _check_model(answer, url, hello)
    return answer


def _check_ranks(answer: Welcome, url: str) -> None:
    """Raise `ProtocolError` if there cannot be such ranks."""
    if not 0 <= answer.rank < answer.ranks <= MOST_RANKS:
        raise ProtocolError(Code.BAD_FRAME, f"{url} says that it is rank {answer.rank} of {answer.ranks}")
    spreads = (
        answer.has_twins and len(answer.shares) == answer.ranks and all(0 < share < 2**64 for share in answer.shares)
    )
    if answer.spread_rows and not (spreads and 0 < answer.spread_rows <= LARGEST):
        raise ProtocolError(Code.BAD_FRAME, f"{url} wants rows to be spread, and does not say over which ranks")
    if not all(_can_begin(answer, number, at) for number, at in answer.begins.items()):
        raise ProtocolError(Code.BAD_FRAME, f"{url} divides layers among its ranks as they cannot be")
    if answer.hosts and (len(answer.hosts) != answer.ranks or not all(map(HOST.fullmatch, answer.hosts))):
        raise ProtocolError(Code.BAD_FRAME, f"{url} does not say on which host each of its ranks is")


def _can_begin(answer: Welcome, number: int, begins: Sequence[int]) -> bool:
    """Whether the ranks' parts of a layer may begin with these outputs."""
    if not 0 <= number < len(answer.manifest) or answer.manifest[number].kind != "linear":
        return False
    distinct = len(set(begins)) == len(begins) == answer.ranks
    return distinct and min(begins) == 0 and max(begins) < answer.manifest[number].shape[0]


def _check_model(answer: Welcome, url: str, hello: Hello) -> None:
    """Raise unless the model matches its fingerprint, and the one that this client joined before."""
    fingerprint = model_fingerprint(answer.config, answer.manifest)
    if fingerprint != answer.fingerprint:
        raise ProtocolError(Code.BAD_FRAME, f"the fingerprint that {url} sends is not that of the model it describes")
    if hello.fingerprint not in (None, fingerprint):
        raise CallError(
            Code.WRONG_MODEL,
            f"{url} now serves another model than the one this client joined: start the executor with the same checkpoint, or wrap "
            "the client's model again",
        )


class MoreRoom(Exception):
    """The reply to a call will be larger than the connection accepts. The session joins again with room for it."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


class Answers:
    """The dtype and shape that the reply to a call must have, which follow from the call and the manifest."""

    def __init__(self, told: Welcome) -> None:
        self._manifest: Sequence[Layer] = told.manifest
        self._most = told.limits.max_call_bytes
        self._known: dict[Call, tuple[str, tuple[int, ...]]] = {}

    def check(self, call: Call, reply: Reply) -> None:
        """Raise `ProtocolError` if `reply` cannot be the answer to `call`. Ask before allocating anything for it."""
        if reply.code is Code.OK and not call.op.traits.open_ended:
            right = (reply.dtype, reply.shape) == (self._known.get(call) or self.of(call))
        else:
            most = MOST_FIGURES if reply.code is Code.OK else LONGEST_TEXT
            right = reply.dtype == "uint8" and len(reply.shape) == 1 and reply.shape[0] <= most
        if not right:
            raise ProtocolError(
                Code.BAD_FRAME, f"the reply to {call.op.name} of {call.shape} came as {reply.shape} of {reply.dtype}"
            )

    def of(self, call: Call) -> tuple[str, tuple[int, ...]]:
        """Return the dtype and shape that `check` expects of an answer to `call`."""
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        try:
            known = self._known[call] = call.dtype, shape_of_reply(call, self._manifest)
        except IndexError:
            raise ProtocolError(Code.BAD_FRAME, f"there is no answer to {call.op.name} of {call.shape}") from None
        return known

    def nbytes(self, call: Call) -> int:
        """Return the most bytes that the reply may have."""
        if call.op.traits.open_ended:
            return MOST_FIGURES
        try:
            dtype, shape = self._known.get(call) or self.of(call)
        except ProtocolError:
            return LONGEST_TEXT
        nbytes = Reply(0, Code.OK, dtype, shape).nbytes
        # A call whose reply is too large is answered with the text of a refusal.
        return nbytes if LONGEST_TEXT < nbytes <= self._most else LONGEST_TEXT
