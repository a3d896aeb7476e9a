"""Packed weights in device memory that programs on the executor's GPU map read-only, as the executor does: a sealed file says what they are, and
their parts lie in a few pieces, each an allocation of its own that goes by descriptor.
"""

import os
from collections.abc import Sequence
from typing import BinaryIO

import torch
from torch import Tensor

from symbiosis.errors import Code, ProtocolError
from symbiosis.kernels.packed import PackedWeight
from symbiosis.protocol import Layer
from symbiosis.transport.cuda.driver import DeviceMemory, enter, whole
from symbiosis.transport.cuda.weights import ALIGNED, Mapping, most_of_piece
from symbiosis.transport.local import packed_file
from symbiosis.transport.local.packed_file import DTYPES, FileEntry, FilePart, parts_of


def sizes_of(entries: Sequence[FileEntry]) -> list[int]:
    """Return how many bytes each piece holds. Both sides count alike."""
    ends: dict[int, int] = {}
    for part in parts_of(entries):
        ends[part.piece] = max(part.end, ends.get(part.piece, 1))
    if sorted(ends) != list(range(len(ends))):
        raise ValueError("its pieces are not numbered one by one")
    return [ends[number] for number in range(len(ends))]


def publish(
    manifest: Sequence[Layer], weights: dict[int, PackedWeight], device: torch.device
) -> tuple[list[BinaryIO], dict[int, PackedWeight]]:
    """Move packed weights into pieces that nobody can change any more. Each part is let go when its piece is full, and `weights` is empty then.
    Returns the file that says what they are, those of all pieces, and the weights as they lie there."""
    entries = packed_file.entries_of(weights, ALIGNED, most_of_piece(sum(weight.nbytes for weight in weights.values())))
    files, pieces = [packed_file.publish_head(entries)], list[DeviceMemory]()
    parts = {number: weight.parts for number, weight in weights.items()}
    weights.clear()
    for number, nbytes in enumerate(sizes_of(entries)):
        torch.cuda.empty_cache()  # what held the parts of the piece before
        piece = Mapping.create(nbytes, device)
        for entry in entries:
            for name, part in entry.parts.items():
                if part.piece == number:
                    _tensor(piece, part).copy_(parts[entry.number].pop(name))
        torch.cuda.synchronize(device)
        piece.protect()
        pieces.append(piece)
        files.append(os.fdopen(piece.fd(), "rb", buffering=0))
    torch.cuda.empty_cache()
    return files, packed_file.made_again(manifest, entries, lambda part: _tensor(pieces[part.piece], part))


def mapped(manifest: Sequence[Layer], descriptors: Sequence[int], device: torch.device) -> dict[int, PackedWeight]:
    """The packed weights behind `descriptors`, by number: of the file that says what they are, and of the pieces. A write to one is a fault of the GPU,
    which ends its program."""
    if not descriptors:
        raise ProtocolError(Code.BAD_FRAME, "packed weights came without a descriptor")
    _, entries = packed_file.head_of(descriptors[0])
    with packed_file.packed_or_refused():
        sizes = sizes_of(entries)
        if len(descriptors) != 1 + len(sizes):
            raise ValueError(f"they are in {len(sizes)} pieces, and came with {len(descriptors) - 1} descriptors")
        enter(device)
        pieces = [
            Mapping.of_fd(fd, whole(nbytes, device), device, True)
            for fd, nbytes in zip(descriptors[1:], sizes, strict=True)
        ]
        return packed_file.made_again(manifest, entries, lambda part: _tensor(pieces[part.piece], part))


def _tensor(piece: DeviceMemory, part: FilePart) -> Tensor:
    return piece.tensor(part.begin, "uint8", (part.nbytes,)).view(DTYPES[part.dtype]).view(part.shape)
