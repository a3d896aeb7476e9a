"""`tcp://HOST:PORT`, the executor's end: ZeroMQ messages of a header frame and raw tensor frames. Nothing is unpickled."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

import zmq

from symbiosis.base.allowance import Allowance
from symbiosis.errors import CallError, Code, ConfigError, ProtocolError
from symbiosis.protocol import (
    MAGIC_CALL,
    MAX_CONTROL,
    Beat,
    Bye,
    Hello,
    Limits,
    Refusal,
    decode_from_client,
    encode_control,
)
from symbiosis.transport.base import ServerPort
from symbiosis.transport.nccl.peer import NcclPeer
from symbiosis.transport.reactor import Reactor
from symbiosis.transport.tcp.call_frames import CallOutcome, Message, take_call
from symbiosis.transport.tcp.connection_monitor import ConnectionMonitor
from symbiosis.transport.tcp.peer import TcpPeer
from symbiosis.transport.tcp.sockets import PIECE, Wire, harden
from symbiosis.transport.tcp.tenant_auth import TenantAuth
from symbiosis.transport.tcp.tenant_queues import TenantQueues

AT_ONCE = 64  # most messages taken in, or read, between two products
OF_ONE = 8  # most messages read of one tenant between two products, while others call
BEGUN_AT_ONCE = 4  # most tenants whose long messages are read a part of between two products
REFUSALS = 100  # a tenant (without keys: connection) with more than this between two ticks is hung up on
IN_VAIN_PER_S = 64 << 20  # bytes that it may send with what is refused, unless --max-tenant-bytes-per-s is less
FORGET_S = 10.0  # messages of a closed connection may still be queued for so long
TOO_EARLY = Code.NOT_JOINED, "join before you say more"
STRANGERS = b""  # stands for all connections that have not joined, without keys to tell them apart


class TcpListener:
    """The executor's ROUTER socket."""

    def __init__(self, address: str, reactor: Reactor, inbox: ServerPort) -> None:
        self.reactor, self.inbox = reactor, inbox
        self._peers: dict[bytes, TcpPeer] = {}
        self._by_nccl: tuple[NcclPeer, ...] = ()
        self._refusals: Counter[str | bytes] = Counter()  # since the last tick, by tenant or identity
        self._in_vain = _most_in_vain(inbox.limits)
        self._gone: dict[bytes, float] = {}  # closed connections, and when to forget them
        # the tenants whose messages were read since the last tick, and in the interval before it
        self._active: tuple[set[str | bytes], set[str | bytes]] = set(), set()
        self._due = False  # whether `_drain` is already scheduled
        self._drained = -1  # the pass of the loop that takes in no more
        self._auth = TenantAuth.at(address, reactor, inbox)
        self.encrypted = self._auth is not None
        self._socket = _router(self._auth, inbox.limits.max_call_bytes)
        self._monitor = ConnectionMonitor(self._socket, reactor, self.encrypted, inbox.kept_out)
        too_much = lambda message: self._handle(message, room=False)  # noqa: E731
        self._queues = TenantQueues(self._socket, reactor, inbox.limits, self._whose, too_much, self.encrypted)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        try:
            self._socket.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen at tcp://{address}: {error}") from None
        self.url: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        reactor.watch(self._fd, self._drain)

    def _drain(self) -> None:
        """Read messages, as many as may be read before the next product. ZeroMQ's descriptor tells of changes only, so if some are
        left, run again soon."""
        queues, heard, begun = self._queues, Counter[str | bytes](), set[str | bytes]()
        room = AT_ONCE if self._drained != self.reactor.passes else 0
        if room:
            queues.unblock()
        for _ in range(room):
            if self._socket.closed:
                return
            room -= queues.take_in(room)
            if not queues.waiting and room and not queues.blocked:
                return
            tenant = queues.next(besides=begun)
            if tenant is None or len(begun) == BEGUN_AT_ONCE or self._products_first(tenant, heard):
                break
            heard[tenant] += 1
            self._active[0].add(tenant)
            if self._handle(queues.first(tenant)):
                begun.add(tenant)
            else:
                queues.remove_first(tenant)
        self._drained = self.reactor.passes
        self._drain_soon()

    def _products_first(self, tenant: str | bytes, heard: Counter[str | bytes]) -> bool:
        """Whether to compute before reading on from `tenant`: because it has had many messages read while others call, or all messages
        of a tenant that was heard are read."""
        many = heard[tenant] >= OF_ONE and len(self._active[0] | self._active[1]) > 1
        return many or self._queues.waiting < heard.keys()

    def _whose(self, message: Message) -> str | bytes:
        """Return the tenant that a message counts for; without keys its connection, or `STRANGERS` if that has not joined."""
        identity = message[0].bytes
        if (peer := self._peers.get(identity)) is not None:
            return peer.tenant or identity
        return (self._tenant_of(message[-1]) or identity) if self._auth else STRANGERS

    def _tenant_of(self, frame: zmq.Frame) -> str | None:
        return self._auth.tenant_of(frame) if self._auth else None

    def _drain_soon(self) -> None:
        if not self._due:
            self._due = True
            self.reactor.call_soon(self._drain_now)

    def _drain_now(self) -> None:
        self._due = False
        self._drain()

    def _handle(self, message: Message, room: bool = True) -> bool:
        """Read a message, and return whether there is more to do for it. Whatever goes wrong ends its connection, and nothing else."""
        try:
            return self._read(message, room)
        except Exception as error:
            identity = message[0].bytes
            peer = self._peers.get(identity) or TcpPeer(self, identity)
            peer.wire = peer.wire or self.reactor.attempt(None, self._wire_below, message[-1])
            self.reactor.failed(peer, error)
            return False

    def _read(self, message: Message, room: bool) -> bool:
        name, *frames = message
        identity = name.bytes
        chosen = identity[:1] != b"\0"  # an identity that a client chose could be another's
        if not frames or chosen or identity in self._gone:
            self.inbox.came_in_vain(TcpPeer(self, identity, self._tenant_of(message[-1])), message.nbytes)
            return False
        peer, tenant = self._peers.get(identity), None
        if peer is not None:
            peer.heard = True
        elif not room and self._queues.holds(identity):  # it would overtake messages that wait
            self._refuse(early := TcpPeer(self, identity, wire=self._wire_below(frames[0])), CallError(*TOO_EARLY))
            self.hang_up(early)
            return False
        most = self._queues.most_frames
        try:
            tenant = self._admitted(peer, frames[0])
            if len(frames) >= most:
                raise ProtocolError(Code.BAD_FRAME, f"a message of {most} frames or more is not a Symbiosis message")
            if frames[0].buffer[:4] == MAGIC_CALL:
                return self._call(peer, message, room) is CallOutcome.BEGUN
            self._control(peer, identity, frames, tenant)
        except CallError as error:
            stranger = peer or TcpPeer(self, identity, tenant)
            stranger.wire, stranger.heeds = stranger.wire or self._wire_below(frames[0]), False
            too_much = self._is_too_much(stranger, message) or len(frames) >= most
            self._refuse(stranger, error, REFUSALS + 1 if too_much else 1)
        return False

    def _is_too_much(self, peer: TcpPeer, message: Message) -> bool:
        """Count the bytes of a message that is refused. Return whether its tenant has sent too many so. Those of a client that was told
        to wait, and did, do not count."""
        self.inbox.came_in_vain(peer, message.nbytes)
        return not (peer.heeds or self._in_vain.spends(peer.tenant or peer.identity, monotonic(), message.nbytes))

    def _refuse(self, stranger: TcpPeer, error: CallError, weight: int = 1) -> None:
        self.send(stranger, [encode_control(Refusal.of(error))])  # first, because sending finds out whether it is gone
        self.too_many(stranger, weight)

    def _admitted(self, peer: TcpPeer | None, frame: zmq.Frame) -> str | None:
        """Return the tenant that sent this frame, None without keys. Raise `CallError` if it may not come in any more."""
        tenant = self._tenant_of(frame)
        if (self._auth and tenant is None) or (peer is not None and peer.tenant != tenant):
            if peer is not None:
                self.drop(peer, "struck off")
            raise CallError(Code.NOT_ALLOWED, "this executor does not serve the owner of this key any more")
        return tenant

    def _control(self, peer: TcpPeer | None, identity: bytes, frames: list[zmq.Frame], tenant: str | None) -> None:
        if len(frames) != 1:
            raise ProtocolError(Code.BAD_FRAME, f"a control message has 1 frame, not {len(frames)}")
        if len(frames[0]) > MAX_CONTROL:  # before it is taken apart
            raise ProtocolError(Code.TOO_LARGE, f"a control message has {MAX_CONTROL} bytes at most")
        message = decode_from_client(frames[0].buffer)
        if isinstance(message, Hello) and peer is None:
            self._join(identity, tenant, frames[0], message)
        elif peer is not None and isinstance(message, Beat):
            self.inbox.heard(peer)
        elif peer is not None and isinstance(message, Bye):
            self.hang_up(peer, "left")
        elif not isinstance(message, Bye):  # of one that has left its descriptor may be another one's by now
            raise ProtocolError(Code.NOT_JOINED, f"unexpected {type(message).__name__}: join first, once")

    # ------------------------------------------------------------------ who comes and goes

    def _join(self, identity: bytes, tenant: str | None, frame: zmq.Frame, hello: Hello) -> None:
        wire = self._wire_below(frame)
        if wire is None:  # it is gone
            self.hang_up(TcpPeer(self, identity, tenant))
            return
        if hello.device is None:
            peer = TcpPeer(self, identity, tenant, wire)
            welcome = self.inbox.joined(peer, hello)
        else:
            key = str(frame.get("User-Id")) if self._auth else ""
            peer = by_nccl = NcclPeer(self, identity, tenant, wire, hello, key)
            self._by_nccl += (by_nccl,)
            welcome = by_nccl.welcome
        self._peers[identity] = peer
        if self._auth and tenant:
            self._auth.joined(tenant)
        self.send(peer, [encode_control(welcome)])

    def _wire_below(self, frame: zmq.Frame) -> Wire | None:
        """Return the wire by which a message seems to have come. If its connection is gone, it may be another's, but ZeroMQ notices
        that here, and the next `send` fails."""
        wire = Wire.below(frame, self._monitor.spoke)
        self._socket.getsockopt(zmq.EVENTS)
        return wire

    def _call(self, peer: TcpPeer | None, message: Message, room: bool) -> CallOutcome:
        if peer is None:
            raise CallError(Code.NOT_JOINED, "this executor does not know the session: join again")
        outcome = take_call(self.inbox, peer, message, self.encrypted, room)
        if outcome is CallOutcome.REFUSED and self._is_too_much(peer, message):
            self.too_many(peer, REFUSALS + 1)
        return outcome

    def send(self, peer: TcpPeer, frames: Sequence[bytes | memoryview], copy: bool = True) -> zmq.MessageTracker | None:
        if self._socket.closed:
            return None
        tracker = None
        try:
            tracker = self._socket.send_multipart([peer.identity, *frames], zmq.NOBLOCK, copy=copy, track=not copy)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:  # the connection is gone, and its descriptor may be another's by now
                peer.wire = None
                self.drop(peer)
            else:  # the client does not read; it may join again
                self.hang_up(peer)
        if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator]
            self._drain_soon()
        return tracker

    def too_many(self, peer: TcpPeer, weight: int = 1) -> bool:
        """Count refusals, or one that weighs as much as many. After too many, hang up and bar the tenant for a while. Return whether
        that was done."""
        self._refusals[peer.tenant or peer.identity] += weight
        if self._refusals[peer.tenant or peer.identity] <= REFUSALS:
            return False
        self.hang_up(peer)
        if self._auth and peer.tenant:
            self._auth.bar(peer.tenant)
        return True

    def drop(self, peer: TcpPeer, why: str = "lost") -> None:
        if self._peers.pop(peer.identity, None):
            self._by_nccl = tuple(other for other in self._by_nccl if other is not peer)
            try:
                self.inbox.left(peer, why)
            finally:
                peer.release()

    def hang_up(self, peer: TcpPeer, why: str = "hung up on") -> None:
        """End the connection, and forget the messages that it sent or that wait for it."""
        self._gone[peer.identity] = monotonic() + FORGET_S
        try:
            self.drop(peer, why)
        finally:
            if peer.wire:
                peer.wire.hang_up()

    def tick(self) -> None:
        now = monotonic()
        self._refusals.clear()
        self._in_vain.forget(now)
        self._active = set(), self._active[0]
        self._gone = {identity: end for identity, end in self._gone.items() if end > now}
        if self._auth:
            self._auth.tick()
            for peer in self._by_nccl:  # their calls come by a port of their own
                if self._auth.tenants.name_of(peer.key) != peer.tenant:
                    self.hang_up(peer, "struck off")
        for each in list(self._peers.values()):
            self.reactor.attempt(each, each.check_wire)
        self._monitor.look({peer.wire for peer in self._peers.values()})
        self._drain()

    def stop_accepting(self) -> None:
        with suppress(zmq.ZMQError):  # it may be unbound already
            self._socket.unbind(self.url)

    def close(self) -> None:
        self.reactor.forget(self._fd)
        for peer in list(self._peers.values()):
            self.drop(peer)
        self._monitor.close()
        self._socket.close(linger=2000)  # the last replies still go out
        if self._auth:
            self._auth.close()


def _most_in_vain(limits: Limits) -> Allowance:
    """Return how many bytes each tenant may send with what is refused. A second's worth may be saved up."""
    most = min(IN_VAIN_PER_S, limits.max_tenant_bytes_per_s or IN_VAIN_PER_S)
    return Allowance(most, most)


def _router(auth: TenantAuth | None, most_bytes: int) -> Any:
    """Return a socket that takes calls of at most so many bytes."""
    context = auth.context if auth else zmq.Context.instance()
    router: Any = context.socket(zmq.ROUTER)
    if auth:
        auth.guard(router)
    harden(router)
    router.router_mandatory, router.handshake_ivl = 1, 2000
    router.maxmsgsize = (PIECE if auth else most_bytes) + 4096
    return router
