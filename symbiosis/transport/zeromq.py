"""`tcp://HOST:PORT`: anything, anywhere, over ZeroMQ. A header frame and raw tensor frames; never pickle. The executor's end."""

from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

import zmq
from torch import Tensor

from symbiosis.errors import CallError, Code, ConfigError, ProtocolError
from symbiosis.protocol import (
    MAGIC_CALL,
    Beat,
    Bye,
    Call,
    Hello,
    Refusal,
    Reply,
    Welcome,
    decode_control,
    encode_control,
    encode_reply,
    parse_call_body,
    split_call,
)
from symbiosis.transport.base import JOIN_S, Inbox, refuse
from symbiosis.transport.control import MAX_CONTROL
from symbiosis.transport.curve import Door
from symbiosis.transport.reactor import Reactor
from symbiosis.transport.tensors import bytes_of, received
from symbiosis.transport.turns import Turns
from symbiosis.transport.wire import COPY_BELOW, Wire, harden

if TYPE_CHECKING:
    from symbiosis.transport.nccl import NcclPeer

AT_ONCE = 64  # messages taken in, or read, between two products
OF_ONE = 8  # ... of one tenant, while others call
REFUSALS = 100  # of one tenant (without keys: connection) between two ticks, after which it is hung up on
MOST_FRAMES = 64  # of a message: one of ours has at most 3
FIRST_BYTES = 64 << 10  # that a connection may send before its first message is complete
MOST_UNREAD = 256 << 20  # bytes of a tenant's messages that wait to be read, but for a single one
SLACK_BYTES = 1 << 20  # that a message may have besides what is called for: frame headers, signatures, beats
NO_MEMORY = "the executor has no memory for this call: send fewer rows at once"
FORGET_S = 10.0  # messages of a connection that was hung up on may still be queued for so long


class Peer:
    """The executor's end of one connection: replies go to the identity that ZeroMQ gave it."""

    transport = "tcp"

    def __init__(self, listener: "Listener", identity: bytes, tenant: str | None = None) -> None:
        self.session = None
        self.identity, self.tenant = identity, tenant
        self.wire: Wire | None = None
        self._listener, self._not_before = listener, 0.0
        self.heard = True  # a whole message since the last tick
        self.before: int | None = None  # bytes received at the first tick after the last whole message
        self.received = 0  # ... at the last tick
        self._sent: deque[tuple[zmq.MessageTracker, int]] = deque()

    def out(self, call: Call, shape: tuple[int, ...]) -> Tensor | None:
        return None

    def reply(self, reply: Reply, result: Tensor) -> None:
        if reply.code is not Code.OK and self._too_many(reply):
            return
        frames = [encode_reply(reply)]
        if reply.nbytes:
            frames.append(bytes_of(result))  # type: ignore[arg-type]
        small = reply.nbytes < COPY_BELOW
        tracker = self._listener.send(self, frames, copy=small)
        if not small and tracker is not None:
            self._sent.append((tracker, reply.nbytes))

    def _too_many(self, reply: Reply) -> bool:
        """Whether this refusal is answered by hanging up. Who is told to wait, and does, has done nothing wrong."""
        early = monotonic() < self._not_before
        if reply.code is Code.BUSY:
            self._not_before = monotonic() + reply.wait_us / 1e6
        return (early or reply.code is not Code.BUSY) and self._listener.too_many(self)

    @property
    def address(self) -> str:
        return ":".join(map(str, self.wire.other_end[:2])) if self.wire else ""

    @property
    def unread(self) -> Sequence[int]:
        if not self._sent:  # as usual: who has many connections is asked for all of them at each call
            return ()
        while self._sent and self._sent[0][0].done:
            self._sent.popleft()
        return [nbytes for _, nbytes in self._sent]

    def close(self) -> None:
        self._listener.hang_up(self)

    def release(self) -> None:
        """The session is over."""


class Listener:
    """The executor's ROUTER socket."""

    def __init__(self, address: str, reactor: Reactor, inbox: Inbox) -> None:
        self.reactor, self.inbox = reactor, inbox
        self._peers: dict[bytes, Peer] = {}
        self._by_nccl: tuple[NcclPeer, ...] = ()
        self._refusals: Counter[str | bytes] = Counter()  # since the last tick, by tenant or identity
        self._gone: dict[bytes, float] = {}  # connections that were hung up on, and when to forget them
        self._strangers: dict[Wire, float] = {}  # connections without a session, and when they were first seen
        # what has come, by tenant or identity
        self._turns = Turns[str | bytes, list[zmq.Frame]](
            inbox.limits.max_in_flight, min(MOST_UNREAD, inbox.limits.max_tenant_bytes)
        )
        # who was heard since the last tick, and before
        self._active: tuple[set[str | bytes], set[str | bytes]] = set(), set()
        self._due = False  # whether `_drain` will run by itself
        self._drained = -1  # in which turn of the loop it left the rest for the next
        self._door = Door.at(address, reactor, inbox)
        context = self._door.context if self._door else zmq.Context.instance()
        self._socket: Any = context.socket(zmq.ROUTER)
        if self._door:
            self._door.guard(self._socket)
        harden(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 2000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, inbox.limits.max_call_bytes + 4096)
        try:
            self._socket.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            self._socket.close()
            if self._door:
                self._door.close()
            raise ConfigError(f"cannot listen at tcp://{address}: {error}") from None
        self.url: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._port = int(self.url.rpartition(":")[2])
        self._fd = int(self._socket.getsockopt(zmq.FD))  # type: ignore[arg-type]
        reactor.watch(self._fd, self._drain)

    def _drain(self) -> None:
        """The descriptor tells of changes only, so take all there is; by turns, or a flood would stop the products. ZeroMQ goes
        by connection, so whose message is read next is decided here."""
        heard = Counter[str | bytes]()
        room = AT_ONCE if self._drained != self.reactor.turns else 0
        for _ in range(room):
            if self._socket.closed:
                return
            room -= self._take_in(room)
            if not self._turns.waiting and room:
                return
            if not self._turns.waiting or self._products_first(heard):
                break
            heard[self._turns.next] += 1
            self._active[0].add(self._turns.next)
            self._handle(self._turns.take())
        self._drained = self.reactor.turns
        self._drain_soon()

    def _products_first(self, heard: Counter[str | bytes]) -> bool:
        """Nobody's call waits until many of another's have been read: neither one that has just been read (then there is no more
        of somebody who was heard), nor one that was read before."""
        many = heard[self._turns.next] >= OF_ONE and len(self._active[0] | self._active[1]) > 1
        return many or self._turns.waiting < heard.keys()

    def _take_in(self, most: int) -> int:
        """How many messages have come, at most so many. They are kept as they are, which takes a tenth of the time of reading
        them; but who has sent too much is told at once."""
        taken = 0
        with suppress(zmq.Again):
            while taken < most:
                frames = self._receive()
                taken += 1
                self.reactor.attempt(None, self._keep, frames)
        return taken

    def _keep(self, frames: list[zmq.Frame]) -> None:
        if not self._turns.put(self._sender(frames), frames[0].bytes, frames, sum(map(len, frames))):
            self._handle(frames, room=False)

    def _sender(self, frames: list[zmq.Frame]) -> str | bytes:
        """Whose turn it takes to read a message: a tenant's, or where keys tell of none a connection's."""
        identity = frames[0].bytes
        peer = self._peers.get(identity)
        if peer is not None:
            return peer.tenant or identity
        return (self._door and self._door.tenant_of(frames[-1])) or identity

    def _receive(self) -> list[zmq.Frame]:
        """The next message, or as much of it as anybody needs who is to refuse it."""
        frames = [self._socket.recv(zmq.NOBLOCK, copy=False)]
        while frames[-1].more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            if len(frames) <= MOST_FRAMES:
                frames.append(frame)
            else:
                frames[-1] = frame
        return frames

    def _drain_soon(self) -> None:
        if not self._due:
            self._due = True
            self.reactor.call_soon(self._drain_now)

    def _drain_now(self) -> None:
        self._due = False
        self._drain()

    def _handle(self, frames: list[zmq.Frame], room: bool = True) -> None:
        """Whatever goes wrong ends that connection, and nothing else."""
        try:
            self._read(frames, room)
        except Exception as error:
            identity = frames[0].bytes
            peer = self._peers.get(identity) or Peer(self, identity)
            peer.wire = peer.wire or self.reactor.attempt(None, self._wire_below, frames[-1])
            self.reactor.failed(peer, error)

    def _read(self, frames: list[zmq.Frame], room: bool) -> None:
        name, *frames = frames
        identity = name.bytes
        chosen = identity[:1] != b"\0"  # by the client: it could be another's
        if not frames or chosen or identity in self._gone:
            return
        peer, tenant = self._peers.get(identity), None
        if peer is not None:
            peer.heard = True
        try:
            tenant = self._admitted(peer, frames[0])
            if len(frames) >= MOST_FRAMES:
                raise ProtocolError(Code.BAD_FRAME, f"a message of {MOST_FRAMES} frames or more is none of ours")
            if frames[0].buffer[:4] == MAGIC_CALL:
                self._call(peer, frames, room)
            else:
                self._control(peer, identity, frames, tenant)
        except CallError as error:
            stranger = peer or Peer(self, identity, tenant)
            stranger.wire = stranger.wire or self._wire_below(frames[0])
            self.send(stranger, [encode_control(Refusal(error.code, error.message))])  # first: it tells who is gone
            self.too_many(stranger, 1 if len(frames) < MOST_FRAMES else REFUSALS + 1)

    def _admitted(self, peer: Peer | None, frame: zmq.Frame) -> str | None:
        """The tenant who sent this; none where there are no tenants."""
        tenant = self._door.tenant_of(frame) if self._door else None
        if (self._door and tenant is None) or (peer is not None and peer.tenant != tenant):
            if peer is not None:
                self.drop(peer, "struck off")
            raise CallError(Code.NOT_ALLOWED, "this executor does not serve the owner of this key any more")
        return tenant

    def _control(self, peer: Peer | None, identity: bytes, frames: list[zmq.Frame], tenant: str | None) -> None:
        if len(frames) != 1:
            raise ProtocolError(Code.BAD_FRAME, f"a control message has 1 frame, not {len(frames)}")
        if len(frames[0]) > MAX_CONTROL:  # before it is taken apart
            raise ProtocolError(Code.TOO_LARGE, f"a control message has {MAX_CONTROL} bytes at most")
        message = decode_control(frames[0].buffer)
        if isinstance(message, Hello) and peer is None:
            peer, welcome = self._joined(identity, tenant, frames[0], message)
            self._peers[identity] = peer
            if self._door and tenant:
                self._door.joined(tenant)
            self.send(peer, [encode_control(welcome)])
        elif peer is not None and isinstance(message, Beat):
            self.inbox.heard(peer)
        elif peer is not None and isinstance(message, Bye):
            self.hang_up(peer, "left")
        else:
            raise ProtocolError(Code.NOT_JOINED, f"unexpected {type(message).__name__}: join first, once")

    def _joined(self, identity: bytes, tenant: str | None, frame: zmq.Frame, hello: Hello) -> tuple[Peer, Welcome]:
        wire = self._wire_below(frame)
        if hello.device is None:
            peer = Peer(self, identity, tenant)
            peer.wire = wire
            return peer, self.inbox.joined(peer, hello)
        from symbiosis.transport.nccl import NcclPeer

        key = str(frame.get("User-Id")) if self._door else ""
        by_nccl = NcclPeer(self, identity, tenant, wire, hello, key)
        self._by_nccl += (by_nccl,)
        return by_nccl, by_nccl.welcome

    def _wire_below(self, frame: zmq.Frame) -> Wire | None:
        """What a message seems to have come by. Of who is gone it may be another's wire: ZeroMQ notices it here, and the next
        `send` says so."""
        wire = Wire.below(frame)
        self._socket.getsockopt(zmq.EVENTS)
        return wire

    def _call(self, peer: Peer | None, frames: list[zmq.Frame], room: bool) -> None:
        if peer is None:
            raise CallError(Code.NOT_JOINED, "this executor does not know the session: join again")
        seq, body = split_call(frames[0].bytes)
        try:
            call = parse_call_body(body)
            if not room:
                self.inbox.turns_away(peer, seq, call)
                return
            _check_sizes(call, frames[1:])
            payload = self._payload(call, frames[1:]) if self.inbox.admits(peer, seq, call) else None
        except CallError as error:
            refuse(peer, seq, error)
        else:
            if payload is not None:
                self.inbox.arrived(peer, seq, call, payload)

    def _payload(self, call: Call, frames: list[zmq.Frame]) -> tuple[Tensor, ...]:
        """The rows, which come last, and where groups of them end."""
        kinds = zip(
            reversed(frames), ((call.payload_dtype, call.payload_shape), ("int32", (call.groups,))), strict=False
        )
        for_gpu = self.inbox.device.type == "cuda"
        try:
            return tuple(received(frame.buffer, dtype, shape, for_gpu) for frame, (dtype, shape) in kinds)
        except CallError:  # a shape that no memory could hold
            raise
        except (RuntimeError, MemoryError):
            raise CallError(Code.RESOURCE, NO_MEMORY) from None

    def send(self, peer: Peer, frames: list[bytes], copy: bool = True) -> zmq.MessageTracker | None:
        if self._socket.closed:
            return None
        tracker = None
        try:
            tracker = self._socket.send_multipart([peer.identity, *frames], zmq.NOBLOCK, copy=copy, track=not copy)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:  # gone: its descriptor may be another's by now
                peer.wire = None
                self.drop(peer)
            else:  # it does not read: it may join again
                self.hang_up(peer)
        if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator]
            self._drain_soon()
        return tracker

    # ------------------------------------------------------------------ who comes and goes

    def too_many(self, peer: Peer, weight: int = 1) -> bool:
        """Who goes on with what is refused costs others time: hang up, and do not let the tenant come back at once."""
        self._refusals[peer.tenant or peer.identity] += weight
        if self._refusals[peer.tenant or peer.identity] <= REFUSALS:
            return False
        self.hang_up(peer)
        if self._door and peer.tenant:
            self._door.bar(peer.tenant)
        return True

    def drop(self, peer: Peer, why: str = "lost") -> None:
        if self._peers.pop(peer.identity, None):
            self._by_nccl = tuple(other for other in self._by_nccl if other is not peer)
            try:
                self.inbox.left(peer, why)
            finally:
                peer.release()

    def hang_up(self, peer: Peer, why: str = "hung up on") -> None:
        """End the connection; what was sent by it and to it is forgotten."""
        self._gone[peer.identity] = monotonic() + FORGET_S
        try:
            self.drop(peer, why)
        finally:
            if peer.wire:
                peer.wire.hang_up()

    def tick(self) -> None:
        now = monotonic()
        self._refusals.clear()
        self._active = set(), self._active[0]
        self._gone = {identity: end for identity, end in self._gone.items() if end > now}
        if self._door:
            self._door.tick()
            for peer in self._by_nccl:  # whose calls do not come through it
                if self._door.tenants.name_of(peer.key) != peer.tenant:
                    self.hang_up(peer, "struck off")
        self._look_at_wires()
        self._drain()

    def _look_at_wires(self) -> None:
        """Whose connection ended has left. Bytes are a sign of life: a large call over a thin line is long in coming. But ZeroMQ
        keeps all frames of a message until the last has come, however many: hang up on who sends too much of one; and on who does
        not join."""
        known = set()
        for peer in list(self._peers.values()):
            if peer.wire:
                known.add(peer.wire.fd)
            if peer.heard:
                peer.heard, peer.before = False, None
            else:
                self.reactor.attempt(peer, self._look_at_silent, peer)
        now = monotonic()
        self._strangers = {wire: self._strangers.get(wire, now) for wire in Wire.all_at(self._port, known)}
        for wire, since in self._strangers.items():
            if now > since + JOIN_S or wire.received() > FIRST_BYTES:
                wire.hang_up()

    def _look_at_silent(self, peer: Peer) -> None:
        received = peer.wire.received() if peer.wire else 0
        if not received:
            self.drop(peer)
        elif peer.before is None:
            peer.before = received
        elif received - peer.before > self.inbox.limits.max_call_bytes + SLACK_BYTES:
            self.hang_up(peer)
        elif received > peer.received:
            self.inbox.heard(peer)
        peer.received = received

    def stop_accepting(self) -> None:
        with suppress(zmq.ZMQError):  # a second time: it is not bound any more
            self._socket.unbind(self.url)

    def close(self) -> None:
        self.reactor.forget(self._fd)
        for peer in list(self._peers.values()):
            self.drop(peer)
        self._socket.close(linger=2000)  # the last replies still go out
        if self._door:
            self._door.close()


def _check_sizes(call: Call, frames: list[zmq.Frame]) -> None:
    sizes = tuple(map(len, frames))
    if sizes != call.parts[::-1]:
        raise ProtocolError(Code.BAD_FRAME, f"the header promises frames of {call.parts[::-1]} bytes, {sizes[:3]} came")
