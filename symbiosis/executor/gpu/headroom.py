"""Memory that an executor keeps for its own products, so that a program that fills the GPU does not keep it from serving the others."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from symbiosis.executor.observe.log import log

PARTS = 4  # rows and result of the largest batch, twice
MOST = 1 / 16  # of the GPU's memory


def headroom_bytes(weights: Sequence[Tensor], most_rows: int, gpu_bytes: int) -> int:
    """Return how many bytes batches of so many rows take.

    >>> headroom_bytes([torch.empty(64, 32), torch.empty(8, 16, 256)], most_rows=1024, gpu_bytes=16 << 30) == 4 * 1024 * 256 * 4
    True
    """
    widest = max((max(weight.shape[-2:]) * weight.itemsize for weight in weights), default=0)
    return min(PARTS * most_rows * widest, int(MOST * gpu_bytes))


def keep_headroom(weights: Sequence[Tensor], most_rows: int, device: torch.device) -> None:
    """Take that memory on the current stream, and free it again: it stays in torch's cache, and torch may use it elsewhere when it must."""
    _, gpu_bytes = torch.cuda.mem_get_info(device)
    part = headroom_bytes(weights, most_rows, gpu_bytes) // PARTS
    torch.cuda.empty_cache()
    try:
        parts = [torch.empty(part, dtype=torch.uint8, device=device) for _ in range(PARTS)]
    except torch.OutOfMemoryError:
        log(
            logging.WARNING, "this GPU is nearly full: calls may fail for lack of memory", wanted_mib=PARTS * part >> 20
        )
    else:
        del parts
