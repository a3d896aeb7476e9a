"""What a stream does, as a CUDA graph."""

import gc
from collections.abc import Callable
from typing import Any

import torch


def captured(run: Callable[[], object], pool: Any) -> "torch.cuda.CUDAGraph":
    """The graph of what `run` enqueues on the current stream. Nothing is freed meanwhile: a graph that ends as garbage, with memory
    that CUDA takes back, would spoil the one that is being made."""
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
