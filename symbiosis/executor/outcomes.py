"""Handles what the engine reports: calls that ran are counted, and are no longer in flight."""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from symbiosis.executor.accounts import ServedSession
from symbiosis.executor.call_kinds import DeviceWork, Repeated, Work
from symbiosis.executor.ledger import Ledger
from symbiosis.executor.scheduling.queue import Batch
from symbiosis.protocol import Reply


class Outcomes:
    """`attempt` does something for a peer, and ends that peer if it fails."""

    def __init__(self, ledger: Ledger, attempt: Callable[..., Any]) -> None:
        self._ledger, self._attempt = ledger, attempt

    def answered(self, work: Work, reply: Reply) -> None:
        """Note the reply to a call of a batch, or to a round."""
        self._ledger.answered(work, reply)
        session: ServedSession | None = work.peer.session
        if session is not None:
            # a GPU's calls lie in the session's own memory
            session.end(0 if isinstance(work, Repeated) else work.plan.held)
            session.heard = monotonic()

    def answered_together(self, batch: Batch) -> None:
        """Note GPUs' calls that the GPU has joined and answered."""
        together, now = len(batch.slices), monotonic()
        for item, _, _ in batch.slices:
            peer = item.work.peer
            self._attempt(peer, peer.count, together, item.work.plan.calls)
            session: ServedSession | None = peer.session
            if session is not None:
                session.end()
                session.heard = now
        self._ledger.joined(batch)

    def went_together(self, works: Sequence[DeviceWork], waited: float, seconds: float) -> None:
        """Note GPUs' calls that were foreseen and launched as one product."""
        for work in works:
            self._attempt(work.peer, work.peer.count, len(works), work.plan.calls)
        self._ledger.together(works, waited, seconds)
