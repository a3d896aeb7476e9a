"""Runs several things beside one another on a GPU: each on a stream of its own, which forks from the current one and joins it again."""

from collections.abc import Callable
from typing import Any

import torch

from symbiosis.kernels.gpu.streams import alongside


class ParallelStreams:
    """So many streams. On a CPU there are none, and things run one after another.

    >>> ParallelStreams(torch.device("cpu"), 2, 0).run(lambda: 1, lambda: 2)
    [1, 2]
    """

    def __init__(self, device: torch.device, count: int, priority: int) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device, priority) for _ in range(count if device.type == "cuda" else 0)]

    def run(self, first: Callable[[], Any], *others: Callable[[], Any]) -> list[Any]:
        """Return what each returns. The first runs on the current stream, and what comes after waits for all."""
        if not self._streams:
            return [first(), *(run() for run in others)]
        now, found = torch.cuda.current_stream(self._device), []
        streams = self._streams[: len(others)]
        with alongside(now, streams):
            for stream, run in zip(streams, others, strict=True):
                with torch.cuda.stream(stream):
                    found.append(run())
            return [first(), *found]
