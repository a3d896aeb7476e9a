"""Tensors as frames of ZeroMQ's messages, none so long that others wait while it is encrypted, decrypted or taken in."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from symbiosis.errors import Code, ProtocolError
from symbiosis.transport.tensors import bytes_of, empty, tensor_at

FRAME_BYTES = 1 << 20  # at most


def frames_of(tensor: Tensor) -> list[memoryview]:
    """What a CPU tensor holds, cut into frames; an empty one is an empty frame.

    >>> [len(frame) for frame in frames_of(torch.zeros(600, 1024))]
    [1048576, 1048576, 360448]
    """
    data = bytes_of(tensor)
    return [data[start : start + FRAME_BYTES] for start in range(0, max(1, len(data)), FRAME_BYTES)]


@lru_cache(maxsize=1 << 10)
def lengths(nbytes: int) -> tuple[int, ...]:
    """Of the frames of so many bytes."""
    return tuple(min(FRAME_BYTES, nbytes - start) for start in range(0, max(1, nbytes), FRAME_BYTES))


def check(sizes: Sequence[int], parts: tuple[int, ...]) -> None:
    """Whether frames of these sizes can be tensors of so many bytes each; `ProtocolError` if not."""
    if sum(sizes) != sum(parts):  # first: what is promised may be more than anybody can count
        raise ProtocolError(Code.BAD_FRAME, f"the header promises {sum(parts)} bytes, {sum(sizes)} came")
    if list(sizes) != [length for part in parts for length in lengths(part)]:
        raise ProtocolError(
            Code.BAD_FRAME,
            f"{sum(sizes)} bytes came in {len(sizes)} frames: a tensor is cut into frames of {FRAME_BYTES}",
        )


class Framed:
    """A tensor that came in frames: put together where it is needed, because all at once would make others wait. Its memory is
    aligned as torch's is (products must not depend on the transport), and pinned if a GPU is to fetch it.

    >>> framed = Framed(frames_of(torch.arange(4.0)), "float32", (2, 2))
    >>> framed.whole()
    tensor([[0., 1.],
            [2., 3.]])
    """

    def __init__(self, frames: Sequence[memoryview], dtype: str, shape: tuple[int, ...], for_gpu: bool = False) -> None:
        self._frames: list[memoryview | None] = list(frames)  # None: it has been copied
        memory = empty((sum(map(len, frames)),), torch.uint8, for_gpu)
        self._data = memory.numpy().data
        self.tensor = tensor_at(memory, 0, dtype, shape)

    def need(self, part: Tensor) -> None:
        """Put together at least this part of `tensor`."""
        if part.numel():
            start = part.data_ptr() - self.tensor.data_ptr()
            self._copy(start // FRAME_BYTES, -(-(start + part.nbytes) // FRAME_BYTES))

    def whole(self) -> Tensor:
        self._copy(0, len(self._frames))
        return self.tensor

    def _copy(self, first: int, end: int) -> None:
        for number in range(first, end):
            frame = self._frames[number]
            if frame is not None:
                start = number * FRAME_BYTES
                self._data[start : start + len(frame)] = frame
                self._frames[number] = None  # only now: another thread may need the frame's other rows
