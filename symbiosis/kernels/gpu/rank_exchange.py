"""What ranks compute together on GPUs that reach each other's memory: the sum of their rows, and all of them. It is one kernel, and no meeting beside it.

Each rank writes its rows into the memory of all others, and then words that say so, one for each block of the kernel. When the words of all are
there, it adds up what has come, in the order of the ranks, so that all have the same bits. What comes lies in turn in one of two places: a rank
begins to write the rows after the next only when all others have read these. So all blocks count alike, and there are always as many.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 1 << 20  # bytes of a rank's rows at once
PART = 8192  # bytes that a block moves at once
BLOCKS, BLOCKS_OF_MANY = 64, 8  # while a block waits, ranks on the same GPU find no room for large products beside it
LOOKS = 64  # at a word, for each at what ends the wait
SUMMED = (torch.bfloat16, torch.float16, torch.float32)


class RankMemory(NamedTuple):
    """What one rank knows.

    Attributes:
        rank: Which one it is.
        memories: The addresses of the memory of each rank, `memory_of` bytes that are zeros at first, int64.
        numbers: How often each of the kernel's blocks has exchanged rows, int32, zeros at first. All ranks have as many blocks.
        stop: The address of an int32; when that is no longer 0, nothing is waited for, and what comes is of no use.
    """

    rank: int
    memories: Tensor
    numbers: Tensor
    stop: int


def memory_of(ranks: int) -> int:
    """Return how many bytes each rank needs: words by which the others say that rows have come, and the rows, twice."""
    return 4 * ranks * BLOCKS + 2 * ranks * MOST


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
    x, made, memories, numbers, stop, size, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCKS: tl.constexpr,
    MOST: tl.constexpr, PART: tl.constexpr, WORDS: tl.constexpr, LOOKS: tl.constexpr, ADDS: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0)
    number = tl.load(numbers + block) + 1
    turn = (number & 1) * RANKS
    for begin in range(block * PART, size, BLOCKS * PART):
        at = begin + tl.arange(0, PART)
        mine = tl.load(x + at, mask=at < size)
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                rows = (tl.load(memories + rank) + 4 * WORDS).to(tl.pointer_type(x.dtype.element_ty))
                there = tl.multiple_of(rows + (turn + RANK) * MOST, 16)
                tl.store(there + at, mine, mask=at < size)
    tl.debug_barrier()
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            words = tl.load(memories + rank).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(words + RANK * BLOCKS + block, number, sem="release", scope="sys")
    words = tl.load(memories + RANK).to(tl.pointer_type(tl.int32))
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            _wait(words + rank * BLOCKS + block, number, stop, LOOKS)
    tl.debug_barrier()
    rows = (tl.load(memories + RANK) + 4 * WORDS).to(tl.pointer_type(x.dtype.element_ty))
    for begin in range(block * PART, size, BLOCKS * PART):
        at = begin + tl.arange(0, PART)
        total = tl.zeros((PART,), tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                theirs = tl.load(x + at, mask=at < size)
            else:
                here = tl.multiple_of(rows + (turn + rank) * MOST, 16)
                theirs = tl.load(here + at, mask=at < size, cache_modifier=".cg")
            if ADDS:
                total += theirs.to(tl.float32)
            else:
                tl.store(made + rank * size + at, theirs, mask=at < size)
        if ADDS:
            tl.store(made + at, total.to(made.dtype.element_ty), mask=at < size)
    tl.store(numbers + block, number)


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
    ranks, blocks = len(memory.memories), len(memory.numbers)
    _exchange[(blocks,)](
        x, made, memory.memories, memory.numbers, memory.stop, x.numel(), RANK=memory.rank, RANKS=ranks, BLOCKS=blocks,
        MOST=MOST // x.itemsize, PART=PART // x.itemsize, WORDS=ranks * BLOCKS, LOOKS=LOOKS, ADDS=adds, num_warps=8
    )  # fmt: skip
