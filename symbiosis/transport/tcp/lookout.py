"""What the kernel knows of the connections below ZeroMQ, looked at from time to time: who is gone, silent, sends too much, or does
not join."""

from collections.abc import Iterable, Iterator
from time import monotonic, perf_counter

from symbiosis.transport.base import JOIN_S
from symbiosis.transport.tcp.peer import TcpHome, TcpPeer
from symbiosis.transport.tcp.sockets import Wire

FIRST_BYTES = 64 << 10  # that a connection may send before its first message is complete
LOOK_S = (
    4e-3  # of a tick, for connections without a session: where there are very many, a look at all takes several ticks
)
SLACK_BYTES = 1 << 20  # that a message may have besides what is called for: frame headers, signatures, beats


class Lookout:
    """Whose connection ended has left. Bytes are a sign of life: a large call over a thin line is long in coming. But ZeroMQ keeps
    all frames of a message until the last has come, however many: hang up on who sends too much of one; and on who does not join."""

    def __init__(self, home: TcpHome, port: int) -> None:
        self._home, self._port = home, port
        self._strangers: dict[Wire, float] = {}  # connections without a session, and when they were first seen
        self._seen: dict[Wire, float] = {}  # those that this look has come to
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
        """At as many as there is time for, from where the last look ended."""
        until = perf_counter() + LOOK_S
        for wire in self._looking:
            if wire.fd not in known:
                now = monotonic()
                since = self._seen[wire] = self._strangers.get(wire, now)
                if now > since + JOIN_S or wire.received() > FIRST_BYTES:
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
