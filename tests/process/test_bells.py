"""Looking and sleeping: bells in shared memory, passes of the loop, and segments that a GPU copies from."""

import math
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from symbiosis.client.session import Session
from symbiosis.protocol import Op
from symbiosis.transport import reactor
from symbiosis.transport.cuda.driver import CudaError
from symbiosis.transport.cuda.peer import DevicePeer
from symbiosis.transport.cuda.words import ANSWERED, BATCHED, ENQUEUED
from symbiosis.transport.local import client as local_client
from symbiosis.transport.local import segment
from symbiosis.transport.local.peer import FIRST_SLAB
from symbiosis.transport.reactor import Reactor, spin
from tests.conftest import tiny_llama
from tests.processes import until
from tests.transports import WAIT_S, echoed


def test_what_is_added_meanwhile_waits_for_the_next_pass() -> None:
    """A callback that calls itself again must not keep the loop from anything else."""
    reactor, turns = Reactor(), []

    def again() -> None:
        turns.append(len(turns))
        reactor.call_soon(again)

    reactor.call_soon(again)
    for turn in range(1, 4):
        reactor.poll(1.0)
        assert len(turns) == turn
    reactor.close()
    reactor.wake()  # after the end: nobody sleeps any more, and nothing happens


@pytest.mark.skipif(not reactor.CAN_SPIN, reason="nobody looks at bells here")
def test_looking_at_bells_does_not_keep_descriptors_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls by tcp come by a descriptor, also while the executor looks out for local ones."""

    class Silent:
        busy, nap = False, 10.0

        def look(self) -> bool:
            return False

        def sleeping(self, flag: bool) -> None:
            pass

        def close(self) -> None:
            raise AssertionError("nothing went wrong with it")

    monkeypatch.setattr(reactor, "SPIN_S", 2 * WAIT_S)
    monkeypatch.setattr(reactor, "CONTENDED_S", 2 * WAIT_S)
    loop, bell, rang = Reactor(), os.eventfd(0, os.EFD_NONBLOCK), []
    loop.watch(bell, lambda: rang.append(os.eventfd_read(bell)))
    loop.watch_bell(Silent())
    threading.Timer(0.1, os.eventfd_write, (bell, 1)).start()
    begun = time.monotonic()
    loop.poll(2 * WAIT_S)
    assert rang == [1]
    assert time.monotonic() - begun < WAIT_S
    loop.close()
    os.close(bell)


def test_a_client_looks_for_what_is_answered_soon_and_sleeps_until_the_rest(
    serve: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    monkeypatch.setattr(local_client, "CAN_SPIN", True)
    monkeypatch.setattr(local_client, "spin", lambda answered: looked.append(1) or spin(answered))
    session = Session(serve(tiny_llama(), listen=[f"local://{tmp_path}/e.sock"]).endpoint)

    def looks(call: int, long_s: float) -> bool:
        """Whether a call of so many rows was looked for, when those are long that take `long_s`."""
        monkeypatch.setattr(local_client, "LONG_S", long_s)
        looked.clear()
        x = torch.randn(call, 8)
        assert torch.equal(session.call(Op.ECHO, 0, x), x)
        return bool(looked)

    assert looks(1, math.inf) and looks(1, math.inf)
    assert looks(1, 0.0) and not looks(1, 0.0)  # the first time nobody knew
    assert looks(2, math.inf)
    assert not looks(1, math.inf) and looks(1, math.inf)
    monkeypatch.setattr(local_client, "MOST_LONG", 1)
    assert looks(1, 0.0) and looks(2, 0.0)
    assert not looks(1, 0.0) and looks(2, 0.0)
    session.close()


class FakePin:
    """Stands for what only a GPU's driver does."""

    open: "set[FakePin]" = set()
    refuses = False

    def __init__(self, memory: mmap.mmap) -> None:
        if self.refuses:
            raise CudaError("cuMemHostRegister: no more")
        self.nbytes = len(memory)
        self.open.add(self)

    def close(self) -> None:
        self.open.remove(self)


@pytest.mark.parametrize("refuses", [False, True])
def test_segments_for_a_gpu_are_pinned_as_long_as_they_are_used(
    refuses: bool, serve: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "PinnedMemory", FakePin)
    monkeypatch.setattr(FakePin, "open", set())
    monkeypatch.setattr(FakePin, "refuses", refuses)
    monkeypatch.setattr(segment, "PINNED_AT_MOST", 4 * FIRST_SLAB)
    executor = serve(tiny_llama(), listen=[f"local://{tmp_path}/executor.sock"])
    executor.server.dispatch.device = torch.device("cuda")
    sessions = [Session(executor.endpoint) for _ in range(2)]
    pinned = []
    for times in (0.1, 2, 10):  # the last is too large
        assert all(echoed(session, torch.randn(int(times * FIRST_SLAB) // 512, 64)) for session in sessions)
        pinned.append(sorted(pin.nbytes // FIRST_SLAB for pin in FakePin.open))
    assert pinned == [[], [], []] if refuses else [[1, 1], [4, 4], []]
    sessions += [Session(executor.endpoint)]
    assert echoed(sessions[-1], torch.ones(2, 2))
    assert len(FakePin.open) == (not refuses)
    for session in sessions:
        session.close()
    until(lambda: not FakePin.open and not executor.server.sessions)


def test_calls_that_a_gpu_makes_unannounced_leave_nothing_behind() -> None:
    """A graph that is replayed without us: the executor is not told, and later it must know again who is about to call."""
    peer, words = DevicePeer.__new__(DevicePeer), [0] * 1024
    peer.words = words  # type: ignore[assignment]
    words[ENQUEUED] = words[ANSWERED] = 0xFFFFFFFE
    for _ in range(5):
        words[ENQUEUED] = (words[ENQUEUED] + 1) & 0xFFFFFFFF
        assert peer.busy
        peer.count(1)
        assert not peer.busy
        for _ in range(3):
            peer.count(2)
            assert not peer.busy
    assert words[ANSWERED] == words[ENQUEUED] == 3 and words[BATCHED] == 5 * 7
