"""Bounds how many clients without keys join at once and a second. The others wait."""

from dataclasses import dataclass

import zmq

from symbiosis.base.allowance import Allowance
from symbiosis.protocol import Hello
from symbiosis.transport.tcp.sockets import Wire

AT_ONCE, PER_S = 256, 100.0  # the default number of sessions; and joins that take a few hundredths of the loop's time
MOST_WAITING, LOOKS = 1024, 16  # waiting connections; and how many at once are checked for being alive
EVERYBODY = ""  # without keys, all belong to users of this host


@dataclass(slots=True)
class Knock:
    """A connection that asks to join."""

    identity: bytes
    tenant: str | None
    frame: zmq.Frame
    hello: Hello
    wire: Wire | None


class WaitingRoom:
    """The connections that wait to join. One that ends meanwhile makes room, and does not count."""

    def __init__(self) -> None:
        self._allowance = Allowance(AT_ONCE, PER_S)
        self._waiting: dict[bytes, Knock] = {}

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, knock: Knock) -> bool:
        """Let a connection wait. Return whether there was room."""
        if knock.wire is None or len(self._waiting) >= MOST_WAITING:
            return False
        self._waiting[knock.identity] = knock
        return True

    def leaves(self, identity: bytes) -> Knock | None:
        """Remove a connection that does not want to join any more, and return it if it was here."""
        return self._waiting.pop(identity, None)

    def next(self, now: float) -> Knock | None:
        """Return a connection that may join now, if there is one."""
        for _ in range(LOOKS):
            if not self._waiting or not self._allowance.has_some(EVERYBODY, now):
                break
            knock = self._waiting.pop(next(iter(self._waiting)))
            if knock.wire is not None and knock.wire.received():
                self._allowance.takes(EVERYBODY, now)
                return knock
        return None
