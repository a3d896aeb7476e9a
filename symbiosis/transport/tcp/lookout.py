"""Watches, through the kernel, the TCP connections below ZeroMQ: for clients that are gone, silent, send too much, or do not join."""

from collections.abc import Callable, Iterable, Iterator
from time import monotonic, perf_counter

from symbiosis.transport.base import UNJOINED_S
from symbiosis.transport.tcp.peer import TcpHome, TcpPeer
from symbiosis.transport.tcp.sockets import Wire

FIRST_BYTES = 64 << 10  # bytes that a connection may send before its first message is complete
LOOK_S = 4e-3  # of a tick for connections without a session; a look at very many takes several ticks
SLACK_BYTES = 1 << 20  # bytes that a message may have besides its payload: frame headers, signatures, beats


class Lookout:
    """Drops peers whose connection has ended. Bytes that arrive are a sign of life, because a large call takes long over a slow line.
    But ZeroMQ keeps all frames of a message until the last has come, so a connection is hung up on if it sends too much of one message,
    or does not join."""

    def __init__(self, home: TcpHome, port: int, fine: Callable[[Wire], None]) -> None:
        """`fine` is told of connections without a session that send too much."""
        self._home, self._port, self._fine = home, port, fine
        self._strangers: dict[Wire, float] = {}  # when connections without a session were first seen
        self._seen: dict[Wire, float] = {}  # those that the current look has come to
        self._looking: Iterator[Wire] = iter(())

    def look(self, peers: Iterable[TcpPeer]) -> None:
        known = set()
        for peer in peers:
            if peer.wire:
                known.add(peer.wire.fd)
            if peer.heard:
                peer.heard, peer.before = False, None
            else:
                self._home.reactor.attempt(peer, self._look_at_silent, peer)
        self._look_at_strangers(known)

    def _look_at_strangers(self, known: set[int]) -> None:
        """Look at as many connections without a session as there is time for, from where the last look ended."""
        until = perf_counter() + LOOK_S
        for wire in self._looking:
            if wire.fd not in known:
                now = monotonic()
                since = self._seen[wire] = self._strangers.get(wire, now)
                too_much = wire.received() > FIRST_BYTES
                if too_much:
                    self._fine(wire)
                if too_much or now > since + UNJOINED_S:
                    wire.hang_up()
            if perf_counter() > until:
                return
        self._strangers, self._seen = self._seen, {}
        self._looking = Wire.all_at(self._port)

    def _look_at_silent(self, peer: TcpPeer) -> None:
        received = peer.wire.received() if peer.wire else 0
        if not received:
            self._home.drop(peer)
        elif peer.before is None:
            peer.before = received
        elif received - peer.before > self._home.inbox.limits.max_call_bytes + SLACK_BYTES:
            self._home.hang_up(peer)
        elif received > peer.received:
            self._home.inbox.heard(peer)
        peer.received = received
