"""Who calls: the batcher asks for the others before each slice, so only those are looked at who called lately."""

from itertools import pairwise

from symbiosis.executor.scheduling.callers import Callers
from symbiosis.executor.scheduling.queue import Item
from symbiosis.executor.scheduling.rules import IMMEDIATE, Rules
from symbiosis.executor.scheduling.tenant_use import ACTIVE_S

COUNT, EVERY_S = 1000, 0.01


def called_one_after_another(tenants: bool) -> Callers:
    callers = Callers(Rules(IMMEDIATE), ())
    for number in range(COUNT):
        callers.join(number, f"tenant-{number}" if tenants else None, watches=False)
    for number in range(COUNT):
        callers.calls(callers.sessions[number], number * EVERY_S)
    return callers


def test_the_last_to_call_is_the_first_of_the_others_and_the_silent_are_none() -> None:
    callers, now = called_one_after_another(tenants=True), COUNT * EVERY_S
    callers.calls(callers.sessions[0], now)  # the first one, again
    others = list(callers.others({callers.sessions[5].tenant}, now))
    assert others[0] is callers.sessions[0].tenant and others[1] is callers.sessions[COUNT - 1].tenant
    assert all(later.called >= earlier.called > now - ACTIVE_S for later, earlier in pairwise(others))
    assert len(others) == round(ACTIVE_S / EVERY_S), "a tenth of them"


def test_only_tenants_are_others_whose_calls_a_product_makes_room_for() -> None:
    now = COUNT * EVERY_S
    for tenants in (True, False):
        callers = called_one_after_another(tenants)
        assert callers.other_tenants_call(Item(COUNT - 1, "key", 1, 0, now)) is tenants
        assert not callers.other_tenants_call(Item(COUNT - 1, "key", 1, 0, now + 2 * ACTIVE_S))


def test_who_leaves_without_a_key_is_forgotten() -> None:
    callers = called_one_after_another(tenants=False)
    for number in range(COUNT):
        callers.leave(number)
    assert not list(callers.others(set(), COUNT * EVERY_S)) and not callers._recent
