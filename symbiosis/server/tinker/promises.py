"""Futures of what a client is told."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from symbiosis.errors import SymbiosisError
from symbiosis.server.ipc.engine_server import without_paths
from symbiosis.server.tinker.tinker_messages import PromiseOutcome, TinkerRefusal

logger = logging.getLogger("symbiosis")


def outcome_after(begun: "Future[Any]", made: Callable[[Any], PromiseOutcome]) -> "Future[PromiseOutcome]":
    """Return what is made of a result, or of its failure. What makes it is let go then, with the data that it knows.

    >>> begun, failed = Future(), Future()
    >>> begun.set_result(0.5); failed.set_exception(TinkerRefusal("no such loss"))
    >>> outcome_after(begun, lambda norm: PromiseOutcome(body={"norm": norm})).result().body
    {'norm': 0.5}
    >>> outcome_after(failed, lambda _: PromiseOutcome()).result().category
    'user'
    """
    done: Future[PromiseOutcome] = Future()
    left = [made]  # a future keeps its callbacks

    def take(begun: "Future[Any]") -> None:
        try:
            outcome = left.pop()(begun.result())
        except Exception as error:
            outcome = outcome_of_error(error)
        with suppress(InvalidStateError):  # its session has ended
            done.set_result(outcome)

    begun.add_done_callback(take)
    return done


def outcome_of_error(error: Exception) -> PromiseOutcome:
    """Return what a client is told of a failure, and whose it is."""
    if isinstance(error, TinkerRefusal):
        return PromiseOutcome(error=str(error), category="user")
    if isinstance(error, SymbiosisError):
        return PromiseOutcome(error=without_paths(str(error)), category="user")
    logger.error("a command of a run failed", exc_info=error)
    return PromiseOutcome(error=f"the server failed: {type(error).__name__}. Its log says more", category="server")
