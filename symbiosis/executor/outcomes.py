"""What the engine tells of calls that ran: they are counted, and no longer under way in their sessions."""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from symbiosis.executor.account import ServedSession
from symbiosis.executor.ledger import Ledger
from symbiosis.executor.scheduling.queue import Batch
from symbiosis.executor.work import DeviceWork, Repeated, Work
from symbiosis.protocol import Reply


class Outcomes:
    """`attempt`: does something for a peer, which is ended if that goes wrong."""

    def __init__(self, ledger: Ledger, attempt: Callable[..., Any]) -> None:
        self._ledger, self._attempt = ledger, attempt

    def answered(self, work: Work, reply: Reply) -> None:
        """A call of a batch, or a round."""
        self._ledger.answered(work, reply)
        session: ServedSession | None = work.peer.session
        if session is not None:
            # a GPU's calls lie in memory of the session's own
            session.end(0 if isinstance(work, Repeated) else work.plan.held)
            session.heard = monotonic()

    def answered_together(self, batch: Batch) -> None:
        """Calls of GPUs, by the GPU."""
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
        """Calls of GPUs that had been foreseen were launched as one product."""
        for work in works:
            self._attempt(work.peer, work.peer.count, len(works), work.plan.calls)
        self._ledger.together(works, waited, seconds)
