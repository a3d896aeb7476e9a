"""Rounds on a simulated GPU: who is answered, with what, and when, if all goes well, and if somebody is late, dies, or fails."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from symbiosis.errors import CallError, Code
from symbiosis.executor.call_kinds import DeviceCall, Round, RowAddresses
from symbiosis.executor.calls.call_plan import CallPlan, Key
from symbiosis.kernels.gpu import LET_GO
from symbiosis.protocol import Call, Op
from symbiosis.transport.base import RoundWords
from symbiosis.transport.cuda.words import ROUND_BELL, ROUND_REPLY, VOID
from tests.simulated_gpu import Gpu, gpu

__all__ = ["gpu"]
CALLS, WIDTH = 4, 8
BELL, REPLY, ERROR = 0, (ROUND_REPLY - ROUND_BELL) // 4, 100


class Client:
    """A captured step of `CALLS` calls, as the executor sees it; every other call is of a group of two layers."""

    session, here = None, True

    def __init__(self, gpu: Gpu, rounds: Any, rows: int = 2, large: bool = False) -> None:
        self.gpu, self.words = gpu, gpu.new_words(128)
        self.refused: list[Code] = []
        self.x = [torch.zeros(rows, WIDTH) for _ in range(CALLS)]
        self.y = [[torch.zeros(rows, WIDTH) for _ in range(1 + at % 2)] for at in range(CALLS)]
        members = tuple(self.member(at, rows, large) for at in range(CALLS))
        words = RoundWords(self.words[BELL:][:1], self.words[REPLY:][:1], self.words[ERROR:].data_ptr())
        self.round = Round(rounds.key_of(members, float("inf")), members, words)

    def member(self, at: int, rows: int, large: bool) -> DeviceCall:
        call = Call(Op.FORWARD, at, "float32", (rows, WIDTH), also=(9,) * (at % 2))
        key = Key(call.layers, call.op, call.dtype, call.bias, call.view)
        peer: Any = self
        return DeviceCall(
            peer=peer, plan=CallPlan(key, rows, call.nbytes, (), 0, (), True), number=at, priority=0, large=large, call=call,
            payload=(self.x[at],), results=tuple(self.y[at]), addresses=RowAddresses([self.x[at]], self.y[at], (0, 0)),
        )  # fmt: skip

    def reply(self, reply: Any, text: Tensor) -> None:
        """A refusal: the stream is let go, as a peer does it."""
        self.refused.append(reply.code)
        self.gpu.enqueue(lambda: self.gpu.write(self.words[REPLY:].data_ptr(), LET_GO))

    def begins(self) -> "Client":
        self.words[BELL] = self.words[REPLY] = 0
        return self

    def calls(self, number: int) -> None:
        """One more, counted from 1."""
        self.x[number - 1].copy_(torch.randn_like(self.x[number - 1]))
        self.words[BELL] = number
        self.gpu.run()

    @property
    def answered(self) -> int:
        return int(self.words[REPLY])

    def is_right(self, number: int) -> bool:
        """Whether it has the right results of the call that it made last."""
        x, y = self.x[number - 1], self.y[number - 1]
        return self.answered == number and all(torch.equal(part, x * (at + 2) + 1) for at, part in enumerate(y))

    def goes(self, first: int = 1) -> bool:
        """To the end; whether it was right."""
        for number in range(first, CALLS + 1):
            self.calls(number)
            if not self.is_right(number):
                return False
        return True


@pytest.fixture
def rounds(gpu: Gpu) -> Iterator[Any]:
    module = sys.modules["symbiosis.executor.gpu.rounds"]
    yield module.Rounds(gpu.multiply, lambda call, rows: None, lambda key, seconds: None, torch.device("cpu"))


def began(rounds: Any, client: Client, calls: int = CALLS) -> Client:
    client.begins()
    if client.round.large:
        rounds.begin_large(client.round, calls)
    else:
        rounds.begin([client.round])
    return client


@pytest.mark.parametrize("large", [False, True])
def test_one_client_again_and_again(large: bool, gpu: Gpu, rounds: Any) -> None:
    client = Client(gpu, rounds, large=large)
    for _ in range(4):
        assert began(rounds, client).goes()
        rounds.look()
        assert not rounds.running
    assert len(gpu.begun) == 2 * CALLS, "a graph of it is made the second time, and replayed from then on"


def test_a_large_round_call_by_call(gpu: Gpu, rounds: Any) -> None:
    client = Client(gpu, rounds, large=True)
    for _ in range(3):
        for number in range(1, CALLS + 1):
            began(rounds, client, 1) if number == 1 else rounds.begin_large(client.round, 1)
            assert client.round.left == CALLS - number
            client.calls(number)
            assert client.is_right(number)
            rounds.look()
            assert rounds.running is (number < CALLS)


def test_room_is_made_for_each_client_before_it_runs(gpu: Gpu, rounds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is full later has the streams of all who run at once."""
    clients = [Client(gpu, rounds, large=True) for _ in range(3)]
    for client in [*clients, *clients]:
        rounds.make_room(client.round)
    assert len(gpu.streams) == 1 + len(clients)

    def full(*how: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(sys.modules["symbiosis.executor.gpu.rounds"], "new_stream", full)
    for client in clients:
        began(rounds, client)
    assert all(client.goes() for client in clients)
    rounds.look()
    late = Client(gpu, rounds, large=True)
    for _ in range(2):
        with pytest.raises(CallError, match="no room .* OutOfMemoryError") as refused:
            rounds.make_room(late.round)
        assert refused.value.code is Code.RESOURCE
    rounds.leave(clients[0], lambda: None)
    rounds.make_room(late.round)
    assert began(rounds, late).goes()


@pytest.mark.parametrize("count", [2, 3, 5])
def test_together_all_are_answered_when_the_last_has_called(count: int, gpu: Gpu, rounds: Any) -> None:
    clients = [Client(gpu, rounds, rows=1 + at % 2) for at in range(count)]
    for _ in range(4):
        rounds.begin([client.begins().round for client in clients])
        for number in range(1, CALLS + 1):
            for client in clients:
                assert all(other.answered == number - 1 for other in clients)
                client.calls(number)
            assert all(client.is_right(number) for client in clients)
        rounds.look()
        assert not rounds.running


def test_each_pair_that_meets_is_answered_itself(gpu: Gpu, rounds: Any) -> None:
    """Clients give their rounds numbers of their own, so those of different clients are often the same."""
    first, second, third, fourth = (Client(gpu, rounds) for _ in range(4))
    for pair in [(first, second), (third, fourth), (first, third), (second, fourth), (first, second)]:
        rounds.begin([client.begins().round for client in pair])
        for number in range(1, CALLS + 1):
            for client in pair:
                client.calls(number)
            assert all(client.is_right(number) for client in pair)
        rounds.look()
        assert not rounds.running


def test_who_dies_in_company_stops_nobody(gpu: Gpu, rounds: Any) -> None:
    clients, freed = [Client(gpu, rounds) for _ in range(3)], []
    rounds.begin([client.begins().round for client in clients])
    for client in clients:
        client.calls(1)
    victim, *others = clients
    others[0].calls(2)
    rounds.leave(victim, lambda: freed.append(True))
    assert freed
    dead = [part.clone() for parts in victim.y for part in parts]
    others[1].calls(2)
    rounds.look()
    gpu.run()
    assert all(other.is_right(2) and other.goes(3) for other in others)
    assert all(map(torch.equal, dead, [part for parts in victim.y for part in parts])), (
        "its memory is not touched any more"
    )
    rounds.look()
    assert not rounds.running


def test_who_is_late_goes_alone_for_a_while(gpu: Gpu, rounds: Any) -> None:
    late, prompt = Client(gpu, rounds), Client(gpu, rounds)
    for times in (1, 2):
        rounds.begin([late.begins().round, prompt.begins().round])
        prompt.calls(1)
        assert prompt.answered == 0
        gpu.now += 1.1
        rounds.look()
        gpu.run()
        assert prompt.is_right(1) and prompt.goes(2)
        assert late.goes()
        rounds.look()
        for _ in range(2**times):
            rounds.begin([late.begins().round, prompt.begins().round])
            assert prompt.goes(), "it waits for nobody"
            assert late.goes()
            rounds.look()
        assert late.round.alone_for == 0
    assert not rounds.running


def test_who_is_alone_and_late_is_told_that_its_round_is_void(gpu: Gpu, rounds: Any) -> None:
    client = began(rounds, Client(gpu, rounds))
    client.calls(1)
    gpu.now += 4.9
    gpu.run()
    assert client.answered == 1
    gpu.now += 0.2
    gpu.run()
    assert client.answered == LET_GO and client.words[ERROR] == VOID
    rounds.look()
    assert not rounds.running, "nobody goes on with it"


@pytest.mark.parametrize("answered", [0, 1, CALLS - 1])
@pytest.mark.parametrize("large", [False, True])
def test_a_round_that_another_executor_began(large: bool, answered: int, gpu: Gpu, rounds: Any) -> None:
    client = Client(gpu, rounds, large=large)
    client.calls(answered + 1)
    client.words[REPLY] = answered
    assert client.round.is_behind(answered)
    rounds.begin_large(client.round, 1) if large else rounds.begin([client.round])
    gpu.run()
    assert client.is_right(answered + 1) and client.goes(answered + 2)
    rounds.look()
    assert not rounds.running
    assert began(rounds, client).goes(), "the next one as ever"


def test_who_was_answered_by_the_other_one_after_all_is_not_written_to(gpu: Gpu, rounds: Any) -> None:
    client = Client(gpu, rounds)
    client.words[BELL], client.words[REPLY] = 2, 1
    assert client.round.is_behind(1)
    client.words[BELL] = client.words[REPLY] = 3  # while we join, it goes on
    client.y[1][0].fill_(7.0)
    rounds.begin([client.round])
    for _ in range(3):
        gpu.now += 1.1
        gpu.run()
        rounds.look()
    client.calls(4)
    assert client.is_right(4), "found where it is"
    assert (client.y[1][0] == 7.0).all()


def test_a_round_that_was_let_go_is_over(gpu: Gpu, rounds: Any) -> None:
    client = Client(gpu, rounds)
    assert not client.round.is_behind(LET_GO) and not client.round.is_behind(CALLS)


@pytest.mark.parametrize("calls", [1, CALLS])
def test_who_dies_in_a_large_round(calls: int, gpu: Gpu, rounds: Any) -> None:
    """Its memory is let go when the stream is through, and not before; nobody waits for that."""
    client, freed = began(rounds, Client(gpu, rounds, large=True), calls), []
    gpu.busy = True
    client.calls(1)
    stream = rounds._alone[client.round].stream
    rounds.leave(client, lambda: freed.append(len(stream.steps)))
    for _ in range(3):
        rounds.look()
    assert not freed and rounds.running
    gpu.busy = False
    for _ in range(2):
        rounds.look()
    assert freed == [0] and not rounds.running


@pytest.mark.parametrize("large", [False, True])
def test_a_product_that_fails_is_its_clients_alone(
    large: bool, gpu: Gpu, rounds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, other, times = Client(gpu, rounds, large=large), Client(gpu, rounds, large=large), iter(range(99))

    def multiply(*how: Any) -> None:
        if next(times) == 2:
            raise torch.OutOfMemoryError
        gpu.multiply(*how)

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(rounds, "_multiply", multiply)
        began(rounds, client)
    client.round.left = 0  # as the engine does, which refuses the round
    client.calls(1)
    client.calls(2)
    rounds.look()
    gpu.run()
    if large:
        assert client.answered == LET_GO, "behind what was answered"
    rounds.look()
    assert not rounds.running
    assert began(rounds, other).goes()


def test_a_client_that_rings_twice_holds_up_nobody(gpu: Gpu, rounds: Any) -> None:
    client, other = began(rounds, Client(gpu, rounds, large=True)), Client(gpu, rounds)
    with pytest.raises(CallError, match="under way"):
        rounds.begin_large(client.round, CALLS)
    assert began(rounds, other).goes()


def test_a_round_under_way_is_not_forgotten(gpu: Gpu, rounds: Any) -> None:
    for large in (False, True):
        client = began(rounds, Client(gpu, rounds, large=large))
        with pytest.raises(CallError, match="under way"):
            rounds.forget(client.round)
        assert client.goes()
        rounds.forget(client.round)
    rounds.look()
    assert not rounds.running


def test_an_executor_that_ends_waits_for_rounds_but_not_for_ever(gpu: Gpu, rounds: Any) -> None:
    ends, slow, large = Client(gpu, rounds), Client(gpu, rounds), Client(gpu, rounds, large=True)
    for client in (ends, slow, large):
        began(rounds, client).calls(1)
    rounds.drain()
    assert ends.goes(2)
    rounds.look()
    assert rounds
    gpu.now += 30.0
    for _ in range(3):
        rounds.look()
        gpu.run()
    assert not rounds.running and not ends.refused
    assert slow.answered == LET_GO and large.answered >= CALLS, "whatever they wait for"
    assert slow.words[ERROR] == VOID and large.refused == [Code.DRAINING], "and told"
