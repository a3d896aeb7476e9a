"""What ranks compute together on GPUs that reach each other's memory: the sum of their rows, and all of them. It is one kernel, and no meeting beside it.

Each rank writes its rows into the memory of all others, and then a word that says so; when the words of all are there, it adds up what has come,
in the order of the ranks, so that all have the same bits. A block of the kernel has a part of the rows, and words of its own. What comes lies in
turn in one of two places: a rank begins to write the rows after the next only when all others have read these.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PART, PARTS = 8192, 128  # bytes of a block, and blocks at most
MOST = PART * PARTS  # bytes of a rank's rows at once
LOOKS = 64  # at a word, for each at what ends the wait
SUMMED = (torch.bfloat16, torch.float16, torch.float32)


class RankMemory(NamedTuple):
    """What one rank knows.

    Attributes:
        rank: Which one it is.
        memories: The addresses of the memory of each rank, `memory_of` bytes that are zeros at first, int64.
        numbers: How often each block has exchanged rows, int32, zeros at first.
        stop: The address of an int32; when that is no longer 0, nothing is waited for, and what comes is of no use.
    """

    rank: int
    memories: Tensor
    numbers: Tensor
    stop: int


def memory_of(ranks: int) -> int:
    """Return how many bytes each rank needs: words by which the others say that rows have come, and the rows, twice.

    >>> memory_of(2)
    4195328
    """
    return 4 * ranks * PARTS + 2 * ranks * MOST


@triton.jit
def _wait(word, number, stop, LOOKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the word has come to this number, or it is said that it never will."""
    ended, looks = number * 0, number * 0
    seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    while (seen - number < 0) & (ended == 0):
        looks += 1
        if looks % LOOKS == 0:
            ended = tl.load(stop.to(tl.pointer_type(tl.int32)), volatile=True)
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")


@triton.jit(do_not_specialize=["stop"])
def _exchange(  # type: ignore[no-untyped-def]
    x, made, memories, numbers, stop, size, RANK: tl.constexpr, RANKS: tl.constexpr, MOST: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, LOOKS: tl.constexpr, ADDS: tl.constexpr
):  # fmt: skip
    part = tl.program_id(0)
    number = tl.load(numbers + part) + 1
    at = part * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(x + at, mask=at < size)
    turn = (number & 1) * RANKS
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            rows = (tl.load(memories + rank) + 4 * RANKS * PARTS).to(tl.pointer_type(x.dtype.element_ty))
            there = tl.multiple_of(rows + (turn + RANK) * MOST, 16)
            tl.store(there + at, mine, mask=at < size)
    tl.debug_barrier()
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            words = tl.load(memories + rank).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(words + RANK * PARTS + part, number, sem="release", scope="sys")
    words = tl.load(memories + RANK).to(tl.pointer_type(tl.int32))
    rows = (tl.load(memories + RANK) + 4 * RANKS * PARTS).to(tl.pointer_type(x.dtype.element_ty))
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(RANKS):
        theirs = mine
        if rank != RANK:
            _wait(words + rank * PARTS + part, number, stop, LOOKS)
            tl.debug_barrier()
            here = tl.multiple_of(rows + (turn + rank) * MOST, 16)
            theirs = tl.load(here + at, mask=at < size, cache_modifier=".cg")
        if ADDS:
            total += theirs.to(tl.float32)
        else:
            tl.store(made + rank * size + at, theirs, mask=at < size)
    if ADDS:
        tl.store(made + at, total.to(made.dtype.element_ty), mask=at < size)
    tl.store(numbers + part, number)


def sum_of_ranks(x: Tensor, memory: RankMemory) -> Tensor:
    """Return the sum of the ranks' tensors, which are contiguous and of a dtype of `SUMMED`."""
    made, most = torch.empty_like(x), MOST // x.itemsize
    for begin in range(0, x.numel(), most):
        _exchange_some(x.view(-1)[begin : begin + most], made.view(-1)[begin : begin + most], memory, adds=True)
    return made


def gather_of_ranks(x: Tensor, memory: RankMemory) -> Tensor:
    """Return all ranks' tensors, [ranks, ...]. They are contiguous."""
    flat, ranks = x.view(-1).view(torch.uint8), len(memory.memories)
    parts = []
    for begin in range(0, len(flat), MOST):
        some = flat[begin : begin + MOST]
        parts.append(some.new_empty(ranks, len(some)))
        _exchange_some(some, parts[-1], memory, adds=False)
    return torch.cat(parts, dim=1).view(x.dtype).view(ranks, *x.shape)


def _exchange_some(x: Tensor, made: Tensor, memory: RankMemory, adds: bool) -> None:
    block = PART // x.itemsize
    _exchange[(triton.cdiv(x.numel(), block),)](
        x, made, memory.memories, memory.numbers, memory.stop, x.numel(), RANK=memory.rank, RANKS=len(memory.memories),
        MOST=MOST // x.itemsize, PARTS=PARTS, BLOCK=block, LOOKS=LOOKS, ADDS=adds, num_warps=8
    )  # fmt: skip
