"""Products, activations and attention on a CPU whose result for a row depends neither on the other rows nor on how many there are.

Libraries choose code by the number of rows: MKL has other kernels for a product of 1, 2, 3 or 5 rows, torch computes the end of an activation's input
number by number where it computes the rest in vectors, and attention of one row has other sums than attention of many. Within `row_invariant`

    products     have 16, 32, ... or 256 rows, and 16 columns or more: few are padded, many are cut; in all of these a row has the same sums
    activations  are computed in whole vectors
    attention    goes over keys in blocks of 64 by their places in the sequence, and adds up what blocks make in their order

so that a token has the same bits as one row of a decoding step, in a piece of a prompt, and among packed sequences that are trained.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from symbiosis.kernels.paged_attention import How

LEAST, MOST = 16, 256  # rows of a product
KEYS = 64  # of a block
ALIGNED = 64  # bytes
ROOM = 1 << 24  # numbers that attention holds at once
GRAIN, VECTORS = (
    32768,
    64,
)  # torch gives a thread no fewer numbers than the first; its loops take a divisor of the second at once
PRODUCTS = frozenset({"linear", "matmul", "__matmul__", "mm", "addmm"})
# of which torch has a formula for vectors and another one for single numbers
ACTIVATIONS = frozenset({
    "silu", "gelu", "sigmoid", "softplus", "rsqrt", "mish", "elu", "selu", "celu", "logsigmoid", "hardswish", "hardsigmoid", "erfc", "log1p",
})  # fmt: skip

Given = ParamSpec("Given")


class _BlocksOfThread(threading.local):
    depth = 0


_now = _BlocksOfThread()


class RowInvariant(TorchFunctionMode):
    """Computes products and activations so."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in PRODUCTS:
            return _product(func, name, args, kwargs)
        if name in ACTIVATIONS:
            return in_vectors(func, *args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def row_invariant(is_on: bool = True) -> Iterator[None]:
    """In the block, this thread's torch computes each row by itself."""
    if not is_on:
        yield
        return
    _now.depth += 1
    try:
        with RowInvariant():
            yield
    finally:
        _now.depth -= 1


def is_row_invariant() -> bool:
    """Whether this thread is in such a block."""
    return _now.depth > 0


def as_it_is(function: Callable[Given, Tensor]) -> Callable[Given, Tensor]:
    """Have a function call torch as it is: what it does is by rows already, and each call through the mode takes time."""

    @wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Tensor:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return called


# ---------------------------------------------------------------- products and activations


def _product(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "addmm":
        if kwargs or args[0].dim() != 1:
            return func(*args, **kwargs)
        bias, x, weight = args
        return _by_rows(lambda rows, w, b: func(b, rows, w), x, weight, bias, 1)
    x, weight, *others = args
    if kwargs or x.dim() < 2 or weight.dim() != 2:
        return func(*args, **kwargs)
    if name != "linear":
        return _by_rows(lambda rows, w, _: func(rows, w), x, weight, None, 1)
    return _by_rows(func, x, weight, others[0] if others else None, 0)


def _by_rows(multiply: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """Multiply rows by a weight, whose dimension `outputs` counts the columns of the result: few of these are padded, too."""
    count = weight.shape[outputs]
    if count >= LEAST or type(weight) not in (Tensor, nn.Parameter):
        return in_tiles(lambda rows: multiply(rows, weight, bias), x)
    wide = pad(weight, (0, 0, 0, LEAST - count) if outputs == 0 else (0, LEAST - count))
    more = None if bias is None else pad(bias, (0, LEAST - count))
    return in_tiles(lambda rows: multiply(rows, wide, more), x)[..., :count].contiguous()


def in_tiles(multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Multiply rows, [..., K], some at a time."""
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if not count:
        return multiply(x)
    rows = pad(rows, (0, 0, 0, spare)) if (spare := -count % LEAST) else rows.contiguous()
    made = [multiply(tile) for tile in rows.split(MOST)] if len(rows) > MOST else [multiply(rows)]
    y = made[0] if len(made) == 1 else torch.cat(made)
    return y[:count].view(*x.shape[:-1], y.shape[-1])


def in_vectors(function: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Apply a function of single numbers, so that no thread has an end that is less than a vector."""
    size = _whole(x.numel(), all_threads=getattr(function, "__name__", "") == "gelu")
    if size == x.numel():
        return function(x.contiguous(), *args, **kwargs)
    flat = pad(x.reshape(-1), (0, size - x.numel()))
    return function(flat, *args, **kwargs)[: x.numel()].view(x.shape)


def _whole(size: int, all_threads: bool) -> int:
    """Return a size from this one on that torch's threads share in whole vectors: as many threads as have enough to do, or, in some loops, all."""
    threads = torch.get_num_threads()
    while True:
        parts = threads if all_threads else min(threads, -(-size // GRAIN))
        if size < GRAIN // 2 or not size % (VECTORS * parts):
            return size + -size % VECTORS
        size += -size % (VECTORS * parts)


@as_it_is
@torch.no_grad()
def add_low_rank_(y_TN: Tensor, x_TK: Tensor, down_RK: Tensor, up_RN: Tensor) -> Tensor:
    """Add `(x downᵀ) up` to y, in the dtype of the rows. Returns `x downᵀ`."""
    down, up = (_laid_out(matrix, x_TK.dtype) for matrix in (down_RK, up_RN))
    low_TR = in_tiles(lambda rows: torch.mm(rows, down.t()), pad(x_TK, (0, down.shape[1] - x_TK.shape[1])))
    y_TN += in_tiles(lambda rows: torch.mm(rows, up), low_TR)[:, : y_TN.shape[1]]
    return low_TR[:, : len(down_RK)]


def _laid_out(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix that lies by rows, where torch puts tensors of their own, with zeros at its ends: libraries look at all of that."""
    rows, columns = matrix.shape
    lies_so = matrix.is_contiguous() and not matrix.data_ptr() % ALIGNED
    if matrix.dtype == dtype and lies_so and not rows % LEAST and columns >= LEAST:
        return matrix
    copy = torch.zeros(-(-rows // LEAST) * LEAST, max(columns, LEAST), dtype=dtype)
    copy[:rows, :columns] = matrix
    return copy


# ---------------------------------------------------------------- attention


def whole_blocks(keys: int) -> int:
    """Return how many keys there are in the blocks that have so many."""
    return -(-keys // KEYS) * KEYS


@as_it_is
@torch.no_grad()
def attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, firsts: Tensor, how: How) -> Tensor:
    """Compute attention of [sequences, heads, rows, size] over as many or fewer heads of keys and values, which begin with a sequence's first
    token; what follows a row is not seen. `firsts` are the places of the sequences' first rows. The result is float32."""
    sequences, heads, rows, _ = query.shape
    shared, keys = heads // key.shape[1], whole_blocks(key.shape[2])
    key, value = (pad(each.float(), (0, 0, 0, keys - each.shape[2])) for each in (key, value))
    size = value.shape[3]
    value = pad(value, (0, max(0, LEAST - size)))
    result = torch.empty(*query.shape[:3], size)
    at_once = max(1, MOST // shared)
    for first in range(0, rows, at_once):
        span = slice(first, min(first + at_once, rows))
        products = -(-(span.stop - span.start) * shared // LEAST) * LEAST
        most = max(1, ROOM // (key.shape[1] * products * keys))
        for some in range(0, sequences, most):
            which = slice(some, some + most)
            places = firsts[which, None] + torch.arange(span.start, span.stop)
            result[which, :, span] = _attend(query[which, :, span].float(), key[which], value[which], places, how)[
                ..., :size
            ]
    return result


def _attend(query: Tensor, key: Tensor, value: Tensor, places: Tensor, how: How) -> Tensor:
    """Compute attention of few rows, at these places [sequences, rows]."""
    sequences, heads, rows, size = query.shape
    kinds, shared = key.shape[1], heads // key.shape[1]
    begin = 0 if how.window is None else max(0, int(places.min()) - how.window + 1) // KEYS
    blocks = int(places.max()) // KEYS + 1 - begin
    seen = slice(begin * KEYS, (begin + blocks) * KEYS)
    # the heads that share keys are rows of one product: [sequences, kinds, rows * shared, size]
    q = query.reshape(sequences, kinds, shared, rows, size).transpose(2, 3).flatten(2, 3)
    q = pad(q, (0, 0, 0, -q.shape[2] % LEAST))
    many = q.shape[2]
    q = q[:, :, None].expand(-1, -1, blocks, -1, -1).reshape(-1, many, size)
    k, v = (each[:, :, seen].reshape(-1, KEYS, each.shape[3]) for each in (key, value))
    scores = (torch.bmm(q, k.transpose(1, 2)) * how.scaling).view(sequences, kinds, blocks, many, KEYS)
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    scores = scores.masked_fill_(_unseen(places, seen, how.window, shared, many), float("-inf"))
    top = scores.amax((2, 4), keepdim=True)
    total = torch.zeros(sequences, kinds, many)
    if how.sinks is not None:
        sinks = pad(how.sinks.float().view(kinds, 1, shared).expand(-1, rows, -1).flatten(1), (0, many - rows * shared))
        top = torch.maximum(top, sinks[None, :, None, :, None])
        total += torch.exp(sinks - top[:, :, 0, :, 0])
    weights = torch.exp(scores.sub_(top))
    made = torch.bmm(weights.view(-1, many, KEYS), v).view(sequences, kinds, blocks, many, -1)
    sums, result = weights.sum(-1), torch.zeros(sequences, kinds, many, v.shape[2])
    for block in range(blocks):
        total += sums[:, :, block]
        result += made[:, :, block]
    result = (result / total[..., None])[:, :, : rows * shared].unflatten(2, (rows, shared))
    return result.transpose(2, 3).flatten(1, 2)


def _unseen(places: Tensor, seen: slice, window: int | None, shared: int, many: int) -> Tensor:
    """Return what the rows of the products do not see, [sequences, 1, blocks, many, KEYS]."""
    at = places.repeat_interleave(shared, 1)
    at = torch.cat([at, at[:, -1:].expand(-1, many - at.shape[1])], 1)[:, None, None, :, None]
    keys = torch.arange(seen.start, seen.stop).view(1, 1, -1, 1, KEYS)
    return keys > at if window is None else (keys > at) | (keys <= at - window)


def total_of(logits: Tensor) -> Tensor:
    """Return the logarithm of the sum of each row's exponentials, [rows, 1]. Of a single row with many numbers, torch's threads would each add up a
    part."""
    rows = logits.expand(2, -1) if len(logits) == 1 else logits
    return rows.logsumexp(dim=-1, keepdim=True)[: len(logits)]
