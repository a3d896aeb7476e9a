"""Decides about each call that arrives: refuse it, queue it, hold it for the calls that are foreseen with it, ration it, or run it at
once."""

import math
import os
import platform
from collections.abc import Callable, Sequence
from functools import lru_cache
from time import monotonic
from typing import BinaryIO

from msgspec.structs import replace
from torch import Tensor

from symbiosis.base.curve_keys import Keyring
from symbiosis.build import build
from symbiosis.errors import CallError, Code
from symbiosis.executor.accounts import BUSY_S, ServedSession, busy
from symbiosis.executor.call_kinds import DeviceCall, DeviceWork, HostCall, Round, call_error
from symbiosis.executor.calls.call_plan import make_plan
from symbiosis.executor.compute.batch_runner import Attempt, BatchRunner
from symbiosis.executor.gpu.foreseen_batch import ForeseenBatch
from symbiosis.executor.gpu.train_share import Background
from symbiosis.executor.ledger import Ledger
from symbiosis.executor.model.store import Store
from symbiosis.executor.observe.join_log import JoinLog
from symbiosis.executor.observe.latest_figures import LatestFigures
from symbiosis.executor.options import Options
from symbiosis.executor.scheduling.advice import Advisor
from symbiosis.executor.scheduling.batcher import Batcher
from symbiosis.executor.scheduling.queue import Item
from symbiosis.executor.scheduling.rules import IMMEDIATE
from symbiosis.executor.sessions import Sessions
from symbiosis.protocol import Call, Hello, Op, Priority, Welcome
from symbiosis.transport import Peer
from symbiosis.transport.base import Advice, Direct, GpuPeer, Prepared, RoundWords, Tokens, refuse
from symbiosis.transport.cuda.driver import device_name
from symbiosis.transport.tensors import TORCH_DTYPE, Shapes, bytes_tensor, check_ends, empty

TOLD_S = 0.5  # at most between two reports of a client that multiplies by mapped weights


class Dispatch:
    """The executor as transports see it (`transport.base.ServerPort`). Each call is checked here and handed to whatever runs it. Some
    methods only pass a question on, because transports know no other part."""

    def __init__(
        self,
        store: Store,
        options: Options,
        keyring: Keyring | None,
        sessions: Sessions,
        register: JoinLog,
        ledger: Ledger,
        batcher: Batcher,
        figures: LatestFigures,
        attempt: Attempt,
    ) -> None:
        """`attempt` does something for a peer, and ends that peer if it fails."""
        self._store, self._options, self.limits = store, options, options.limits
        self.keyring, self.nccl = keyring, keyring is None if options.nccl is None else options.nccl
        self._sessions, self._register, self._ledger, self._figures = sessions, register, ledger, figures
        self._attempt, self._batcher = attempt, batcher
        self.kept_out, self.came_in_vain = register.kept_out, ledger.came_in_vain
        self.commons = store.commons_files
        self.engine = BatchRunner(
            store,
            ledger.answered,
            ledger.batched,
            options.workers,
            batcher.took,
            options.max_batch_tokens,
            attempt,
            options.batch_invariant,
        )
        self.gpu, self.device, self.stream = self.engine.gpu, self.engine.device, self.engine.gpu.stream
        self._gpu_name = device_name(self.device) if self.device.type == "cuda" else ""
        self.cohort = ForeseenBatch(batcher, self.gpu.launch_batch, ledger.together, self._enqueue)
        self.background = Background(options.train_share)
        self._advisor = Advisor(batcher.rules.policy.batches, self.device.type == "cuda" and options.train_share < 1)
        self._plan = lru_cache(maxsize=1 << 14)(lambda call: make_plan(call, store, options))
        self.has_prepared = False  # whether a GPU makes calls, which may be held back
        self.draining = False  # set when no new calls are taken
        self.has_news = False  # set when clients that map the weights should be advised at once

    @property
    def waiting(self) -> int:
        """How many calls have arrived and not begun to run."""
        return len(self._batcher) + len(self.cohort) + len(self.background)

    def wake_at(self) -> float:
        """Return when to call `run_due`, or ask the batcher, again."""
        if not self.has_prepared:
            return self._batcher.wake_at()
        return min(self._batcher.wake_at(), self.cohort.wake_at(), self.background.wake_at())

    def wait_for_nobody(self) -> None:
        """Answer every call that has arrived without waiting for others, because the executor ends."""
        self._batcher.rules.policy, self.background.share = IMMEDIATE, 1.0
        if self.gpu.rounds is not None:
            self.gpu.rounds.drain()

    # ------------------------------------------------------------------ clients

    def joined(self, peer: Peer, hello: Hello) -> Welcome:
        session = self._sessions.join(peer, hello)
        self._batcher.join(session.number, peer.tenant, hello.observer)
        store, options = self._store, self._options
        return Welcome(
            session.number, store.fingerprint, store.manifest, store.config_json, store.model_class,
            self.limits, options.allow_read, options.heartbeat_s, f"{platform.node()}:{os.getpid()}",
            integers=options.integers, operator=options.operator, shares_weights=bool(store.files),
            rank=store.rank, ranks=store.ranks, shard=store.shard,
            spread_rows=options.spread_rows, shares=options.all_shares if store.ranks > 1 else (), gpus=store.on_gpus.names if store.on_gpus else (),
            hosts=options.host_of_each, begins=dict(store.on_gpus.begins) if store.on_gpus and options.spread_rows else {},
            build=build(), gpu=self._gpu_name, batch_invariant=options.batch_invariant,
        )  # fmt: skip

    def heard(self, peer: Peer) -> None:
        if peer.session is not None:
            peer.session.heard = monotonic()

    def left(self, peer: Peer, why: str = "left") -> None:
        session: ServedSession | None = peer.session
        if session is not None:
            self.cohort.disband()
            self.background.leave(peer)
            self._batcher.leave(session.number)
            self._advisor.left(session.number)
            self._sessions.leave(session, why)

    def drain_gpu(self, peer: Peer, then: Callable[[], None] = lambda: None) -> None:
        self.gpu.drain(peer, then)

    # ------------------------------------------------------------------ calls through the host

    def admits(self, peer: Peer, seq: int, call: Call) -> bool:
        session: ServedSession = peer.session
        session.heard = monotonic()
        try:
            if session.observer or call.op is Op.STATS:
                _check_allowed(session, call)
            if self.draining and not session.observer:
                raise CallError(Code.DRAINING, "this executor is shutting down: the call will be sent again")
            if session.in_flight >= self.limits.max_in_flight:
                raise CallError(
                    Code.LIMIT, f"a session may have {self.limits.max_in_flight} calls in flight: wait for one"
                )
            plan = self._plan(call) if call.op is not Op.STATS else None
            held, scratch = (plan.held, plan.scratch) if plan else (self._figures.nbytes, 0)
            session.account.check(peer, held, session.held, session.heard, scratch)
        except Exception as error:  # whatever it is: the executor has other clients
            self._refuse(session, seq, call, call_error(error))
            return False
        return True

    def turns_away(self, peer: Peer, seq: int, call: Call) -> None:
        session: ServedSession = peer.session
        session.heard = monotonic()
        error = busy(BUSY_S, "too many calls of this connection, or of its tenant, are waiting to be read")
        self._refuse(session, seq, call, error)

    def arrived(self, peer: Peer, seq: int, call: Call, payload: tuple[Tensor, ...]) -> bool:
        session: ServedSession = peer.session
        try:
            if call.op is Op.STATS:
                payload = (bytes_tensor(self._figures.told(session.heard)),)
                call = replace(call, op=Op.ECHO, dtype="uint8", shape=tuple(payload[0].shape))
            plan = self._plan(call)
            if call.op is Op.GROUPED:  # ids of a LOOKUP may be very many: each turn checks its own
                check_ends(call, payload[1])
            if call.seeded:  # keep the seed as it is now: the client could change it
                payload = (payload[0].clone(),)
            out = peer.out(call, plan.shape)
            if out is None:
                out = empty(plan.shape, TORCH_DTYPE[call.dtype], self.device.type == "cuda")
            finite = plan.finite and not payload[0].is_cuda  # checking would wait for the GPU
            work = HostCall(peer, seq, call, payload, out, plan, finite)
        except Exception as error:  # whatever it is: the executor has other clients
            self._refuse(session, seq, call, call_error(error))
            return False
        priority = call.priority if session.priority is None else session.priority
        if priority == Priority.DECODE and call.op.traits.activations and not session.observer:
            self._makes_tokens(session, session.heard)
        self._ledger.came(session, plan, plan.held)
        key = ("observer", plan.key) if session.observer else plan.key
        self._batcher.add(Item(
            session.number, key, plan.rows, priority, session.heard, work, call.by_rows, plan.batchable,
            price=plan.multiplications, grains=plan.grains, kind=plan.kind, turns=plan.turns,
        ))  # fmt: skip
        return True

    def _refuse(self, session: ServedSession, seq: int, call: Call, error: CallError) -> None:
        if error.code is not Code.GROW:
            self._ledger.refused(error.code)
            self._ledger.refused_call(session, call, error.code)
            if error.code is not Code.BUSY and session.account.limited:  # those who are told to wait send it again
                session.account.sent(0, 0, call.nbytes)
        refuse(session.peer, seq, error)

    def shape(self, call: Call) -> tuple[int, ...]:
        try:
            return self._plan(call).shape
        except CallError as error:
            self._ledger.refused(error.code)
            raise

    def results(self, call: Call) -> Shapes:
        plan = self._plan(call)
        return plan.parts if plan.parts and call.op is Op.FORWARD else (plan.shape,)

    def served_weights(self) -> Sequence[BinaryIO]:
        return self._store.files

    def multiplied(self, peer: Peer, direct: Direct) -> Advice:
        session, now = peer.session, monotonic()
        session.count_direct(direct)
        if direct.tokens:
            self._makes_tokens(session, now, direct.tokens)
        return Advice(*self._advisor.of(session.number, now))

    def _makes_tokens(self, session: ServedSession, now: float, direct: Tokens = Tokens.NONE) -> None:
        """Note that a session makes tokens, by calls or directly. Training gives way, and others are advised."""
        self.background.decoded = max(self.background.decoded, now + TOLD_S if direct else now)
        self.has_news |= self._advisor.decoded(session.number, now, not direct, few=direct is not Tokens.MANY)

    # ------------------------------------------------------------------ calls that a GPU makes again and again

    def prepare(
        self,
        peer: GpuPeer,
        number: int,
        call: Call,
        payload: tuple[Tensor, ...],
        results: tuple[Tensor, ...],
        seq: int = 0,
        at: Callable[[Tensor], int] | None = Tensor.data_ptr,
    ) -> DeviceCall:
        if call.seeded or call.op is Op.LOOKUP:
            raise CallError(
                Code.UNKNOWN_OP, "seeds and ids are checked with each call, which therefore cannot be registered"
            )
        self.has_prepared = True
        plan, session = self._plan(call), peer.session
        takes_turns = not peer.here or peer.tenant is not None
        made = DeviceCall(
            peer=peer, plan=plan, number=number, priority=call.priority if session.priority is None else session.priority, call=call, payload=payload,
            results=results, seq=seq, large=not takes_turns and self.gpu.batch_below <= plan.rows <= self._batcher.rules.max_rows,
        )  # fmt: skip
        self.gpu.note_addresses(made, at)
        return made

    def compose(self, number: int, prepared: Sequence[Prepared], words: RoundWords, again: bool) -> Round:
        members = tuple(call for call in prepared if isinstance(call, DeviceCall))
        rounds, wanted = self.gpu.rounds, self._options.rounds and not self.gpu.shares_time
        if rounds is None or not (wanted or again):  # a client that was in the middle of a round may go on
            raise CallError(
                Code.UNKNOWN_OP,
                "calls are answered one by one here: MPS does not serve the executor, Triton is missing, or --no-rounds is set",
            )
        large = bool(members) and members[0].large
        if large and self._batcher.rules.policy.waits_for_all and not again:
            raise CallError(Code.UNKNOWN_OP, "large calls take turns under lockstep, and are answered one by one")
        # an executor before this one may have measured another limit
        most = math.inf if again or large else self.gpu.batch_below
        round = Round(rounds.key_of(members, most), members, words, number)
        if number and not again:
            rounds.make_room(round)
        return round

    def forget(self, peer: GpuPeer, prepared: Sequence[Prepared]) -> None:
        self.cohort.disband()
        if peer.session.in_flight:
            raise CallError(Code.BAD_FRAME, "calls can be forgotten only when all are answered: wait for the replies")
        self.gpu.forget([work for work in prepared if isinstance(work, (DeviceCall, Round))])

    def on_doorbell(self, prepared: Prepared) -> bool:
        """Handle a prepared call whose doorbell rang. Return whether it waits: for the calls that are foreseen with it, for training's
        share of the GPU while somebody decodes, or in the batcher's queue. Any other call is launched at once."""
        work: DeviceWork = prepared  # type: ignore[assignment]  # what `prepare` or `compose` made
        session: ServedSession = work.peer.session
        session.heard = now = monotonic()
        if work.priority == Priority.DECODE:
            self._makes_tokens(session, now)
        if self.cohort.takes(work, now):
            return True
        if work.large and not self._batcher.rules.policy.waits_for_all:
            if session.number in self._batcher.callers.live:  # others may be waiting for a smaller call of this session
                self.cohort.disband()
            self._batcher.away(session.number)
            if work.priority >= Priority.TRAIN and self.background.takes(work, now):
                session.begin()
                return True
        else:
            self.cohort.disband()
            if not self._batcher.alone(session.number, now):
                self._enqueue(work, now)
                return True
        self._launch(work, now)
        return False

    def run_due(self, now: float) -> bool:
        """Launch rationed calls whose time has come, and foreseen calls that are complete. Return whether the foreseen calls go before
        the queue."""
        while work := self.background.next(now):
            self._attempt(work.peer, self._launch_rationed, work, now)
        return bool(self.cohort) and self.cohort.step(now)

    def _launch_rationed(self, work: DeviceWork, now: float) -> None:
        """Launch a call that was rationed."""
        work.peer.session.end()
        self._launch(work, now)

    def _launch(self, work: DeviceWork, now: float) -> None:
        """Launch a GPU's call without the batcher."""
        session: ServedSession = work.peer.session
        rationed = work.large and work.priority >= Priority.TRAIN
        is_new = not isinstance(work, Round) or not work.left
        reply = self.gpu.launch(work, rationed and self.background.rations(now))
        seconds = self.gpu.estimate(work, work.plan.rows)
        self._ledger.launched(session, seconds)
        if is_new:
            self._ledger.came(session, work.plan)
            self._ledger.answered_alone(work, reply)
        if rationed:
            self.background.ran(seconds, now)
        if isinstance(work, Round) and work.left:
            session.begin()
            self.background.put(work)

    def _enqueue(self, work: DeviceWork, arrived: float) -> None:
        """Leave a call of a GPU to the batcher."""
        session: ServedSession = work.peer.session
        plan = work.plan
        self._ledger.came(session, plan, held=0)
        divisible = not isinstance(work, Round) and work.call.by_rows
        self._batcher.add(Item(
            session.number, plan.key, plan.rows, work.priority, arrived, work, divisible, plan.batchable, plan.calls,
        ))  # fmt: skip


def _check_allowed(session: ServedSession, call: Call) -> None:
    """Refuse figures to tenants, because they tell of others, and calls of layers to observers."""
    if call.op is Op.STATS and session.peer.tenant is not None:
        raise CallError(
            Code.NOT_ALLOWED,
            "an executor's figures are about all its tenants, so only its operator may see them: over local:// or --metrics-port",
        )
    if session.observer and call.op not in (Op.STATS, Op.ECHO):
        raise CallError(
            Code.UNKNOWN_OP, f"an observer may ask for STATS and ECHO, not {call.op.name}: join as a client"
        )
