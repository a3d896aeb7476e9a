"""The one place where the executor counts what happens: by layer and op, session, tenant and transport, and by refusal. It is told of each
call when it has come, and when it is answered."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from symbiosis.base.logs import worth_logging
from symbiosis.errors import Code
from symbiosis.executor.accounts import ServedSession
from symbiosis.executor.call_kinds import DeviceWork, Repeated, Work
from symbiosis.executor.calls.call_plan import CallPlan
from symbiosis.executor.model.store import Store
from symbiosis.executor.observe.log import log
from symbiosis.executor.scheduling.queue import Batch
from symbiosis.protocol import Call, Op, Reply
from symbiosis.transport.base import Peer


@dataclass(slots=True)
class LayerTotals:
    """Totals of one layer and op."""

    calls: int = 0
    rows: int = 0
    batches: int = 0
    wait_s: float = 0.0
    compute_s: float = 0.0


class Ledger:
    """Totals since the start, and what is in flight."""

    def __init__(self, store: Store, attempt: Callable[..., Any]) -> None:
        """`attempt` does something for a peer, and ends that peer if it fails."""
        self._attempt = attempt
        self.names = [layer.name for layer in store.manifest]
        self.weights_bytes, self.gather_bytes = store.nbytes, store.gather_bytes
        self.started = monotonic()
        self.totals: defaultdict[tuple[int, Op], LayerTotals] = defaultdict(LayerTotals)
        self.batch_sizes: Counter[int] = Counter()
        self.bytes: Counter[str] = Counter()  # payloads, by transport
        self.errors: Counter[str] = Counter()
        self.refused_joins: Counter[tuple[str, str]] = Counter()  # by tenant and code
        self.kept_out: Counter[str] = Counter()  # handshakes that were refused, by reason
        self.in_vain: Counter[tuple[str, str]] = Counter()  # bytes of what was refused, by tenant and transport
        self.dropped = 0  # sessions that were dropped for silence

    # ------------------------------------------------------------------ what came

    def came(self, session: ServedSession, plan: CallPlan, held: int | None = None) -> None:
        """Count a call, or a round of calls, that will be answered. It is in flight, with so many bytes, unless it was answered at once."""
        if held is not None:
            session.begin(held)
        rows = plan.rows * plan.calls
        session.calls += plan.calls
        session.rows += rows
        session.multiplications += plan.multiplications
        session.bytes += plan.nbytes
        usage = session.account.usage
        usage.calls += plan.calls
        usage.rows += rows
        usage.multiplications += plan.multiplications
        usage.bytes += plan.moved
        if session.account.limited:
            session.account.sent(rows, plan.multiplications, plan.moved)

    def refused(self, code: Code) -> None:
        """Count a refusal of a call or of a client."""
        self.errors[code.name] += 1

    def refused_call(self, session: ServedSession, call: Call, code: Code) -> None:
        """Count a call that a session was refused, and log it the 1st, 2nd, 4th, ... time."""
        session.refused += 1
        if worth_logging(session.refused):
            layer = self.names[call.layer] if call.layer < len(self.names) else call.layer
            log(
                logging.WARNING, "call refused", session=session.number, code=code.name, op=call.op.name, layer=layer,
                shape=call.shape, dtype=call.dtype, refused=session.refused,
            )  # fmt: skip

    def came_in_vain(self, peer: Peer, nbytes: int) -> None:
        """Count bytes that came with what was refused."""
        self.in_vain[peer.tenant or "", peer.transport] += nbytes

    # ------------------------------------------------------------------ what was answered

    def ran(self, batch: Batch, seconds: float) -> None:
        """Count a turn of a product. Its seconds are shared among the tenants that called, by their rows."""
        each = seconds / max(1, batch.rows)
        for item, start, stop in batch.slices:
            session: ServedSession | None = item.work.peer.session
            if session is not None:
                session.account.usage.seconds += each * (stop - start)
        work: Work = batch.slices[0].item.work
        observer = work.peer.session is not None and work.peer.session.observer  # its calls are not counted
        if batch.ends and not observer:
            calls = work.calls if isinstance(work, Repeated) else (work.call,)
            self._multiplied(calls, len(batch.slices), batch.seconds + seconds)

    def launched(self, session: ServedSession, seconds: float) -> None:
        """Count the seconds of a call, a round, or a part of one that was launched on a GPU."""
        session.account.usage.seconds += seconds

    def answered_alone(self, work: DeviceWork, reply: Reply) -> None:
        """Count a GPU's call or round that was launched alone. No CPU sees how long it takes."""
        self._called([work])
        self._multiplied(work.calls, 1, 0.0)
        if reply.code is not Code.OK:
            self.refused(reply.code)

    def batched(self, batch: Batch) -> None:
        """Count GPUs' calls that the GPU has batched and answered."""
        together, now = len(batch.slices), monotonic()
        for item, _, _ in batch.slices:
            peer = item.work.peer
            self._attempt(peer, peer.count, together, item.work.plan.calls)
            session: ServedSession | None = peer.session
            if session is not None:
                session.end()
                session.heard = now
        self._called([piece.item.work for piece in batch.slices])
        call: Call = batch.slices[0].item.work.calls[0]
        self.totals[call.layer, call.op].wait_s += sum(batch.formed - piece.item.arrived for piece in batch.slices)

    def together(self, works: Sequence[DeviceWork], wait_s: float, seconds: float) -> None:
        """Count GPUs' calls that were foreseen and launched as one product."""
        each = seconds / sum(work.plan.rows for work in works)
        for work in works:
            self._attempt(work.peer, work.peer.count, len(works), work.plan.calls)
            session: ServedSession | None = work.peer.session
            if session is not None:
                self.came(session, work.plan)
                session.account.usage.seconds += each * work.plan.rows
        self._called(works)
        self._multiplied(works[0].calls, len(works), seconds)
        call = works[0].calls[0]
        self.totals[call.layer, call.op].wait_s += wait_s

    def answered(self, work: Work, reply: Reply) -> None:
        """Count the reply to a call of a batch, or to a whole round, which is in flight no more."""
        session: ServedSession | None = work.peer.session
        call = work.calls[0] if isinstance(work, Repeated) else work.call
        if session is not None:  # a GPU's calls lie in the session's own memory
            session.end(0 if isinstance(work, Repeated) else work.plan.held)
            session.heard = monotonic()
        if session is None or not session.observer:
            totals = self.totals[call.layer, call.op]
            totals.wait_s += reply.wait_us / 1e6
            if isinstance(work, Repeated):
                self._called([work])
            else:
                totals.calls += 1
                totals.rows += call.rows
                moved = work.plan.moved if reply.code is Code.OK else call.nbytes + reply.nbytes
                self.bytes[work.peer.transport] += moved
            if reply.code is not Code.OK:
                self.refused(reply.code)
        if session is not None and reply.code is not Code.OK:
            self.refused_call(session, call, reply.code)

    def _called(self, works: Sequence[DeviceWork]) -> None:
        """Count GPUs' calls of the same key by layer and transport."""
        for calls in zip(*(work.calls for work in works), strict=True):
            totals = self.totals[calls[0].layer, calls[0].op]
            totals.calls += len(calls)
            totals.rows += sum(call.rows for call in calls)
        for work in works:
            self.bytes[work.peer.transport] += work.plan.moved

    def _multiplied(self, calls: Sequence[Call], together: int, seconds: float) -> None:
        """Count one product for each of `calls`, each of which `together` clients shared."""
        for call in calls:
            totals = self.totals[call.layer, call.op]
            totals.batches += 1
            totals.compute_s += seconds / len(calls)
        self.batch_sizes[together] += len(calls)
