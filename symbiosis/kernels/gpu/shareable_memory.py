"""The memory of captured steps. torch allocates it here, so that an executor can map it, read rows and write results in place."""

import logging
import subprocess
from functools import cache
from pathlib import Path

import torch

from symbiosis.errors import ConfigError
from symbiosis.kernels.compile_c import compiled

logger = logging.getLogger("symbiosis")
SOURCE, FLAGS = Path(__file__).with_suffix(".c"), ["-O2", "-ldl"]


@cache
def _allocator() -> "torch.cuda.memory.CUDAPluggableAllocator | None":
    """Return an allocator in C. One in Python could deadlock: torch asks for memory while it holds a lock that threads with Python's
    lock wait for."""
    try:
        with compiled(SOURCE, *FLAGS) as library:
            return torch.cuda.memory.CUDAPluggableAllocator(library, "take", "give")
    except (ConfigError, OSError, subprocess.SubprocessError) as error:
        logger.info("captured steps copy their rows and results, because nothing in C could be compiled: %s", error)
        return None


def new_pool() -> "torch.cuda.MemPool | None":
    """Return a pool for one graph, which it must outlive, or None if such memory cannot be had."""
    allocator = _allocator()
    try:
        return None if allocator is None else torch.cuda.MemPool(allocator.allocator())
    except RuntimeError as error:  # PYTORCH_CUDA_ALLOC_CONF chose an allocator without pools
        logger.info("captured steps copy their rows and results: %s", error)
        return None
