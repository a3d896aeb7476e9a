"""Who may have its captured step answered as a round: whoever is in the midst of one, and others where that is wanted and pays."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from symbiosis.errors import CallError, Code
from symbiosis.protocol import Priority
from symbiosis.transport.base import RoundWords
from tests.test_background import Executor

WORDS = RoundWords(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 0)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("shares_time", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_rounds(wanted: bool, shares_time: bool, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Executor(monkeypatch, rounds=wanted)
    most: list[float] = []
    made_room: list[Any] = []

    def new(works: Any, words: Any, limit: float, large: bool) -> Any:
        most.append(limit)
        assert not large
        return SimpleNamespace(key="round", calls=tuple(work.call for work in works))

    rounds = SimpleNamespace(new=new, make_room=made_room.append)
    executor.engine.rounds, executor.engine.shares_time = rounds, shares_time
    works = [executor.works[priority] for priority in (Priority.DECODE, Priority.TRAIN, Priority.DECODE)]
    if not again and (shares_time or not wanted):
        with pytest.raises(CallError) as refused:
            executor.server.compose(works[0].peer, 7, works, WORDS, again)
        assert refused.value.code is Code.UNKNOWN_OP and not most
        return
    work = executor.server.compose(works[0].peer, 7, works, WORDS, again)
    assert work.calls == tuple(work.call for work in works) and work.number == 7
    assert work.priority == Priority.TRAIN, "the least urgent of its calls tells what it is"
    assert (work.plan.key, work.plan.calls, work.plan.nbytes) == ("round", 3, sum(work.plan.nbytes for work in works))
    assert most == [float("inf") if again else executor.engine.join_below]
    assert len(made_room) == (not again), "who was in the midst of one is not refused for want of room"


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("policy", ["opportunistic", "lockstep"])
def test_large_rounds(policy: Any, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody joins them; so under lockstep, where all take turns, there are none."""
    executor = Executor(monkeypatch, policy=policy)
    said: list[tuple[float, bool]] = []

    def new(works: Any, words: Any, limit: float, large: bool) -> Any:
        said.append((limit, large))
        return SimpleNamespace(key="round", calls=tuple(work.call for work in works))

    executor.engine.rounds = SimpleNamespace(new=new, make_room=lambda round: None)
    executor.engine.shares_time = False
    works = [executor.works[Priority.TRAIN]] * 2
    if policy == "lockstep" and not again:
        with pytest.raises(CallError, match="lockstep"):
            executor.server.compose(works[0].peer, 7, works, WORDS, again)
    else:
        assert executor.server.compose(works[0].peer, 7, works, WORDS, again).large
        assert said == [(float("inf"), True)]


def test_without_triton_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Executor(monkeypatch)
    executor.engine.shares_time = False
    works = [executor.works[Priority.DECODE]]
    for again in (False, True):
        with pytest.raises(CallError, match="Triton"):
            executor.server.compose(works[0].peer, 7, works, WORDS, again)
