"""Captures work of this process as a CUDA graph."""

import gc
from collections.abc import Callable
from typing import Any

import torch


def captured(run: Callable[[], object], pool: Any) -> "torch.cuda.CUDAGraph":
    """Return the graph of what `run` enqueues on the current stream. Garbage is not collected meanwhile: a graph that ended then, and
    gave memory back to CUDA, would spoil the one being captured."""
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return graph
