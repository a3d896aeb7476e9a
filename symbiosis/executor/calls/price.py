"""Prices: the multiplications and the bytes that a call takes, and the cells that it can be cut into, known from its header alone."""

from collections.abc import Callable, Sequence
from math import ceil, prod
from typing import NamedTuple

import msgspec
from torch import Tensor

from symbiosis.errors import CallError, Code
from symbiosis.executor.calls.cells import Grain, Grid, cells, leading
from symbiosis.executor.model.store import Store
from symbiosis.executor.options import Options
from symbiosis.protocol import ITEMSIZE, WEIGHT_BITS, Call, Op

MOST_SCRATCH = 1 << 30  # bytes that a turn may need besides payload and reply, if the call can be cut
MOVED = 8  # moving a value to fresh memory takes as long as so many multiplications
GROUP = 1 << 12  # so does looking whether a group has rows
KEY_BLOCK = 32  # a row of a keystream may be longer by so many bytes, padding included


class Price(msgspec.Struct, frozen=True):
    """The price of one call. It takes at least so many `turns`, and each needs `scratch` bytes besides payload and reply."""

    multiplications: int  # and other work, as the multiplications that would take as long
    held: int
    scratch: int
    turns: int


def price_of(call: Call, shape: tuple[int, ...], most_turns: int, store: Store, options: Options) -> Price:
    """Return the price of a valid call whose reply has this shape, or raise `CallError` if it exceeds the limit of a call."""
    rules = PRICES[call.op]
    work = rules.multiplications(call, prod(shape), store)
    if work > options.max_call_multiplications:
        raise CallError(
            Code.TOO_LARGE,
            f"a call may take {options.max_call_multiplications:.3g} multiplications, this one takes {work:.3g}: send fewer rows, "
            "or raise --max-call-multiplications",
        )
    scratch = rules.scratch(call, prod(shape), store, options)
    least = max(scratch / MOST_SCRATCH, 1 if call.by_rows else work / store.multiplications(options.max_batch_tokens))
    turns = max(1, min(most_turns, ceil(least)))  # a call of no rows takes one turn, too
    values = prod(call.shape) if call.op.traits.has_payload else 0
    rows = values * (8 if call.op is Op.LOOKUP else ITEMSIZE[call.dtype]) + 4 * call.groups
    held = rows + prod(shape) * ITEMSIZE[call.dtype]
    return Price(work, held, -(-scratch // turns), turns)


def grid_of(call: Call, shape: Sequence[int], widths: Sequence[int], grain: Grain) -> Grid:
    """Return the grid of a result of this `shape`. A call that goes by rows is cut into slices before, which leaves the columns of each
    member, of these `widths`. Cells are ordered so that a run of them needs as little of a weight as possible."""
    if call.by_rows:
        return (sum(cells(width, grain.columns) for width in widths),)
    return PRICES[call.op].grid(shape, grain)


def _matrices(call: Call, store: Store) -> list[Sequence[int]]:
    """Return the shapes of the matrices that rows are multiplied by."""
    return [store.matrix(layer, call.op, call.view).shape for layer in call.layers]


def _moved(call: Call, reply: int, store: Store) -> int:
    """Return the price of a call that only copies."""
    return max(1, MOVED * reply)


def _every_weight(call: Call, reply: int, store: Store) -> int:
    return prod(store.manifest[call.layer].shape)


def _of_rows(call: Call, reply: int, store: Store) -> int:
    rows = prod(call.shape[:-1])
    products = rows * sum(K * N for *_, K, N in _matrices(call, store))
    return products * products_of_bytes(call.dtype) + _besides(call, reply, store) + GROUP * call.groups


def _of_columns(call: Call, reply: int, store: Store) -> int:
    """Return the price of a product of (.., M, K) by (.., K, T)."""
    return reply * call.shape[-2] + _besides(call, reply, store)


def _besides(call: Call, reply: int, store: Store) -> int:
    """Return the price of moving rows, growing seeds and converting matrices."""
    return prod(call.shape) * (1 + call.seeded * ITEMSIZE[call.dtype]) + reply + _converted(call, store)


def products_of_bytes(dtype: str) -> int:
    """Return how many products of bytes make a product of integers; 1 for other dtypes."""
    if dtype not in WEIGHT_BITS:
        return 1
    return sum(ITEMSIZE[dtype] - place for place in range(WEIGHT_BITS[dtype] // 8))


def _converted(call: Call, store: Store) -> int:
    """Return how many values of matrices must be made whole, converted or copied before they are multiplied."""
    if call.dtype in WEIGHT_BITS:  # bytes are converted to whatever torch multiplies
        return sum(K * N for K, N in _matrices(call, store))
    return sum(
        prod(matrix.shape[matrix.stride(0) == 0 and matrix.dim() == 3 :])
        for layer, matrix in ((layer, store.matrix(layer, call.op, call.view)) for layer in call.layers)
        if layer in store.packed or call.dtype != store.manifest[call.layer].dtype or not _lies_well(matrix)
    )


def _lies_well(matrix: Tensor) -> bool:
    """Whether libraries multiply by the matrix as it lies there, without a copy of all its elements."""
    rows, columns = matrix.shape[-2:]
    over, along = matrix.stride()[-2:]
    return (along == 1 and over >= columns) or (over == 1 and along >= rows)


# Bytes that a whole call needs besides payload and reply, for as many rows as run together at most.


def _none(call: Call, reply: int, store: Store, options: Options) -> int:
    return 0


def _rows_found(call: Call, reply: int, store: Store, options: Options) -> int:
    return reply * ITEMSIZE[store.manifest[call.layer].dtype]


def _cast_weight(call: Call, reply: int, store: Store, options: Options) -> int:
    return 2 * prod(store.manifest[call.layer].shape) * ITEMSIZE[call.dtype]


def _for_product(call: Call, reply: int, store: Store, options: Options) -> int:
    size = ITEMSIZE[call.dtype]
    share = min(1.0, options.max_batch_tokens / max(1, call.rows)) if call.by_rows else 1.0
    taken, made = ceil(prod(call.shape) * share), ceil(reply * share)
    if call.dtype in WEIGHT_BITS:  # digits of rows and weights as doubles, their products and the sums
        grown = ceil(call.rows * share) * KEY_BLOCK + 2 * taken * size if call.seeded else 0
        return grown + taken * size * 12 + made * (size * 12 + 3 * size) + 8 * _converted(call, store)
    copies = 1 if len(call.layers) == 1 else 2  # of the sum of a group's gradients
    matrices = _converted(call, store) * size
    return matrices + taken * (2 * size + 1) + copies * made * size  # rows are aligned, and checked for infinities


# The cells of a call that does not go by rows, by the shape of its reply.


def _by_panels(shape: Sequence[int], grain: Grain) -> Grid:
    return (*shape[:-2], cells(shape[-1], grain.columns), cells(shape[-2], grain.rows))


def _by_blocks(shape: Sequence[int], grain: Grain) -> Grid:
    return (*shape[:-2], cells(shape[-2], grain.rows), cells(shape[-1], grain.columns))


def _by_first(shape: Sequence[int], grain: Grain) -> Grid:
    return (shape[0],)


def _by_values(shape: Sequence[int], grain: Grain) -> Grid:
    return (prod(shape),)


class OpPrice(NamedTuple):
    """How an op is priced and cut. Both prices count from the number of values in the reply."""

    multiplications: Callable[[Call, int, Store], int]
    scratch: Callable[[Call, int, Store, Options], int]
    grid: Callable[[Sequence[int], Grain], Grid] = _by_panels  # of calls that do not go by rows


PRICES: dict[Op, OpPrice] = {  # STATS is answered as an ECHO
    Op.FORWARD: OpPrice(_of_rows, _for_product),
    Op.DGRAD: OpPrice(_of_rows, _for_product),
    Op.PRODUCT: OpPrice(_of_rows, _for_product, _by_panels),
    Op.LEFT: OpPrice(_of_columns, _for_product, _by_blocks),
    Op.GROUPED: OpPrice(_of_rows, _for_product, _by_panels),
    Op.LOOKUP: OpPrice(_moved, _rows_found, _by_first),
    Op.NORMS: OpPrice(_every_weight, _cast_weight, _by_first),
    Op.READ: OpPrice(_moved, _none, leading),
    Op.ECHO: OpPrice(_moved, _none, _by_values),
}
