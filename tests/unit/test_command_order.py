"""Commands with numbers: in their order and once, in whichever order they arrive, and however often."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.errors import ConfigError
from symbiosis.training.command_order import ALWAYS_KEPT, EARLY, KEPT, KEPT_BYTES, PATIENCE_S, CommandOrder


@dataclass(eq=False)
class Asked:
    number: int
    verb: str = "step"
    future: "Future[Any]" = field(default_factory=Future)


@given(st.data())
def test_in_order_and_once(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    arrivals = data.draw(st.permutations([n for n in range(1, count + 1) for _ in range(data.draw(st.integers(1, 3)))]))
    order, done, futures = CommandOrder[Asked](), list[int](), dict[int, Future[Any]]()
    for number in arrivals:
        future = order.known(number, "step")
        if future is None:
            asked = Asked(number)
            future = asked.future
            done += [each.number for each in order.arrived(number, asked, 0.0)]
        assert futures.setdefault(number, future) is future
    assert done == list(range(1, count + 1)) and order.missing is None and order.next == count + 1


def test_who_waits_too_long_is_told_and_may_come_again() -> None:
    order = CommandOrder[Asked]()
    waiting = [Asked(n) for n in (3, 2)]
    for at, asked in enumerate(waiting):
        assert not list(order.arrived(asked.number, asked, float(at)))
    assert order.missing == 1 and order.due == PATIENCE_S
    assert not order.waited_too_long(PATIENCE_S - 1) and order.waited_too_long(PATIENCE_S) == waiting
    assert order.missing is None and order.known(2, "step") is None and order.next == 1
    assert [each.number for each in order.arrived(1, Asked(1), 99.0)] == [1]


def test_results_of_the_last_ones_are_kept() -> None:
    order = CommandOrder[Asked]()
    for number in range(1, KEPT + 4):
        [asked] = order.arrived(number, Asked(number), 0.0)
        asked.future.set_result(number)
    last = order.known(KEPT + 3, "step")
    assert last is not None and last.result() == KEPT + 3
    with pytest.raises(ConfigError, match=f"from {order.first_kept} on are kept"):
        order.known(1, "step")
    assert len(list(order.results())) == KEPT and order.first_kept == 4


@dataclass
class Large:
    nbytes: int = KEPT_BYTES


def test_few_large_results_are_kept() -> None:
    order = CommandOrder[Asked]()
    for number in range(1, 2 * ALWAYS_KEPT):
        [asked] = order.arrived(number, Asked(number), 0.0)
        asked.future.set_result(Large())
    assert len(list(order.results())) == ALWAYS_KEPT and order.first_kept == ALWAYS_KEPT


def test_what_is_not_done_is_never_forgotten() -> None:
    order = CommandOrder[Asked]()
    first = Asked(1)
    for number in range(1, 2 * KEPT):
        list(order.arrived(number, first if number == 1 else Asked(number), 0.0))
    assert order.known(1, "step") is first.future


@pytest.mark.parametrize("number", [0, -1, True, 1.0, "1"])
def test_numbers_that_are_none(number: Any) -> None:
    with pytest.raises(ConfigError, match="numbered from 1"):
        CommandOrder[Asked]().known(number, "step")


def test_another_command_of_the_same_number() -> None:
    order = CommandOrder[Asked]()
    list(order.arrived(1, Asked(1), 0.0))
    list(order.arrived(3, Asked(3), 0.0))
    for number in (1, 3):
        with pytest.raises(ConfigError, match="is a step, and not a save"):
            order.known(number, "save")


def test_a_flood_of_early_ones() -> None:
    order = CommandOrder[Asked]()
    for number in range(2, EARLY + 2):
        list(order.arrived(number, Asked(number), 0.0))
    with pytest.raises(ConfigError, match="send that one first"):
        list(order.arrived(EARLY + 2, Asked(EARLY + 2), 0.0))
    assert len(list(order.arrived(1, Asked(1), 0.0))) == EARLY + 1


def test_an_earlier_life() -> None:
    order, done = CommandOrder[Asked](), Future[Any]()
    done.set_result(5)
    order.was_done(7, "step", done)
    assert order.next == 8 and order.known(7, "step") is done
