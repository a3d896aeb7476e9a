"""Who may have its captured step answered as a round: whoever is in the midst of one, and others where that is wanted and pays."""

from types import SimpleNamespace
from typing import Any

import pytest

from symbiosis.errors import CallError, Code
from symbiosis.executor.call_kinds import RoundKey
from symbiosis.protocol import Priority
from tests.inproc.test_background import WORDS, Executor

KEY = RoundKey(("a round",))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("shares_time", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_rounds(wanted: bool, shares_time: bool, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Executor(monkeypatch, rounds=wanted)
    most: list[float] = []
    made_room: list[Any] = []

    def key_of(calls: Any, limit: float) -> RoundKey:
        most.append(limit)
        return KEY

    rounds = SimpleNamespace(key_of=key_of, make_room=made_room.append)
    executor.engine.rounds, executor.engine.shares_time = rounds, shares_time
    works = [executor.works[priority] for priority in (Priority.DECODE, Priority.TRAIN, Priority.DECODE)]
    if not again and (shares_time or not wanted):
        with pytest.raises(CallError) as refused:
            executor.server.dispatch.compose(7, works, WORDS, again)
        assert refused.value.code is Code.UNKNOWN_OP and not most
        return
    work = executor.server.dispatch.compose(7, works, WORDS, again)
    assert not work.large and work.calls == tuple(work.call for work in works) and work.number == 7
    assert work.priority == Priority.TRAIN, "the least urgent of its calls tells what it is"
    assert (work.plan.key, work.plan.calls, work.plan.nbytes) == (KEY, 3, sum(work.plan.nbytes for work in works))
    assert most == [float("inf") if again else executor.engine.batch_below]
    assert len(made_room) == (not again), "who was in the midst of one is not refused for want of room"


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("policy", ["opportunistic", "lockstep"])
def test_large_rounds(policy: Any, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody joins them; so under lockstep, where all take turns, there are none."""
    executor = Executor(monkeypatch, policy=policy)
    said: list[float] = []

    def key_of(calls: Any, limit: float) -> RoundKey:
        said.append(limit)
        return KEY

    executor.engine.rounds = SimpleNamespace(key_of=key_of, make_room=lambda round: None)
    executor.engine.shares_time = False
    works = [executor.works[Priority.TRAIN]] * 2
    if policy == "lockstep" and not again:
        with pytest.raises(CallError, match="lockstep"):
            executor.server.dispatch.compose(7, works, WORDS, again)
    else:
        assert executor.server.dispatch.compose(7, works, WORDS, again).large
        assert said == [float("inf")]


def test_without_triton_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Executor(monkeypatch)
    executor.engine.shares_time = False
    works = [executor.works[Priority.DECODE]]
    for again in (False, True):
        with pytest.raises(CallError, match="Triton"):
            executor.server.dispatch.compose(7, works, WORDS, again)
