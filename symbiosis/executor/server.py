"""Sessions and the executor's loop: messages in, checked and queued; batches out to the engine."""

import itertools
import os
import platform
from dataclasses import dataclass, field
from functools import lru_cache
from time import monotonic

import torch
from torch import Tensor

from symbiosis.config import Options
from symbiosis.errors import CallError, Code
from symbiosis.executor.batcher import Batcher, Item
from symbiosis.executor.engine import Engine, Work, bytes_tensor, refuse
from symbiosis.executor.metrics import Figures
from symbiosis.executor.plan import make_plan
from symbiosis.executor.store import Store
from symbiosis.executor.validate import check_values
from symbiosis.protocol import VERSION, Call, Hello, Op, Reply, Welcome
from symbiosis.transport import Listener, Peer, Reactor, listen
from symbiosis.transport.tensors import TORCH_DTYPE

TICK_S = 0.5


@dataclass(slots=True)
class Session:
    """What the executor knows of one client."""

    number: int
    peer: Peer
    client: str
    priority: int | None
    observer: bool
    heard: float
    in_flight: int = 0
    calls: int = 0
    rows: int = 0
    bytes: int = 0
    joined: float = field(default_factory=monotonic)


class Server:
    """Owns the reactor's thread. Everything but `stop` and `drain` runs in it."""

    def __init__(self, store: Store, options: Options) -> None:
        self.store, self.options, self.limits = store, options, options.limits
        self.figures = Figures(store)
        self.sessions: dict[int, Session] = {}
        self.batcher = Batcher(options.policy, options.max_wait_us / 1e6, options.max_batch_tokens)
        self.engine = Engine(store, self._answered)
        self.reactor = Reactor()
        self.listeners: list[Listener] = []
        self._numbers = itertools.count(1)
        self._draining = self._stopped = False
        self._next_tick = 0.0
        self._plan = lru_cache(maxsize=1 << 14)(lambda call: make_plan(call, store, options))

    def listen(self, urls: tuple[str, ...]) -> None:
        self.listeners += [listen(url, self.reactor, self) for url in urls]

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Serve until `stop`, or until `drain` has answered everything."""
        torch.set_grad_enabled(False)  # of this thread
        try:
            while not self._stopped:
                self.reactor.poll(self._patience())
                self._work()
                if self._draining and not len(self.batcher):
                    break
        finally:
            for listener in self.listeners:
                listener.close()

    def _work(self) -> None:
        """Run what is ready, taking along what arrives meanwhile."""
        while batch := self.batcher.next_batch(monotonic()):
            seconds = self.engine.step(batch)
            self.figures.ran(batch, seconds)
            self.batcher.done(batch, seconds, monotonic())
            if not len(self.batcher):
                break
            self.reactor.poll(0)
        if monotonic() >= self._next_tick:
            self._tick()

    def _patience(self) -> float:
        now = monotonic()
        return max(0.0, min(self.batcher.wake_at(), self._next_tick) - now)

    def _tick(self) -> None:
        """Once in a while: signs of life, and sessions that gave none."""
        now = self._next_tick = monotonic()
        self._next_tick += TICK_S
        for listener in self.listeners:
            listener.tick()
        for session in list(self.sessions.values()):
            if not session.in_flight and now - session.heard > self.options.heartbeat_s:
                self.figures.dropped += 1
                session.peer.close()

    def drain(self) -> None:
        """Take no new sessions, answer what has come, then end `run`. Callable from any thread or signal handler."""
        self._draining = True
        self.reactor.wake()

    def stop(self) -> None:
        """End `run` at once."""
        self._stopped = True
        self.reactor.wake()

    # ------------------------------------------------------------------ what listeners tell (transport.Inbox)

    def joined(self, peer: Peer, hello: Hello) -> Welcome:
        self._admit(hello)
        number = next(self._numbers)
        peer.session = Session(number, peer, hello.client, hello.priority, hello.observer, monotonic())
        self.sessions[number] = peer.session
        self.batcher.join(number)
        return Welcome(
            number, self.store.fingerprint, self.store.manifest, self.store.config_json, self.store.model_class,
            self.limits, self.options.allow_read, self.options.heartbeat_s, f"{platform.node()}:{os.getpid()}",
        )  # fmt: skip

    def _admit(self, hello: Hello) -> None:
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
        if len(self.sessions) >= self.limits.max_sessions:
            raise CallError(Code.LIMIT, f"all {self.limits.max_sessions} sessions are taken: raise --max-sessions")

    def arrived(self, peer: Peer, seq: int, call: Call, payload: tuple[Tensor, ...]) -> None:
        session: Session = peer.session
        session.heard = monotonic()
        try:
            item = self._item(session, seq, call, payload)
        except CallError as error:
            if error.code is not Code.GROW:
                self.figures.refused(error.code)
            refuse(peer, seq, error)
            return
        if item is None:
            return
        session.in_flight += 1
        session.calls += 1
        session.rows += item.rows
        self.batcher.add(item)

    def _item(self, session: Session, seq: int, call: Call, payload: tuple[Tensor, ...]) -> Item | None:
        peer = session.peer
        if call.op is Op.STATS:
            snapshot = bytes_tensor(self.figures.snapshot(self))
            peer.out(call, tuple(snapshot.shape))
            peer.reply(Reply(seq, shape=tuple(snapshot.shape)), snapshot)
            return None
        if session.in_flight >= self.limits.max_in_flight:
            raise CallError(Code.LIMIT, f"a session may have {self.limits.max_in_flight} calls in flight: wait for one")
        plan = self._plan(call)
        check_values(call, payload, self.store, self.options)
        out = peer.out(call, plan.shape)
        if out is None:
            out = torch.empty(plan.shape, dtype=TORCH_DTYPE[call.dtype])
        session.bytes += plan.nbytes
        priority = call.priority if session.priority is None else session.priority
        work = Work(peer, seq, call, payload, out)
        return Item(session.number, plan.key, plan.rows, priority, session.heard, work, plan.divisible, plan.joinable)

    def heard(self, peer: Peer) -> None:
        if peer.session is not None:
            peer.session.heard = monotonic()

    def left(self, peer: Peer) -> None:
        if peer.session is not None:
            self.batcher.leave(peer.session.number)
            self.sessions.pop(peer.session.number, None)
            peer.session = None

    def _answered(self, work: Work, reply: Reply) -> None:
        session: Session | None = work.peer.session
        self.figures.answered(work.call, reply, work.peer.transport)
        if session is not None:
            session.in_flight -= 1
            session.heard = monotonic()

