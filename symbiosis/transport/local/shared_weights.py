"""Tensors of the base model that lie once in a host's memory, in sealed files that nobody can change.

There are two files. The *commons* hold what every client has for itself (embeddings, norms, biases, an output head). Each client maps
them privately and may change its tensors, and then has its own copy of the pages that it changed. The *served* weights, with the biases
that the executor adds to their products, are mapped read-only by clients and executor. Equal tensors lie in a file once.
"""

import fcntl
import mmap
import os
import warnings
from collections.abc import Callable, Sequence
from math import prod
from typing import BinaryIO

import torch
from torch import Tensor

from symbiosis.errors import Code, ProtocolError
from symbiosis.protocol import ELSEWHERE, ITEMSIZE, Layer
from symbiosis.transport.local.segment import must_hold
from symbiosis.transport.tensors import TORCH_DTYPE, bytes_of

ALIGNED = 64
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
HUGE = 2 << 20  # bytes; a larger file lies in huge pages, if the system has them, which are read faster
NAMES = {False: "symbiosis-commons", True: "symbiosis-weights"}


def in_file(manifest: Sequence[Layer], served: bool = False) -> list[int]:
    """Return the numbers of the tensors that lie in a file, in the order of the manifest."""
    others = ("client", ELSEWHERE)
    added = {f"{layer.name}.bias" for layer in manifest if layer.kind not in others and layer.bias} if served else set()
    return [
        number
        for number, layer in enumerate(manifest)
        if ((layer.kind not in others or layer.name in added) if served else layer.kind == "client")
        and layer.dtype in ITEMSIZE and 0 not in layer.shape and not layer.packed
    ]  # fmt: skip


def phase(tensor: Tensor) -> int:
    """Return how far from a multiple of 64 bytes a tensor begins. A product of one row depends on it (MKL), and in a checkpoint's file
    tensors begin anywhere.

    >>> phase(torch.zeros(8)[2:])
    8
    """
    begins = 0 if tensor.is_cuda else tensor.data_ptr() % ALIGNED
    return 0 if begins % tensor.element_size() else begins


def offsets(manifest: Sequence[Layer], phases: bytes, served: bool = False) -> dict[int, int]:
    """Return where each tensor begins, by its number in the manifest. Both sides compute it, from the phases with which the file
    begins."""
    found: dict[int, int] = {}
    same: dict[tuple[str, str, tuple[int, ...], int], int] = {}
    end = len(phases)
    for number, wanted in zip(in_file(manifest, served), phases, strict=True):
        layer = manifest[number]
        if wanted >= ALIGNED or wanted % ITEMSIZE[layer.dtype]:
            raise ProtocolError(Code.BAD_FRAME, f"{layer.name} cannot begin {wanted} bytes after a multiple of 64")
        begin = end + (wanted - end) % ALIGNED
        found[number] = same.setdefault((layer.digest, layer.dtype, layer.shape, wanted), begin)
        if found[number] == begin:
            end = begin + _nbytes(layer)
    return found


def _nbytes(layer: Layer) -> int:
    return prod(layer.shape) * ITEMSIZE[layer.dtype]


def _size(manifest: Sequence[Layer], at: dict[int, int]) -> int:
    return max((place + _nbytes(manifest[number]) for number, place in at.items()), default=0)


def publish(
    manifest: Sequence[Layer], phase_of: Callable[[int], int], tensor: Callable[[int], Tensor], served: bool = False
) -> BinaryIO:
    """Write tensors into a memory file and seal it. Each `tensor` is asked for once, in turn, and let go when it is written."""
    phases = bytes(map(phase_of, in_file(manifest, served)))
    at = offsets(manifest, phases, served)
    size = _size(manifest, at)
    file = os.fdopen(os.memfd_create(NAMES[served], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b", buffering=0)
    file.truncate(size)
    if size:
        with mmap.mmap(file.fileno(), size) as memory:
            _use_huge_pages(memory)
            memory[: len(phases)] = phases
            written = 0
            for number, place in at.items():
                if place >= written:
                    raw = bytes_of(tensor(number).cpu())
                    memory[place : place + len(raw)] = raw
                    written = place + len(raw)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
    return file


def taken(manifest: Sequence[Layer], fd: int, served: bool = False) -> dict[int, Tensor]:
    """Map the tensors of the file `fd`, by number. Each has its own storage; equal tensors are the same object. The commons may be
    changed freely. A write to `served` weights ends the process (SIGSEGV)."""
    at: dict[int, Tensor] = {}
    found: dict[int, Tensor] = {}
    count = len(in_file(manifest, served))
    if not count:
        return {}
    must_hold(fd, count, SEALS)
    wanted = offsets(manifest, os.pread(fd, count, 0), served)
    size = _size(manifest, wanted)
    must_hold(fd, size, SEALS)
    memory = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | (0 if served else mmap.PROT_WRITE))
    if served:
        _use_huge_pages(memory)
    for number, place in wanted.items():
        layer = manifest[number]
        if place not in at:
            at[place] = _tensor(memory, layer, place)
        found[number] = at[place]
    return found


def _tensor(memory: mmap.mmap, layer: Layer, place: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # as intended
        flat = torch.frombuffer(memory, dtype=TORCH_DTYPE[layer.dtype], count=prod(layer.shape), offset=place)
    return flat.view(layer.shape)


def _use_huge_pages(memory: mmap.mmap) -> None:
    if len(memory) >= HUGE:
        memory.madvise(mmap.MADV_HUGEPAGE)
