"""The protocols of a transport's two ends, and of the executor as a transport sees it."""

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, BinaryIO, NamedTuple, Protocol

import torch
from torch import Tensor

from symbiosis.base.curve_keys import Keyring
from symbiosis.errors import CallError
from symbiosis.kernels.packed import PackedWeight
from symbiosis.protocol import LONGEST_TEXT, Call, Hello, Limits, Reply, Welcome
from symbiosis.transport.reactor import Reactor
from symbiosis.transport.tensors import Shapes, bytes_tensor

NO_MEMORY = "the executor has no memory for this call: send fewer rows at once"
UNJOINED_S = 10.0  # a connection that has not joined by then is ended


class Tokens(IntEnum):
    """What tokens a client has made directly: none, more at a time than calls are batched for, or few."""

    NONE = 0
    MANY = 1
    FEW = 2


class Advice(NamedTuple):
    """An executor's advice to a client that maps the weights: how many other sessions decode whose few rows could be batched with its
    own, and whether any makes tokens to which training gives way in the executor."""

    others: int = 0
    give_way: bool = False

    @property
    def is_none(self) -> bool:
        """Whether there is no reason to send anything."""
        return not (self.others or self.give_way)


class Direct(NamedTuple):
    """What a client has multiplied directly since it joined, and what tokens it made a moment ago."""

    calls: int
    rows: int
    multiplications: float
    tokens: Tokens


class Sharing(Protocol):
    """What a connection tells of the served weights that its client may multiply by itself, and asks it for."""

    def join(self, weights: Mapping[int, Tensor | PackedWeight], page: Any) -> None:
        """Take the weights that are mapped now, by their numbers in the manifest; none, if the executor does not share them."""
        ...

    def leave(self) -> None:
        """Note that the executor is away."""
        ...

    def report(self) -> None:
        """Write what was multiplied into the page."""
        ...

    @property
    def suffices(self) -> bool:
        """Whether the client can go on without an executor."""
        ...


class Connection(Protocol):
    """The client's end. It carries one call at a time: the session holds a lock around it. What breaks is a `ConnectionLost` with the reason
    alone, since the error that a user sees (`patience.unavailable`) names the endpoint."""

    welcome: Welcome
    device: torch.device  # it takes rows from there as well as from the CPU, and puts their results there
    look_s: float  # `beat` must be called at least this often, whatever heartbeat the executor asks for

    def call(
        self, seq: int, call: Call, payload: tuple[Tensor, ...], timeout: float, shapes: Shapes = ()
    ) -> tuple[Reply, list[Tensor]]:
        """Send a call and wait for its reply. The rows of the payload may have any shape with as many values as the call's. The result
        comes as fresh tensors on the device of the rows: one, or one of each of the `shapes`."""
        ...

    def commons(self) -> dict[int, Tensor]:
        """Return the client's own tensors, by number in the manifest, from memory that the clients of a host share until they change
        it; nothing where there is no such memory."""
        ...

    def served_weights(self) -> dict[int, Tensor | PackedWeight]:
        """Return the served weights, by number in the manifest, with the biases that the executor adds, from memory that nobody can
        change; nothing where they are not shared."""
        ...

    @property
    def page(self) -> Any:
        """Where a client that maps the served weights reads advice and writes its figures."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the executor is known to be gone."""
        ...

    def beat(self) -> None:
        """Tell the executor that this client is alive, if that is due."""
        ...

    def close(self) -> None: ...


class Peer(Protocol):
    """The executor's end of one connection. The server keeps its record of the session in `session`."""

    session: Any
    transport: str

    @property
    def tenant(self) -> str | None:
        """The client's tenant; None without keys."""
        ...

    @property
    def address(self) -> str:
        """Where the client is, for the logs."""
        ...

    @property
    def unread(self) -> Sequence[int]:
        """The bytes of each large reply that has not left this process."""
        ...

    def out(self, call: Call, shape: tuple[int, ...]) -> Tensor | None:
        """Return the tensor to write the reply to `call` into, or None to let the engine allocate one."""
        ...

    def reply(self, reply: Reply, result: Tensor) -> None: ...

    def close(self) -> None: ...


class GpuPeer(Peer, Protocol):
    """The executor's end of a client whose calls come again and again from the same places of a GPU. A call counts as answered when its
    product is launched, not when it is done."""

    @property
    def here(self) -> bool:
        """Whether those places are on the executor's own GPU."""
        ...

    def answer(self, number: int) -> tuple[int, int]:
        """Return the address of the word that tells the client that a call is answered, 0 if there is none, and the value that it must
        take."""
        ...

    def enqueue_reply(self) -> None:
        """Enqueue on the stream, or capture into a graph, what follows the product."""
        ...

    def count(self, batch: int, calls: int = 1) -> None:
        """Count so many calls that were launched, each in a batch of so many."""
        ...


def refuse(peer: Peer, seq: int, error: CallError) -> Reply:
    """Answer a call with an error."""
    text = bytes_tensor(error.message.encode()[:LONGEST_TEXT])
    reply = Reply(seq, error.code, shape=(text.numel(),), wait_us=round(error.retry_s * 1e6))
    peer.reply(reply, text)
    return reply


class RoundWords(NamedTuple):
    """The words of one client's round: the number of the call that it made last, that of the call answered last, and the address of the
    word that tells it of an error."""

    bell: Tensor
    reply: Tensor
    error: int


class Prepared(Protocol):
    """A call that a GPU makes again and again from the same places, or a round of such calls. A peer keeps it, and hands it back each
    time that its doorbell rings."""

    @property
    def large(self) -> bool:
        """Whether it has so many rows that other calls overtake it."""
        ...

    @property
    def results(self) -> tuple[Tensor, ...]:
        """Where its results go. A round has none, because its calls have places of their own."""
        ...


class PreparedRound(Prepared, Protocol):
    """A round of such calls."""

    def is_behind(self, answered: int) -> bool:
        """Continue after the `answered` calls of an earlier executor. Return whether any are left."""
        ...


class ServerPort(Protocol):
    """The executor as transports see it. They call it in the server's thread only."""

    limits: Limits
    keyring: Keyring | None  # set if strangers may reach the executor
    device: torch.device
    stream: int  # the device's stream that copies rows; 0 without a GPU
    nccl: bool  # whether rows may come and go by NCCL

    def joined(self, peer: Peer, hello: Hello) -> Welcome:
        """Let a client join, or raise `CallError` to refuse it."""
        ...

    def kept_out(self, why: str, address: str, tenant: str = "") -> None:
        """Note a connection that was refused before it could ask to join."""
        ...

    def admits(self, peer: Peer, seq: int, call: Call) -> bool:
        """Whether there is room for a call. If not, it has been refused. Ask before allocating anything for it."""
        ...

    def turns_away(self, peer: Peer, seq: int, call: Call) -> None:
        """Refuse a call because too many wait to be read, and tell the client to send it again later."""
        ...

    def arrived(self, peer: Peer, seq: int, call: Call, payload: tuple[Tensor, ...]) -> bool:
        """Take a call that was admitted. Return whether it was taken; if not, it has been refused."""
        ...

    def came_in_vain(self, peer: Peer, nbytes: int) -> None:
        """Count bytes that came with what was refused."""
        ...

    def shape(self, call: Call) -> tuple[int, ...]:
        """Return the shape of the reply to `call`, or raise `CallError` if the call is wrong."""
        ...

    def commons(self) -> Sequence[BinaryIO]:
        """Return the files with the tensors that every client holds for itself: one, or one of each rank."""
        ...

    def served_weights(self) -> Sequence[BinaryIO]:
        """Return the files that hold the served weights; none if they are not shared."""
        ...

    def multiplied(self, peer: Peer, direct: Direct) -> Advice:
        """Count what a client has multiplied directly, and return advice."""
        ...

    def results(self, call: Call) -> Shapes:
        """Return the shapes of the results of a call: one, or one for each layer of a group."""
        ...

    def prepare(
        self,
        peer: GpuPeer,
        number: int,
        call: Call,
        payload: tuple[Tensor, ...],
        results: tuple[Tensor, ...],
        seq: int = 0,
        at: Callable[[Tensor], int] | None = Tensor.data_ptr,
    ) -> Prepared:
        """Prepare a call that will come again and again, by this number, with payload and results always in the same places. `results`
        is one tensor for the whole reply, or one for each result. Its replies have this `seq`. `at` returns the address where kernels find
        what these tensors stand for in the client's memory; it is None if they cannot reach that."""
        ...

    def compose(self, number: int, prepared: Sequence[Prepared], words: RoundWords, again: bool) -> PreparedRound:
        """Make a round of prepared calls, in this order, which the device answers by itself by reading and writing their numbers. Raise
        `CallError` if it cannot. `again` says that an earlier executor could."""
        ...

    def forget(self, peer: GpuPeer, prepared: Sequence[Prepared]) -> None:
        """Forget calls that do not come again. Raise `CallError` if they may be in flight."""
        ...

    def on_doorbell(self, prepared: Prepared) -> bool:
        """Handle a prepared call whose doorbell rang. Return whether it must wait; if not, it is answered by now."""
        ...

    def drain_gpu(self, peer: Peer, then: Callable[[], None] = ...) -> None:
        """Wait until the device has done what was launched for a client that is gone. A large round is not waited for: `then` is called
        when that is over, too."""
        ...

    def heard(self, peer: Peer) -> None:
        """Note a sign of life of the client."""
        ...

    def left(self, peer: Peer, why: str = "left") -> None: ...


class PeerHome(Protocol):
    """What a peer needs of its listener."""

    inbox: ServerPort
    reactor: Reactor
    leaving: bool  # whether it has left the address to another executor

    def drop(self, peer: Any) -> None:
        """Forget a peer whose connection is over."""
        ...


class Listener(Protocol):
    """The executor's end of one endpoint."""

    url: str

    def tick(self) -> None:
        """Look after the peers; called about twice a second."""
        ...

    def stop_accepting(self) -> None:
        """Let no new client join, and leave the address to another executor."""
        ...

    def close(self) -> None: ...
