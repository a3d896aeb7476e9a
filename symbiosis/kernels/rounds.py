"""A round of calls without a CPU: the client's kernel rings and waits for the answer, the executor's waits for all bells.

Both spin on words in device memory that both sides map: a bell holds the number of the call that its client made last in the
round, a reply word that of the call answered last. A kernel that waits is one warp. It needs programs that run on the GPU at the
same time (MPS): else who waits would keep the GPU until its time slice is over.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from symbiosis.kernels.rows import PLACES

LET_GO = -1
WORD, BLOCK = 8, 4096  # bytes that a thread copies at once; how often, within the kernel that calls


@triton.jit(do_not_specialize=["number", "source", "target", "count", "limit"])
def _call(bell, reply, number, source, target, count, limit, LET_GO: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    where = tl.arange(0, BLOCK)
    words = tl.load(source.to(tl.pointer_type(tl.int64)) + where, mask=where < count)
    tl.store(target.to(tl.pointer_type(tl.int64)) + where, words, mask=where < count)
    tl.debug_barrier()
    tl.atomic_xchg(bell, number, sem="release", scope="sys")
    begun = globaltimer()
    seen = tl.atomic_add(reply, 0, sem="acquire", scope="sys")
    while (seen != number) & (seen != LET_GO) & (globaltimer() - begun < limit):
        seen = tl.atomic_add(reply, 0, sem="acquire", scope="sys")


@triton.jit(do_not_specialize=["pages", "stride", "limit", "behind"])
def _wait(table, turn, stop, late, pages, stride, limit, behind, PLACES: tl.constexpr):  # type: ignore[no-untyped-def]
    now = tl.load(turn)
    place = 2 * tl.arange(0, PLACES)
    at = table + now * stride + place
    reply, number = tl.load(at), tl.load(at + 1).to(tl.int32)
    bell, there = (reply + behind).to(tl.pointer_type(tl.int32)), reply != 0
    begun = globaltimer()
    given_up = tl.load(stop, volatile=True)
    missing = tl.sum((there & (tl.load(bell, mask=there, other=0, volatile=True) != number)).to(tl.int32))
    while (missing > 0) & (given_up == 0):
        given_up = tl.load(stop, volatile=True) | (globaltimer() - begun > limit).to(tl.int32)
        missing = tl.sum((there & (tl.load(bell, mask=there, other=0, volatile=True) != number)).to(tl.int32))
    if missing > 0:  # from here on nobody is waited for, and nobody answered
        for page in range(now, pages):
            tl.store(table + page * stride + place, tl.zeros_like(reply))
        tl.store(late, 1)


def call(bell: Tensor, reply: Tensor, number: int, rows: Tensor, place: Tensor, seconds: float) -> None:
    """Copy the rows to their place, make the call of this number, and wait until it is answered, or the reply word becomes `LET_GO`;
    if neither happens within these seconds, there is nobody any more whom that could matter to."""
    count = rows.nbytes // WORD
    if count > BLOCK or rows.nbytes % WORD or rows.data_ptr() % WORD or not rows.is_contiguous():
        place.copy_(rows)
        count = 0
    _call[(1,)](
        bell, reply, number, rows.data_ptr(), place.data_ptr(), count, int(seconds * 1e9), LET_GO, BLOCK, num_warps=8
    )


def wait(table: Tensor, turn: Tensor, stop: Tensor, late: Tensor, behind: int, seconds: float) -> None:
    """Until all whom the page is going to answer (`kernels.rows`) have rung for that: their bells lie so many bytes behind their
    reply words. If `stop` is set, or after so many seconds, nobody is answered by this page and those after it, and `late` is set."""
    limit = int(seconds * 1e9)
    _wait[(1,)](table, turn, stop, late, len(table), table.stride(0), limit, behind, PLACES, num_warps=1)


def warm_up(device: torch.device) -> None:
    """CUDA loads the client's kernel now: while a stream waits, it could not."""
    words, row = torch.ones(2, dtype=torch.int32, device=device), torch.ones(2, 2, device=device)
    call(words[:1], words[1:], 1, row[0], row[1], 60.0)
