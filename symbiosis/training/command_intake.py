"""Where commands come in, from any thread, and from where the engine's own thread takes what comes next."""

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from symbiosis.errors import Busy, ConfigError
from symbiosis.training.command_order import CommandOrder
from symbiosis.training.command_queue import CommandQueue, QueuedRun
from symbiosis.training.run_command import Command

LINGER = 0.1  # of what the last pass took: runs that were in passes are waited for as long as they keep coming
LEAST_LINGER_S = 0.002
MOST_LINGER = 0.5  # ... and for so long in any case
RECENT = 8  # passes: runs that were in one of these may come back
SHARE_S = 0.1  # so long a part of a large pass takes at most while there are others
LEAST_S = 0.03  # ... and at least, however short theirs are
CLOSED = "this run is closed"


class CommandingRun(QueuedRun, Protocol):
    """A run, as far as its commands are concerned."""

    @property
    def order(self) -> CommandOrder[Command]: ...


Taken = list[tuple[Any, Command]]  # runs, and the command of each


class Turn(NamedTuple):
    """What comes next."""

    calls: list[Any] = []  # runs that have some
    passes: Taken = []
    goes_on: Any = None  # a run in the midst of a pass


class RecentPass(NamedTuple):
    """The last pass of a run."""

    number: int
    took_s: float


class CommandIntake:
    """Commands that wait.

    Args:
        most: How many, in all. Of these a tenant has as many as it leaves free.
        room_wait: How long one waits for room among them, in seconds, until it raises `Busy`; None: as long as it takes.
        together: Tokens of the passes that are taken together; 0: one at a time.
    """

    def __init__(self, most: int, room_wait: float | None, together: int) -> None:
        self.runs: dict[str, Any] = {}  # by name
        self.changed = threading.Condition()
        self.tokens_in: Callable[[float], int] = lambda seconds: together  # told by who computes
        self.taker: threading.Thread | None = None  # the engine's own
        self._room_wait, self._together = room_wait, together
        self._queue = CommandQueue(most)
        self._early: set[Any] = set()  # runs with commands that wait for one before them
        self._recent: dict[Any, RecentPass] = {}
        self.last_s = 0.0  # what the last pass took, or the last part of a large one
        self._arrived = self._free_since = 0.0  # when the last command came, and since when one could be done
        self._had_calls = self._closed = False

    def has_room(self, tenant: str) -> bool:
        with self.changed:
            return self._queue.room.has(tenant, 1)

    def put(self, run: CommandingRun, command: Command) -> "Future[Any]":
        """Add a command to those of a run; return its future."""
        with self.changed:
            self._wait_for_room(run)
            self._add(run, command)
        return command.future

    def put_in_order(self, run: CommandingRun, number: int, verb: str, make: Callable[[], Command]) -> "Future[Any]":
        """Add a command that has a number, when its turn comes; or return the future of the same one."""
        with self.changed:
            self.refuse_if_closed(run)
            if (known := run.order.known(number, verb)) is not None:
                return known
        command = _made_or_wrong(verb, make)
        command.number = number
        with self.changed:
            if run.order.missing != number:  # for which others wait, that have their room
                self._wait_for_room(run)
            if (known := run.order.known(number, verb)) is not None:
                return known
            turns = list(run.order.arrived(number, command, time.monotonic()))
            (self._early.add if run.order.missing else self._early.discard)(run)
            self._queue.room.take(run.tenant, 1)
            for turn in turns:
                self._add(run, turn, has_room=True)
            self.changed.notify_all()
        return command.future

    def forget(self, run: CommandingRun) -> None:
        """Forget a run, and refuse what it still has waiting."""
        with self.changed:
            self.runs.pop(run.name, None)
            self._recent.pop(run, None)
            is_last = not any(other.tenant == run.tenant for other in self.runs.values())
            left = self._taken([(run, command) for command in self._queue.forget(run, is_last)])
            for _, command in left:
                command.future.set_exception(ConfigError(CLOSED))

    def close(self) -> bool:
        """Take no more commands; what waits is still given out. Returns whether it was closed before."""
        with self.changed:
            was_closed, self._closed = self._closed, True
            self.changed.notify_all()
        return was_closed

    def refuse_if_closed(self, run: CommandingRun | None = None) -> None:
        if self._closed:
            raise ConfigError("this engine is closed")
        if run is not None and self.runs.get(run.name) is not run:
            raise ConfigError(CLOSED)

    # ---------------------------------------------------------------- for the thread that does them

    def next(self) -> Turn | None:
        """Wait for what comes next: runs that have calls to make, passes of several, or a run in the midst of a pass which goes on. None, when
        the engine is closed."""
        with self.changed:
            while True:
                now = time.monotonic()
                due = self._tell_who_waits_too_long(now)
                is_open = bool(self._queue.open)
                if not self._queue and not is_open:
                    if self._closed:
                        return None
                    self.changed.wait(None if due is None else due - now)
                    continue
                until = self._linger_until()
                lingers = not is_open and now < until and self._together and not self._all_are_back()
                calls = self._queue.calls()
                if calls and (lingers or not self._had_calls or not (is_open or self._queue.has_passes)):
                    self._had_calls = True
                    return Turn(calls=calls)
                if lingers:
                    self.changed.wait(until - now)
                    continue
                self._had_calls = False
                are_several = is_open or len({*self._queue.waiting, *self._recent}) > 1
                if passes := self._queue.passes(self._together, self.share if are_several else None):
                    return Turn(passes=self._taken(passes))
                return Turn(goes_on=self._queue.goes_on())

    @property
    def share(self) -> int:
        """How many tokens of one tenant are computed together while others may wait; 0: those of one command."""
        return min(self._together, self.tokens_in(SHARE_S))

    def part(self, runs: Collection[CommandingRun]) -> int:
        """Return how many tokens of a large pass of these runs are computed until others have their turn: as many as take as long as the shortest
        pass of another lately, within bounds. 0: as many as there are, whoever waits."""
        with self.changed:
            took = [was.took_s for run, was in self._recent.items() if run not in runs]
            tenants = {run.tenant for run in runs}
            there = (*self._queue.waiting, *self._queue.open)
            if (
                not took
                and all(run in runs for run in there)
                and all(run.tenant in tenants for run in self.runs.values())
            ):
                return self._together
        return min(self._together, self.tokens_in(max(LEAST_S, min([SHARE_S, *took]))))

    def take(self, runs: list[Any], verb: str | None = None) -> Taken:
        """Take the next command of each of these runs that has one, or of those where it is this verb."""
        with self.changed:
            wanted = [run for run in runs if run.commands and (verb is None or run.commands[0].verb == verb)]
            return self._taken([(run, self._queue.take(run)) for run in wanted])

    def was_done(self) -> None:
        """Note that the next ones could be done from now on."""
        self._free_since = time.monotonic()

    def computed(self, passes: Taken, part: float, took_s: float) -> None:
        """Count this part of passes as had."""
        with self.changed:
            self._queue.computed(passes, part)
        self.last_s = took_s

    def passed(self, runs: list[Any], number: int, took_s: float) -> None:
        """Note who was in a pass, and what all of it took."""
        with self.changed:
            self._queue.done(runs)
            self._recent = {run: was for run, was in self._recent.items() if number - was.number < RECENT}
            self._recent |= {run: RecentPass(number, took_s) for run in runs if self.runs.get(run.name) is run}

    # ---------------------------------------------------------------- with the lock held

    def _add(self, run: CommandingRun, command: Command, has_room: bool = False) -> None:
        if not has_room:
            self._queue.room.take(run.tenant, 1)
        command.future.set_running_or_notify_cancel()  # what is put is done: others may come after it
        self._arrived = time.monotonic()
        if not self._queue:
            self._free_since = self._arrived
        self._queue.add(run, command)
        self.changed.notify_all()

    def _wait_for_room(self, run: CommandingRun) -> None:
        self.refuse_if_closed(run)
        if threading.current_thread() is self.taker:
            return  # what is done when a future is done
        until = None if self._room_wait is None else time.monotonic() + self._room_wait
        while not self._queue.room.has(run.tenant, 1):
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                who = f"tenant {run.tenant!r}" if run.tenant else "this engine"
                raise Busy(f"so many commands of {who} wait already: send it again when some have been done")
            self.changed.wait(left)
            self.refuse_if_closed(run)

    def _tell_who_waits_too_long(self, now: float) -> float | None:
        """Return when this is to be asked again."""
        for run in list(self._early):
            number = run.order.missing
            forgotten = run.order.waited_too_long(now + (float("inf") if self._closed else 0.0))
            for command in forgotten:
                command.future.set_running_or_notify_cancel()
                self._queue.room.give_back(run.tenant, 1)
                command.future.set_exception(
                    ConfigError(f"command {number} has not come: send it, and then this one again; it was not done")
                )
            if forgotten:
                self._early.discard(run)
        return min((run.order.due for run in self._early), default=None)

    def _linger_until(self) -> float:
        """Return until when a pass waits for others, as long as they keep coming."""
        quiet = self._arrived + max(LEAST_LINGER_S, LINGER * self.last_s)
        return min(quiet, self._free_since + MOST_LINGER * self.last_s)

    def _all_are_back(self) -> bool:
        """Whether the runs of the last passes have one to compute."""
        return self._closed or all(run.commands and run.commands[0].is_pass for run in self._recent)

    def _taken(self, commands: Taken) -> Taken:
        for run, _ in commands:
            self._queue.room.give_back(run.tenant, 1)
        self.changed.notify_all()
        return commands


def _made_or_wrong(verb: str, make: Callable[[], Command]) -> Command:
    """Return a command; or, if it is wrong, one that says so when its turn comes."""
    try:
        return make()
    except Exception as wrong:
        error = wrong.with_traceback(None)  # its frames have the command's data

    def tell(_: Any) -> None:
        raise error

    return Command(verb, call=tell)
