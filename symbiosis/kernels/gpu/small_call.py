"""A call of few rows, made by one kernel: it copies the rows to their place, rings, waits for the answer, and fetches the results.

Copies and stream memory operations (`transport.cuda.words`) do the same. But to enqueue one of them takes a CPU as long as launching this
whole kernel, and a token of eager code takes as long as its CPU does.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from symbiosis.kernels.gpu import LET_GO
from symbiosis.kernels.gpu.doorbell import LONGEST_S, LOOKS, WORD, wait_for_answer

MOST_RESULTS = 4
MOST_BYTES = 128 << 10  # of rows, and of each result: one block copies them
BLOCK, WARPS = 4096, 8
LEAST_S = 5.0  # that a kernel waits: in nanoseconds a number of 64 bits, as all that it is compiled for


class CallWords(NamedTuple):
    """Addresses of a client's words: the bell in the host's memory, two in the device's, one for errors in the host's; and the value
    that this one takes if no answer ever comes."""

    bell: int
    reply: int
    over: int
    error: int
    void: int


class Lies(NamedTuple):
    """The places of a registered call's rows and of each result: addresses and bytes."""

    number: int
    rows: tuple[int, int]
    results: Sequence[tuple[int, int]]


@triton.jit
def _move(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    for start in range(0, count, BLOCK):
        where = start + tl.arange(0, BLOCK)
        words = tl.load(source.to(tl.pointer_type(tl.int64)) + where, mask=where < count, cache_modifier=".cg")
        tl.store(target.to(tl.pointer_type(tl.int64)) + where, words, mask=where < count)


@triton.jit(do_not_specialize=[
    "bell", "reply", "over", "error", "limit", "number", "place", "count", "out0", "count0", "out1", "count1", "out2", "count2",
    "out3", "count3", "rows", "target0", "target1", "target2", "target3",
])  # fmt: skip
def _call(  # type: ignore[no-untyped-def]
    bell, reply, over, error, limit, number, place, count, out0, count0, out1, count1, out2, count2, out3, count3,
    rows, target0, target1, target2, target3,
    RESULTS: tl.constexpr, VOID: tl.constexpr, LET_GO: tl.constexpr, LOOKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _move(rows, place, count, BLOCK)
    tl.debug_barrier()
    reply, over = reply.to(tl.pointer_type(tl.int32)), over.to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(reply, 0, sem="release", scope="sys")
    ended = tl.atomic_add(over, 0, sem="acq_rel", scope="sys")  # behind which the bell rings, with all the above done
    tl.store(bell.to(tl.pointer_type(tl.int32)), number, mask=ended == 0)
    wait_for_answer(reply, over, error, number, ended, limit, VOID, LET_GO, LOOKS)
    tl.debug_barrier()
    _move(out0, target0, count0, BLOCK)
    if RESULTS > 1:
        _move(out1, target1, count1, BLOCK)
    if RESULTS > 2:
        _move(out2, target2, count2, BLOCK)
    if RESULTS > 3:
        _move(out3, target3, count3, BLOCK)


class SmallCalls:
    """The small calls of one client."""

    def __init__(self, words: CallWords, seconds: float, device: torch.device) -> None:
        """A call waits for at most `seconds`. CUDA loads the kernels now, because it cannot while a stream waits."""
        bell, reply, over, error, void = words
        self._words = bell, reply, over, error, int(min(max(seconds, LEAST_S), LONGEST_S) * 1e9)
        self._void = void
        self._runs = [self._load(results, device) for results in range(1, MOST_RESULTS + 1)]

    def prepared(self, lies: Lies) -> Callable[[int, Sequence[int], int], None]:
        """Return a function that makes this call, given where the rows are, where each result is wanted, and a stream of the current
        device."""
        missing = MOST_RESULTS - len(lies.results)
        pairs = [*lies.results, *[(lies.rows[0], 0)] * missing]
        place, nbytes = lies.rows
        known = *self._words, lies.number, place, nbytes // WORD, *(
            word for out, nbytes in pairs for word in (out, nbytes // WORD)
        )  # fmt: skip
        nowhere, constants = (place,) * missing, self._constants(len(lies.results))
        run = self._runs[len(lies.results) - 1]

        def make(rows: int, targets: Sequence[int], stream: int) -> None:
            run(*known, rows, *targets, *nowhere, *constants, stream=stream)

        return make

    def _constants(self, results: int) -> tuple[int, ...]:
        return results, self._void, LET_GO, LOOKS, BLOCK

    def _load(self, results: int, device: torch.device) -> Any:
        """Load the kernel for so many results. It is launched without Triton's own launcher, which takes as long as copies do."""
        words = torch.ones(2 * BLOCK, dtype=torch.int64, device=device)  # the call is over before it begins
        here = words.data_ptr()
        words_of_mine = here, here, here + 64, here, self._words[-1]
        nothing = (here, 0) * (1 + MOST_RESULTS)
        compiled = _call[(1,)](
            *words_of_mine, 1, *nothing, *[here] * (1 + MOST_RESULTS), *self._constants(results), num_warps=WARPS
        )
        return compiled[1, 1, 1]


def takes(lies: Lies) -> bool:
    """Whether a kernel makes such a call."""
    return 0 < len(lies.results) <= MOST_RESULTS and all(
        0 < nbytes <= MOST_BYTES and not nbytes % WORD and not address % WORD
        for address, nbytes in (lies.rows, *lies.results)
    )
