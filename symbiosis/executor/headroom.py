"""Memory of a GPU that an executor keeps for itself: programs that fill the GPU must not keep it from serving the others."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from symbiosis.executor.log import log

PARTS = 4  # rows and result of the largest batch, twice


def headroom_bytes(weights: Sequence[Tensor], most_rows: int) -> int:
    """What batches of so many rows take at most.

    >>> headroom_bytes([torch.empty(64, 32), torch.empty(8, 16, 256)], most_rows=1024) == 4 * 1024 * 256 * 4
    True
    """
    return PARTS * most_rows * max((max(weight.shape[-2:]) * weight.itemsize for weight in weights), default=0)


def keep_headroom(weights: Sequence[Tensor], most_rows: int, device: torch.device) -> None:
    """Take that memory on the current stream, and no more. It stays in torch's cache, which gives it back for what torch needs elsewhere."""
    part = headroom_bytes(weights, most_rows) // PARTS
    torch.cuda.empty_cache()
    try:
        parts = [torch.empty(part, dtype=torch.uint8, device=device) for _ in range(PARTS)]
    except torch.OutOfMemoryError:
        log(logging.WARNING, "this GPU is full: calls may fail for want of memory", wanted_mib=PARTS * part >> 20)
    else:
        del parts
