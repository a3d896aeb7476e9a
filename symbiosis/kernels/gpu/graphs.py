"""Captures work of this process as CUDA graphs, one at a time."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

capturing = threading.RLock()  # held during a capture
_under_way: list["torch.cuda.CUDAGraph"] = []


class GraphPool:
    """Where graphs take their memory that run one after another on one stream. torch does not use a pool again whose graphs are all gone, or in
    which a capture failed: then this takes another one."""

    def __init__(self) -> None:
        self._id: Any = None
        self._first: torch.cuda.CUDAGraph | None = None  # holds the pool

    def captured(self, run: Callable[[], object]) -> "torch.cuda.CUDAGraph | None":
        """Return the graph of what `run` enqueues on the current stream, or None (`captured`)."""
        try:
            if self._id is None:
                pool = torch.cuda.graph_pool_handle()
                # without memory of the pool: there may be none left
                first = captured(torch.zeros(1, device="cuda").zero_, pool)
                if first is None:
                    return None
                self._first, self._id = first, pool
            return captured(run, self._id)
        except BaseException:
            self._id = None
            raise


@contextmanager
def nothing_captured() -> Iterator[bool]:
    """Whether this process captures nothing now; then it captures nothing in the block, either. Who waited for all of the GPU during a capture
    would spoil it, and who freed a pool of memory would be ended by torch."""
    free = not torch.cuda.is_current_stream_capturing() and capturing.acquire(blocking=False)
    try:
        yield free and not _under_way
    finally:
        if free:
            capturing.release()


def captured(run: Callable[[], object], pool: Any, *, draws: bool = False) -> "torch.cuda.CUDAGraph | None":
    """Return the graph of what `run` enqueues on the current stream, with memory of the pool of this id. Return None if another thread captures
    now, which may wait for this one. Garbage is not collected meanwhile: what ended then, and gave memory back to CUDA or waited for the GPU,
    would spoil the capture. With `draws`, `run` may draw random numbers, and no other thread may until the capture ends."""
    if not capturing.acquire(blocking=False):
        return None
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    _under_way.append(graph)
    gc.disable()
    try:
        _capture(graph, run, pool, draws)
    except BaseException:
        with suppress(RuntimeError):  # CUDA is broken
            _mend(pool)
        raise
    finally:
        if collects:
            gc.enable()
        _under_way.pop()
        capturing.release()
    return graph


def _capture(graph: "torch.cuda.CUDAGraph", run: Callable[[], object], pool: Any, draws: bool = False) -> None:
    with nullcontext() if draws else _others_may_draw():
        graph.capture_begin(pool, capture_error_mode="thread_local")
    try:
        run()
    finally:
        graph.capture_end()


@contextmanager
def _others_may_draw() -> Iterator[None]:
    """A capture that begins in the block gets a random state of its own. Otherwise torch refuses to draw any
    outside of the graph until the capture ends, such as for the dropout of a training that runs in another thread of the program."""
    usual = torch.cuda.default_generators[torch.cuda.current_device()]
    state = usual.graphsafe_get_state()
    usual.graphsafe_set_state(usual.clone_state())
    try:
        yield
    finally:
        usual.graphsafe_set_state(state)


def _mend(pool: Any) -> None:
    """Mend what a capture that failed leaves in torch: it takes the capture for one under way, so that freeing a pool would end the process; and
    it draws no random numbers outside of graphs, until another capture succeeds."""
    _end(pool)
    if torch.cuda.is_current_stream_capturing():  # it was within another one
        return
    own = torch.cuda.graph_pool_handle()
    try:
        # on another stream: torch 2.12 frees what graphs of a stream use when one of them is dropped
        with torch.cuda.stream(torch.cuda.Stream()):
            _capture(torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda").zero_, own, draws=True)
    except RuntimeError:
        _end(own)


def _end(pool: Any) -> None:
    """Have torch know that nothing is being captured in a pool, if it has not noticed."""
    device = torch.cuda.current_device()
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
