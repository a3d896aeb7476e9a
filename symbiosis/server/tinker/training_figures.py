"""What is seen of training: each run for its tenant, and figures by tenant for Prometheus."""

import threading
from collections.abc import Iterable
from typing import Protocol

import msgspec

from symbiosis.server.labelled_figures import OTHER, Labelled


class RunFigures(msgspec.Struct, kw_only=True):
    """A run, as the page shows it. What is not a number of steps is counted since the server began.

    Args:
        loss: Of the last pass with gradients, by token.
        kl: The sampler's log probabilities less the trainer's there, on average, if the client has told the sampler's.
        apart: The largest of these differences; 0 if sampler and trainer agree to the bit.
        waiting: Requests whose outcome is not there yet.
    """

    id: str
    rank: int
    steps: int
    waiting: int
    tokens: int = 0
    loss: float | None = None
    kl: float | None = None
    apart: float | None = None


class TenantTraining(msgspec.Struct):
    """What a tenant trains."""

    tokens: int = 0
    steps: int = 0
    runs: int = 0
    waiting: int = 0


class OfTenant(Protocol):
    """A run, as far as it is counted for somebody."""

    @property
    def tenant(self) -> str: ...
    @property
    def waiting(self) -> int: ...


class TrainingCounters:
    """Counts by tenant: those that train most have figures of their own.

    >>> counters = TrainingCounters()
    >>> counters.count("anna", tokens=5)
    >>> counters.told([])["anna"].tokens
    5
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tenants = Labelled(TenantTraining)

    def count(self, tenant: str, tokens: int = 0, steps: int = 0) -> None:
        with self._lock:
            series = self._tenants.shown[self._tenants.label((tenant,))]
            series.tokens, series.steps = series.tokens + tokens, series.steps + steps

    def told(self, runs: Iterable[OfTenant]) -> dict[str, TenantTraining]:
        """Return the figures of tenants, with their runs of this moment."""
        with self._lock:
            told = {tenant: msgspec.structs.replace(series) for (tenant,), series in self._tenants.shown.items()}
        for run in runs:
            series = told.setdefault(run.tenant if run.tenant in told else OTHER, TenantTraining())
            series.runs, series.waiting = series.runs + 1, series.waiting + run.waiting
        return told
