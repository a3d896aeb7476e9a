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


@contextmanager
def aside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run the block on this stream, behind what the current one was given so far, and wait until it is over. What other threads give the current
    stream meanwhile does not wait. None: the block runs where it is."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()


def wait_until_done(device: torch.device) -> None:
    """Wait until the current stream is done. To be called before a long pass is read: a copy to pageable memory waits as well, but until then
    no other thread of the program can launch anything."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
