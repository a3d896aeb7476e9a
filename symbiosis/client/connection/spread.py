"""Calls of few rows that go to all ranks of a service, each of which multiplies by its share of the weight's outputs.

Forward, each rank makes some columns of the result, which are put together, and so with views and experts' matrices. Backward, each makes what some
columns of the gradient add to the result, and the parts are added in the order of the ranks. Both round otherwise than one product does, so the provider says up to how many rows
(`--spread-rows`). Any rank could answer alone (`--shard fsdp`), so one that is gone is stood in for by the next.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, reduce
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from symbiosis.client.requests import unshared
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
from symbiosis.transport.tensors import Shapes

Payload = tuple[Tensor, ...]
SPREAD = frozenset((Op.FORWARD, Op.DGRAD, Op.PRODUCT, Op.GROUPED))


class Caller(Protocol):
    """A session with one rank, as far as it is used here."""

    def _send(self, call: Call, payload: Payload, shapes: Shapes = ()) -> list[Tensor]: ...

    def close(self, timeout: float = 1.0) -> None:
        """Leave the executor."""
        ...


Session = TypeVar("Session", bound=Caller)


class Share(NamedTuple):
    """What one rank does of a call for one layer: the call, and from where to where in the layer's outputs."""

    call: Call
    begin: int
    end: int


class Spread(Generic[Session]):
    """Calls of one session that all ranks answer together. `callers` has a session with each rank, this one first, and `shares` how much each
    of them does."""

    def __init__(
        self, callers: Sequence[Session], manifest: list[Layer], shares: Sequence[float], most_rows: int
    ) -> None:
        self._first, self._others = weakref.ref(callers[0]), list(callers[1:])  # the first holds this
        self._manifest, self._most_rows, self._shares = manifest, most_rows, tuple(shares)
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0  # whose threads they are

    @classmethod
    def over(
        cls,
        first: Session,
        told: Welcome,
        endpoints: Sequence[str],
        join: Callable[[tuple[str, ...], str], Session],
    ) -> "Spread[Session]":
        """Spread the calls of `first`, whose endpoints are those of all ranks, its own first. `join` makes a session, which joins at its first
        call; should its rank be gone, it goes to the next."""
        here, count = told.session % told.ranks if told.rank == 0 else told.rank, told.ranks
        others = [join((*endpoints[step:], *endpoints[:step]), told.fingerprint) for step in range(1, count)]
        shares = [told.shares[(here + step) % count] for step in range(count)]
        return cls([first, *others], told.manifest, shares, told.spread_rows)

    @property
    def callers(self) -> list[Session]:
        """The sessions with all ranks."""
        first = self._first()
        assert first is not None
        return [first, *self._others]

    def answer(self, call: Call, payload: Payload, shapes: Shapes) -> list[Tensor] | None:
        """Return the results of a call, or None if it should go to one rank."""
        if not self._takes(call, payload, shapes):
            return None
        each = [shares_of(call, number, self._manifest[number], self._shares) for number in call.layers]
        if any(share.end == share.begin for shares in each for share in shares):
            return None
        parts = self._made((payload[0].reshape(call.shape), *payload[1:]), each, sums=call.op is Op.DGRAD)
        join = _summed if call.op is Op.DGRAD else _side_by_side
        results = [join([parts[rank][at] for rank in range(len(self._shares))]) for at in range(len(each))]
        return [unshared(y, shape) for y, shape in zip(results, shapes, strict=True)] if shapes else results

    def _takes(self, call: Call, payload: Payload, shapes: Shapes) -> bool:
        if call.op not in SPREAD or call.dtype not in FLOATS or len(call.shape) != 2:
            return False
        if not 0 < call.rows <= self._most_rows or call.seeded or not payload[0].is_cpu:
            return False
        return not call.also or (call.op is Op.FORWARD and bool(shapes))

    def _made(self, payload: Payload, each: list[list[Share]], sums: bool) -> list[list[Tensor]]:
        """Return what each rank makes of each layer: of all values of the rows, or if it `sums` of its own. This thread waits for the first
        rank, and others for the rest."""
        (x, *ends), callers = payload, self.callers

        def made(rank: int) -> list[Tensor]:
            found = []
            for shares in each:
                call, begin, end = shares[rank]
                rows = x[:, begin:end].contiguous() if sums else x
                found.append(callers[rank]._send(call, (rows, *ends))[0])
            return found

        if self._pool is None or self._process != os.getpid():  # a forked child has none of its parent's threads
            self._pool, self._process = ThreadPoolExecutor(len(callers) - 1, "symbiosis-spread"), os.getpid()
        others: list[Future[list[Tensor]]] = [self._pool.submit(made, rank) for rank in range(1, len(callers))]
        try:
            first = made(0)
        finally:
            for one in others:
                one.exception()  # wait: no call may be under way when this one has failed
        return [first, *(one.result() for one in others)]

    def close(self, timeout: float) -> None:
        """Leave the other ranks."""
        for other in self._others:
            other.close(timeout)
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None


@lru_cache(maxsize=1 << 14)
def _cuts(outputs: int, shares: tuple[float, ...]) -> list[tuple[int, int]]:
    """Divide outputs by shares.

    >>> _cuts(10, (3.0, 1.0))
    [(0, 7), (7, 10)]
    """
    ends = [int(outputs * taken / sum(shares)) for taken in accumulate(shares)]
    return list(pairwise([0, *ends[:-1], outputs]))


@lru_cache(maxsize=1 << 14)
def shares_of(call: Call, number: int, layer: Layer, shares: tuple[float, ...]) -> list[Share]:
    """Return what each rank does of a call, for one of its layers."""
    if call.op in (Op.PRODUCT, Op.GROUPED):
        whole = call.view or View(layer.shape, contiguous_stride(layer.shape), 0)
        cuts = _cuts(whole.size[-1], shares)
        return [Share(replace(call, view=_columns(whole, begin, end)), begin, end) for begin, end in cuts]
    made = []
    for begin, end in _cuts(width(layer), shares):
        view = view_of_outputs(layer, begin, end)
        if call.op is Op.DGRAD:
            view = View(view.size[::-1], view.stride[::-1], view.offset)
        bias, gradient = call.bias, call.gradient or call.op is Op.DGRAD
        part = Call(
            Op.PRODUCT, number, call.dtype, (call.rows, view.size[0]), bias, call.priority, view, gradient=gradient
        )
        made.append(Share(part, begin, end))
    return made


def _columns(view: View, begin: int, end: int) -> View:
    return View((*view.size[:-1], end - begin), view.stride, view.offset + begin * view.stride[-1])


def _side_by_side(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, 1)


def _summed(parts: list[Tensor]) -> Tensor:
    """Add in float32 at least, so that halves round once."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    return reduce(Tensor.add_, parts[1:], parts[0].to(wide, copy=True)).to(parts[0].dtype)
