"""The executor's loop: it reads messages, runs batches, and watches for clients that have gone silent."""

import errno
import logging
import os
import resource
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import torch

from symbiosis.base.curve_keys import Keyring
from symbiosis.base.logs import worth_logging
from symbiosis.errors import Code, ConfigError
from symbiosis.executor.accounts import ServedSession
from symbiosis.executor.compute.probe import ROWS as PROBED_ROWS
from symbiosis.executor.compute.probe import seconds_by_kind
from symbiosis.executor.dispatch import Dispatch
from symbiosis.executor.ledger import Ledger
from symbiosis.executor.model.store import Store
from symbiosis.executor.observe.join_log import JoinLog
from symbiosis.executor.observe.latest_figures import LatestFigures, snapshot_of
from symbiosis.executor.observe.log import Alarm, AuditLog, log, log_mistake
from symbiosis.executor.observe.snapshot import Snapshot
from symbiosis.executor.options import Options
from symbiosis.executor.scheduling.batcher import Batcher
from symbiosis.executor.scheduling.contention import Contention
from symbiosis.executor.scheduling.queue import Batch
from symbiosis.executor.scheduling.rules import POLICIES
from symbiosis.executor.sessions import Sessions
from symbiosis.kernels.few_rows import MOST_ROWS
from symbiosis.transport import Listener, Reactor, listen
from symbiosis.transport.reactor import Endable

# On a GPU, on a CPU. On a GPU a training step goes whole, at the cost of those who decode, until its program is told that somebody does.
TICK_S = {True: 0.1, False: 0.5}
LONG_S = 1e-3  # during a product this long another worker runs the loop; waking one costs tens of microseconds
MAX_WAIT_US = {True: 2_000, False: 10_000}  # on a GPU, on a CPU: the time of a few products
# A product is measured alone on the GPU, and takes longer beside the clients' kernels. On a CPU, threads that wait for a core are late.
SPREAD, OVERDUE = {True: 4.0, False: 1.0}, {True: 1.5, False: 3.0}
NO_DESCRIPTOR = (
    "no descriptor is left: new clients wait until connections end. Start the executor with a higher limit (ulimit -Hn), or lower "
    "--max-tenant-sessions"
)


class ExecutorLoop:
    """Owns the reactor and the listeners. `stop`, `drain`, `health` and `snapshot` may be called from any thread; everything else runs in the worker that runs the loop."""

    dispatch_class: type[Dispatch] = Dispatch

    def __init__(self, store: Store, options: Options) -> None:
        options.check_device(store.on_gpu)
        if store.shard not in ("", options.shard):
            raise ConfigError(
                f"these ranks hold the model by {store.shard}, and shard says {options.shard}: a model in memory is held by layers"
            )
        self.store, self.options = store, options
        keyring = Keyring.open(options.key, options.tenants) if options.key and options.tenants else None
        self.reactor = Reactor(self._failed)
        self.ledger = Ledger(store, self.reactor.attempt)
        audit = AuditLog(Path(options.audit_log)) if options.audit_log else None
        self.register = JoinLog(self.ledger, audit, keyring.tenants if keyring else None)
        self.sessions = Sessions(store, options, self.register, keyed=keyring is not None)
        self.batcher = _batcher(options, store.on_gpu)
        if not store.on_gpu:
            self.batcher.costs.measured(seconds_by_kind(bool(options.integers)), PROBED_ROWS)
        self.dispatch = self.dispatch_class(
            store, options, keyring, self.sessions, self.register, self.ledger, self.batcher,
            LatestFigures(lambda: self.snapshot()), self.reactor.attempt,
        )  # fmt: skip
        self.engine, self.gpu = self.dispatch.engine, self.dispatch.gpu
        self.contention = Contention() if self.batcher.rules.policy.foresees and not store.on_gpu else None
        self.listeners: list[Listener] = []
        self._more = self._stopped = False
        self._loop = threading.Lock()  # held by the worker that runs it
        self._failure: BaseException | None = None  # what ended the first worker that failed
        self._mistakes = 0  # bugs of the executor, each of which ended one peer
        self._computing, self._computed = 0, deque[tuple[Batch, float]]()  # products of the other workers
        self._next_tick, self._tick_s = 0.0, TICK_S[store.on_gpu]
        self._no_descriptor = Alarm()

    def listen(self, urls: tuple[str, ...]) -> None:
        """Answer at these endpoints as well; at none, if one cannot be had."""
        try:
            for url in urls:
                self.listeners.append(listen(url, self.reactor, self.dispatch))
        except BaseException:
            for listener in self.listeners:
                listener.close()
            raise

    # ------------------------------------------------------------------ the loop

    def run(self, ready: Callable[[], None]) -> None:
        """Serve until `stop`, or until `drain` has answered everything. `ready` is called when nothing more is to be prepared, which may
        take long on a GPU whose kernels have yet to be compiled."""
        self.register.began()
        try:
            self.gpu.use_stream()
            self.batcher.rules.batch_below = self.gpu.batch_below
            self._next_tick = monotonic()
            ready()
            self._run_workers()
        finally:
            self._close()
        if self._failure:
            raise self._failure

    def _run_workers(self) -> None:
        others = [threading.Thread(target=self._work, daemon=True) for _ in range(self.options.workers - 1)]
        for thread in others:
            thread.start()
        self._work()
        for thread in others:
            thread.join()

    def _close(self) -> None:
        for session in self.sessions.values():
            session.ends_for = "executor stopped"
        for listener in self.listeners:
            listener.close()
        self.register.ended()
        self.reactor.close()
        self.store.close_files()
        if self.contention:
            self.contention.close()

    def _work(self) -> None:
        """Run one worker. One worker at a time runs the loop: it listens, decides and answers. To compute a long product, it leaves the
        loop to another."""
        torch.set_grad_enabled(False)  # a setting of this thread
        torch.set_flush_denormal(True)  # here and in threads that compute for it: denormal numbers are 30 times as slow
        torch.get_num_threads()  # applies that number to this thread: until then BLAS takes all cores, and so rounds differently
        with self._loop:
            try:
                while not self._over():
                    self.reactor.poll(self._sleep_s())
                    self._step()
            except BaseException as error:
                self._failure = self._failure or error
            self.stop()  # ends the other workers, too

    def _over(self) -> bool:
        if self._stopped or not self.dispatch.draining:
            return self._stopped
        rounds = self.gpu.rounds
        return not (self._computing or self.dispatch.waiting or (rounds is not None and rounds.running))

    def _step(self) -> None:
        """Reply for the products that other workers have finished, then run one batch if one is ready."""
        while self._computed:
            self._answer(*self._computed.popleft())
        if monotonic() >= self._next_tick or self.dispatch.has_news:
            self._tick()
        rounds = self.gpu.rounds
        if rounds is not None and rounds.running:
            self.reactor.attempt(None, rounds.look)
        now = monotonic()
        if self.dispatch.has_prepared and self.dispatch.run_due(now):
            return
        if self.contention and len(self.batcher.callers.live) > 1 and not self.batcher.idle:  # else nothing waits
            self.contention.look()
            self.batcher.rules.contention = self.contention.now
        batch = self.batcher.next_batch(now)
        if batch is None:
            self._more = False
        elif self.options.workers > 1 and self._leaves_time(batch):
            self._more = not self.batcher.idle
            self._compute_meanwhile(batch)
        else:
            self._ran(batch, self.engine.step(batch))
            self._more = not self.batcher.idle

    def _leaves_time(self, batch: Batch) -> bool:
        """Whether to leave the loop to another worker while `batch` is computed. Not for a few rows: calls that arrive meanwhile should gather, because
        together they run faster, and on all workers' cores."""
        gathers = batch.rows <= MOST_ROWS and self.batcher.rules.policy.batches
        return not gathers and self.batcher.costs.of_turn(batch) > LONG_S

    def _compute_meanwhile(self, batch: Batch) -> None:
        """Compute `batch` while another worker runs the loop, which then sends the replies."""
        self._computing += 1
        self._loop.release()
        try:
            seconds = self.engine.compute(batch)
            self._computed.append((batch, seconds))
            self.reactor.wake()  # so that the worker in the loop replies at once
        finally:
            self._loop.acquire()

    def _answer(self, batch: Batch, seconds: float) -> None:
        self._computing -= 1
        self.engine.reply(batch, seconds)
        self._ran(batch, seconds)

    def _ran(self, batch: Batch, seconds: float) -> None:
        self.ledger.ran(batch, seconds)
        self.batcher.done(batch, seconds, max(monotonic(), batch.formed + seconds))  # a GPU may still be computing

    def _sleep_s(self) -> float:
        """Return how long to sleep if nothing arrives: not at all while there is more to run."""
        if self._more:
            return 0.0
        return max(0.0, min(self.dispatch.wake_at(), self._next_tick) - monotonic())

    def _tick(self) -> None:
        """Do what is due every half second, on a GPU more often, and when somebody begins to make tokens: look after listeners, and drop sessions that have been
        silent for too long."""
        now = monotonic()
        late, self._next_tick = now - self._next_tick, now + self._tick_s
        self.dispatch.has_news = False
        self._look_for_descriptors(now)
        for listener in self.listeners:
            self.reactor.attempt(None, listener.tick)
        self.reactor.attempt(None, self.register.look)
        if late > self.options.heartbeat_s / 2:  # this process was frozen, and has yet to read what came meanwhile
            return
        for session in self.sessions.silent(now):
            self.ledger.dropped += 1
            session.ends_for = "silent"
            log(logging.WARNING, "session dropped", session=session.number, silent_s=round(now - session.heard, 1))
            self.reactor.attempt(session.peer, session.peer.close)

    def _failed(self, peer: Endable | None, error: Exception) -> None:
        """Log a bug of the executor that has ended one peer. If the GPU is broken, raise, which ends the executor."""
        if not self.gpu.works:
            raise error
        self._mistakes += 1
        self.ledger.refused(Code.INTERNAL)
        if worth_logging(self._mistakes):
            session: ServedSession | None = getattr(peer, "session", None)
            log_mistake(
                "a bug in the executor ended a session, or some of its work: please report it", error,
                session=session and session.number, transport=getattr(peer, "transport", None), times=self._mistakes,
            )  # fmt: skip

    def _look_for_descriptors(self, now: float) -> None:
        """Warn if no file descriptor is left: then no client can join, and ZeroMQ does not say so."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._no_descriptor.sounds(now):
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                log(logging.WARNING, NO_DESCRIPTOR, descriptors=limit, sessions=len(self.sessions))

    def drain(self) -> None:
        """Answer the calls that have arrived, take no new ones, then end `run`. Callable from any thread or signal handler."""
        self.dispatch.draining = True
        self.reactor.call_soon(self.dispatch.wait_for_nobody)
        self.retire()

    def retire(self) -> bool:
        """Leave the endpoints to a successor, which may start now, let nobody new in, and return whether anybody is joined. Callable from any thread
        or signal handler."""
        self.sessions.closed = True
        self.reactor.call_soon(self._stop_listening)
        return self.clients > 0

    def health(self, stalled_s: float) -> str:
        """Return `ready` while calls are answered, else `starting`, `draining`, or `stalled` if the loop has not run for `stalled_s`
        seconds. Callable from any thread."""
        if self.dispatch.draining or self._stopped:
            return "draining"
        if not self._next_tick:
            return "starting"
        return "stalled" if self.turned_s > stalled_s else "ready"

    @property
    def turned_s(self) -> float:
        """Seconds since the loop was last due to look at its clock, which it does every half second or more often. Callable from any thread."""
        return max(0.0, monotonic() - self._next_tick + self._tick_s)

    @property
    def fingerprint(self) -> str:
        return self.store.fingerprint

    @property
    def shares_weights(self) -> bool:
        """Whether clients may map weights: none do that lie packed on a GPU, whatever the options say."""
        return bool(self.store.files)

    @property
    def clients(self) -> int:
        """How many are joined, those aside that only look. Callable from any thread."""
        return sum(not session.observer for session in list(self.sessions.values()))

    def stop(self) -> None:
        """End `run` at once."""
        self._stopped = True
        self.reactor.wake()

    def _stop_listening(self) -> None:
        for listener in self.listeners:
            listener.stop_accepting()

    def snapshot(self) -> Snapshot:
        """Return the current figures. Callable from any thread."""
        return snapshot_of(
            self.ledger, list(self.sessions.values()), self.sessions.usage, self.batcher.rules.policy.name,
            [listener.url for listener in self.listeners], self.dispatch.waiting,
        )  # fmt: skip


def _batcher(options: Options, on_gpu: bool) -> Batcher:
    max_wait_us = MAX_WAIT_US[on_gpu] if options.max_wait_us is None else options.max_wait_us
    return Batcher(
        POLICIES[options.policy],
        max_wait_us / 1e6,
        options.max_batch_tokens,
        options.heartbeat_s,
        options.batch_invariant,
        spread=SPREAD[on_gpu],
        overdue=OVERDUE[on_gpu],
    )
