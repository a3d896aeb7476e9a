"""Tensors over raw memory, and the names of their dtypes on the wire."""

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
MOST_PINNED = 64 << 20  # bytes of a tensor; larger ones are not pinned, because torch keeps pinned memory
Shapes = tuple[tuple[int, ...], ...]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor: its own memory if that is contiguous, else a copy."""
    whole = tensor.contiguous()
    # One number may be contiguous with a stride of 0, which torch does not view as bytes.
    flat = whole.as_strided((whole.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def bytes_tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw or b" "), dtype=torch.uint8)


def copied(data: Sequence[memoryview], dtype: str, shape: tuple[int, ...], for_gpu: bool = False) -> Tensor:
    """Copy `data`, one behind the other, into a tensor in memory aligned as torch's is, because products must not depend on the
    transport. Memory `for_gpu` is pinned."""
    memory = empty((sum(map(len, data)),), torch.uint8, for_gpu)
    target, start = memory.numpy().data, 0
    for part in data:
        target[start : start + len(part)] = part
        start += len(part)
    return tensor_at(memory, 0, dtype, shape)


def tensor_of_frame(data: memoryview, dtype: str, shape: tuple[int, ...], for_gpu: bool) -> Tensor:
    """Return a tensor of `data`. Small data are copied. Large data stay where they are, aligned or not, because a copy would block the
    loop."""
    if for_gpu or len(data) < LARGE:
        return copied([data], dtype, shape, for_gpu)
    memory = torch.frombuffer(data, dtype=torch.uint8) if len(data) < APART else lent(data)
    return tensor_at(memory, 0, dtype, shape)


def empty(shape: tuple[int, ...], dtype: torch.dtype, for_gpu: bool) -> Tensor:
    """Allocate a tensor in the host's memory: pinned memory if it is `for_gpu` and there is any."""
    nbytes = prod(shape) * dtype.itemsize
    if nbytes >= APART and not (for_gpu and nbytes <= MOST_PINNED):
        return mapped(nbytes).view(dtype).view(shape)
    if for_gpu:
        with suppress(RuntimeError):
            return torch.empty(shape, dtype=dtype, pin_memory=True)
    return torch.empty(shape, dtype=dtype)


def on_host(rows: Tensor) -> Tensor:
    """Copy rows to the host's memory. A GPU copies them itself, into pinned memory."""
    if not rows.is_cuda:
        return rows.cpu()
    host = empty(tuple(rows.shape), rows.dtype, True)
    host.copy_(rows, non_blocking=True)
    torch.cuda.current_stream(rows.device).synchronize()
    return host


def tensor_at(memory: Tensor, start: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor that lies in `memory` (1-D uint8) from byte `start` on."""
    target, count = TORCH_DTYPE[dtype], prod(shape)
    if not count and prod(max(1, dim) for dim in shape) >= _MOST:  # nothing to hold, yet torch cannot count it
        raise ProtocolError(Code.BAD_SHAPE, f"the shape {shape} is larger than any memory")
    return memory[start : start + count * target.itemsize].view(target).view(shape)


def cut(result: Tensor, shapes: Shapes) -> list[Tensor]:
    """Return the tensors of these shapes that lie one behind the other in `result`. Autograd does not know them as views, which it
    would not let be changed in place."""
    if not shapes:
        return [result]
    parts = torch.unsafe_split_with_sizes(result.reshape(-1), [prod(shape) for shape in shapes])
    return [part.view(shape).data for part, shape in zip(parts, shapes, strict=True)]


def split_payload(call: Call, memory: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors of a call's payload, which share `memory`. Raise `ProtocolError` unless its length is what the header says."""
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


def as_multiplied(call: Call, x: Tensor) -> Tensor:
    """Return the payload with the strides that it has in the unsplit model's product, because rounding depends on them: also on that of a
    stack of one, which `view` gives to it, as `F.linear` does."""
    return x.mT.view(call.shape) if call.columns else x


def check_values(call: Call, payload: Sequence[Tensor], layer: Layer) -> None:
    """Raise `CallError` unless ids and ends of groups are in range, which the header does not tell."""
    if call.op is Op.LOOKUP:
        check_ids(payload[0], layer)
    if call.op is Op.GROUPED:
        check_ends(call, payload[1])


def check_ids(ids: Tensor, layer: Layer) -> None:
    """Raise `CallError` unless these ids, all or some of a call's, are rows of the layer."""
    rows = layer.shape[0]
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise CallError(Code.BAD_SHAPE, f"{layer.name}: ids must lie between 0 and {rows - 1}")


def check_ends(call: Call, ends_G: Tensor) -> None:
    """Raise `CallError` unless these are ends of groups of the call's rows."""
    ends = ends_G.tolist()
    if ends != sorted(ends) or ends[0] < 0 or ends[-1] > call.rows:
        raise CallError(Code.BAD_SHAPE, f"group ends must rise from 0 to at most {call.rows}")
