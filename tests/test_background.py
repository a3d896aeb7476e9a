"""Large calls of training beside those who decode: none is lost or overtakes another, and they get their share of the time."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.executor.background import DECODES_S, Background

PRODUCT_S, SHARE = 1e-3, 0.1


def work(number: int = 0, peer: object = None) -> Any:
    return SimpleNamespace(number=number, peer=peer)


def test_alone_they_never_wait() -> None:
    background = Background(SHARE)
    for now in (1.0, 1.0, 1.0001):
        assert not background.takes(work(), now)
        background.ran(PRODUCT_S, now)
    assert not background and background.wake_at() == float("inf")


def test_beside_who_decodes_they_get_their_share() -> None:
    background, now, ran = Background(SHARE), 1.0, 0
    while now < 2.0:
        background.decoded = now
        if not background and not background.takes(work(), now):  # the client calls again as soon as it has its answer
            background.ran(PRODUCT_S, now)
            ran += 1
        while background.next(now):
            background.ran(PRODUCT_S, now)
            ran += 1
        now = min(background.wake_at(), now + 0.01)
    assert ran * PRODUCT_S == pytest.approx(SHARE, rel=0.1)


def test_when_nobody_decodes_any_more_they_all_run() -> None:
    background = Background(1e-9)
    background.decoded = 1.0
    background.ran(PRODUCT_S, 1.0)
    assert all(background.takes(work(number), 1.0) for number in range(3))
    assert background.wake_at() == 1.0 + DECODES_S and background.next(1.0 + 0.9 * DECODES_S) is None
    assert [background.next(1.0 + DECODES_S).number for _ in range(3)] == [0, 1, 2]  # type: ignore[union-attr]


def test_a_share_of_one_is_no_limit() -> None:
    background = Background(1.0)
    background.decoded = 1.0
    background.ran(PRODUCT_S, 1.0)
    assert not background.takes(work(), 1.0)


def test_who_leaves_is_not_answered() -> None:
    background, other = Background(SHARE), object()
    background.decoded = 1.0
    background.ran(PRODUCT_S, 1.0)
    for number, peer in enumerate((None, other, None, other)):
        assert background.takes(work(number, peer), 1.0)
    background.leave(None)
    assert [background.next(9.0).number for _ in range(2)] == [1, 3] and not background  # type: ignore[union-attr]


@given(st.lists(st.tuples(st.sampled_from(["call", "decode", "step"]), st.floats(0, 0.05)), max_size=200))
def test_none_is_lost_and_none_overtakes_another(events: list[tuple[str, float]]) -> None:
    background, now, sent, answered = Background(SHARE), 1.0, 0, list[int]()
    for what, later in [*events, ("step", 10.0)]:
        now += later
        if what == "decode":
            background.decoded = now
        elif what == "call":
            if not background.takes(work(sent), now):
                background.ran(PRODUCT_S, now)
                answered.append(sent)
            sent += 1
        while one := background.next(now):
            background.ran(PRODUCT_S, now)
            answered.append(one.number)
        assert background.wake_at() > now
    assert answered == list(range(sent)) and not background
