"""The served weights in device memory that programs on the executor's GPU map read-only, as the executor does: in a few pieces, each an
allocation of its own that goes by descriptor. Equal tensors lie there once.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from symbiosis.errors import Code, ProtocolError
from symbiosis.kernels.gpu.graphs import nothing_captured
from symbiosis.protocol import ITEMSIZE, Layer
from symbiosis.transport.cuda.driver import CudaError, DeviceMemory, enter, whole
from symbiosis.transport.local.shared_weights import in_file

ALIGNED = 512  # bytes, as torch's own allocator aligns tensors: products round alike
PIECES = 64  # or so; while weights are moved there is a second copy of one
SMALLEST = 32 << 20  # bytes of a piece that is not the last


class TensorPlace(NamedTuple):
    """Where a tensor lies."""

    piece: int
    start: int


def layout(manifest: Sequence[Layer]) -> tuple[dict[int, TensorPlace], list[int]]:
    """Where each tensor lies, by its number in the manifest, and how many bytes each piece holds. Both sides count alike."""
    numbers = in_file(manifest, served=True)
    distinct = {_same(manifest[number]): _nbytes(manifest[number]) for number in numbers}
    most = most_of_piece(sum(distinct.values()))
    places: dict[int, TensorPlace] = {}
    found: dict[tuple[str, str, tuple[int, ...]], TensorPlace] = {}
    sizes: list[int] = []
    for number in numbers:
        key = _same(manifest[number])
        if key not in found:
            if not sizes or sizes[-1] + distinct[key] > most:
                sizes.append(0)
            found[key] = TensorPlace(len(sizes) - 1, sizes[-1])
            sizes[-1] += distinct[key]
        places[number] = found[key]
    return places, sizes


def most_of_piece(nbytes: int) -> int:
    """Return about how many bytes a piece holds, of so many in all."""
    return max(nbytes // PIECES, SMALLEST)


def _same(layer: Layer) -> tuple[str, str, tuple[int, ...]]:
    return layer.digest, layer.dtype, layer.shape


def _nbytes(layer: Layer) -> int:
    return -(-prod(layer.shape) * ITEMSIZE[layer.dtype] // ALIGNED) * ALIGNED


def publish(
    manifest: Sequence[Layer], device: torch.device, taken: Callable[[int], Tensor]
) -> tuple[list[DeviceMemory], dict[int, Tensor]]:
    """Move the served tensors into pieces that nobody can change any more. Each tensor is `taken` once, and let go when its piece is full."""
    places, sizes = layout(manifest)
    pieces: list[DeviceMemory] = []
    for number, nbytes in enumerate(sizes):
        torch.cuda.empty_cache()  # what held the tensors of the piece before
        piece = Mapping.create(nbytes, device)
        for tensor, place in places.items():
            if place.piece == number:
                old = taken(tensor)
                _tensor(piece, manifest[tensor], place).copy_(old)
                del old
        torch.cuda.synchronize(device)
        piece.protect()
        pieces.append(piece)
    torch.cuda.empty_cache()
    return pieces, {number: _tensor(pieces[place.piece], manifest[number], place) for number, place in places.items()}


def mapped(manifest: Sequence[Layer], descriptors: Sequence[int], device: torch.device) -> dict[int, Tensor]:
    """The tensors in the pieces behind `descriptors`, by number. A write to one is a fault of the GPU, which ends its program."""
    places, sizes = layout(manifest)
    if len(descriptors) != len(sizes):
        raise ProtocolError(Code.BAD_FRAME, f"weights in {len(sizes)} pieces came with {len(descriptors)} descriptors")
    enter(device)
    pieces = [
        Mapping.of_fd(fd, whole(nbytes, device), device, True) for fd, nbytes in zip(descriptors, sizes, strict=True)
    ]
    return {number: _tensor(pieces[place.piece], manifest[number], place) for number, place in places.items()}


def _tensor(piece: DeviceMemory, layer: Layer, place: TensorPlace) -> Tensor:
    return piece.tensor(place.start, layer.dtype, layer.shape)


class Mapping(DeviceMemory):
    """A piece that is unmapped when the last tensor over it is gone. While a step is captured it waits: to synchronise would break the
    capture, and garbage may be found at any time.
    """

    def __del__(self) -> None:
        if sys.is_finalizing() or not getattr(self, "address", 0):
            return
        _unused.append(self)
        unmap_unused()


_unused: list[Mapping] = []  # there is no tensor over them any more


def unmap_unused() -> None:
    """Unmap what no tensor lies over, unless something is being captured."""
    if not _unused:
        return
    # if CUDA is broken, it stays mapped until the program ends
    with suppress(CudaError, RuntimeError), nothing_captured() as free:
        if not free:
            return
        torch.cuda.synchronize(_unused[0].user)  # what is launched may still read it
        while _unused:
            _unused.pop().close()
