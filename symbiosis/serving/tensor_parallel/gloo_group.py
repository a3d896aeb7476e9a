"""Ranks on CPUs, connected by gloo over the loopback interface."""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]


class GlooGroup:
    """One rank's end. A rank that dies ends what others wait for with an error; one that hangs does so after `seconds`.

    Args:
        file: Where ranks meet; a new one each time.
    """

    def __init__(self, file: str, rank: int, ranks: int, seconds: float) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        options._timeout = timedelta(seconds=seconds)
        self._ranks = ranks
        self._group: Any = ProcessGroupGloo(FileStore(file, ranks), rank, ranks, options)  # type: ignore[call-overload]
        self.sum(torch.zeros(1))  # until all have come

    def sum(self, x: Tensor) -> Tensor:
        x = x.clone()
        self._group.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> Tensor:
        made = x.new_empty(self._ranks, *x.shape)
        self._group.allgather([list(made.unbind())], [x]).wait()
        return made

    def broadcast(self, x: Tensor) -> None:
        self._group.broadcast(x, 0).wait()

    def abort(self) -> None:
        """Nothing: connections end with the processes at the other end."""
