"""Which base each model of a cluster has: one at a time, by its fingerprint. A process that serves another one takes nothing new.

It stays what it is while any process serves it, whatever lies in the checkpoint by then, and changes by a roll of the model: when the first
server that was started anew serves another base, the model has that one, and the other servers finish what they have.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from symbiosis.cluster.controller.member import MemberProcess

logger = logging.getLogger("symbiosis")

WHAT_TO_DO = (
    "its checkpoint was changed after the others had read it. `symbiosis cluster roll --only {}` moves the whole model to what the checkpoint holds "
    "by now; to stay with the old base, put the old checkpoint back and roll this process only"
)


def base_of(now: str, held: Sequence[tuple[str, str]], left: str | None) -> str:
    """Return the base that a model has from now on.

    Args:
        now: The one that it had; nothing at its start.
        held: Of each process, its kind and its base. Executors come first.
        left: The one that a roll moves away from; None: nothing is rolled.

    >>> base_of("old", [("executor", "new"), ("server", "old")], left=None)
    'old'
    >>> base_of("old", [("executor", "new"), ("server", "new"), ("server", "old")], left="old")
    'new'
    >>> base_of("old", [("executor", "new")], left=None)  # nothing is left that serves the old one
    'new'
    """
    moved = [base for kind, base in held if kind == "server" and base != left]
    if now == left and moved:
        return moved[0]
    found = [base for _, base in held]
    return now if now in found or not found else found[0]


class Bases:
    """The bases of all models of a cluster."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}
        self._left: dict[str, str] = {}  # by model that is rolled: the base that it had
        self._others = frozenset[str]()  # processes that serve another base than their model has

    def look(self, processes: Iterable[MemberProcess]) -> None:
        """Find out which base each model has, and tell its processes."""
        of_models: dict[str, list[MemberProcess]] = {}
        for process in processes:
            of_models.setdefault(process.member.model, []).append(process)
        others = frozenset(
            each.name for model, those in of_models.items() if model for each in self._look(model, those)
        )
        for process in (each for those in of_models.values() for each in those):
            if process.name in others - self._others and process.member.model not in self._left:
                model, found = process.member.model, process.fingerprint[:12]
                logger.error("%s serves another base (%s) than %s has (%s), and takes nothing: %s", process.name, found, model, process.base[:12], WHAT_TO_DO.format(model))  # fmt: skip
        self._others = others

    def _look(self, model: str, processes: Sequence[MemberProcess]) -> list[MemberProcess]:
        """Return those that serve another base than the model has."""
        known = [each for each in processes if each.is_running and each.fingerprint]
        before = self._of.get(model, "")
        base = base_of(before, [(each.member.kind, each.fingerprint) for each in known], self._left.get(model))
        if before and base != before:
            logger.warning("%s has another base from now on: %s instead of %s", model, base[:12], before[:12])
        self._of[model] = base
        for each in processes:
            each.base = base
        return [each for each in known if each.fingerprint != base]

    @contextmanager
    def rolled(self, models: Iterable[str]) -> Iterator[None]:
        """Let these models have another base from the first new server on."""
        self._left = {model: self._of.get(model, "") for model in models}
        try:
            yield
        finally:
            self._left = {}

    def may_change(self, model: str) -> bool:
        return model in self._left

    def changes(self, model: str, processes: Iterable[MemberProcess]) -> bool:
        """Whether a roll moves this model to another base, as far as its new processes tell."""
        left = self._left.get(model)
        return left is not None and any(each.fingerprint not in ("", left) for each in processes)
