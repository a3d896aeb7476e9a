"""Large memory is given back by a thread of its own, while others go on."""

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from symbiosis.transport.local.segment import Slab
from symbiosis.transport.release import APART
from symbiosis.transport.tensors import empty, tensor_of_frame
from tests.processes import until

GIB = 1 << 30


def filled(memory: Tensor) -> Tensor:
    return memory.fill_(1)


def segment(nbytes: int = GIB) -> Slab:
    slab = Slab.create(nbytes)
    filled(slab._bytes)
    return slab


def frame() -> Tensor:
    return tensor_of_frame(memoryview(bytearray(b"\1") * GIB), "uint8", (GIB,), False)


MADE: dict[str, Callable[[], Any]] = {
    "a reply": lambda: filled(empty((GIB,), torch.uint8, False)),
    "a payload": frame,
    "a session's segment": segment,
}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def longest_pause(act: Callable[[], None], until_s: float = 0.6) -> float:
    """Between two turns of a loop that acts once."""
    last = begun = time.perf_counter()
    longest, acted = 0.0, False
    while last < begun + until_s:
        if not acted and last > begun + 0.05:
            act()
            acted = True
        os.sched_yield()
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


@pytest.mark.alone
@pytest.mark.parametrize("what", MADE)
def test_giving_back_a_gib_does_not_hold_who_does_it(what: str) -> None:
    """It takes 70 to 150 ms in the thread that lets go; here it may be late by what other programs take from it."""

    def once() -> float:
        held = [MADE[what]()]
        before = resident()

        def let_go() -> None:
            if isinstance(held[0], Slab):
                held[0].close()
            held.clear()

        pause = longest_pause(let_go)
        until(lambda: resident() < before - GIB * 0.9, "the end of the memory")
        return pause

    assert any(once() < 0.03 for _ in range(4))


def test_a_client_reads_the_last_reply_after_its_executor_has_gone() -> None:
    nbytes = 4 * APART
    slab = segment(nbytes)
    theirs = mmap.mmap(slab.fd, nbytes)
    before = len(list(Path("/proc/self/fd").iterdir()))
    slab.close()
    del slab
    until(lambda: len(list(Path("/proc/self/fd").iterdir())) == before - 2, "the end of the executor's handles")
    assert theirs[nbytes // 2] == theirs[nbytes - 1] == 1


def test_tensors_over_memory_that_is_given_back_keep_it() -> None:
    whole = filled(empty((GIB // 8,), torch.uint8, False))
    part = whole[1 << 20 : 2 << 20]
    payload = tensor_of_frame(memoryview(bytearray(b"\1") * (GIB // 8)), "uint8", (GIB // 8,), False)[5:]
    del whole
    time.sleep(0.05)
    assert part.eq(1).all() and payload.eq(1).all()
