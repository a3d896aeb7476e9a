"""A round of calls without a CPU: the client's kernel rings and waits for the answer, and the executor's kernel waits for all bells.

Both spin on words in device memory that both sides map. A bell holds the number of the call that its client made last in the round; a reply
word holds that of the call answered last. A kernel that waits is one block. The programs must run on the GPU at the same time (MPS), or a
waiting kernel would keep the GPU until its time slice is over.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from symbiosis.kernels.gpu import LET_GO
from symbiosis.kernels.gpu.gather import PLACES

LONGEST_S = 1e9  # about as long as a kernel can wait
LOOKS, ZEROS = 64, 1024  # at what is waited for, for each at what ends that; words of a table that are cleared at once
WORD, BLOCK = 8, 4096  # bytes that a thread copies at once; how often, within the kernel that calls


class DoorbellWords(NamedTuple):
    """A client's words: three in device memory, the address of one in the host's, and the value that this one takes if no answer ever
    comes."""

    bell: Tensor
    reply: Tensor
    over: Tensor
    error: int
    void: int


@triton.jit
def wait_for_answer(  # type: ignore[no-untyped-def]
    reply, over, error, number, ended, limit, VOID: tl.constexpr, LET_GO: tl.constexpr, LOOKS: tl.constexpr
):  # fmt: skip
    """Wait for the reply word, unless the wait has `ended` already."""
    begun, looks = globaltimer(), number * 0
    seen = tl.atomic_add(reply, 0, sem="acquire", scope="sys")
    while (seen != number) & (seen != LET_GO) & (ended == 0):
        looks += 1
        if looks % LOOKS == 0:
            ended = tl.atomic_add(over, 0, sem="relaxed", scope="sys")
            if globaltimer() - begun > limit:
                tl.store(error.to(tl.pointer_type(tl.int32)), VOID)
                tl.store(over, 1)
        seen = tl.atomic_add(reply, 0, sem="acquire", scope="sys")


@triton.jit(do_not_specialize=["error", "number", "source", "target", "count", "limit"])
def _call(  # type: ignore[no-untyped-def]
    bell, reply, over, error, number, source, target, count, limit, VOID: tl.constexpr, LET_GO: tl.constexpr,
    LOOKS: tl.constexpr, BLOCK: tl.constexpr, COPIES: tl.constexpr
):  # fmt: skip
    if COPIES:
        where = tl.arange(0, BLOCK)
        rows = tl.load(source.to(tl.pointer_type(tl.int64)) + where, mask=where < count)
        tl.store(target.to(tl.pointer_type(tl.int64)) + where, rows, mask=where < count)
        tl.debug_barrier()
    tl.atomic_xchg(bell, number, sem="release", scope="sys")
    wait_for_answer(reply, over, error, number, number * 0, limit, VOID, LET_GO, LOOKS)


@triton.jit(do_not_specialize=["pages", "stride", "limit", "behind", "error"])
def _wait(  # type: ignore[no-untyped-def]
    table, turn, stop, late, pages, stride, limit, behind, error, VOID: tl.constexpr, LET_GO: tl.constexpr,
    PLACES: tl.constexpr, LOOKS: tl.constexpr, ZEROS: tl.constexpr
):  # fmt: skip
    now = tl.load(turn).to(tl.int32)
    place = tl.arange(0, PLACES)
    at = table + now * stride + 2 * place
    reply, number = tl.load(at), tl.load(at + 1).to(tl.int32)
    bell, there = (reply + behind).to(tl.pointer_type(tl.int32)), reply != 0
    begun = globaltimer()
    given_up, looks = now * 0, now * 0
    missing = tl.sum((there & (tl.load(bell, mask=there, other=0, volatile=True) != number)).to(tl.int32))
    while (missing > 0) & (given_up == 0):
        looks += 1
        if looks % LOOKS == 0:
            given_up = tl.load(stop, volatile=True) + tl.sum((globaltimer() - begun + 0 * place > limit).to(tl.int32))
        missing = tl.sum((there & (tl.load(bell, mask=there, other=0, volatile=True) != number)).to(tl.int32))
    if missing > 0:
        if error != 0:
            tl.store(error.to(tl.int64).to(tl.pointer_type(tl.int32)), VOID)
            tl.debug_barrier()
            tl.atomic_xchg(reply.to(tl.pointer_type(tl.int32)), LET_GO, mask=there, sem="release", scope="sys")
        words = tl.arange(0, ZEROS)
        for start in range(now * stride, pages * stride, ZEROS):
            tl.store(table + start + words, tl.zeros([ZEROS], tl.int64), mask=start + words < pages * stride)
        tl.store(late, 1)


def call(words: DoorbellWords, seconds: float, number: int, rows: Tensor, place: Tensor) -> None:
    """Copy the rows to their place, unless they lie there, make the call of this number, and wait until it is answered, the reply word becomes `LET_GO`, or
    `over` is not zero, as it is after so many seconds."""
    count = rows.nbytes // WORD
    if rows.data_ptr() == place.data_ptr():
        count = 0
    elif count > BLOCK or rows.nbytes % WORD or rows.data_ptr() % WORD or not rows.is_contiguous():
        place.copy_(rows)
        count = 0
    _call[(1,)](
        words.bell, words.reply, words.over, words.error, number, rows.data_ptr(), place.data_ptr(), count,
        int(min(seconds, LONGEST_S) * 1e9), words.void, LET_GO, LOOKS, BLOCK, count > 0, num_warps=8 if count else 1,
    )  # fmt: skip


def wait(
    table: Tensor, turn: Tensor, stop: Tensor, late: Tensor, behind: int, seconds: float, error: int = 0, void: int = 0
) -> None:
    """Wait until all clients that the page answers (`kernels.gpu.gather`) have rung. Their bells lie `behind` bytes after their reply
    words. If `stop` is set, or after so many seconds, the table is cleared from this page on, so that nothing more is copied or
    answered, and `late` is set. Both words lie in the host's memory. `error` is the address of a word there that then becomes `void`,
    before the clients are let go: what they compute from then on is wrong."""
    pages, stride = table.shape
    _wait[(1,)](
        table, turn, stop, late, pages, stride, int(seconds * 1e9), behind, error, void, LET_GO, PLACES, LOOKS, ZEROS,
        num_warps=1,
    )  # fmt: skip


def load_wait(device: torch.device, seconds: float, error: int = 0, void: int = 0) -> None:
    """Make CUDA load the executor's kernel now, which takes a tenth of a second, and not when somebody waits for it."""
    table, turn = (torch.zeros(1, words, dtype=torch.int64, device=device) for words in (2 * PLACES, 1))
    stop, late = (torch.zeros(1, dtype=torch.int32, pin_memory=True) for _ in range(2))
    wait(table, turn, stop, late, 0, seconds, error, void)


def load_call(device: torch.device) -> None:
    """Make CUDA load the client's kernels now, which it cannot do while a stream waits."""
    words, rows = torch.ones(3, 64, dtype=torch.int32, device=device), torch.ones(2, 64, device=device)
    mine = DoorbellWords(words[0, :1], words[1, :1], words[2, :1], words.data_ptr(), 0xFFFF)
    for place in rows:
        call(mine, 60.0, 1, rows[0], place)
