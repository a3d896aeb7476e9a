"""What a client on a GPU may tell the executor over its socket, in any order: it is answered, and no call uses memory that is gone.

With memory that only looks like a GPU's.
"""

import itertools
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from symbiosis.errors import CallError, Code
from symbiosis.protocol import (
    Call,
    Compose,
    Composed,
    Control,
    Done,
    Forget,
    Op,
    Refusal,
    Register,
    Registered,
    Segment,
    call_body,
    decode_from_executor,
    encode_control,
)
from symbiosis.transport.cuda import peer as cuda
from symbiosis.transport.cuda.remote_gpu import Place, Staging
from symbiosis.transport.cuda.words import BELL, CURRENT, aligned

NBYTES, ROWS = 4096, (4, 8)
CALL = call_body(Call(Op.FORWARD, 0, "float32", ROWS))
SMALL = st.integers(0, 4)
MESSAGES = st.one_of(
    st.builds(Segment, SMALL, st.just(NBYTES)),
    st.builds(
        Register, st.integers(0, 6), st.sampled_from([CALL, CALL, b"", CALL[:-1]]), SMALL,
        st.sampled_from([0, 16, 8, -16, NBYTES - 16, 1 << 62]),
        st.lists(st.tuples(SMALL, st.sampled_from([0, 1024, 4, NBYTES])), max_size=2).map(tuple),
    ),
    st.builds(Compose, st.integers(0, 6), st.lists(st.integers(0, 6), max_size=3).map(tuple)),
    st.builds(
        Forget, st.lists(st.integers(0, 6), max_size=3).map(tuple), st.lists(SMALL, max_size=3).map(tuple)
    ),
)  # fmt: skip


class Memory:
    """A segment: tensors in it know whether it is still there."""

    address = 1 << 20

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.is_there = nbytes, True

    def tensor(self, start: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
        assert self.is_there and 0 <= start < self.nbytes
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        assert start + tensor.nbytes <= self.nbytes
        tensor.memory = self  # type: ignore[attr-defined]
        return tensor

    def close(self) -> None:
        assert self.is_there
        self.is_there = False


class Inbox:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.forgotten: list[Any] = []
        self.busy = False

    def shape(self, call: Call) -> tuple[int, ...]:
        return ROWS

    def results(self, call: Call) -> tuple[tuple[int, ...], ...]:
        return ((4, 4), (4, 4))

    def prepare(self, peer: Any, number: int, call: Call, payload: tuple[Tensor, ...], results: Any, at: Any) -> Any:
        return SimpleNamespace(tensors=[*payload, *results], at=at)

    def compose(self, number: int, prepared: Any, words: Any, again: bool) -> Any:
        return SimpleNamespace(tensors=[tensor for work in prepared for tensor in work.tensors], large=False)

    def forget(self, peer: Any, prepared: Any) -> None:
        if self.busy:
            raise CallError(Code.BAD_FRAME, "under way")
        self.forgotten += prepared


class Peer(cuda.DevicePeer):
    def __init__(self, elsewhere: bool = False, in_reach: bool = True) -> None:
        self._socket, self.client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._inbox: Any = Inbox()
        self._segments, self._calls, self._uses, self._remote, self._replies, self._rounds = {}, {}, {}, {}, {}, {}
        self._looking = False
        self._staging = Staging(self._inbox.device, in_reach) if elsewhere else None
        self.words: Any = [0] * 256
        self._words: Any = SimpleNamespace(at=lambda index: 4 * index)
        self.dropped = False
        self._listener: Any = SimpleNamespace(drop=self.drop, leaving=False)

    def drop(self, peer: Any) -> None:
        self.dropped = True

    def ask(self, message: Control) -> Control:
        fds = [os.memfd_create("memory")] if isinstance(message, Segment) else []
        socket.send_fds(self.client, [encode_control(message)], fds)
        for fd in fds:
            os.close(fd)
        self.control()
        self.client.setblocking(False)
        return decode_from_executor(self.client.recv(1 << 14))

    def close(self) -> None:
        self._socket.close()
        self.client.close()


@pytest.fixture(autouse=True, scope="module")
def memory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda.DeviceMemory, "of_fd", lambda fd, nbytes, user: Memory(nbytes))
        patch.setattr(cuda, "MemOps", lambda ops: ops)
        properties = SimpleNamespace(total_memory=3 * NBYTES)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        yield


@settings(max_examples=300, deadline=None)
@given(st.lists(MESSAGES, max_size=30))
def test_whatever_comes_is_answered_and_uses_what_is_there(messages: list[Control]) -> None:
    peer = Peer()
    try:
        peer.ask(Segment(0, NBYTES))
        for message in messages:
            answer = peer.ask(message)
            assert isinstance(answer, Done | Registered | Composed | Refusal)
            assert all(tensor.memory.is_there for work in peer._calls.values() for tensor in work.tensors)
            assert peer._calls.keys() == peer._uses.keys() and 0 in peer._segments
            assert sum(memory.nbytes for memory in peer._segments.values()) <= 3 * NBYTES
        assert not peer.dropped
    finally:
        peer.close()


def test_what_is_forgotten_makes_room() -> None:
    peer = Peer()
    assert peer.ask(Segment(0, NBYTES)) == peer.ask(Segment(1, NBYTES)) == Done()
    for number in (1, 2):
        assert peer.ask(Register(number, CALL, 1, 0, ((0, 1024), (1, 1024)))) == Registered(ROWS)
        assert isinstance(peer.ask(Register(number, CALL, 1, 0)), Refusal), "its number is taken"
    assert peer.ask(Compose(3, (1, 2))) == Composed(False)
    for refused in (Forget((1, 2), (1,)), Forget((3,), (1,)), Forget((9,)), Forget((), (0,)), Forget((), (7,))):
        assert isinstance(peer.ask(refused), Refusal), refused
    memory = peer._segments[1]
    peer._inbox.busy = True
    assert isinstance(peer.ask(Forget((3, 2, 1))), Refusal), "as long as they are under way"
    peer._inbox.busy = False
    assert peer.ask(Forget((3, 2, 1, 1))) == peer.ask(Forget((), (1, 1))) == Done()
    assert len(peer._inbox.forgotten) == 3 and not memory.is_there and not peer._calls and not peer._rounds
    assert peer.ask(Segment(1, NBYTES)) == Done() and peer.ask(Register(1, CALL, 1, 0)) == Registered(ROWS)
    peer.close()


def test_asking_for_a_round_makes_none() -> None:
    peer = Peer()
    peer.ask(Segment(0, NBYTES))
    peer.ask(Register(1, CALL, 0, 0))
    assert peer.ask(Compose(0, (1,))) == Composed(False)
    assert list(peer._calls) == [1] and not peer._rounds
    peer.close()


def test_a_round_that_was_forgotten_is_not_taken_for_an_unanswered_call() -> None:
    peer = Peer()
    peer.words[CURRENT] = 77
    peer._resume()
    assert peer.words[BELL] == 0 and peer._looking
    peer.close()


def test_calls_of_another_gpu_lie_in_one_place() -> None:
    """A client has one call under way at a time, so many registered calls need no more memory here than the largest."""
    peer, numbers = Peer(elsewhere=True), range(1, 200)
    peer.ask(Segment(0, NBYTES))
    for number in numbers:
        assert peer.ask(Register(number, CALL, 0, 0, ((0, 1024), (0, 2048)))) == Registered(ROWS)
    of_each = [peer._calls[number].tensors for number in numbers]
    assert len({tensor.untyped_storage().data_ptr() for tensors in of_each for tensor in tensors}) == 1
    for tensors in of_each:
        places = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
        assert len(places) == 3 and all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))
    assert peer.ask(Forget(tuple(numbers))) == Done()
    peer.close()


def test_a_kernel_finds_a_call_of_another_gpu_where_the_client_has_it() -> None:
    """Rows, results, and parts of them. Out of reach, nobody is told where that is."""
    peer = Peer(elsewhere=True)
    peer.ask(Segment(0, NBYTES))
    peer.ask(Segment(1, NBYTES))
    peer._segments[1].address = 1 << 30
    assert peer.ask(Register(1, CALL, 0, 256, ((1, 1024), (0, 2048)))) == Registered(ROWS)
    (rows, first, second), at = peer._calls[1].tensors, peer._calls[1].at
    assert [at(rows), at(first), at(second)] == [Memory.address + 256, (1 << 30) + 1024, Memory.address + 2048]
    assert at(rows[1:]) == Memory.address + 256 + rows[0].nbytes and at(second[3:]) == at(second) + 3 * second[0].nbytes
    with pytest.raises(ValueError, match="no part"):
        at(torch.empty(1))
    assert peer.ask(Forget((1,))) == Done()
    peer.close()
    far = Peer(elsewhere=True, in_reach=False)
    far.ask(Segment(0, NBYTES))
    assert far.ask(Register(1, CALL, 0, 256)) == Registered(ROWS) and far._calls[1].at is None
    far.close()


@pytest.mark.parametrize("order", [1, -1])
def test_memory_for_larger_calls_doubles(order: int) -> None:
    staging, blocks = Staging(torch.device("cpu"), in_reach=True), {}
    for rows in range(1, 500)[::order]:
        (tensor,) = staging.copies([Place(Memory(0), 0, "float32", (rows, 64))], 1).tensors  # type: ignore[arg-type]
        assert tensor.shape == (rows, 64)
        storage = tensor.untyped_storage()
        blocks[storage.data_ptr()] = storage
    assert sum(storage.nbytes() for storage in blocks.values()) <= 3 * aligned(500 * 64 * 4)


def test_without_memory_a_call_is_refused_and_the_session_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(elsewhere=True)
    peer.ask(Segment(0, NBYTES))
    with monkeypatch.context() as full:
        full.setattr(torch.Tensor, "new_empty", fails)
        refused = peer.ask(Register(1, CALL, 0, 0))
    assert isinstance(refused, Refusal) and refused.code == Code.RESOURCE and "no memory" in refused.message
    assert not peer.dropped and peer.ask(Register(1, CALL, 0, 0)) == Registered(ROWS)
    peer.close()


def fails(*_: Any) -> None:
    raise torch.OutOfMemoryError("of a GPU")
