"""Processes that serve look for garbage seldom while they are loaded, and as usual afterwards."""

import gc

from symbiosis.base import memory


def test_what_was_there_is_not_searched_again() -> None:
    try:
        memory.look_seldom()
        assert gc.get_threshold()[0] == memory.WHILE_LOADING
        memory.look_at_what_is_new()
        assert gc.get_threshold() == memory.USUAL and gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
