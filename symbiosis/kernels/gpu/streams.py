"""Uses several streams of a GPU beside the current one."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def alongside(current: torch.cuda.Stream, streams: Collection[torch.cuda.Stream]) -> Iterator[None]:
    """Have all these streams follow the current one before any of them is used, and have it wait for them after the block, also after one that
    failed."""
    for stream in streams:
        stream.wait_stream(current)
    try:
        yield
    finally:
        for stream in streams:
            current.wait_stream(stream)
