"""Sessions and the executor's loop: messages in, checked and queued; batches out to the engine."""

import errno
import itertools
import logging
import math
import os
import platform
import resource
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import BinaryIO

import torch
from msgspec.structs import replace
from torch import Tensor

from symbiosis.config import Options
from symbiosis.errors import CallError, Code
from symbiosis.executor.account import BUSY_S, Account, Pool, Rate, Usage, busy, half_of_memory
from symbiosis.executor.audit_log import AuditLog
from symbiosis.executor.background import Background
from symbiosis.executor.batch import Batch, Item
from symbiosis.executor.batcher import Batcher
from symbiosis.executor.cohort import Cohort
from symbiosis.executor.crowd import Crowd
from symbiosis.executor.engine import Engine, Work, call_error
from symbiosis.executor.log import log, log_mistake, worth_logging
from symbiosis.executor.metrics import Figures
from symbiosis.executor.plan import Plan, make_plan, plan_of_round
from symbiosis.executor.register import Register, name_of
from symbiosis.executor.store import Store
from symbiosis.executor.validate import check_values, must_be_finite
from symbiosis.kernels.few_rows import MOST_ROWS
from symbiosis.keys import Keyring
from symbiosis.protocol import VERSION, Call, Hello, Op, Priority, Reply, Welcome
from symbiosis.transport import Listener, Peer, Reactor, listen
from symbiosis.transport.base import RoundWords, refuse
from symbiosis.transport.reactor import Served
from symbiosis.transport.tensors import TORCH_DTYPE, Shapes, bytes_tensor, empty

TICK_S = 0.5
LONG_S = 1e-3  # of a product during which another worker may take the turn: waking one costs tens of microseconds
MAX_WAIT_US = {True: 2_000, False: 10_000}  # on a GPU, on a CPU: some products
# A GPU takes longer for a product beside the clients' kernels than alone, as it was measured. Threads that wait for a core are late.
SPREAD, PATIENCE = {True: 4.0, False: 1.0}, {True: 1.5, False: 3.0}
ALARM_S = 60.0  # between two warnings of the same
MOST_OBSERVERS = 16  # without keys; of tenants they are sessions like others
SNAPSHOTS_PER_S = 20  # of the figures
NO_DESCRIPTOR = (
    "no descriptor is left: new clients wait until connections end. Start the executor with a higher limit (ulimit -Hn), or lower "
    "--max-tenant-sessions"
)


@dataclass(slots=True)
class Session:
    """What the executor knows of one client."""

    number: int
    peer: Peer
    client: str
    priority: int | None
    observer: bool
    heard: float
    account: Account
    in_flight: int = 0
    held: int = 0  # bytes of the calls in flight and their replies
    calls: int = 0
    rows: int = 0
    multiplications: int = 0
    bytes: int = 0
    refused: int = 0
    joined: float = field(default_factory=monotonic)
    address: str = ""
    ends_for: str = ""  # why the executor itself ends it

    def count(self, plan: Plan) -> None:
        """A call has come."""
        self.calls += plan.calls
        self.rows += plan.rows * plan.calls
        self.multiplications += plan.multiplications
        self.bytes += plan.nbytes
        self.account.usage.count(plan)
        self.account.sent(plan.rows * plan.calls, plan.multiplications, plan.moved)

    def begin(self, held: int = 0) -> None:
        """A call is on its way that needs so many bytes of the executor's memory."""
        self.in_flight += 1
        self.held += held
        self.account.begin(held)

    def end(self, held: int = 0) -> None:
        """... and is answered."""
        self.in_flight -= 1
        self.held -= held
        self.account.end(held)


class Server:
    """Owns the reactor. Everything but `stop` and `drain` runs in the thread that has the turn."""

    def __init__(self, store: Store, options: Options) -> None:
        options.check_device(store.on_gpu)
        self.store, self.options, self.limits = store, options, options.limits
        self.keyring = Keyring.open(options.key, options.tenants) if options.key and options.tenants else None
        self.nccl = self.keyring is None if options.nccl is None else options.nccl
        self.figures = Figures(store)
        self.sessions: dict[int, Session] = {}
        self.pool = Pool(options.max_bytes or half_of_memory(), lambda: (s.peer for s in self.sessions.values()))
        self._accounts: dict[str, Account] = {}  # by tenant
        self._without_keys = Usage()
        self._fresh, self._snapshot = Rate(SNAPSHOTS_PER_S), b""
        audit = AuditLog(Path(options.audit_log)) if options.audit_log else None
        self.register = Register(self.figures, audit, self.keyring.tenants if self.keyring else None)
        self.batcher = Batcher(
            options.policy,
            (MAX_WAIT_US[store.on_gpu] if options.max_wait_us is None else options.max_wait_us) / 1e6,
            options.max_batch_tokens,
            options.heartbeat_s,
            options.batch_invariant,
            spread=SPREAD[store.on_gpu],
            patience=PATIENCE[store.on_gpu],
        )
        self.reactor = Reactor(self._failed)
        self.engine = Engine(
            store, self._answered, self._joined, options.workers, self.batcher.took, options.max_batch_tokens,
            self.reactor.attempt,
        )  # fmt: skip
        self.cohort = Cohort(self.batcher, self.engine, self.figures, self._enqueue)
        self.background = Background(options.train_share)
        self.crowd = Crowd() if self.batcher.policy == "opportunistic" and not store.on_gpu else None
        self.device, self.stream, self.settle = self.engine.device, self.engine.stream, self.engine.settle
        self.listeners: list[Listener] = []
        self._numbers = itertools.count(1)
        self._more = self._draining = self._stopped = False
        self._turn = threading.Lock()  # of the workers
        self._failure: BaseException | None = None  # of the first of them that failed
        self._mistakes = 0  # of ours, each of which ended one peer
        self._computing, self._computed = 0, deque[tuple[Batch, float]]()  # products of those who do not have it
        self._next_tick = self._next_alarm = 0.0
        self._plan = lru_cache(maxsize=1 << 14)(lambda call: make_plan(call, store, options))

    def listen(self, urls: tuple[str, ...]) -> None:
        self.listeners += [listen(url, self.reactor, self) for url in urls]

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Serve until `stop`, or until `drain` has answered everything."""
        self.register.began()
        self.engine.use_stream()
        self.batcher.join_below = self.engine.join_below
        others = [threading.Thread(target=self._work, daemon=True) for _ in range(self.options.workers - 1)]
        for thread in others:
            thread.start()
        self._work()
        for thread in others:
            thread.join()
        for session in self.sessions.values():
            session.ends_for = "executor stopped"
        for listener in self.listeners:
            listener.close()
        self.register.ended()
        self.reactor.close()
        if self.crowd:
            self.crowd.close()
        if self._failure:
            raise self._failure

    def _work(self) -> None:
        """What each worker does. One at a time has the turn: it listens, decides and answers. For as long as a product takes
        that is worth it, it leaves that to the next."""
        torch.set_grad_enabled(False)  # of this thread
        torch.get_num_threads()  # sets that number for it: till then BLAS takes all cores, and rounds otherwise than other threads
        with self._turn:
            try:
                while not self._over():
                    self.reactor.poll(self._patience())
                    self._step()
            except BaseException as error:
                self._failure = self._failure or error
            self.stop()  # the others, too

    @property
    def usage(self) -> dict[str, Usage]:
        """What each tenant has had since the start; without keys, all together."""
        named = {tenant: account.usage for tenant, account in list(self._accounts.items())}
        return named if self.keyring else {"": self._without_keys, **named}

    @property
    def waiting(self) -> int:
        """Calls that have come and not begun."""
        return len(self.batcher) + len(self.cohort) + len(self.background)

    def _over(self) -> bool:
        return self._stopped or (self._draining and not self._computing and not self.waiting and not self.engine.rounds)

    def _step(self) -> None:
        """Run one batch, if one is ready; calls may arrive in a tick, too."""
        while self._computed:
            self._answer(*self._computed.popleft())
        if monotonic() >= self._next_tick:
            self._tick()
        if self.engine.rounds:
            self.reactor.attempt(None, self.engine.rounds.look)
        now = monotonic()
        while work := self.background.next(now):
            self.reactor.attempt(work.peer, self._launch_in_turn, work, now)
        if self.cohort and self.cohort.step(now):
            return
        if self.crowd and len(self.sessions) > 1 and not self.batcher.idle:
            self.crowd.look()
            self.batcher.price = self.crowd.price
        batch = self.batcher.next_batch(now)
        self._more = batch is not None and not self.batcher.idle
        if batch is None:
            return
        if self._leaves_time(batch):
            self._compute_meanwhile(batch)
        else:
            self._ran(batch, self.engine.step(batch))
            self._more = self._more or not self.batcher.idle

    def _leaves_time(self, batch: Batch) -> bool:
        """Whether another worker should have the turn meanwhile. It would not let the calls gather that come while few rows are
        multiplied; together they run faster, and on all workers' cores."""
        gathers = batch.rows <= MOST_ROWS and self.batcher.policy != "immediate"
        return self.options.workers > 1 and not gathers and self.batcher.expected(batch) > LONG_S

    def _compute_meanwhile(self, batch: Batch) -> None:
        """Others have the turn."""
        self._computing += 1
        self._turn.release()
        try:
            seconds = self.engine.compute(batch)
            self._computed.append((batch, seconds))
            self.reactor.wake()  # whoever has the turn may answer at once
        finally:
            self._turn.acquire()

    def _answer(self, batch: Batch, seconds: float) -> None:
        self._computing -= 1
        self.engine.reply(batch, seconds)
        self._ran(batch, seconds)

    def _ran(self, batch: Batch, seconds: float) -> None:
        self._charge(batch, seconds)
        if batch.ends and _is_counted(batch.slices[0].item.work):
            self.figures.ran(batch, batch.seconds + seconds)
        self.batcher.done(batch, seconds, max(monotonic(), batch.formed + seconds))  # a GPU has yet to end

    def _charge(self, batch: Batch, seconds: float) -> None:
        """To those who called, by their rows."""
        each = seconds / max(1, batch.rows)
        for item, start, stop in batch.slices:
            session: Session | None = item.work.peer.session
            if session is not None:
                session.account.usage.seconds += each * (stop - start)

    def _patience(self) -> float:
        """How long to sleep if nothing arrives; not at all while there is more to run."""
        if self._more:
            return 0.0
        wake = min(self.batcher.wake_at(), self.cohort.wake_at(), self.background.wake_at(), self._next_tick)
        return max(0.0, wake - monotonic())

    def _tick(self) -> None:
        """Once in a while: signs of life, and sessions that gave none."""
        now = monotonic()
        late, self._next_tick = now - self._next_tick, now + TICK_S
        if now >= self._next_alarm:
            self._look_for_descriptors(now)
        for listener in self.listeners:
            self.reactor.attempt(None, listener.tick)
        self.reactor.attempt(None, self.register.look)
        if late > self.options.heartbeat_s / 2:  # this process was frozen: what was said meanwhile is not read yet
            return
        for session in list(self.sessions.values()):
            if not session.in_flight and now - session.heard > self.options.heartbeat_s:
                self.figures.dropped += 1
                session.ends_for = "silent"
                log(logging.WARNING, "session dropped", session=session.number, silent_s=round(now - session.heard, 1))
                self.reactor.attempt(session.peer, session.peer.close)

    def _failed(self, peer: Served | None, error: Exception) -> None:
        """A mistake of ours, which ends that peer and nobody else; but what broke the device ends the executor."""
        if not self.engine.works:
            raise error
        self._mistakes += 1
        self.figures.refused(Code.INTERNAL)
        if worth_logging(self._mistakes):
            session: Session | None = getattr(peer, "session", None)
            log_mistake(
                "a mistake in the executor ended a session, or what was done for it: please report it", error,
                session=session and session.number, transport=getattr(peer, "transport", None), times=self._mistakes,
            )  # fmt: skip

    def _look_for_descriptors(self, now: float) -> None:
        """Without one nobody new is let in, and ZeroMQ says nothing of it."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._next_alarm = now + ALARM_S
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                log(logging.WARNING, NO_DESCRIPTOR, descriptors=limit, sessions=len(self.sessions))

    def drain(self) -> None:
        """Answer what has come, take nothing new, then end `run`. Callable from any thread or signal handler."""
        self._draining = True
        self.reactor.call_soon(self._stop_listening)

    def health(self, stalled_s: float) -> str:
        """`ready` while calls are answered; `starting`, `draining`, or `stalled` when the loop has not turned for so long. Callable from any
        thread."""
        if self._draining or self._stopped:
            return "draining"
        if not self._next_tick:
            return "starting"
        return "stalled" if monotonic() > self._next_tick + stalled_s else "ready"

    def stop(self) -> None:
        """End `run` at once."""
        self._stopped = True
        self.reactor.wake()

    def _stop_listening(self) -> None:
        """Leave the endpoints to a successor, which may start now; and wait for nobody to answer what has come."""
        self.batcher.policy, self.background.share = "immediate", 1.0
        if self.engine.rounds is not None:
            self.engine.rounds.drain()
        for listener in self.listeners:
            listener.stop_accepting()

    # ------------------------------------------------------------------ what listeners tell (transport.Inbox)

    def joined(self, peer: Peer, hello: Hello) -> Welcome:
        client = name_of(hello)
        try:
            account = self._account(peer.tenant)
            self._admit(hello, peer.tenant, account)
        except CallError as error:
            self.register.refused(peer, client, error.code)
            raise
        number = next(self._numbers)
        peer.session = Session(
            number, peer, client, hello.priority, hello.observer, monotonic(), account, address=peer.address
        )
        self.sessions[number] = peer.session
        account.readers.add(peer)
        self.batcher.join(number, peer.tenant, hello.observer)
        self.register.joined(peer.session)
        return Welcome(
            number, self.store.fingerprint, self.store.manifest, self.store.config_json, self.store.model_class,
            self.limits, self.options.allow_read, self.options.heartbeat_s, f"{platform.node()}:{os.getpid()}",
            integers=self.options.integers, operator=self.options.operator,
        )  # fmt: skip

    def kept_out(self, why: str, address: str, tenant: str = "") -> None:
        self.register.kept_out(why, address, tenant)

    def _account(self, tenant: str | None) -> Account:
        """The tenant's; where there are no keys, a new one."""
        if tenant is None:
            return Account(self.limits, self.pool, self._without_keys)
        return self._accounts.setdefault(tenant, Account(self.limits, self.pool))

    def _admit(self, hello: Hello, tenant: str | None, account: Account) -> None:
        if hello.version != VERSION:
            raise CallError(
                Code.BAD_VERSION,
                f"this executor speaks protocol version {VERSION}, the client {hello.version}: "
                "install the same release of symbiosis on both sides",
            )
        if self._draining:
            raise CallError(Code.DRAINING, "this executor is shutting down: try again, or use another one")
        if hello.fingerprint not in (None, self.store.fingerprint):
            raise CallError(
                Code.WRONG_MODEL,
                "this executor now serves another model than the one this client joined: "
                "start the executor with the same checkpoint, or wrap the client's model again",
            )
        watches = hello.observer and tenant is None
        alike = sum((s.observer and s.peer.tenant is None) == watches for s in self.sessions.values())
        if watches and alike >= MOST_OBSERVERS:
            raise CallError(Code.LIMIT, f"{MOST_OBSERVERS} observers watch this executor: end one (symbiosis top)")
        if not watches and alike >= self.limits.max_sessions:
            raise CallError(Code.LIMIT, f"all {self.limits.max_sessions} sessions are taken: raise --max-sessions")
        if len(account.readers) >= self.limits.max_tenant_sessions:
            raise CallError(
                Code.LIMIT,
                f"a tenant may have {self.limits.max_tenant_sessions} sessions: end one, or ask for a larger --max-tenant-sessions",
            )

    def admits(self, peer: Peer, seq: int, call: Call) -> bool:
        session: Session = peer.session
        session.heard = monotonic()
        try:
            self._check_room(session, call)
        except Exception as error:  # whatever it is: the executor has other clients
            self._refuse(session, seq, call, call_error(error))
            return False
        return True

    def turns_away(self, peer: Peer, seq: int, call: Call) -> None:
        session: Session = peer.session
        session.heard = monotonic()
        error = busy(BUSY_S, "more calls of this connection, or of its tenant, wait to be read than may")
        self._refuse(session, seq, call, error)

    def _check_room(self, session: Session, call: Call) -> None:
        _check_allowed(session, call)
        if self._draining and not session.observer:
            raise CallError(Code.DRAINING, "this executor is shutting down: the call will be sent again")
        if session.in_flight >= self.limits.max_in_flight:
            raise CallError(Code.LIMIT, f"a session may have {self.limits.max_in_flight} calls in flight: wait for one")
        plan = self._plan(call) if call.op is not Op.STATS else None
        held, scratch = (plan.held, plan.scratch) if plan else (len(self._snapshot), 0)
        session.account.check(session.peer, held, session.held, session.heard, scratch)

    def arrived(self, peer: Peer, seq: int, call: Call, payload: tuple[Tensor, ...]) -> None:
        session: Session = peer.session
        try:
            item = self._item(session, seq, call, payload)
        except Exception as error:  # whatever it is: the executor has other clients
            self._refuse(session, seq, call, call_error(error))
            return
        session.begin(item.work.plan.held)
        session.count(item.work.plan)
        self.batcher.add(item)

    def _refuse(self, session: Session, seq: int, call: Call, error: CallError) -> None:
        if error.code is not Code.GROW:
            self.figures.refused(error.code)
            self._log_refusal(session, call, error.code)
        refuse(session.peer, seq, error)

    def shape(self, call: Call) -> tuple[int, ...]:
        try:
            return self._plan(call).shape
        except CallError as error:
            self.figures.refused(error.code)
            raise

    def shared(self) -> BinaryIO:
        return self.store.shared()

    def results(self, call: Call) -> Shapes:
        plan = self._plan(call)
        return plan.parts if plan.parts and call.op is Op.FORWARD else (plan.shape,)

    def prepare(
        self, peer: Peer, number: int, call: Call, payload: tuple[Tensor, ...], out: Tensor, *others: Tensor
    ) -> Work:
        if call.seeded or call.op is Op.LOOKUP:
            raise CallError(
                Code.UNKNOWN_OP, "seeds and ids are checked with each call, which therefore cannot be registered"
            )
        plan = self._plan(call)
        work = Work(peer, 0, call, payload, out, plan.parts, plan, number, _priority(peer.session, call))
        work.outs = (out, *others) if others else ()
        takes_turns = not work.peer.here or work.peer.tenant is not None
        work.large = not takes_turns and self.engine.join_below <= plan.rows <= self.batcher.max_rows
        self.engine.place(work)
        return work

    def compose(self, peer: Peer, number: int, works: Sequence[Work], words: RoundWords, again: bool) -> Work:
        wanted = self.options.rounds and not self.engine.shares_time
        if self.engine.rounds is None or not (wanted or again):  # who was in the midst of one goes on
            raise CallError(
                Code.UNKNOWN_OP,
                "calls are answered one by one here: MPS does not serve the executor, Triton is missing, or --no-rounds is set",
            )
        large = bool(works) and works[0].large
        if large and self.batcher.policy == "lockstep" and not again:
            raise CallError(Code.UNKNOWN_OP, "large calls take turns under lockstep, and are answered one by one")
        most = (
            math.inf if again or large else self.engine.join_below
        )  # ... which an executor before us measured otherwise
        round = self.engine.rounds.new(tuple(works), words, most, large)
        if number and not again:
            self.engine.rounds.make_room(round)
        first, plan = works[0], plan_of_round(round.key, [work.plan for work in works])
        # those calls of a training step that need no gradient look more urgent
        priority = max(work.priority for work in works)
        return Work(
            peer, 0, first.call, first.payload, first.out, plan=plan, number=number, priority=priority, large=large,
            places=first.places, round=round,
        )  # fmt: skip

    def forget(self, peer: Peer, works: Sequence[Work]) -> None:
        self.cohort.disband()
        if peer.session.in_flight:
            raise CallError(Code.BAD_FRAME, "calls are forgotten when all are answered")
        self.engine.forget(works)

    def rang(self, work: Work) -> bool:
        """On a GPU; what nobody can join is launched at once, but for large calls of training while somebody decodes."""
        session: Session = work.peer.session
        session.heard = now = monotonic()
        if work.priority == Priority.DECODE:
            self.background.decoded = now
        if self.cohort.takes(work, now):
            return True
        if work.large and self.batcher.policy != "lockstep":
            if self.batcher.lives(session.number):  # others may wait for another call of it
                self.cohort.disband()
            self.batcher.away(session.number)
            if work.priority >= Priority.TRAIN and self.background.takes(work, now):
                session.begin()
                return True
        else:
            self.cohort.disband()
            if not self.batcher.alone(session.number, now):
                self._enqueue(work, now)
                return True
        self._launch(work, now)
        return False

    def _launch_in_turn(self, work: Work, now: float) -> None:
        """... and of those that wait there."""
        work.peer.session.end()
        self._launch(work, now)

    def _launch(self, work: Work, now: float) -> None:
        """Without the batcher."""
        session: Session = work.peer.session
        rationed = work.large and work.priority >= Priority.TRAIN
        is_new = work.round is None or not work.round.left
        reply = self.engine.launch(work, rationed and self.background.rations(now))
        seconds = self.engine.estimate(work, work.plan.rows)
        session.account.usage.seconds += seconds
        if is_new:
            session.count(work.plan)
            self.figures.launched(work, reply)
        if rationed:
            self.background.ran(seconds, now)
        if work.round is not None and work.round.left:
            session.begin()
            self.background.put(work)

    def _enqueue(self, work: Work, arrived: float) -> None:
        """A call of a GPU."""
        session: Session = work.peer.session
        plan = work.plan
        session.count(plan)
        session.begin()
        divisible = work.call.by_rows and work.round is None
        self.batcher.add(
            Item(
                session.number, plan.key, plan.rows, work.priority, arrived, work, divisible, plan.joinable, plan.calls
            )
        )

    def _item(self, session: Session, seq: int, call: Call, payload: tuple[Tensor, ...]) -> Item:
        peer = session.peer
        if call.op is Op.STATS:
            payload = (bytes_tensor(self._figures(session.heard)),)
            call = replace(call, op=Op.ECHO, dtype="uint8", shape=tuple(payload[0].shape))
        plan = self._plan(call)
        check_values(call, payload, self.store)
        if call.seeded:  # as it is now: the client may change it
            payload = (payload[0].clone(),)
        out = peer.out(call, plan.shape)
        if out is None:
            out = empty(plan.shape, TORCH_DTYPE[call.dtype], self.device.type == "cuda")
        priority = _priority(session, call)
        if priority == Priority.DECODE:
            self.background.decoded = session.heard
        finite = must_be_finite(call, payload, self.options)
        work = Work(peer, seq, call, payload, out, plan.parts, plan, finite=finite)
        key = ("observer", plan.key) if session.observer else plan.key
        return Item(
            session.number, key, plan.rows, priority, session.heard, work, call.by_rows, plan.joinable,
            price=plan.multiplications, cells=plan.cells, turns=plan.turns,
        )  # fmt: skip

    def _figures(self, now: float) -> bytes:
        """As they are now; or, if they are asked for very often, as they were a moment ago."""
        if not self._snapshot or not self._fresh.wait(now):
            self._fresh.take(1)
            self._snapshot = self.figures.snapshot(self)
        return self._snapshot

    def heard(self, peer: Peer) -> None:
        if peer.session is not None:
            peer.session.heard = monotonic()

    def left(self, peer: Peer, why: str = "left") -> None:
        session: Session | None = peer.session
        if session is not None:
            self.cohort.disband()
            self.background.leave(peer)
            self.batcher.leave(session.number)
            self.sessions.pop(session.number, None)
            session.account.readers.discard(peer)
            session.account.end(session.held, session.in_flight)
            peer.session = None
            self.register.left(session, session.ends_for or why)

    def _answered(self, work: Work, reply: Reply) -> None:
        session: Session | None = work.peer.session
        if _is_counted(work):
            self.figures.answered(work, reply)
        if session is not None:
            session.end(0 if work.number else work.plan.held)  # a GPU's calls lie in memory of the session's own
            session.heard = monotonic()
            if reply.code is not Code.OK:
                self._log_refusal(session, work.call, reply.code)

    def _joined(self, batch: Batch) -> None:
        """Calls of GPUs were answered together."""
        together, now = len(batch.slices), monotonic()
        for item, _, _ in batch.slices:
            peer = item.work.peer
            self.reactor.attempt(peer, peer.count, together, len(item.work.calls))
            session: Session | None = peer.session
            if session is not None:
                session.end()
                session.heard = now
        self.figures.joined(batch)

    def _log_refusal(self, session: Session, call: Call, code: Code) -> None:
        session.refused += 1
        if worth_logging(session.refused):
            layer = self.store.manifest[call.layer].name if call.layer < len(self.store.manifest) else call.layer
            log(
                logging.WARNING, "call refused", session=session.number, code=code.name, op=call.op.name, layer=layer,
                shape=call.shape, dtype=call.dtype, refused=session.refused,
            )  # fmt: skip


def _is_counted(work: Work) -> bool:
    """Whether it shows in the figures: what an observer asks for does not."""
    return work.peer.session is None or not work.peer.session.observer


def _check_allowed(session: Session, call: Call) -> None:
    """Figures are the operator's; who only watches makes no calls."""
    if call.op is Op.STATS and session.peer.tenant is not None:
        raise CallError(
            Code.NOT_ALLOWED,
            "an executor's figures tell of all its tenants: they are the operator's, over local:// or --metrics-port",
        )
    if session.observer and call.op not in (Op.STATS, Op.ECHO):
        raise CallError(
            Code.UNKNOWN_OP, f"an observer may ask for STATS and ECHO, not {call.op.name}: join as a client"
        )


def _priority(session: Session, call: Call) -> int:
    return call.priority if session.priority is None else session.priority
