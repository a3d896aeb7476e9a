"""The host's memory for keys and values: as much as is free, and locked in place where a GPU copies from and to it."""

import torch
from torch import Tensor

from symbiosis.base.memory import free_memory
from symbiosis.errors import OutOfHostMemory

AHEAD, SPARE = 1 << 28, 1 << 28  # bytes: reserved at once; left to other programs


class HostMemory:
    """Hands out the host's memory as long as there is some free. A context that does not fit gets an error; without this, the system would
    end the process."""

    def __init__(self) -> None:
        self.pinned = False  # whether a GPU copies from it and to it
        self._granted = 0

    def take(self, size: int) -> Tensor:
        """Return so many bytes."""
        if size > self._granted:
            free = free_memory() - SPARE
            if free < size:
                raise OutOfHostMemory(
                    f"keys and values need {size >> 20} MiB more of the host's memory, of which {max(0, free) >> 20} MiB can be had: "
                    "shorten the context or the batch, or free memory"
                )
            self._granted = min(max(AHEAD, size), free)
        self._granted -= size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)
