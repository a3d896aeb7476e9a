"""What every client holds for itself (embeddings, norms, biases, an output head), once in the memory of a host.

The executor writes these tensors into one sealed memfd; clients of `local://` map it privately. So each may change its tensors,
and then has its own copy of the pages that it changed. Equal tensors (a tied embedding and head) lie there once.
"""

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from math import prod
from typing import BinaryIO

import torch
from torch import Tensor

from symbiosis.protocol import ITEMSIZE, Layer
from symbiosis.transport.slab import must_hold
from symbiosis.transport.tensors import TORCH_DTYPE, bytes_of

ALIGNED = 64
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def places(manifest: Sequence[Layer]) -> dict[int, int]:
    """Where each of these tensors begins, by its number in the manifest: so both sides count."""
    found: dict[int, int] = {}
    same: dict[tuple[str, str, tuple[int, ...]], int] = {}
    end = 0
    for number, layer in enumerate(manifest):
        if layer.kind != "client" or layer.dtype not in ITEMSIZE or 0 in layer.shape:
            continue
        place = same.setdefault((layer.digest, layer.dtype, layer.shape), end)
        if place == end:
            end += -(-_nbytes(layer) // ALIGNED) * ALIGNED
        found[number] = place
    return found


def _nbytes(layer: Layer) -> int:
    return prod(layer.shape) * ITEMSIZE[layer.dtype]


def publish(manifest: Sequence[Layer], tensor: Callable[[int], Tensor]) -> BinaryIO:
    """The memory, as a file that nobody can change any more."""
    file = os.fdopen(os.memfd_create("symbiosis-commons", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b", buffering=0)
    written = 0
    for number, place in places(manifest).items():
        if place < written:
            continue
        file.write(bytes(place - written))
        rest = bytes_of(tensor(number).cpu())
        written = place + len(rest)
        while rest:  # one write takes 2 GiB at most
            rest = rest[file.write(rest) :]
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
    return file


def taken(manifest: Sequence[Layer], fd: int) -> dict[int, Tensor]:
    """The tensors in the memory behind `fd`, by number, to be changed as one likes: each has a storage of its own, but equal
    ones are the same."""
    at: dict[int, Tensor] = {}
    found: dict[int, Tensor] = {}
    wanted = places(manifest)
    size = max((place + _nbytes(manifest[number]) for number, place in wanted.items()), default=0)
    if not size:
        return {}
    must_hold(fd, size, SEALS)
    memory = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE)
    for number, place in wanted.items():
        layer = manifest[number]
        if place not in at:
            flat = torch.frombuffer(memory, dtype=TORCH_DTYPE[layer.dtype], count=prod(layer.shape), offset=place)
            at[place] = flat.view(layer.shape)
        found[number] = at[place]
    return found
