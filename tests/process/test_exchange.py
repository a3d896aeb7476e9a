"""Ranks that ask each other for descriptors: whoever answers goes on when none are left, and who asks keeps none of what came in vain."""

import os
import resource
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from symbiosis.executor.ranks import descriptor_exchange
from symbiosis.executor.ranks.descriptor_exchange import Exchange, part_of
from tests.processes import WAIT_S, context


@pytest.fixture
def descriptors() -> Iterator[list[int]]:
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    yield opened
    descriptor_exchange.close(opened)


def _open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_came_before_the_sender_stalled_is_closed(descriptors: list[int]) -> None:
    sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with sender, receiver:
        socket.send_fds(sender, [descriptor_exchange.BEHIND], descriptors)
        receiver.settimeout(0.01)
        before = _open()
        with pytest.raises(TimeoutError):
            descriptor_exchange._received(receiver, 10)
        assert _open() == before


def _answer_without_descriptors(orders: Connection) -> None:
    answering = Exchange()
    answering.hold(0, "digest", [os.open(os.devnull, os.O_RDONLY)])
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    orders.send(answering.address)
    while (allowed := orders.recv()) is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual[0] if allowed else 3, usual[1]))
        orders.send(True)


def _ask(address: str, timeout: float = WAIT_S) -> None:
    found = part_of(0, address, timeout)
    assert found is not None and len(found[1]) == 1
    descriptor_exchange.close(found[1])


def test_who_had_no_descriptor_left_answers_later() -> None:
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer_without_descriptors, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(WAIT_S)
    address = ours.recv()
    try:
        for allowed in (False, True):
            ours.send(allowed)
            assert ours.poll(WAIT_S) and ours.recv()
            _ask(address)  # whoever waits for somebody to ask has the descriptor already
            if not allowed:
                with pytest.raises(TimeoutError):
                    _ask(address, timeout=0.3)
    finally:
        ours.send(None)
        process.join(WAIT_S)
