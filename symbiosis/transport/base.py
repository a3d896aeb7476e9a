"""The two ends of every transport, and what a listener tells the server."""

from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol

import torch
from torch import Tensor

from symbiosis.errors import CallError
from symbiosis.protocol import LONGEST_TEXT, Call, Hello, Limits, Reply, Welcome
from symbiosis.security.keys import Keyring
from symbiosis.transport.reactor import Reactor
from symbiosis.transport.tensors import Shapes, bytes_tensor

JOIN_S = 10.0  # a connection that has not joined by then is ended


class Advice(NamedTuple):
    """What an executor tells a client that can multiply by itself: how many other sessions decode, and whether tokens of others wait
    in the executor's queue, where training gives way to them."""

    others: int = 0
    rationed: bool = False


class Direct(NamedTuple):
    """What a client has multiplied by itself since it joined, and whether it decoded so a moment ago."""

    calls: int
    rows: int
    multiplications: int
    decoded: bool


class Connection(Protocol):
    """The client's end. One call at a time: the session holds a lock around it."""

    welcome: Welcome
    device: torch.device  # where it takes rows from besides the CPU, and puts results
    look_s: float  # `beat` is called so often at least, whatever the executor asks for

    def call(
        self, seq: int, call: Call, payload: tuple[Tensor, ...], timeout: float, shapes: Shapes = ()
    ) -> tuple[Reply, list[Tensor]]:
        """Send a call, wait for its reply. The rows of the payload may have any shape of as many values as the call's.
        The result comes as fresh tensors where the rows were: one, or one of each of the `shapes`."""
        ...

    def shared(self, served: bool = False) -> dict[int, Tensor]:
        """What is the client's own, by number in the manifest, in memory that the clients of a host share as long as they do not
        change it; nothing where there is no such memory. Or what is `served`, read-only, and the biases added to it."""
        ...

    @property
    def page(self) -> Any:
        """For a client that has mapped what is served: where advice comes and figures go."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether it is known by now that the executor is gone."""
        ...

    def beat(self) -> None:
        """Tell the executor that this client lives, if that is due."""
        ...

    def close(self) -> None: ...


class Peer(Protocol):
    """The executor's end of one connection. The server hangs its own record of the session on `session`."""

    session: Any
    transport: str

    @property
    def tenant(self) -> str | None:
        """Who this is, if keys tell."""
        ...

    @property
    def address(self) -> str:
        """Where its client is."""
        ...

    @property
    def unread(self) -> Sequence[int]:
        """Bytes of each large reply that has not left this process."""
        ...

    def out(self, call: Call, shape: tuple[int, ...]) -> Tensor | None:
        """The tensor where the reply to `call` is wanted, or None: the engine allocates."""
        ...

    def reply(self, reply: Reply, result: Tensor) -> None: ...

    def close(self) -> None: ...


class GpuPeer(Peer, Protocol):
    """The executor's end of a client whose calls come again and again from the same places of a GPU. A call is answered when its product
    is launched, not when it is done."""

    @property
    def here(self) -> bool:
        """Whether those places are on the executor's own GPU."""
        ...

    def answer(self, number: int) -> tuple[int, int]:
        """The word in memory that tells the client of the answer to a call, and what it must become; 0 if there is none."""
        ...

    def enqueue_reply(self) -> None:
        """What the stream does behind the product, in a graph, too."""
        ...

    def count(self, batch: int, calls: int = 1) -> None:
        """What came last is launched: so many calls, each in a batch of so many."""
        ...


def refuse(peer: Peer, seq: int, error: CallError) -> Reply:
    """Answer a call with an error."""
    text = bytes_tensor(error.message.encode()[:LONGEST_TEXT])
    reply = Reply(seq, error.code, shape=(text.numel(),), wait_us=round(error.retry_s * 1e6))
    peer.reply(reply, text)
    return reply


class RoundWords(NamedTuple):
    """Of one client: the number of the call that it made last in its round, and that of the one answered last; and the address of the
    word that tells it of what went wrong."""

    bell: Tensor
    reply: Tensor
    error: int


class Prepared(Protocol):
    """A call that a GPU makes again and again from the same places, or a round of calls: a peer keeps it, and hands it back when it has
    come."""

    @property
    def large(self) -> bool:
        """Whether others overtake it."""
        ...

    @property
    def results(self) -> tuple[Tensor, ...]:
        """Where its results go; of a round none, as its calls have places of their own."""
        ...


class PreparedRound(Prepared, Protocol):
    """A round of such calls."""

    def is_behind(self, answered: int) -> bool:
        """Whether there are calls left when so many were answered: then it goes on from there."""
        ...


class ServerPort(Protocol):
    """What transports call, always in the server's thread."""

    limits: Limits
    keyring: Keyring | None  # of an executor that strangers may reach
    device: torch.device
    stream: int  # the device's stream that rows come and go by; 0 where there is none
    nccl: bool  # whether rows may come and go by NCCL

    def joined(self, peer: Peer, hello: Hello) -> Welcome:
        """A client asks to join; raises `CallError` to refuse it."""
        ...

    def kept_out(self, why: str, address: str, tenant: str = "") -> None:
        """Somebody was refused before it could ask to join."""
        ...

    def admits(self, peer: Peer, seq: int, call: Call) -> bool:
        """Whether there is room for a call, to be asked before anything is allocated for it; else it was refused."""
        ...

    def turns_away(self, peer: Peer, seq: int, call: Call) -> None:
        """There is no room where calls wait to be read: the client is told to come again."""
        ...

    def arrived(self, peer: Peer, seq: int, call: Call, payload: tuple[Tensor, ...]) -> None:
        """A call that was admitted."""
        ...

    def shape(self, call: Call) -> tuple[int, ...]:
        """The shape of the reply to `call`; raises `CallError` if it is wrong."""
        ...

    def shared(self) -> BinaryIO:
        """The memory in which lies what every client holds for itself."""
        ...

    def weights(self) -> BinaryIO | None:
        """The memory in which lie the served weights; None where they are not shared."""
        ...

    def multiplied(self, peer: Peer, direct: Direct) -> Advice:
        """What a client has done by itself, to be counted; and what to do next."""
        ...

    def results(self, call: Call) -> Shapes:
        """The shapes of what the layers of a group make of their rows; else that of the reply."""
        ...

    def prepare(
        self,
        peer: GpuPeer,
        number: int,
        call: Call,
        payload: tuple[Tensor, ...],
        results: tuple[Tensor, ...],
        seq: int = 0,
    ) -> Prepared:
        """A call that will come again and again, by this number, with payload and reply always in the same places: the whole reply in
        one, or each of its `results` in one. Its replies have this `seq`."""
        ...

    def compose(
        self, peer: GpuPeer, number: int, prepared: Sequence[Prepared], words: RoundWords, again: bool
    ) -> PreparedRound:
        """Make a round of prepared calls, in this order, which the device answers by itself, by reading and writing their numbers. Raises
        `CallError` if it cannot. `again`: another executor could."""
        ...

    def forget(self, peer: GpuPeer, prepared: Sequence[Prepared]) -> None:
        """These do not come again; raises `CallError` if they may be under way."""
        ...

    def on_doorbell(self, prepared: Prepared) -> bool:
        """A prepared call has come. Whether it must wait: else it is answered by now."""
        ...

    def drain_gpu(self, peer: Peer, then: Callable[[], None] = ...) -> None:
        """Wait until the device is through with what was launched for a client which is gone, but for a large round: when that is over,
        too, `then` is called."""
        ...

    def heard(self, peer: Peer) -> None:
        """The client gave a sign of life."""
        ...

    def left(self, peer: Peer, why: str = "left") -> None: ...


class PeerHome(Protocol):
    """The listener of a peer, as far as the peer needs it."""

    inbox: ServerPort
    reactor: Reactor
    leaving: bool  # whether another executor takes over the address

    def drop(self, peer: Any) -> None:
        """The connection of this one is over."""
        ...


class Listener(Protocol):
    """The executor's end of one endpoint."""

    url: str

    def tick(self) -> None:
        """Called about twice a second."""
        ...

    def stop_accepting(self) -> None:
        """Let no new client in, and leave the address to another executor."""
        ...

    def close(self) -> None: ...
