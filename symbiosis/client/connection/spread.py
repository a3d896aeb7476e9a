"""Calls of few rows that go to all ranks of a service, each of which multiplies by its share of the weight's outputs.

Forward, each rank makes some columns of the result, which are put together, and so with views and experts' matrices. Backward, each makes what some
columns of the gradient add to the result, and the parts are added in the order of the ranks. Both round otherwise than one product does, so the provider says up to how many rows
(`--spread-rows`). Any rank could answer alone (`--shard fsdp`), so one that is gone is stood in for by the next.

A CPU calls each rank by a thread of its own. A GPU calls each by a stream, all of which follow the current one and join it again, so that a captured
step does the same. Where ranks are GPUs, each makes what lies in its own memory.
"""

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, reduce
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from symbiosis.base.forks import look_for_fork
from symbiosis.client.requests import unshared
from symbiosis.client.stats import Stats
from symbiosis.kernels.gpu.streams import alongside
from symbiosis.protocol import (
    FLOATS,
    Call,
    Layer,
    Op,
    View,
    Welcome,
    contiguous_stride,
    view_of_outputs,
    width,
)
from symbiosis.transport.tensors import TORCH_DTYPE, Shapes

if TYPE_CHECKING:
    from symbiosis.transport.cuda.client import CudaConnection

Payload = tuple[Tensor, ...]
SPREAD = frozenset((Op.FORWARD, Op.DGRAD, Op.PRODUCT, Op.GROUPED))


class Caller(Protocol):
    """A session with one rank, as far as it is used here."""

    stats: Stats

    def send(self, call: Call, payload: Payload, shapes: Shapes = ()) -> list[Tensor]: ...

    def line(self, device: torch.device) -> "CudaConnection | None": ...

    def close(self, timeout: float = 1.0) -> None:
        """Leave the executor."""
        ...


Session = TypeVar("Session", bound=Caller)


class RankShare(NamedTuple):
    """What one rank does of a call for one layer: the call, and from where to where in the layer's outputs."""

    call: Call
    begin: int
    end: int


class Spread(Generic[Session]):
    """Calls of one session that all ranks answer together. `callers` has a session with each rank, by rank; the one with rank `here` is asked
    for them. `told` is what a rank tells of all, and `endpoints` begins with one of each."""

    def __init__(self, callers: Sequence[Session], here: int, told: Welcome, endpoints: Sequence[str]) -> None:
        self._here, self._told, self._endpoints = here, told, endpoints
        self._first = weakref.ref(callers[here])  # which holds this
        self._others = {rank: caller for rank, caller in enumerate(callers) if rank != here}
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}  # by rank and the stream that calls
        self._pool: ThreadPoolExecutor | None = None
        self._fork = 0  # of the process whose threads they are

    @classmethod
    def over(
        cls,
        first: Session,
        told: Welcome,
        endpoints: Sequence[str],
        here: str,
        join: Callable[[tuple[str, ...], str], Session],
    ) -> "Spread[Session]":
        """Spread the calls of `first`, which joins the rank at `here`, over the ranks at these endpoints. `join` makes a session, which joins at
        its first call; should its rank be gone, it goes to the next."""
        rank = endpoints.index(here)
        ranks = [
            first if n == rank else join((*endpoints[n:], *endpoints[:n]), told.fingerprint) for n in range(told.ranks)
        ]
        return cls(ranks, rank, told, endpoints)

    def moved(self, here: str, join: Callable[[tuple[str, ...], str], Session]) -> "Spread[Session]":
        """Return what spreads the calls of the same session when it has gone to the rank at `here`, perhaps of another service."""
        if here not in self._endpoints[: self._told.ranks] or self._endpoints[self._here] == here:
            return self
        self.close(0.0)
        return self.over(self.callers[self._here], self._told, self._endpoints, here, join)

    @property
    def callers(self) -> list[Session]:
        """The sessions with all ranks, by rank."""
        first = self._first()
        assert first is not None
        return [self._others.get(rank, first) for rank in range(self._told.ranks)]

    def answer(self, call: Call, payload: Payload, shapes: Shapes) -> list[Tensor] | None:
        """Return the results of a call, or None if it should go to one rank."""
        if not self._takes(call, payload, shapes):
            return None
        each = [self._shares(call, number) for number in call.layers]
        if any(share.end == share.begin for shares in each for share in shares):
            return None
        made = self._by_threads if payload[0].is_cpu else self._by_streams
        parts = made((payload[0].reshape(call.shape), *payload[1:]), each)
        join = _summed if call.op is Op.DGRAD else _side_by_side
        results = [join([made[at] for made in parts], shares) for at, shares in enumerate(each)]
        return [unshared(y, shape) for y, shape in zip(results, shapes, strict=True)] if shapes else results

    def _shares(self, call: Call, number: int) -> list[RankShare]:
        return shares_of(
            call, number, self._told.manifest[number], self._told.shares, self._told.begins.get(number, ())
        )

    def _takes(self, call: Call, payload: Payload, shapes: Shapes) -> bool:
        if call.op not in SPREAD or call.dtype not in FLOATS or len(call.shape) != 2:
            return False
        if not 0 < call.rows <= self._told.spread_rows or call.seeded:
            return False
        if call.also and not (call.op is Op.FORWARD and shapes):
            return False
        x = payload[0]
        return x.is_cpu or (x.is_cuda and all(caller.line(x.device) for caller in self.callers))

    def _by_threads(self, payload: Payload, each: list[list[RankShare]]) -> list[list[Tensor]]:
        """Return what each rank makes of each layer. This thread waits for the rank that is here, and others for the rest."""
        callers = self.callers

        def made(rank: int) -> list[Tensor]:
            return [callers[rank].send(shares[rank].call, _part(payload, shares[rank]))[0] for shares in each]

        if self._pool is None or self._fork != look_for_fork():  # a forked child has none of its parent's threads
            self._pool, self._fork = ThreadPoolExecutor(len(self._others), "symbiosis-spread"), look_for_fork()
        others: dict[int, Future[list[Tensor]]] = {rank: self._pool.submit(made, rank) for rank in self._others}
        try:
            mine = made(self._here)
        finally:
            for one in others.values():
                one.exception()  # wait: no call may be under way when this one has failed
        return [others[rank].result() if rank in others else mine for rank in range(len(callers))]

    def _by_streams(self, payload: Payload, each: list[list[RankShare]]) -> list[list[Tensor]]:
        """Enqueue a GPU's calls, each rank's by a stream, and return the results in the same way."""
        device, found = payload[0].device, {}
        callers, current = self.callers, torch.cuda.current_stream(device)
        aside = {rank: self._stream(rank, current) for rank in self._others}
        with alongside(current, aside.values()):
            for rank in (*aside, self._here):
                with torch.cuda.stream(aside.get(rank, current)):
                    found[rank] = [_enqueued(callers[rank], device, payload, shares[rank]) for shares in each]
        return [found[rank] for rank in range(len(callers))]

    def _stream(self, rank: int, current: torch.cuda.Stream) -> torch.cuda.Stream:
        """Return the stream of a rank beside the current one. What is allocated there is used there only, and freed before it follows the
        current one again."""
        key = rank, current.cuda_stream
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(current.device)
        return self._streams[key]

    def close(self, timeout: float) -> None:
        """Leave the other ranks."""
        for other in self._others.values():
            other.close(timeout)
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None


def _part(payload: Payload, share: RankShare) -> Payload:
    """Return what a rank needs of a payload: of a gradient that it adds to, its own columns."""
    x, *others = payload
    return (x if x.shape[1] == share.call.shape[1] else x[:, share.begin : share.end].contiguous(), *others)


def _enqueued(caller: Caller, device: torch.device, payload: Payload, share: RankShare) -> Tensor:
    line = caller.line(device)
    assert line is not None
    caller.stats.count(share.call)
    call, part = share.call, _part(payload, share)
    if len(part) == 1 and part[0].dtype == TORCH_DTYPE[call.dtype] and call.view is not None:
        return line.rows(call, part[0], ((call.rows, call.view.size[-1]),))[0]  # by one kernel, if it is small
    return line.call(call, part)


@lru_cache(maxsize=1 << 14)
def _cuts(outputs: int, shares: tuple[float, ...]) -> list[tuple[int, int]]:
    """Divide outputs by shares.

    >>> _cuts(10, (3.0, 1.0))
    [(0, 7), (7, 10)]
    """
    ends = [int(outputs * taken / sum(shares)) for taken in accumulate(shares)]
    return list(pairwise([0, *ends[:-1], outputs]))


@lru_cache(maxsize=1 << 14)
def shares_of(
    call: Call, number: int, layer: Layer, shares: tuple[float, ...], begins: tuple[int, ...] = ()
) -> list[RankShare]:
    """Return what each rank does of a call, for one of its layers. `begins`: with which output its part of the layer begins, if the
    ranks' memory says so."""
    if call.op in (Op.PRODUCT, Op.GROUPED):
        whole = call.view or View(layer.shape, contiguous_stride(layer.shape), 0)
        cuts = _cuts(whole.size[-1], shares)
        return [RankShare(replace(call, view=_columns(whole, begin, end)), begin, end) for begin, end in cuts]
    made = []
    for begin, end in _between(begins, width(layer)) if begins else _cuts(width(layer), shares):
        view = view_of_outputs(layer, begin, end)
        if call.op is Op.DGRAD:
            view = View(view.size[::-1], view.stride[::-1], view.offset)
        bias, gradient = call.bias, call.gradient or call.op is Op.DGRAD
        part = Call(
            Op.PRODUCT, number, call.dtype, (call.rows, view.size[0]), bias, call.priority, view, gradient=gradient
        )
        made.append(RankShare(part, begin, end))
    return made


def _columns(view: View, begin: int, end: int) -> View:
    return View((*view.size[:-1], end - begin), view.stride, view.offset + begin * view.stride[-1])


def _between(begins: Sequence[int], outputs: int) -> list[tuple[int, int]]:
    """Return from where to where each part goes.

    >>> _between((6, 0), 10)
    [(6, 10), (0, 6)]
    """
    ends = dict(pairwise([*sorted(begins), outputs]))
    return [(begin, ends[begin]) for begin in begins]


def _side_by_side(parts: list[Tensor], shares: Sequence[RankShare]) -> Tensor:
    order = sorted(range(len(parts)), key=lambda rank: shares[rank].begin)
    return torch.cat([parts[rank] for rank in order], 1)


def _summed(parts: list[Tensor], _: Sequence[RankShare]) -> Tensor:
    """Add in float32 at least, so that halves round once, as they do when two are added."""
    if len(parts) == 2:
        return parts[0] + parts[1]
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    return reduce(Tensor.add_, parts[1:], parts[0].to(wide, copy=True)).to(parts[0].dtype)
