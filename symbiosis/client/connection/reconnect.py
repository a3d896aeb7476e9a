"""A connection that lasts: it is joined at the first call, and again whenever it is lost, with the same executor or a replica.

An executor keeps nothing between calls. So a call that got no answer is simply sent again: to the next replica if there are several, else
to the same executor when it is back. Each attempt uses a connection on which nothing is unanswered, so an answer that comes late is never
taken for another one.
"""

import itertools
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeGuard

import torch
from torch import Tensor

from symbiosis import transport
from symbiosis.build import build
from symbiosis.client import arguments
from symbiosis.client.connection import named_endpoints
from symbiosis.client.connection.lifetime import beat_every, beat_from_now_on
from symbiosis.client.direct.mapped import Mapped
from symbiosis.client.stats import Stats
from symbiosis.errors import CallError, Code, ConnectionLost, ExecutorUnavailable, HandshakeFailed, ProtocolError
from symbiosis.protocol import Call, Hello, Layer, Priority, Reply, Welcome
from symbiosis.transport.patience import AWAY, JOIN_S, LONGEST_PAUSE_S, Patience, Reason, unavailable
from symbiosis.transport.reply_checks import MoreRoom
from symbiosis.transport.tensors import CPU, Shapes, on_host

PATIENCE_S = arguments.seconds_in("SYMBIOSIS_PATIENCE_S", 60.0)  # how long a lost executor may be away
PATIENCE = "patience=, $SYMBIOSIS_PATIENCE_S"
FIRST_WAIT = "wait=, --wait-s"  # where the first wait has been told by itself
LEAST_JOIN_S = 0.1  # how long a join may take when the patience is over
CALL_S = arguments.seconds_in("SYMBIOSIS_CALL_TIMEOUT_S", 120.0)  # how long one call may take, before it is sent again
FIRST_ROOM = 64 << 20  # bytes of the largest reply at first: for a larger one a session joins anew
KEEPS_OUT = frozenset((Code.WRONG_MODEL, Code.LIMIT, Code.NOT_ALLOWED))  # of a join: another executor may let us in
FIRST_PAUSE_S = 0.02  # between two attempts
LONGEST_FIRST_PAUSE_S = 0.1  # ... to join for the first time
FIRST_WAIT_S, LONGEST_WAIT_S = (
    1e-3,
    0.05,
)  # before a busy executor is asked again at least: at first, and after some times
REFUSES = "%s is back and refuses this client, which goes on with the weights that it has mapped: %s"

logger = logging.getLogger("symbiosis")
Answer = tuple[Reply, list[Tensor]]


class Reconnecting:
    """One connection at a time, to one executor or to whichever of its replicas answers. Its calls go one by one, under `_lock`."""

    def __init__(
        self,
        endpoint: str | Sequence[str],
        priority: Priority | None = None,
        fingerprint: str | None = None,
        observer: bool = False,
        patience: float = PATIENCE_S,
        timeout: float = CALL_S,
        wait: float | None = 0.0,
        share: bool = False,
    ) -> None:
        """With `share`, the served weights are mapped if the executor offers that. `wait`: how long the first join may take; None: as
        `patience` says, where it is another process."""
        self._names = arguments.endpoints(endpoint)  # URLs, or names of models in clusters
        self.timeout = arguments.timeout(timeout)
        self.patience, asked = arguments.seconds("patience", patience), arguments.seconds("wait", wait or 0.0)
        # a cluster starts what it tells of, and knows which models there will never be
        others = wait is None and not all(map(transport.is_within_process, self._names))
        self.wait = max(asked, self.patience if others or named_endpoints.is_by_name(self._names) else 0.0)
        self._first_wait = FIRST_WAIT if asked and self.wait == asked else PATIENCE
        self.endpoints = named_endpoints.located_within(self._names, self.wait, asked)
        self.endpoint = self.endpoints[0]  # the one in use
        self.priority, self.fingerprint, self.observer = priority, fingerprint, observer
        self.share = arguments.flag("share", share)
        self.mapped: Mapped | None = None  # the served weights, where this client may multiply by itself
        self._is_away = False  # the executor, from which weights are mapped
        self.stats = Stats()
        self._lock = threading.Lock()
        self._is_beating = False  # whether it is the heartbeat that holds the lock
        self._seq = itertools.count(1)
        self._connection: transport.Connection | None = None
        self._device = CPU  # where rows may be when they need not go through the host
        self._room = FIRST_ROOM  # bytes of the largest reply
        self._waiting: Patience | None = None  # for an executor that is away
        self._refusing: dict[str, CallError] = {}  # endpoints that do not let this client in, and why
        self._welcome: Welcome | None = None

    @property
    def welcome(self) -> Welcome:
        """What the executor said when this session joined."""
        if self._welcome is None:
            with self._lock:
                try:
                    self._connected()
                except ConnectionLost:
                    if self._welcome is None:
                        raise  # else it has joined, and broke since: the first call joins again
        assert self._welcome
        return self._welcome

    @property
    def manifest(self) -> list[Layer]:
        return self.welcome.manifest

    @property
    def may_read(self) -> bool:
        """Whether weights may be read: the provider allows it, or they are mapped."""
        if self.share and self._connection is None and not has_weights(self.mapped) and self.welcome.shares_weights:
            with suppress(ConnectionLost), self._lock:
                self._connected()  # after `close`, or in a forked child
        return self.welcome.allow_read or has_weights(self.mapped)

    def name(self, layer: int) -> str:
        known = self._welcome.manifest if self._welcome else []
        return known[layer].name if layer < len(known) else f"layer {layer}"

    # ------------------------------------------------------------------ calls

    def _call_again(
        self, error: BaseException, call: Call, payload: tuple[Tensor, ...], shapes: Shapes
    ) -> Answer | None:
        """Make a call that failed again: if the connection is lost, join the next replica, or the same executor again, until the
        patience is over. Returns None if the executor is away and the weights are mapped, so that the caller can compute locally."""
        end, pause, lost, least = time.perf_counter() + self.patience, FIRST_PAUSE_S, 0, FIRST_WAIT_S
        try:
            while True:
                if isinstance(error, MoreRoom):
                    self._room = 2 * error.nbytes
                    self._join_anew()
                elif not isinstance(
                    error, ConnectionLost | CallError
                ):  # interrupted: the next call must not meet this one's reply
                    self._disconnect()
                    raise error
                elif _says_when(error) and time.perf_counter() + error.retry_s <= end:
                    self._slow_down(error, least)
                    least = min(2 * least, LONGEST_WAIT_S)
                elif (mapped := mapped_on_cpu(self.mapped)) is not None and is_away(error) and mapped.knows(call):
                    self._disconnect()
                    return None
                else:
                    self._look_elsewhere(error)
                    lost += 1
                    if not lost % len(self.endpoints):  # all were asked
                        time.sleep(pause)
                        pause = min(2 * pause, LONGEST_PAUSE_S)
                try:
                    return call_once(self._connected(), next(self._seq), call, payload, self.timeout, shapes)
                except BaseException as another:
                    error = another
        finally:
            if self._waiting is not None:
                self._waiting.end(self.endpoint if self._connection else None)
                self._waiting = None
                self._refusing.clear()  # the next wait asks all of them again
            del error  # which holds this frame, and the rows with it

    def _look_elsewhere(self, error: Exception) -> None:
        """Turn to another executor after a call was lost. Raises if there will be no other attempt."""
        away = is_away(error) and not isinstance(error, ExecutorUnavailable)  # which says that nobody was ever there
        if away or isinstance(error, ProtocolError):  # after which nothing that comes is to be trusted
            self._disconnect()
        if not away:
            raise error
        if self._waiting is None:
            self._waiting = Patience(self.endpoints, self.patience, PATIENCE)
        self._waiting.reasons[self.endpoint] = Reason.of(error)
        gone = self._welcome is None or not any(map(transport.may_come_back, self.endpoints))
        if gone or self._waiting.left < 0:
            in_vain = unavailable(self._waiting.reasons, "" if gone else PATIENCE)
            raise next(iter(self._refusing.values()), in_vain) from None
        self._turn_to_next()
        self.stats.retries += 1

    def _slow_down(self, error: CallError, least: float) -> None:
        """Wait as long as the executor says (a little longer, so that not all clients return at once), with heartbeats; but `least` seconds."""
        if not self.stats.slowed_s:
            logger.warning("%s slows this client down: %s", self.endpoint, error.message)
        begun = time.perf_counter()
        end = begun + max(least, error.retry_s) * random.uniform(1.0, 1.25)
        while (left := end - time.perf_counter()) > 0 and self._connection and self._welcome:
            time.sleep(min(left, beat_every(self._connection)))
            self._connection.beat()
        self.stats.slowed_s += time.perf_counter() - begun

    # ------------------------------------------------------------------ joins

    def _connected(self) -> transport.Connection:
        return self._connection or self._connect()

    @torch.inference_mode(False)  # tensors that are made here are used in whatever mode calls are made later
    def _connect(self) -> transport.Connection:
        seconds = self._waiting.left / len(self.endpoints) if self._waiting else JOIN_S
        made = self._connection = self._join(seconds) if self._welcome else self._join_first()
        self.stats.reconnects += self._is_reconnect()
        self._welcome = made.welcome
        self.fingerprint = self._welcome.fingerprint
        if self._is_away:
            logger.info("%s is back", self.endpoint)
        self._is_away = False
        if self.share:
            self._map(made)
        connection = weakref.ref(made)
        beat_from_now_on(self, beat_every(made), lambda alive: alive._beats(connection()))
        return made

    def _map(self, connection: transport.Connection) -> None:
        """Map the served weights, if the executor shares them. The weights of a previous executor are freed once unused."""
        try:
            weights = connection.served_weights()
        except ConnectionLost:
            self._disconnect()  # else a late answer would be taken for that of another question
            raise
        except OSError as error:  # of this process: it has no memory or descriptors left
            logger.warning("the weights of %s cannot be mapped (%s), so each product is a call", self.endpoint, error)
            return
        before = mapped_on_cpu(self.mapped)
        if weights:
            mapped = before or Mapped(connection.welcome.manifest, self.priority, CPU)
            mapped.join(weights, connection.page)
            self.mapped = mapped
        elif before is not None and before.suffices:  # who answers a call by these weights now keeps them until then
            self.mapped = Mapped(connection.welcome.manifest, self.priority, CPU).take_over(before)

    def look_for_executor(self) -> bool:
        """Whether an executor is back, for a session that went on alone when its executor went away."""
        with self._held_by_heartbeat() as held:
            try:
                if held:
                    self._connected()
            except ConnectionLost:
                self._turn_to_next()
            except CallError as error:
                if self.endpoint not in self._refusing:
                    logger.warning(REFUSES, self.endpoint, error)
                self._refusing[self.endpoint] = error
                self._turn_to_next()
        return self._connection is not None

    def _is_reconnect(self) -> bool:
        """Whether a join that succeeded makes up for a connection that was lost."""
        return self._welcome is not None

    def _join(self, seconds: float) -> transport.Connection:
        """Ask the executor in use to let this client in, for about so long."""
        try:
            return self._join_within(min(JOIN_S, max(LEAST_JOIN_S, seconds)))
        except CallError as error:
            if len(self.endpoints) == 1 or error.code not in KEEPS_OUT:
                raise
            self._say_who_refuses(error)
            raise HandshakeFailed(error.message) from None

    def _join_within(self, seconds: float) -> transport.Connection:
        """Return one more connection to the executor in use."""
        joined = transport.connect(self.endpoint, self._hello(), seconds, self._device, self._room)
        if self._welcome is not None:
            must_serve_the_same(joined, self._welcome.manifest, self.endpoint)
        return joined

    def _say_who_refuses(self, error: CallError) -> None:
        """Log once that one of several executors does not admit this client and is skipped."""
        if self.endpoint not in self._refusing:
            logger.warning("%s does not serve this client and is skipped: %s", self.endpoint, error.message)
        self._refusing[self.endpoint] = error

    def _join_first(self) -> transport.Connection:
        """Join whichever replica answers. Waits for one that is being started, or started again, and cannot tell it from one that never comes."""
        attempt_s = JOIN_S * len(self.endpoints)  # by each, whole, if there is no patience at all
        waiting = Patience(self.endpoints, self.wait or attempt_s, self._first_wait)
        connection, pause = None, FIRST_PAUSE_S
        may_come = any(map(transport.may_come_back, self.endpoints))
        longer = "" if all(map(transport.is_within_process, self.endpoints)) else self._first_wait
        try:
            while True:
                connection = self._ask_each(waiting)
                if connection is not None:
                    return connection
                if not may_come or time.monotonic() > waiting.begun + self.wait:
                    raise next(iter(self._refusing.values()), unavailable(waiting.reasons, longer)) from None
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_FIRST_PAUSE_S)
        finally:
            waiting.end(self.endpoint if connection else None)
            self._refusing.clear()

    def _ask_each(self, waiting: Patience) -> transport.Connection | None:
        """Return a connection to the first executor that admits us. What is left of the wait is shared among those still to be asked."""
        for others in reversed(range(len(self.endpoints))):
            try:
                return self._join(waiting.left / (1 + others))
            except (ConnectionLost, CallError) as error:
                if not is_away(error):
                    raise
                waiting.reasons[self.endpoint] = Reason.of(error)
                self._turn_to_next()
        return None

    def _turn_to_next(self) -> None:
        self.endpoints = named_endpoints.brought_up_to_date(self.endpoints, self._names)
        self.endpoint = named_endpoints.after(self.endpoint, self.endpoints)

    def _hello(self, device: str | None = None) -> Hello:
        client = f"pid {os.getpid()}"
        return Hello(
            client=client,
            priority=self.priority,
            fingerprint=self.fingerprint,
            observer=self.observer,
            device=device,
            build=build(),
        )

    def _join_for(self, device: torch.device) -> None:
        """Join again, as a client whose rows are on a GPU."""
        if self._device.type == "cuda":
            logger.warning(
                "rows of %s already go by NCCL, so those of %s go through the host's memory", self._device, device
            )
            return
        self._device = device
        self._join_anew()

    def _join_anew(self) -> None:
        """Replace the current connection. Nothing was lost, so it does not count as a reconnect."""
        reconnects = self.stats.reconnects
        self._disconnect()
        try:
            self._connected()
        except ConnectionLost:
            pass  # the call looks for another one
        except CallError as error:
            if error.code not in (Code.DRAINING, Code.LIMIT):
                raise
        self.stats.reconnects = reconnects

    def _disconnect(self) -> None:
        if self._connection is not None:
            if (mapped := mapped_on_cpu(self.mapped)) is not None:
                if not self._connection.is_lost:
                    mapped.report()
                elif mapped.suffices:
                    logger.warning(AWAY, self.endpoint)
                mapped.leave()
                self._is_away = mapped.suffices
            self._connection.close()
            self._connection = None

    # ------------------------------------------------------------------ signs of life

    def _beats(self, connection: transport.Connection | None) -> bool:
        """Beat as long as this is the connection in use, or until there is another one."""
        if self._connection is None and self._is_away:
            return not self.look_for_executor()
        if connection is None or self._connection is not connection:
            return False
        self.beat()
        return True

    @contextmanager
    def _held_by_heartbeat(self) -> Iterator[bool]:
        """Hold the connection for the heartbeat, and yield True; or False, if a call is under way."""
        if not self._lock.acquire(blocking=False):
            yield False
            return
        self._is_beating = True
        try:
            yield True
        finally:
            self._is_beating = False
            self._lock.release()

    def beat(self) -> None:
        """Tell the executor that this client lives; during a call it knows anyway."""
        with self._held_by_heartbeat() as held:
            if held and self._connection is not None:
                self._connection.beat()
                if (mapped := mapped_on_cpu(self.mapped)) is not None:
                    if self._connection.is_lost:
                        self._disconnect()
                    else:
                        mapped.report()


def has_weights(mapped: Mapped | None) -> bool:
    return mapped is not None and mapped.suffices


def mapped_on_cpu(mapped: Mapped | None) -> Mapped | None:
    """The weights that are mapped by the connection itself, not by the line of a GPU."""
    return mapped if mapped is not None and mapped.device is CPU else None


def must_serve_the_same(joined: transport.Connection, layers: Sequence[Layer], endpoint: str) -> None:
    """Refuse an executor that serves the same weights as other kinds of layer. (A replica may serve fewer.)"""
    for now, then in zip(joined.welcome.manifest, layers, strict=True):
        if now != then and "client" not in (now.kind, then.kind):
            joined.close()
            raise CallError(Code.WRONG_MODEL, f"{endpoint} now serves {now.name} as another kind of layer")


def call_once(
    connection: transport.Connection,
    seq: int,
    call: Call,
    payload: tuple[Tensor, ...],
    timeout: float,
    shapes: Shapes,
) -> Answer:
    """Make a call over this connection and return the answer. Raises `CallError` if the executor refuses the call."""
    connection.welcome.limits.check(call)
    if payload and payload[0].device.type != "cpu" and payload[0].device != connection.device:
        payload = tuple(map(on_host, payload))
    reply, results = connection.call(seq, call, payload, timeout, shapes)
    if reply.code is not Code.OK:
        text = bytes(results[0].numpy()).decode(errors="replace")
        raise CallError.told(reply.code, text, reply.wait_us / 1e6)
    return reply, results


def is_away(error: Exception) -> bool:
    """Whether this error says that the executor is lost or about to end, so that another one may serve the call."""
    return isinstance(error, ConnectionLost) or (isinstance(error, CallError) and error.code is Code.DRAINING)


def _says_when(error: Exception) -> TypeGuard[CallError]:
    """Whether the executor is busy and says when to repeat the call."""
    return isinstance(error, CallError) and error.code is Code.BUSY
