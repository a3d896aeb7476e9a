"""Captures work of this process as a CUDA graph."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

capturing = threading.RLock()  # held during a capture


@contextmanager
def nothing_captured() -> Iterator[bool]:
    """Whether this process captures nothing now; then it captures nothing in the block, either. Who waited for all of the GPU during a capture
    would spoil it, and who freed a pool of memory would be ended by torch."""
    free = not torch.cuda.is_current_stream_capturing() and capturing.acquire(blocking=False)
    try:
        yield free
    finally:
        if free:
            capturing.release()


def captured(run: Callable[[], object], pool: Any) -> "torch.cuda.CUDAGraph":
    """Return the graph of what `run` enqueues on the current stream, with memory of the pool of this id. Garbage is not collected meanwhile:
    what ended then, and gave memory back to CUDA or waited for the GPU, would spoil the capture."""
    with capturing:
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        except BaseException:
            _mend(pool)
            raise
        finally:
            if collects:
                gc.enable()
    return graph


def _mend(pool: Any) -> None:
    """Mend what a capture that failed leaves in torch: it takes the capture for one under way, so that freeing a pool would end the process; and
    it draws no random numbers outside of graphs, until another capture succeeds."""
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # the capture did not come so far, or was ended
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    if torch.cuda.is_current_stream_capturing():  # it was within another one
        return
    graph = torch.cuda.CUDAGraph()
    with suppress(RuntimeError):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            torch.zeros(1, device="cuda")
        finally:
            graph.capture_end()
