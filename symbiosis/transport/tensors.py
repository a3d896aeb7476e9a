"""Tensors over raw memory, and the names their dtypes have on the wire."""

from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from symbiosis.errors import Code, ProtocolError
from symbiosis.protocol import DTYPES, Call

TORCH_DTYPE: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
DTYPE_NAME: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPE.items()}
CPU = torch.device("cpu")
_MOST = 2**60
LARGE = 1 << 20  # bytes
MOST_PINNED = 64 << 20  # bytes of a tensor: torch keeps such memory
Shapes = tuple[tuple[int, ...], ...]


def bytes_of(tensor: Tensor) -> memoryview:
    """What a CPU tensor holds: its own memory, if that is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def bytes_tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw or b" "), dtype=torch.uint8)


def copied(data: memoryview, dtype: str, shape: tuple[int, ...], for_gpu: bool = False) -> Tensor:
    """The tensor that came as these bytes, in memory aligned as torch's is: products must not depend on the transport. One that a
    GPU is to fetch is pinned."""
    memory = empty((len(data),), torch.uint8, for_gpu)
    memory.numpy().data[:] = data
    return tensor_at(memory, 0, dtype, shape)


def received(data: memoryview, dtype: str, shape: tuple[int, ...], for_gpu: bool) -> Tensor:
    """The same, but one that is large is left where it is, aligned or not: nothing else would happen while it is copied."""
    if for_gpu or len(data) < LARGE:
        return copied(data, dtype, shape, for_gpu)
    return tensor_at(torch.frombuffer(data, dtype=torch.uint8), 0, dtype, shape)


def empty(shape: tuple[int, ...], dtype: torch.dtype, for_gpu: bool) -> Tensor:
    """Memory of the host, from which and to which a GPU copies by itself if it is to, and there is such memory."""
    if for_gpu and prod(shape) * dtype.itemsize <= MOST_PINNED:
        with suppress(RuntimeError):
            return torch.empty(shape, dtype=dtype, pin_memory=True)
    return torch.empty(shape, dtype=dtype)


def on_host(rows: Tensor) -> Tensor:
    """A copy of a GPU's rows, which the GPU writes by itself."""
    if not rows.is_cuda:
        return rows.cpu()
    host = empty(tuple(rows.shape), rows.dtype, True)
    host.copy_(rows, non_blocking=True)
    torch.cuda.current_stream(rows.device).synchronize()
    return host


def tensor_at(memory: Tensor, start: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor that lies in `memory` (1-D uint8) from byte `start` on."""
    target, count = TORCH_DTYPE[dtype], prod(shape)
    if not count and prod(max(1, dim) for dim in shape) >= _MOST:  # nothing to hold, yet torch cannot count it
        raise ProtocolError(Code.BAD_SHAPE, f"the shape {shape} is larger than any memory")
    return memory[start : start + count * target.itemsize].view(target).view(shape)


def cut(result: Tensor, shapes: Shapes) -> list[Tensor]:
    """What lies in `result` one after another; no views to autograd, which would not let them be changed in place."""
    if not shapes:
        return [result]
    parts = torch.unsafe_split_with_sizes(result.reshape(-1), [prod(shape) for shape in shapes])
    return [part.view(shape).data for part, shape in zip(parts, shapes, strict=True)]


def split_payload(call: Call, memory: Tensor) -> tuple[Tensor, ...]:
    """The tensors of a call's payload; they share `memory`, whose length must be what the header says."""
    if memory.numel() != call.nbytes:
        raise ProtocolError(
            Code.BAD_FRAME, f"the header promises {call.nbytes} bytes of payload, {memory.numel()} came"
        )
    if not call.parts:
        return ()
    rows = tensor_at(memory, 0, call.payload_dtype, call.payload_shape)
    if not call.groups:
        return (rows,)
    return rows, tensor_at(memory, call.nbytes - 4 * call.groups, "int32", (call.groups,))
