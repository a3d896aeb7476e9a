"""Tensors over raw memory, and the names their dtypes have on the wire."""

from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from symbiosis.errors import CallError, Code, ProtocolError
from symbiosis.protocol import DTYPES, Call, Layer, Op
from symbiosis.transport.release import APART, lent, mapped

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


def tensor_of_frame(data: memoryview, dtype: str, shape: tuple[int, ...], for_gpu: bool) -> Tensor:
    """A tensor of `data`. Small data are copied; large data are left where they are, aligned or not, because nothing else would happen
    while they are copied."""
    if for_gpu or len(data) < LARGE:
        return copied(data, dtype, shape, for_gpu)
    memory = torch.frombuffer(data, dtype=torch.uint8) if len(data) < APART else lent(data)
    return tensor_at(memory, 0, dtype, shape)


def empty(shape: tuple[int, ...], dtype: torch.dtype, for_gpu: bool) -> Tensor:
    """Memory of the host, from which and to which a GPU copies by itself if it is to, and there is such memory."""
    nbytes = prod(shape) * dtype.itemsize
    if nbytes >= APART and not (for_gpu and nbytes <= MOST_PINNED):
        return mapped(nbytes).view(dtype).view(shape)
    if for_gpu:
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


def check_values(call: Call, payload: Sequence[Tensor], layer: Layer) -> None:
    """What only the values tell, wherever the call is answered: ids and group ends in range."""
    if call.op is Op.LOOKUP:
        rows = layer.shape[0]
        if call.nbytes and not 0 <= int(payload[0].min()) <= int(payload[0].max()) < rows:
            raise CallError(Code.BAD_SHAPE, f"{layer.name}: ids must lie between 0 and {rows - 1}")
    if call.op is Op.GROUPED:
        ends = payload[1].tolist()
        if ends != sorted(ends) or ends[0] < 0 or ends[-1] > call.rows:
            raise CallError(Code.BAD_SHAPE, f"group ends must rise from 0 to at most {call.rows}")
