"""Which commands come next: those of a run in their order, those of several runs joined, shared out among tenants.

It is plain Python. Whose turn it is says the virtual token counter, as in serving: first of tenants, then of the runs of one.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from math import inf
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
    """What each of those who share has had. Who comes back after a while has saved up nothing."""

    def __init__(self) -> None:
        self._had: dict[str, float] = {}

    def came(self, name: str, others: Iterable[str]) -> None:
        self._had[name] = lifted(self._had, name, others)

    def had(self, name: str, cost: int) -> None:
        self._had[name] = self._had.get(name, 0.0) + INPUT_COST * cost

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
        self._tenants, self._runs = TokenCounters(), TokenCounters()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def has_passes(self) -> bool:
        """Whether a run's next command is a pass."""
        return any(run.commands[0].is_pass for run in self._waiting)

    def add(self, run: QueuedRun, command: Queued) -> None:
        if run not in self._waiting:
            self._tenants.came(run.tenant, {other.tenant for other in self._waiting})
            self._runs.came(run.name, [other.name for other in self._waiting if other.tenant == run.tenant])
            self._waiting[run] = None
        run.commands.append(command)

    @property
    def waiting(self) -> Collection[Any]:
        """The runs that have commands."""
        return self._waiting.keys()

    def calls(self, besides: Collection[Any] = ()) -> list[Any]:
        """Return the runs whose next command is a call, in their turn, but for some."""
        waiting = [run for run in self._waiting if run not in besides]
        runs = [_Turn(run.tenant, 1, run, None) for run in waiting if not run.commands[0].is_pass]
        return [turn.run for turn in self._tenants.in_turn(runs)]

    def take(self, run: QueuedRun) -> Any:
        """Take the next command of a run."""
        command = run.commands.popleft()
        if not run.commands:
            del self._waiting[run]
        self._tenants.had(run.tenant, command.cost)
        self._runs.had(run.name, command.cost)
        return command

    def passes(self, most: int, besides: Collection[Any] = (), largest: float = inf) -> list[tuple[Any, Any]]:
        """Take passes that are computed together: of at most so many tokens, or a single one.

        Args:
            besides: Runs whose passes are not taken.
            largest: Tokens of one pass, at most.
        """
        taken: list[tuple[Any, Any]] = []
        tokens, blocked = 0, set[str]()
        for turn in self._tenants.in_turn(list(self._leading(besides))):
            if turn.run.name in blocked:
                continue
            if (taken and tokens + turn.command.tokens > most) or turn.command.tokens > largest:
                blocked.add(turn.run.name)  # its commands stay in their order
                continue
            taken.append((turn.run, self.take(turn.run)))
            tokens += turn.command.tokens
            if tokens >= most:
                break
        return taken

    def forget(self, run: QueuedRun, is_last_of_tenant: bool) -> None:
        self._runs.forget(run.name)
        if is_last_of_tenant:
            self._tenants.forget(run.tenant)

    def _leading(self, besides: Collection[Any]) -> Iterator[_Turn]:
        """Yield the passes that may come next, those of each tenant in the turn of its runs."""
        of_tenants: dict[str, list[_Turn]] = {}
        for run in (run for run in self._waiting if run not in besides):
            for command in run.commands:
                if not command.is_pass:
                    break
                of_tenants.setdefault(run.tenant, []).append(_Turn(run.name, command.cost, run, command))
        for turns in of_tenants.values():
            for turn in self._runs.in_turn(turns):
                yield turn._replace(tenant=turn.run.tenant)
