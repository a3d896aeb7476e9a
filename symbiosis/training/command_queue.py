"""Which commands come next: those of a run in their order, those of several runs joined, shared out among tenants.

It is plain Python. Whose turn it is says the virtual token counter, as in serving: first of tenants, then of the runs of one.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from symbiosis.base.fair_share import FairShare
from symbiosis.serving.scheduler.policy import INPUT_COST, by_fairness, lifted


class Queued(Protocol):
    """A command, as far as its turn is concerned."""

    @property
    def is_pass(self) -> bool: ...
    @property
    def tokens(self) -> int: ...
    @property
    def cost(self) -> int: ...


class QueuedRun(Protocol):
    """A run, as far as the turn of its commands is concerned."""

    @property
    def name(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def commands(self) -> "deque[Any]": ...


class _Turn(NamedTuple):
    tenant: str  # or a run: whoever shares with others
    brought: int
    run: Any
    command: Any


class TokenCounters:
    """What each of those who share has had. Who comes, or comes back, has saved up nothing: it begins with as much as the one of the others that
    had least, or, if there is none at the moment, with as much as had been had by whoever came last in its turn."""

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        self._reached = 0.0

    def came(self, name: str, others: Collection[str]) -> None:
        self._had[name] = lifted(self._had, name, others) if others else max(self._had.get(name, 0.0), self._reached)

    def had(self, name: str, cost: float) -> None:
        before = self._had.get(name, 0.0)
        self._reached = max(self._reached, before)
        self._had[name] = before + INPUT_COST * cost

    def forget(self, name: str) -> None:
        self._had.pop(name, None)

    def in_turn(self, wanted: Iterable[_Turn]) -> Iterator[_Turn]:
        return by_fairness(wanted, self._had)


class CommandQueue:
    """What waits in an engine. Its caller holds the lock.

    Args:
        most: Commands that wait at most; a tenant has half of the room if it is alone, and leaves some to whoever comes next.
    """

    def __init__(self, most: int) -> None:
        self.room = FairShare(most)
        self._waiting: dict[Any, None] = {}  # runs with commands
        self._open: dict[Any, None] = {}  # runs in the midst of a pass
        self._tenants = TokenCounters()
        self._runs = defaultdict[str, TokenCounters](TokenCounters)  # by tenant

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def has_passes(self) -> bool:
        """Whether a run's next command is a pass."""
        return any(run.commands[0].is_pass for run in self._waiting)

    def add(self, run: QueuedRun, command: Queued) -> None:
        if run not in self._waiting:
            there = self._waiting | self._open
            if run.tenant not in (tenants := {other.tenant for other in there}):
                self._tenants.came(run.tenant, tenants)
            if run not in there:
                others = [other.name for other in there if other.tenant == run.tenant]
                self._runs[run.tenant].came(run.name, others)
            self._waiting[run] = None
        run.commands.append(command)

    @property
    def waiting(self) -> Collection[Any]:
        """The runs that have commands."""
        return self._waiting.keys()

    @property
    def open(self) -> Collection[Any]:
        """The runs in the midst of a pass. They have nothing else done meanwhile."""
        return self._open.keys()

    def calls(self) -> list[Any]:
        """Return the runs whose next command is a call, in their turn."""
        waiting = [run for run in self._waiting if run not in self._open]
        runs = [_Turn(run.tenant, 1, run, None) for run in waiting if not run.commands[0].is_pass]
        return [turn.run for turn in self._tenants.in_turn(runs)]

    def take(self, run: QueuedRun) -> Any:
        """Take a run's next command, a call."""
        command = self._pop(run)
        self._had(run, command.cost)
        return command

    def passes(self, most: int, share: int | None = None) -> list[tuple[Any, Any]]:
        """Take passes that are computed together: of at most `most` tokens, or a single one. Their runs are in the midst of a pass until it is
        `done`. Nothing if it is another's turn, who is in the midst of one already.

        Args:
            share: Of several tenants, each has at most so many tokens among them. A pass of more is large: it is taken alone, and a tenant has one
                at a time. Default: `most`.
        """
        taken: list[tuple[Any, Any]] = []
        large = most if share is None else share
        of_tenant = large if len({run.tenant for run in (*self._waiting, *self._open)}) > 1 else most
        tokens, blocked = Counter[str](), set[str]()
        for turn in self._tenants.in_turn(self._leading(large)):
            if turn.command is None:
                break
            if turn.run.name in blocked:
                continue
            its, theirs = turn.command.tokens, tokens[turn.run.tenant]
            if taken and (tokens.total() + its > most or its > large or theirs + its > of_tenant):
                blocked.add(turn.run.name)  # its commands stay in their order
                continue
            taken.append((turn.run, self._pop(turn.run)))
            tokens[turn.run.tenant] += its
            if tokens.total() >= most or its > large:
                break
        self._open |= {run: None for run, _ in taken}
        return taken

    def goes_on(self) -> Any:
        """Return the run in the midst of a pass that had least."""
        turns = [_Turn(run.tenant, 1, run, None) for run in self._open]
        return next(self._in_turn(turns)).run

    def computed(self, commands: Iterable[tuple[QueuedRun, Queued]], part: float) -> None:
        """Count this part of passes as had."""
        for run, command in commands:
            self._had(run, part * command.cost)

    def done(self, runs: Iterable[QueuedRun]) -> None:
        """Note that these are in the midst of a pass no more."""
        for run in runs:
            self._open.pop(run, None)

    def forget(self, run: QueuedRun, is_last_of_tenant: bool) -> list[Any]:
        """Forget a run. Return the commands that it still has: they came before it was closed, and behind that."""
        left = list(run.commands)
        run.commands.clear()
        self._waiting.pop(run, None)
        self._runs[run.tenant].forget(run.name)
        if is_last_of_tenant:
            self._tenants.forget(run.tenant)
            del self._runs[run.tenant]
        return left

    def _pop(self, run: QueuedRun) -> Any:
        command = run.commands.popleft()
        if not run.commands:
            del self._waiting[run]
        return command

    def _had(self, run: QueuedRun, cost: float) -> None:
        self._tenants.had(run.tenant, cost)
        self._runs[run.tenant].had(run.name, cost)

    def _leading(self, most: int) -> Iterator[_Turn]:
        """Return the passes that may come next, in the turn of tenants' runs, and those that are open: of these there is no command."""
        turns = list[_Turn]()
        have_open = {run.tenant for run in self._open}
        for run in (run for run in self._waiting if run not in self._open):
            for command in run.commands:
                if not command.is_pass or (command.tokens > most and run.tenant in have_open):
                    break
                turns.append(_Turn(run.name, command.cost, run, command))
        return self._in_turn([*turns, *(_Turn(run.name, 1, run, None) for run in self._open)])

    def _in_turn(self, turns: Iterable[_Turn]) -> Iterator[_Turn]:
        """Yield turns of runs by what their tenants had, and of each tenant by what the runs had."""
        of_tenants: dict[str, list[_Turn]] = {}
        for turn in turns:
            of_tenants.setdefault(turn.run.tenant, []).append(turn)
        ordered = [
            turn._replace(tenant=tenant)
            for tenant, of_one in of_tenants.items()
            for turn in self._runs[tenant].in_turn(of_one)
        ]
        return self._tenants.in_turn(ordered)
