"""One client's connection to an executor: it reconnects, resends, keeps count, and is safe over threads, forks and pickling.

An executor keeps nothing between calls, so a call whose answer did not come is simply sent again: to the next replica where
there are several, else to the same executor when it is back. Each attempt has a connection of its own, or one on which nothing
is unanswered: so an answer that comes late meets nobody.
"""

import atexit
import itertools
import logging
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from msgspec.structs import replace
from torch import Tensor

from symbiosis import transport
from symbiosis.client.calls import (
    call_of,
    goes_in_parts,
    parts_of,
    refuse_tracers,
    refuse_transforms,
    rows_call,
    shape_of_result,
    unshared,
)
from symbiosis.client.groups import Groups, Member
from symbiosis.client.stats import Stats
from symbiosis.errors import (
    CallError,
    CaptureError,
    Code,
    ConfigError,
    ConnectionLost,
    ExecutorUnavailable,
    ProtocolError,
    RemoteWeightError,
)
from symbiosis.kernels import with_triton
from symbiosis.protocol import Call, Hello, Layer, Op, Priority, Reply, View, Welcome
from symbiosis.transport.accepted import MoreRoom
from symbiosis.transport.tensors import CPU, TORCH_DTYPE, Shapes, on_host
from symbiosis.transport.waiting import Waiting

if TYPE_CHECKING:
    from symbiosis.transport.cuda_client import DeviceLine

BY_DEVICE = frozenset((Op.FORWARD, Op.DGRAD, Op.PRODUCT, Op.LEFT, Op.GROUPED))  # whose payload no CPU must have seen
PATIENCE_S = float(os.environ.get("SYMBIOSIS_PATIENCE_S", "60"))  # how long a lost executor may be away
PATIENCE = "patience=, $SYMBIOSIS_PATIENCE_S"
JOIN_S, LEAST_JOIN_S = 10.0, 0.1  # how long a join may take; and how long it may when the patience is over
CALL_S = float(os.environ.get("SYMBIOSIS_CALL_TIMEOUT_S", "120"))  # how long one call may take, before it is sent again
FIRST_ROOM = 64 << 20  # bytes of the largest reply at first: for a larger one a session joins anew
KEEPS_OUT = frozenset((Code.WRONG_MODEL, Code.LIMIT, Code.NOT_ALLOWED))  # of a join: another executor may let us in
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5

logger = logging.getLogger("symbiosis")
_numbers = itertools.count(1)
_sessions: "weakref.WeakValueDictionary[int, Session]" = weakref.WeakValueDictionary()
_restored: "weakref.WeakValueDictionary[str, Session]" = weakref.WeakValueDictionary()


def sessions() -> "list[Session]":
    """Those of this process."""
    return list(_sessions.values())


class Session:
    """Calls to one executor, or to whichever of its replicas answers. All threads of a process may use it; a forked or
    unpickled copy joins anew by itself."""

    keeps_secrets = False  # what the executor must not see

    def __init__(
        self,
        endpoint: str | Sequence[str],
        priority: Priority | None = None,
        fingerprint: str | None = None,
        observer: bool = False,
        patience: float = PATIENCE_S,
        timeout: float = CALL_S,
        exact: bool = True,
        wait: float = 0.0,
    ) -> None:
        several = isinstance(endpoint, Sequence) and not isinstance(endpoint, str)
        self.endpoints: tuple[str, ...] = tuple(dict.fromkeys(endpoint)) if several else (endpoint,)  # type: ignore[assignment]
        if not self.endpoints:
            raise ConfigError("an empty list of endpoints: name at least one executor")
        if unknown := [one for one in self.endpoints if not isinstance(one, str)]:
            raise ConfigError(f"{unknown[0]!r} is no endpoint: write its URL (of an Executor: its .endpoint)")
        for one in self.endpoints:
            transport.parts_of(one)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise ConfigError(f"timeout must be positive, not {timeout!r}: seconds that one call may take")
        for name, seconds in (("patience", patience), ("wait", wait)):
            if not isinstance(seconds, int | float) or not seconds >= 0:
                raise ConfigError(f"{name} must not be negative, but is {seconds}: seconds to wait for an executor")
        self.endpoint = self.endpoints[0]  # the one in use
        self.priority, self.patience, self.timeout, self.wait = priority, patience, timeout, wait
        self.fingerprint, self.observer, self.exact = fingerprint, observer, exact
        self.stats = Stats()
        self.known_groups: dict[Member, tuple[Member, ...]] = {}
        self.number = next(_numbers)
        self._key = f"{os.getpid()}-{self.number}-{time.time_ns()}"
        self._seq = itertools.count(1)
        self._local = threading.local()
        self._lock = threading.Lock()
        self._connection: transport.Connection | None = None
        self._waiting: Waiting | None = None  # for an executor that is away
        self._device = CPU  # where rows may be when they need not go through the host
        self._room = FIRST_ROOM  # bytes of the largest reply
        self._lines: dict[torch.device, DeviceLine | None] = {}  # for the calls of GPUs
        self._refusing: dict[str, CallError] = {}  # endpoints that do not let this client in, and why
        self._welcome: Welcome | None = None
        _sessions[self.number] = self

    @staticmethod
    def of(number: int) -> "Session":
        """For compiled graphs, which have its number only."""
        session = _sessions.get(number)
        if session is None:
            raise RemoteWeightError(
                "the wrapped model of this compiled graph is gone, and with it the connection to the executor: keep the model until "
                "its backward pass is over"
            )
        return session

    @property
    def welcome(self) -> Welcome:
        """What the executor said when this session joined."""
        if self._welcome is None:
            with self._lock:
                self._connected()
        assert self._welcome
        return self._welcome

    @property
    def manifest(self) -> list[Layer]:
        return self.welcome.manifest

    @property
    def groups(self) -> Groups:
        """What this thread's calls have shown."""
        try:
            return self._local.groups  # type: ignore[no-any-return]
        except AttributeError:
            groups = self._local.groups = Groups(self.known_groups)
            return groups

    def call(
        self,
        op: Op,
        layer: int,
        x: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        bias: bool = False,
        view: View | None = None,
        ends: Tensor | None = None,
        priority: Priority = Priority.PREFILL,
        gradient: bool = False,
        also: tuple[int, ...] = (),
    ) -> Tensor:
        """The result of `op` on `layer` for the rows of `x`, on x's device; sent again until an executor answers."""
        if x is None:
            call = call_of(op, layer, dtype or torch.float32, (), bias, priority, view, 0, gradient, ())
            return self._answer(call, ())[0]
        refuse_transforms(x)
        refuse_tracers()
        payload = (x.detach(),) if ends is None else (x.detach(), ends)
        groups = 0 if ends is None else ends.numel()
        call = call_of(op, layer, dtype or x.dtype, tuple(x.shape), bias, priority, view, groups, gradient, also)
        if x.is_cuda and op in BY_DEVICE and (line := self._line(x.device)):
            self.stats.enqueue(call)
            return line.call(call, payload)
        return self._by_host(call, payload, x.device)[0]

    def rows(self, op: Op, group: tuple[Member, ...], x: Tensor, priority: Priority) -> list[Tensor]:
        """What each layer of `group` makes of the rows of `x`, in the shape of `x` but for the width, in one call."""
        refuse_transforms(x)
        call, shapes = rows_call(op, group, x.dtype, x.shape, priority)
        if x.is_cuda and (line := self._line(x.device)):
            self.stats.enqueue(call)
            return line.rows(call, x, shapes)
        return self._by_host(call, (x.detach() if x.requires_grad else x,), x.device, shapes)

    def _by_host(
        self, call: Call, payload: tuple[Tensor, ...], device: torch.device, shapes: Shapes = ()
    ) -> list[Tensor]:
        """The results of a call that this CPU makes, on `device`; very many rows go in several calls."""
        if goes_in_parts(call, shapes):
            return self._in_parts(call, payload[0], device, shapes)
        if device.type == "cpu":
            return self._answer(call, payload, shapes)
        if device.type == "meta":  # which holds no rows: no more than a shape is asked for
            shapes = shapes or (shape_of_result(call, self.manifest[call.layer]),)
            return [torch.empty(shape, dtype=TORCH_DTYPE[call.dtype], device=device) for shape in shapes]
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"{call.op.name} of {self.name(call.layer)} is made by the CPU, which a CUDA graph cannot capture: use local://"
            )
        return [result.to(device) for result in self._answer(call, payload, shapes)]

    def _in_parts(self, call: Call, x: Tensor, device: torch.device, shapes: Shapes) -> list[Tensor]:
        results = []
        for part in parts_of(x.reshape(call.shape)):
            some = replace(call, shape=tuple(part.shape))
            results.append(self._by_host(some, (part,), device, tuple((len(part), shape[-1]) for shape in shapes)))
        whole = [torch.cat(parts) for parts in zip(*results, strict=True)]
        return [unshared(y, shape) for y, shape in zip(whole, shapes, strict=True)] if shapes else whole

    def _line(self, device: torch.device) -> "DeviceLine | None":
        """The way of this GPU's calls; None if they must go through the host."""
        if device not in self._lines:
            with self._lock:
                if device not in self._lines:
                    self._connected()
                    self._lines[device] = self._open_line(device)
        return self._lines[device]

    def _open_line(self, device: torch.device) -> "DeviceLine | None":
        name = str(torch.cuda.get_device_properties(device).uuid)
        line = transport.open_line(self.endpoint, lambda: self._hello(name), device, self.patience)
        if line is not None:
            line.kernel = with_triton("calls")
            self._disconnect()  # a session of its own; should a call be made by this CPU again, it joins again
        elif transport.may_go_by_nccl(self.endpoint):
            self._join_for(device)
        return line

    def _join_for(self, device: torch.device) -> None:
        """Join again, as one whose rows are on a GPU."""
        if self._device.type == "cuda":
            logger.warning("rows of %s go by NCCL already, those of %s through the host's memory", self._device, device)
            return
        self._device = device
        self._join_anew()

    def _join_anew(self) -> None:
        """In place of the connection that there is; nothing was lost."""
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

    @property
    def lines(self) -> "list[DeviceLine]":
        return [line for line in self._lines.values() if line is not None]

    def _answer(self, call: Call, payload: tuple[Tensor, ...], shapes: Shapes = ()) -> list[Tensor]:
        with self._lock:
            begun = time.perf_counter()
            reply, results = self._persist(call, payload, shapes)
            self.stats.count(call, reply, time.perf_counter() - begun)
            return results

    def _persist(self, call: Call, payload: tuple[Tensor, ...], shapes: Shapes) -> tuple[Reply, list[Tensor]]:
        """Call; on a lost connection join the next replica, or the same executor again, until the patience is over."""
        end, pause, first = time.perf_counter() + self.patience, FIRST_PAUSE_S, self.endpoint
        try:
            while True:
                try:
                    return self._attempt(call, payload, shapes)
                except (ConnectionLost, CallError) as error:
                    if _says_when(error) and time.perf_counter() + error.retry_s <= end:
                        self._slow_down(error)
                        continue
                    self._look_elsewhere(error)
                except BaseException:  # interrupted: the next call must not meet this one's reply
                    self._disconnect()
                    raise
                if self.endpoint == first:  # all were asked
                    time.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_S)
        finally:
            if self._waiting is not None:
                self._waiting.end(self.endpoint if self._connection else None)
                self._waiting = None
                self._refusing.clear()  # the next wait asks all of them again

    def _look_elsewhere(self, error: Exception) -> None:
        """After a call was lost: the next attempt is for another executor, if there is one. Raises when there is to be none."""
        if isinstance(error, ProtocolError):  # what comes next may be no better
            self._disconnect()
        if not _is_away(error) or isinstance(error, ExecutorUnavailable):  # the latter: nobody was ever there
            raise error
        self._disconnect()
        if self._waiting is None:
            self._waiting = Waiting(self.endpoints, self.patience, PATIENCE)
        if self._welcome is None or self._waiting.left < 0:
            raise next(iter(self._refusing.values()), ExecutorUnavailable.at(self.endpoints, error)) from None
        self._turn_to_next()
        self.stats.retries += 1

    def _attempt(self, call: Call, payload: tuple[Tensor, ...], shapes: Shapes) -> tuple[Reply, list[Tensor]]:
        connection = self._connection or self._connected()
        connection.welcome.limits.check(call)
        if payload and payload[0].device.type != "cpu" and payload[0].device != connection.device:
            payload = tuple(map(on_host, payload))
        try:
            reply, results = connection.call(next(self._seq), call, payload, self.timeout, shapes)
        except MoreRoom as wanted:
            self._room = 2 * wanted.nbytes
            self._join_anew()
            return self._attempt(call, payload, shapes)
        if reply.code is not Code.OK:
            text = bytes(results[0].numpy()).decode(errors="replace")
            raise CallError.told(reply.code, text, reply.wait_us / 1e6)
        return reply, results

    def _slow_down(self, error: CallError) -> None:
        """Wait as long as the executor says (a little longer, so that not all come back at once), and show that we live."""
        if not self.stats.slowed_s:
            logger.warning("%s slows this client down: %s", self.endpoint, error.message)
        begun = time.perf_counter()
        end = begun + error.retry_s * random.uniform(1.0, 1.25)
        while (left := end - time.perf_counter()) > 0 and self._connection and self._welcome:
            time.sleep(min(left, self._welcome.heartbeat_s / 4))
            self._connection.beat()
        self.stats.slowed_s += time.perf_counter() - begun

    def _connected(self) -> transport.Connection:
        if self._connection is None:
            self._connection = self._join() if self._welcome else self._join_first()
            self.stats.reconnects += self._welcome is not None and not self.lines
            self._welcome = self._connection.welcome
            self.fingerprint = self._welcome.fingerprint
            _beat_from_now_on(self, self._welcome.heartbeat_s / 4)
        return self._connection

    def _must_serve_the_same(self, joined: transport.Connection) -> None:
        """The fingerprint tells of weights; what they are to each layer is known since the first join. (A replica may serve fewer.)"""
        told = joined.welcome.manifest
        for now, then in zip(told, self._welcome.manifest if self._welcome else told, strict=True):
            if now != then and "client" not in (now.kind, then.kind):
                joined.close()
                raise CallError(Code.WRONG_MODEL, f"{self.endpoint} now serves {now.name} as another kind of layer")

    def _join(self) -> transport.Connection:
        left = self._waiting.left if self._waiting else JOIN_S
        try:
            joined = transport.connect(
                self.endpoint, self._hello(), min(JOIN_S, max(LEAST_JOIN_S, left)), self._device, self._room
            )
            self._must_serve_the_same(joined)
        except CallError as error:
            if len(self.endpoints) == 1 or error.code not in KEEPS_OUT:
                raise
            self._say_who_refuses(error)
            raise ConnectionLost(f"{self.endpoint}: {error.message}") from None
        return joined

    def _say_who_refuses(self, error: CallError) -> None:
        """Of several executors one that does not let this client in is passed by, and named once."""
        if self.endpoint not in self._refusing:
            logger.warning("%s does not serve this client, and is passed by: %s", self.endpoint, error.message)
        self._refusing[self.endpoint] = error

    def _join_first(self) -> transport.Connection:
        """Whichever replica answers: one that was never there is waited for only if the user says so."""
        waiting = Waiting(self.endpoints, self.wait or JOIN_S, "wait=")
        connection = None
        try:
            while connection is None:
                connection, cause = self._ask_each()
                if connection is None and time.monotonic() > waiting.begun + self.wait:
                    raise next(iter(self._refusing.values()), ExecutorUnavailable.at(self.endpoints, cause)) from None
                time.sleep(0 if connection else FIRST_PAUSE_S)
            return connection
        finally:
            waiting.end(self.endpoint if connection else None)
            self._refusing.clear()

    def _ask_each(self) -> tuple[transport.Connection | None, Exception]:
        """A connection to whichever executor lets us in; or why none does."""
        cause: Exception = ConnectionLost("nobody was asked")
        for _ in self.endpoints:
            try:
                return self._join(), cause
            except (ConnectionLost, CallError) as error:
                if not _is_away(error):
                    raise
                cause = error
                self._turn_to_next()
        return None, cause

    def _turn_to_next(self) -> None:
        at = self.endpoints.index(self.endpoint)
        self.endpoint = self.endpoints[(at + 1) % len(self.endpoints)]

    def _hello(self, device: str | None = None) -> Hello:
        client = f"pid {os.getpid()}"
        return Hello(
            client=client, priority=self.priority, fingerprint=self.fingerprint, observer=self.observer, device=device
        )

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def shared(self) -> dict[int, Tensor]:
        """What is the client's own, as far as an executor on this host shares it; the rest is to be read."""
        with self._lock:
            try:
                return self._connected().shared()
            except ConnectionLost:
                self._disconnect()
                return {}

    def beat(self) -> None:
        """Tell the executor that this client lives; during a call it knows anyway."""
        if self._lock.acquire(blocking=False):
            try:
                if self._connection is not None:
                    self._connection.beat()
            finally:
                self._lock.release()

    def close(self, timeout: float = 1.0) -> None:
        """Leave the executor, after a call that another thread is in if that ends in time. A later call joins again."""
        lines, self._lines = self.lines, {}
        for line in lines:
            line.close()
        if self._lock.acquire(timeout=timeout):  # else the process is ending
            try:
                self._disconnect()
            finally:
                self._lock.release()

    def __del__(self) -> None:
        if sys is None or sys.is_finalizing():  # at the very end modules are gone
            return
        if getattr(self, "_connection", None) is not None:
            self._disconnect()
        for line in getattr(self, "_lines", {}).values():
            if line is not None:
                line.close()

    def name(self, layer: int) -> str:
        known = self._welcome.manifest if self._welcome else []
        return known[layer].name if layer < len(known) else f"layer {layer}"

    def forget_parent(self) -> None:
        """In a forked child: the connection is the parent's, and so is an executor that lives in it."""
        if all(endpoint.startswith("inproc://") for endpoint in self.endpoints):
            self._welcome = None  # nobody waits for what will never come
        self._lock = threading.Lock()
        self._connection = None
        self._device = CPU
        self._lines = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Session":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (
            self._key,
            self.endpoints,
            self.priority,
            self.fingerprint,
            self.patience,
            self.timeout,
            self.exact,
        )


def _restore(
    key: str,
    endpoints: tuple[str, ...],
    priority: Priority | None,
    fingerprint: str | None,
    patience: float,
    timeout: float,
    exact: bool,
) -> Session:
    """An unpickled session: one per pickled original and process, joined at its first call."""
    session = _restored.get(key)
    if session is None:
        session = Session(endpoints, priority, fingerprint, patience=patience, timeout=timeout, exact=exact)
        _restored[key] = session
    return session


def _is_away(error: Exception) -> bool:
    """Whether it says that the executor is lost, or about to end: another one may serve the call."""
    return isinstance(error, ConnectionLost) or (isinstance(error, CallError) and error.code is Code.DRAINING)


def _says_when(error: Exception) -> TypeGuard[CallError]:
    """Whether the executor is there, and says when the call may come again."""
    return isinstance(error, CallError) and error.code is Code.BUSY


def _beat_from_now_on(session: Session, interval: float) -> None:
    """A thread that beats as long as the session lives and has the connection it has now."""
    reference, connection = weakref.ref(session), weakref.ref(session._connection)  # type: ignore[arg-type]

    def run() -> None:
        while True:
            time.sleep(interval)
            alive = reference()
            if alive is None or alive._connection is None or alive._connection is not connection():
                return
            alive.beat()
            del alive

    threading.Thread(target=run, name="symbiosis-heartbeat", daemon=True).start()


def _after_fork() -> None:
    for session in list(_sessions.values()):
        session.forget_parent()


def _leave() -> None:
    end = time.monotonic() + 1.0
    for session in list(_sessions.values()):
        session.close(max(0.0, end - time.monotonic()))


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_leave)
