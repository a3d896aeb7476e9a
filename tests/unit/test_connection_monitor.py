"""Who ended without a message is told, in whatever order ZeroMQ's threads tell of a connection, and nobody else is."""

import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from symbiosis.transport.reactor import Reactor
from symbiosis.transport.tcp.connection_monitor import ConnectionMonitor

CAME, WENT, HALF = zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Teller:
    """A socket whose monitor the test writes itself, about connections that it makes."""

    def __init__(self) -> None:
        self.context: Any = zmq.Context.instance()
        self.told: list[tuple[str, str]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: dict[int, tuple[socket.socket, socket.socket]] = {}
        self._reactor = Reactor()
        self.connections = ConnectionMonitor(
            self, self._reactor, False, lambda why, where: self.told.append((why, where))
        )

    def monitor(self, place: str, _events: int) -> None:
        self._monitor = self.context.socket(zmq.PAIR)
        self._monitor.bind(place)

    def disable_monitor(self) -> None:
        self._monitor.close(0)

    def connection(self) -> int:
        """Open one, and return the descriptor of its near end."""
        far = socket.create_connection(self._listener.getsockname())
        near, _ = self._listener.accept()
        self._ends[near.fileno()] = near, far
        return near.fileno()

    def cut(self, fd: int) -> None:
        for end in self._ends.pop(fd):
            end.close()

    def tell(self, event: int, fd: int) -> None:
        self._monitor.send_multipart([struct.pack("=HI", event, fd), b""])
        self._reactor.poll(0.0)

    def close(self) -> None:
        for fd in list(self._ends):
            self.cut(fd)
        self._listener.close()
        self.connections.close()
        self._reactor.close()


@pytest.fixture
def teller() -> Iterator[Teller]:
    teller = Teller()
    yield teller
    teller.close()


def came(teller: Teller, fd: int) -> None:
    teller.tell(CAME, fd)


def spoke(teller: Teller, fd: int) -> None:
    teller.connections.spoke(fd)


def went(teller: Teller, fd: int) -> None:
    teller.tell(WENT, fd)


def ended(teller: Teller, fd: int) -> None:
    teller.cut(fd)


@pytest.mark.parametrize(
    "order",
    [
        (came, spoke, went, ended),
        (came, spoke, ended, went),
        (spoke, came, went, ended),
        (spoke, came, ended, went),
        (spoke, ended, came, went),
        (spoke, went, ended, came),
        (spoke, ended, went, came),
    ],
    ids=lambda order: " ".join(step.__name__ for step in order),
)
def test_who_spoke_is_not_told_of(teller: Teller, order: tuple[Callable[[Teller, int], None], ...]) -> None:
    for _ in range(2):  # the second may have the first one's descriptor
        fd = teller.connection()
        for step in order:
            step(teller, fd)
    assert teller.told == []


def successor(teller: Teller) -> int:
    """A connection that has the descriptor of one that spoke and went. That that one came is told only now."""
    for _ in range(20):  # another thread of the process may take the descriptor in between
        first = teller.connection()
        spoke(teller, first)
        went(teller, first)
        ended(teller, first)
        second = teller.connection()
        came(teller, first)
        if second == first:
            return second
        spoke(teller, second)
    raise AssertionError("no descriptor came back")


def test_who_came_after_one_that_spoke_is_told_of_under_the_same_descriptor(teller: Teller) -> None:
    second = successor(teller)
    came(teller, second)
    went(teller, second)
    assert teller.told == [("NOTHING_SAID", "127.0.0.1")]


def test_who_spoke_between_two_late_words_is_not_told_of(teller: Teller) -> None:
    second = successor(teller)
    spoke(teller, second)
    came(teller, second)
    went(teller, second)
    assert teller.told == []


def test_who_ended_before_it_was_told_as_there_has_no_address(teller: Teller) -> None:
    fd = teller.connection()
    went(teller, fd)
    ended(teller, fd)
    came(teller, fd)
    assert teller.told == [("NOTHING_SAID", "")]


def test_why_a_handshake_failed_is_told(teller: Teller) -> None:
    fd = teller.connection()
    came(teller, fd)
    teller.tell(HALF, fd)
    went(teller, fd)
    assert teller.told == [("UNFINISHED", "127.0.0.1")]
