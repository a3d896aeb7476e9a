"""Commands with numbers: each is done once, in the order of the numbers, however they arrive and however often they are sent."""

from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from symbiosis.errors import ConfigError

KEPT, KEPT_BYTES = 512, 16 << 20  # results of a run, for whoever sends a command again
ALWAYS_KEPT = 32  # of these, however large they are
EARLY = 1024  # commands of a run that wait for one before them, at most
PATIENCE_S = 60.0  # for so long they wait


class Numbered(Protocol):
    """A command, as far as its order is concerned."""

    @property
    def future(self) -> "Future[Any]": ...
    @property
    def verb(self) -> str: ...


C = TypeVar("C", bound=Numbered)


class CommandOrder(Generic[C]):
    """The numbers of one run, which begin at 1.

    >>> from types import SimpleNamespace as S
    >>> order, first, second = CommandOrder(), *(S(future=Future(), verb="step") for _ in range(2))
    >>> list(order.arrived(2, second, now=0.0)), order.missing
    ([], 1)
    >>> list(order.arrived(1, first, now=1.0)) == [first, second], order.next
    (True, 3)
    >>> order.known(2, "step") is second.future
    True
    """

    def __init__(self, patience: float = PATIENCE_S) -> None:
        self.next = self.first_kept = 1  # the latter: the first number whose result is kept
        self._patience = patience
        self._taken: OrderedDict[int, tuple[str, Future[Any]]] = (
            OrderedDict()
        )  # futures, of the last ones also when they are done
        self._sizes: dict[int, int] = {}  # of results
        self._early: dict[int, C] = {}
        self._since = 0.0  # when the first of these came

    @property
    def missing(self) -> int | None:
        """The number for which others wait."""
        return self.next if self._early else None

    @property
    def due(self) -> float:
        """When those that wait are told what is missing."""
        return self._since + self._patience if self._early else float("inf")

    def known(self, number: int, verb: str) -> "Future[Any] | None":
        """Return the future of a command that came before. Raises `ConfigError` if there was another command of this number, or if its result
        is kept no more."""
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ConfigError(f"commands are numbered from 1 on, and this is number {number!r}")
        early = self._early.get(number)
        kept = (early.verb, early.future) if early is not None else self._taken.get(number)
        if kept is not None and kept[0] != verb:
            raise ConfigError(
                f"command {number} is a {kept[0]}, and not a {verb}: give each command a number of its own"
            )
        if kept is None and number < self.next:
            raise ConfigError(
                f"command {number} was done, and only results from {self.first_kept} on are kept: the next number is {self.next}"
            )
        return None if kept is None else kept[1]

    def arrived(self, number: int, command: C, now: float) -> Iterator[C]:
        """Take a command that is not known, and yield those whose turn it is."""
        if number > self.next and len(self._early) >= EARLY:
            raise ConfigError(f"{EARLY} commands wait for number {self.next}: send that one first")
        if number > self.next and not self._early:
            self._since = now
        self._early[number] = command
        while (turn := self._early.pop(self.next, None)) is not None:
            self._take(self.next, turn.verb, turn.future)
            self.next += 1
            self._since = now
            yield turn

    def waited_too_long(self, now: float) -> list[C]:
        """Return the commands that wait for one that has not come in time, and forget them: they may be sent again."""
        if now < self.due:
            return []
        early, self._early = list(self._early.values()), {}
        return early

    def results(self) -> Iterator[tuple[int, str, "Future[Any]"]]:
        """Yield the number, the verb and the future of each command whose result is kept."""
        for number, (verb, future) in list(self._taken.items()):
            if future.done():
                yield number, verb, future

    def was_done(self, number: int, verb: str, future: "Future[Any]") -> None:
        """Note a command that was done in an earlier life."""
        self._take(number, verb, future)
        self.next = max(self.next, number + 1)

    def _take(self, number: int, verb: str, future: "Future[Any]") -> None:
        self._taken[number] = verb, future
        future.add_done_callback(lambda done: self._sizes.update({number: _nbytes(done)}))
        held = sum(self._sizes.get(each, 0) for each in self._taken)
        for old in list(self._taken)[:-ALWAYS_KEPT]:
            if (len(self._taken) <= KEPT and held <= KEPT_BYTES) or not self._taken[old][1].done():
                break
            held -= self._sizes.pop(old, 0)
            del self._taken[old]
        self.first_kept = next(iter(self._taken))


def _nbytes(done: "Future[Any]") -> int:
    return 0 if done.exception() else int(getattr(done.result(), "nbytes", 0))
