"""Plans: what follows from a call's header alone, worked out once and looked up whenever the same call comes again."""

from collections.abc import Hashable, Sequence
from math import prod

import msgspec

from symbiosis.executor.calls.cell_ops import BATCHED
from symbiosis.executor.calls.cells import GRAINS, Grid, grains_for
from symbiosis.executor.calls.price import grid_of, price_of
from symbiosis.executor.calls.validation import check_call, must_be_finite
from symbiosis.executor.model.store import Store
from symbiosis.executor.options import Options
from symbiosis.executor.scheduling.queue import Grains
from symbiosis.protocol import ITEMSIZE, Call, Op, View, width
from symbiosis.transport.tensors import Shapes

WORTH_CUTTING = 1 << 17  # multiplications; a shorter call that is not batched keeps nobody waiting, whatever its dtype
WHOLE: tuple[Grid, ...] = ((1,),)  # the grids of what is not cut


class Key(msgspec.Struct, frozen=True, cache_hash=True):
    """Calls of the same key can run as one product."""

    layers: tuple[int, ...]
    op: Op
    dtype: str
    bias: bool
    view: View | None
    seeded: bool = False  # growing the rows takes time, too


class CallPlan(msgspec.Struct, frozen=True):
    """How a valid call is batched, what its reply looks like, and what it costs."""

    key: Hashable
    rows: int
    nbytes: int
    shape: tuple[int, ...]
    held: int  # bytes of the payload and the reply
    parts: Shapes  # what lies in memory for each member of a group
    batchable: bool
    calls: int = 1  # more than one for a round
    multiplications: int = 0
    moved: int = 0  # bytes of the payload and the reply, as they are sent
    scratch: int = 0  # bytes besides `held` while one of its turns is computed
    turns: int = 1  # least number of turns
    grids: tuple[Grid, ...] = WHOLE  # the cells that it can be cut into, at each grain
    grains: Grains = ((GRAINS[0].rows, 1),)  # how few rows a slice may have, and how many cells there are
    kind: Hashable = None  # calls of the same kind are computed by the same kernels
    finite: bool = False  # whether rows that are not finite are refused


def make_plan(call: Call, store: Store, options: Options) -> CallPlan:
    """Return the plan of `call`, or raise `CallError` if the call is wrong whatever its values are."""
    shape = check_call(call, store, options)
    widths = [width(store.manifest[layer]) for layer in call.layers] if call.op is Op.FORWARD else list(shape[1:])
    grids: tuple[Grid, ...] = WHOLE
    if not store.on_gpu and (prod(shape) > 0 or call.by_rows):
        grids = tuple(grid_of(call, shape, widths, grain) for grain in grains_for(call.dtype))
    price = price_of(call, shape, prod(grids[0]), store, options)
    if not call.by_rows and price.turns == 1 and price.multiplications < WORTH_CUTTING:
        grids = WHOLE
    return CallPlan(
        key=Key(call.layers, call.op, call.dtype, call.bias, call.view, call.seeded),
        rows=max(1, call.rows),
        nbytes=call.nbytes,
        shape=shape,
        held=price.held,
        parts=tuple((call.shape[0], width(store.manifest[layer])) for layer in call.layers) if call.also else (),
        batchable=call.by_rows or (call.op in BATCHED and not store.on_gpu),
        multiplications=price.multiplications,
        moved=call.nbytes + prod(shape) * ITEMSIZE[call.dtype],
        scratch=price.scratch,
        turns=price.turns,
        grids=grids,
        grains=tuple((grain.rows, prod(grid)) for grain, grid in zip(grains_for(call.dtype), grids, strict=False)),
        kind=kind_of(call, store),
        finite=must_be_finite(call, options),
    )


def kind_of(call: Call, store: Store) -> Hashable:
    """Return what says, besides the shape, how fast a CPU multiplies: the op, the dtype, and whether the matrix lies row by row."""
    if not call.op.traits.multiplies:
        return call.op
    return call.op, call.dtype, store.matrix(call.layer, call.op, call.view).stride(-1) == 1


def plan_of_round(key: Hashable, plans: Sequence[CallPlan]) -> CallPlan:
    """Return the plan of a round: of calls one behind the other, all with the same number of rows."""
    nbytes, held = sum(plan.nbytes for plan in plans), sum(plan.held for plan in plans)
    work, moved = sum(plan.multiplications for plan in plans), sum(plan.moved for plan in plans)
    return CallPlan(key, plans[0].rows, nbytes, (), held, (), True, len(plans), work, moved)
