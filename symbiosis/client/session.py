"""The session: how a client calls an executor, from a CPU or a GPU, whole or in parts, from one thread or several.

All threads of a process may use a session. A forked or unpickled copy joins again by itself. `reconnect` keeps the connection and
resends calls, `lanes` gives busy threads connections of their own, and `lifetime` handles heartbeats, forks and the end.
"""

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from symbiosis import transport
from symbiosis.base.forks import look_for_fork
from symbiosis.client import arguments, requests
from symbiosis.client.connection import lifetime
from symbiosis.client.connection.lanes import Lane, Lanes
from symbiosis.client.connection.rank_sessions import ServiceSessions, beside, twins
from symbiosis.client.connection.reconnect import CALL_S, PATIENCE_S, Reconnecting, call_once
from symbiosis.client.connection.spread import Spread
from symbiosis.client.direct.mapped import Mapped, answered_despite
from symbiosis.client.layers.groups import GroupMember, Groups
from symbiosis.client.requests import (
    call_of,
    goes_in_parts,
    in_parts,
    lies_by_columns,
    refuse_tracers,
    refuse_transforms,
    rows_call,
)
from symbiosis.errors import CallError, CallNotTaken, CaptureError, ConnectionLost
from symbiosis.kernels import with_triton
from symbiosis.protocol import Call, Hello, Layer, Op, Priority, View, shape_of_reply
from symbiosis.transport.cuda.driver import device_name
from symbiosis.transport.tensors import CPU, TORCH_DTYPE, Shapes

if TYPE_CHECKING:
    from symbiosis.transport.cuda.client import CudaConnection

logger = logging.getLogger("symbiosis")
LANE_AFTER_S = 0.5e-3  # a thread that waited so long for the others gets a connection of its own
MOST_LANES, OF_A_TENANT = 16, 4  # in a process: of the sessions that a tenant may have, one in so many
LANE_JOIN_S = 2.0
OPTIONS = ("patience", "timeout", "exact", "share")


class OfThread(threading.local):
    """What a session knows of the present thread: the groups that its calls have shown."""

    def __init__(self, known: dict[GroupMember, tuple[GroupMember, ...]]) -> None:
        self.groups = Groups(known)


class Session(Reconnecting):
    """Calls to one executor, or to whichever of its replicas answers. With a service of several ranks, it joins one of them, and there is
    another session for each of the others (`holder`)."""

    keeps_secrets = False  # what the executor must not see
    stays = False  # with its rank, wherever its GPU is

    def __init__(
        self,
        endpoint: str | Sequence[str],
        priority: Priority | None = None,
        fingerprint: str | None = None,
        observer: bool = False,
        patience: float = PATIENCE_S,
        timeout: float = CALL_S,
        exact: bool = True,
        wait: float | None = 0.0,
        share: bool = False,
        whole: bool = True,
    ) -> None:
        """With `whole`, all ranks of a service are asked for what they hold, not only the one that this session joins."""
        super().__init__(endpoint, priority, fingerprint, observer, patience, timeout, wait, share)
        self._whole, self._joining = whole, threading.Lock()
        self._service: ServiceSessions[Session] | None = None
        self.spread: Spread[Session] | None = None
        self.exact = arguments.flag("exact", exact)
        self.known_groups: dict[GroupMember, tuple[GroupMember, ...]] = {}
        self.thread = OfThread(self.known_groups)
        self._lanes = Lanes()
        self._counting = threading.Lock()
        self._lines: dict[torch.device, CudaConnection | None] = {}  # for the calls of GPUs
        self.number = lifetime.register(self)  # at last: others look at those that are registered
        self._key = f"{os.getpid()}-{self.number}-{time.time_ns()}"

    @property
    def service(self) -> "ServiceSessions[Session] | None":
        """The other ranks of the service, once their sessions have joined; None if the executor is alone."""
        if self._service is None and self._whole and not self.keeps_secrets and self.welcome.is_part:
            with self._joining:
                self._service = self._service or ServiceSessions(self, self._with_rank)
        return self._service

    def _join_first(self) -> transport.Connection:
        connection = super()._join_first()
        if not self._whole or self.keeps_secrets or self.observer or not connection.welcome.has_twins:
            return connection
        self._whole, self._names, told = False, (), connection.welcome  # no cluster names ranks one by one
        stays, self.endpoint, self.endpoints, every = twins(told, self.endpoint, self.endpoints)
        if told.spread_rows:
            self.spread = Spread.over(self, told, every, self.endpoint, self._with_rank)
        if stays:
            return connection
        connection.close()
        return super()._join_first()

    def _with_rank(self, endpoints: tuple[str, ...], fingerprint: str) -> "Session":
        words = self._options() | {"whole": False, "wait": max(self.wait, self.patience)}
        return RankSession(endpoints, self.priority, fingerprint, **words)

    @property
    def manifest(self) -> list[Layer]:
        """The layers of the whole model."""
        return self.welcome.manifest if self.service is None else self.service.manifest

    @property
    def ranks(self) -> "list[Session]":
        """This session and those with the other ranks."""
        return [self] if self.service is None else [self, *self.service.others]

    def holder(self, layer: int) -> "Session":
        """Return the session with the rank that holds this layer."""
        return self if self.service is None else self.service.holder(layer) or self

    def has_values_on(self, device: torch.device) -> bool:
        """Whether this client computes with a weight's values what the unsplit model does, because they lie on its device: they are
        mapped, or in the memory of this process. Else methods that change a weight are rewritten, and round otherwise."""
        return self.exact and not self.keeps_secrets and all(rank.holds_on(device) for rank in self.ranks)

    def holds_on(self, device: torch.device) -> bool:
        """Whether the weights of this rank lie there, where this client may read them."""
        if self.mapped is not None and self.mapped.suffices:
            return self.mapped.device == device
        return device == CPU and transport.is_within_process(self.endpoint) and self.welcome.allow_read

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
        """Return the result of `op` on `layer` for the rows of `x`, on the device of `x`. The call is repeated until an executor answers."""
        if x is None:
            call = call_of(op, layer, dtype or torch.float32, (), bias, priority, view, 0, gradient, ())
            return self._by_cpu(call, (), CPU)[0]
        refuse_transforms(x)
        refuse_tracers()
        columns = lies_by_columns(op, x)
        rows = x.detach().mT if columns else x.detach()
        payload = (rows,) if ends is None else (rows, ends)
        groups, shape = 0 if ends is None else ends.numel(), tuple(x.shape)
        call = call_of(op, layer, dtype or x.dtype, shape, bias, priority, view, groups, gradient, also, columns)
        if x.is_cuda and op.traits.multiplies and (line := self.line(x.device)):
            made = self._locally(call, payload, x.device)
            return (made or self._by_line(lambda: [line.call(call, payload)], call, payload))[0]
        return self._by_cpu(call, payload, x.device)[0]

    def rows(self, op: Op, group: tuple[GroupMember, ...], x: Tensor, priority: Priority) -> list[Tensor]:
        """Ask every layer of `group` for its product with the rows of `x`, in one call. Results have the shape of `x`, but for the width."""
        refuse_transforms(x)
        call, shapes = rows_call(op, group, x.dtype, x.shape, priority)
        payload = (x.detach() if x.requires_grad else x,)
        if x.is_cuda and (line := self.line(x.device)):
            made = self._locally(call, payload, x.device, shapes)
            return made or self._by_line(lambda: line.rows(call, x, shapes), call, payload, shapes)
        if x.is_cpu and call.nbytes <= requests.LARGEST and not (self.mapped or self.spread):
            return self.send(call, payload, shapes)
        return self._by_cpu(call, payload, x.device, shapes)

    def _locally(
        self, call: Call, payload: tuple[Tensor, ...], device: torch.device, shapes: Shapes = ()
    ) -> list[Tensor] | None:
        """Return the results, on `device`, of a call that mapped weights answer, or all ranks together; None if it should be sent."""
        mapped = self.mapped
        if mapped is not None and (not payload or device == mapped.device) and mapped.takes(call):
            return [result.to(device) for result in mapped.answer(call, payload, shapes)]
        return None if self.spread is None else self.spread.answer(call, payload, shapes)

    def _by_cpu(
        self, call: Call, payload: tuple[Tensor, ...], device: torch.device, shapes: Shapes = ()
    ) -> list[Tensor]:
        """Make a call from this CPU, and return its results on `device`: mapped weights answer it, or it is sent, in parts if it is
        large."""
        if (self.mapped or self.spread) and (made := self._locally(call, payload, device, shapes)):
            return made
        if call.nbytes > requests.LARGEST and goes_in_parts(call, shapes):
            return in_parts(call, payload[0], shapes, lambda part, rows, of: self._by_cpu(part, rows, device, of))
        if device.type == "cpu":
            return self.send(call, payload, shapes)
        if device.type == "meta":  # which holds no rows: no more than a shape is asked for
            shapes = shapes or (shape_of_reply(call, self.manifest),)
            return [torch.empty(shape, dtype=TORCH_DTYPE[call.dtype], device=device) for shape in shapes]
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"{call.op.name} of {self.name(call.layer)} is made by the CPU, which a CUDA graph cannot capture: use local://"
            )
        return [result.to(device) for result in self.send(call, payload, shapes)]

    def line(self, device: torch.device) -> "CudaConnection | None":
        """Return the line that carries this GPU's calls, or None if they must go through the host."""
        if device not in self._lines:
            with self._lock:
                if device not in self._lines:
                    self._connected()
                    self._lines[device] = self._open_line(device)
        return self._lines[device]

    def _by_line(
        self, make: Callable[[], list[Tensor]], call: Call, payload: tuple[Tensor, ...], shapes: Shapes = ()
    ) -> list[Tensor]:
        """Make a GPU's call, or answer it by mapped weights if the executor does not take it."""
        try:
            results = make()
        except CallNotTaken as error:
            return answered_despite(error, self.mapped, call, payload, shapes)
        self.stats.count(call)
        return results

    @torch.inference_mode(False)  # as for `_connect`
    def _open_line(self, device: torch.device) -> "CudaConnection | None":
        name = device_name(device)
        welcome = self._connected().welcome
        if not self.stays:
            self.endpoint = beside(welcome, self.endpoint, self.endpoints, name)
        mapped = None
        if self.share and welcome.shares_weights:
            mapped = Mapped(welcome.manifest, self.priority, device, reads_codes=not welcome.batch_invariant)
        line = transport.open_line(self.endpoint, greeting(self, name), device, self.patience, mapped)
        if self.spread is not None:
            self.spread = self.spread.moved(self.endpoint, self._with_rank)
        if line is not None:
            line.kernel = with_triton("gpu.small_call")
            self._disconnect()  # a session of its own; should a call be made by this CPU again, it joins again
            if mapped is not None and mapped.suffices:
                self.mapped = mapped if self.mapped is None else mapped.take_over(self.mapped)
        elif transport.may_go_by_nccl(self.endpoint):
            self._join_for(device)
        return line

    def map_for(self, device: torch.device) -> None:
        """Map the weights for a model on this GPU before its first call, where the executor may be on the same one."""
        if (
            device.type == "cuda"
            and self.share
            and self.welcome.shares_weights
            and transport.may_have_lines(self.endpoint)
        ):
            self.line(torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index))

    def _is_reconnect(self) -> bool:
        return super()._is_reconnect() and not self.lines

    @property
    def lines(self) -> "list[CudaConnection]":
        return [line for line in self._lines.values() if line is not None]

    def send(self, call: Call, payload: tuple[Tensor, ...], shapes: Shapes = ()) -> list[Tensor]:
        """Send a call to the executor, again and again until there is an answer, and return the results."""
        look_for_fork()
        begun = time.perf_counter()
        lane = self._lanes.mine.lane
        if (lane is None or lane.closed) and self._lock.locked():
            lane = self._contended()
        try:
            made = lane.attempt(call, payload, self.timeout, shapes) if lane else None
            if made is None:
                with self._lock:
                    try:
                        connection = self._connection or self._connected()
                        made = call_once(connection, next(self._seq), call, payload, self.timeout, shapes)
                    except BaseException as error:
                        made = self._call_again(error, call, payload, shapes)
                    if made is None:
                        assert self.mapped
                        return self.mapped.answer(call, payload, shapes)
        except CallError as error:
            return answered_despite(error, self.mapped, call, payload, shapes)
        reply, results = made
        with self._counting:
            self.stats.count(call, reply, sum([y.nbytes for y in results]), time.perf_counter() - begun)
        return results

    def _contended(self) -> Lane | None:
        """Open a connection for this thread alone if others' calls keep it waiting. None means that it shares the session's."""
        if self._lock.acquire(timeout=LANE_AFTER_S):
            self._lock.release()
            return None
        return self._lanes.open(lambda: self._join_within(LANE_JOIN_S), self._may_have_lanes)

    def _may_have_lanes(self) -> bool:
        """Whether this session may have more connections. Private sessions are pinned to one, and a connection over NCCL belongs to a GPU.
        Not if it is the heartbeat that keeps a thread waiting: it makes no calls, and may itself be waiting for a core."""
        if self._is_beating or self.keeps_secrets or self.observer:
            return False
        if self._device is not CPU or self._connection is None:
            return False
        most = min(MOST_LANES, self.welcome.limits.max_tenant_sessions // OF_A_TENANT)
        return sum(len(one._lanes) for one in lifetime.sessions()) < most

    def commons(self) -> dict[int, Tensor]:
        """Return the tensors that every client holds for itself, if an executor on this host shares them. The rest must be read."""
        return {number: tensor for rank in self.ranks for number, tensor in rank._commons().items()}

    def _commons(self) -> dict[int, Tensor]:
        look_for_fork()
        with self._lock:
            try:
                return self._connected().commons()
            except ConnectionLost:
                self._disconnect()
            except OSError as error:  # of this process: it has no memory or descriptors left
                logger.warning("what %s shares cannot be mapped (%s), so it is read", self.endpoint, error)
            return {}

    def close(self, timeout: float = 1.0) -> None:
        """Leave the executor. A call that another thread has under way gets `timeout` seconds to end. A later call joins again."""
        look_for_fork()
        end = time.monotonic() + timeout
        for other in self._service.others if self._service else ():
            other.close(timeout)
        if self.spread is not None:
            self.spread.close(timeout)
        lines, self._lines = self.lines, {}
        for line in lines:
            self.stats.batched_calls += line.batched
            self.stats.reconnects += line.reconnects
            line.close()
        self._lanes.close(timeout)
        if self._lock.acquire(timeout=max(0.0, end - time.monotonic())):  # else a call is under way
            try:
                self._disconnect()
                self._is_away = False
                if self.mapped is not None:
                    self.mapped.join({}, None)
            finally:
                self._lock.release()

    def __del__(self) -> None:
        if sys is None or sys.is_finalizing():  # at the very end modules are gone
            return
        look_for_fork()
        if getattr(self, "_connection", None) is not None:
            self._disconnect()
        if (lanes := getattr(self, "_lanes", None)) is not None:
            lanes.close(0.0)
        for line in getattr(self, "_lines", {}).values():
            if line is not None:
                line.close()

    def forget_parent(self) -> None:
        """Let go, in a forked child, of the connections, which are the parent's, and of an executor that lives in the parent."""
        if all(map(transport.is_within_process, self.endpoints)):
            self._welcome = None  # nobody waits for what will never come
        self._lock, self._counting, self._joining = threading.Lock(), threading.Lock(), threading.Lock()
        self._connection = self.mapped = None
        self._device, self._is_beating = CPU, False
        self._lines, self._lanes = {}, Lanes()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Session":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        found = self._names, self.endpoints, self.wait
        return _restore, (self._key, found, self.priority, self.fingerprint, self._options())

    def _options(self) -> dict[str, Any]:
        """Return the options for another session with the same executor, or with a rank beside it."""
        return {"whole": self._whole, **{name: getattr(self, name) for name in OPTIONS}}


class RankSession(Session):
    """A session with one rank of a service, for a session that joins another one."""

    stays = True


def greeting(session: Session, device: str) -> Callable[[], Hello]:
    """Return what a line joins with. A line lives in threads of its own, which must not keep a session that nobody uses any more."""
    kept = weakref.ref(session)

    def hello() -> Hello:
        if (mine := kept()) is None:
            raise ConnectionLost("the session of this line is gone")
        return mine._hello(device)

    return hello


def _restore(
    key: str,
    found: tuple[tuple[str, ...], tuple[str, ...], float],
    priority: Priority | None,
    fingerprint: str | None,
    options: dict[str, Any],
) -> Session:
    """Return an unpickled session. It joins at its first call, where the original was; later it asks for its names again."""

    def made() -> Session:
        names, endpoints, wait = found
        session = Session(endpoints, priority, fingerprint, **options)
        session._names, session.wait = names, wait
        return session

    return lifetime.restored(key, made)
