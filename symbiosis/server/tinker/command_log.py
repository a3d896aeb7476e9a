"""The commands of one run: begun strictly in the order of their numbers, each once, whatever comes twice or too early."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec

from symbiosis.server.tinker.tinker_messages import Asked, PromiseOutcome, TinkerRefusal

AHEAD = 4096  # commands that may wait for those before them
KEPT, KEPT_BYTES = 512, 64 << 20  # outcomes that may be asked for again
Begin = Callable[[], "Future[PromiseOutcome]"]


@dataclass(slots=True)
class NumberedCommand:
    """One command, from its coming until its outcome is forgotten."""

    digest: bytes
    came: float
    begin: Begin | None
    outcome: "Future[PromiseOutcome]" = field(default_factory=Future)
    nbytes: int = 0  # of the outcome


class CommandLog:
    """What a run was asked for, by number. The first number is 1.

    >>> def begin() -> Future[PromiseOutcome]:
    ...     done = Future()
    ...     done.set_result(PromiseOutcome(body={"type": "a step"}))
    ...     return done
    >>> from symbiosis.server.tinker.tinker_messages import GetInfo
    >>> log = CommandLog()
    >>> log.put(2, GetInfo(model_id="b"), begin); log.outcome(2).done()
    False
    >>> log.put(1, GetInfo(model_id="a"), begin); log.outcome(2).done()
    True
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = 1
        self._commands: dict[int, NumberedCommand] = {}
        self._lock = threading.Lock()
        self._is_beginning = False
        self._ended = ""  # why nothing is begun any more

    def put(self, number: int, asked: Asked, begin: Begin) -> None:
        """Begin a command as soon as all before it were begun. The same one may come again: it is not begun again.

        Raises `TinkerRefusal` for a number that another command has, or whose outcome is forgotten.
        """
        digest = sha256(msgspec.msgpack.encode(asked)).digest()
        with self._lock:
            if self._ended:
                raise TinkerRefusal(self._ended, 410)
            if (known := self._commands.get(number)) is not None:
                if known.digest != digest:
                    raise TinkerRefusal(
                        f"seq_id {number} was another request of this run: each has a number of its own, one more than the one before"
                    )
                return
            if number < 1:
                raise TinkerRefusal(f"seq_id begins with 1, and this is {number}")
            if number < self._next:
                raise TinkerRefusal(
                    f"seq_id {number} of this run was carried out, and what came of it is not kept any more", 410
                )
            if number > self._next + AHEAD:
                raise TinkerRefusal(f"seq_id {number} is far ahead: {self._next} has not come yet", 429)
            self._commands[number] = NumberedCommand(digest, self._clock(), begin)
        self._begin_those_in_order()

    def outcome(self, number: int) -> "Future[PromiseOutcome]":
        """Return what becomes of a command. Raises `TinkerRefusal` for one that has not come, or was forgotten: the client sends it again."""
        with self._lock:
            if (known := self._commands.get(number)) is None:
                raise TinkerRefusal("nothing is known of this request: send it again", 410)
            return known.outcome

    def refuse_late(self, seconds: float) -> None:
        """End commands that have waited so long for one before them that has not come."""
        with self._lock:
            late = [
                each
                for number, each in self._commands.items()
                if number > self._next and each.came < self._clock() - seconds
            ]
            missing = self._next
            for command in late:
                if not command.outcome.done():
                    why = f"seq_id {missing} of this run has not come within {seconds:g} s, and this request comes after it: send that one"
                    command.outcome.set_result(PromiseOutcome(error=why, category="user"))

    def end(self, why: str) -> None:
        """Begin nothing more. What waits fails; outcomes that are there can be asked for."""
        with self._lock:
            self._ended = why
            for command in self._commands.values():
                if command.begin is not None and not command.outcome.done():
                    command.outcome.set_result(PromiseOutcome(error=why, category="user"))

    def _begin_those_in_order(self) -> None:
        """Begin what can be begun, one after another, whoever puts it. Nothing is locked meanwhile: an engine that is full has it wait."""
        while True:
            with self._lock:
                command = self._commands.get(self._next)
                if self._is_beginning or command is None:
                    return
                self._next += 1
                begin, command.begin = command.begin, None
                if begin is None or command.outcome.done():  # it was too late
                    continue
                self._is_beginning = True
            try:
                begin().add_done_callback(lambda done, command=command: self._finish(command, done.result()))  # type: ignore[misc]
            finally:
                with self._lock:
                    self._is_beginning = False

    def _finish(self, command: NumberedCommand, outcome: PromiseOutcome) -> None:
        with self._lock:
            command.nbytes = len(outcome.passed.logprobs) if outcome.passed else 0
            kept = sum(each.nbytes for each in self._commands.values())
            for number in [n for n, each in self._commands.items() if each.outcome.done()]:
                if len(self._commands) <= KEPT and kept <= KEPT_BYTES:
                    break
                kept -= self._commands.pop(number).nbytes
        command.outcome.set_result(outcome)


def failed(error: str, category: Any = "user") -> "Future[PromiseOutcome]":
    """Return the outcome of what could not even be begun."""
    done: Future[PromiseOutcome] = Future()
    done.set_result(PromiseOutcome(error=error, category=category))
    return done
