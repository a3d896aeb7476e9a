"""Attention over keys and values that lie in pages: a C function for single rows, compiled when first needed, and the torch formulas
that it is compared with."""

import ctypes
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from symbiosis.kernels import compile_c
from symbiosis.kernels.few_rows import FLAGS

SOURCE = Path(__file__).with_suffix(".c")
DEFINED: dict[torch.dtype, list[str]] = {torch.float32: [], torch.bfloat16: ["-DBFLOAT16"]}
NUMBERS = (
    "rows", "heads", "shared", "key", "value", "page", "values_at", "query_row", "query_head", "tables", "window", "longest", "threads",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class How:
    """How a model's attention differs from the usual. A sink takes part in the weights of its head, and has no value."""

    scaling: float
    window: int | None = None  # how many tokens a row sees, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, how: How) -> Tensor:
    """Compute attention of [sequences, heads, rows, size] over as many or fewer heads of keys and values. A row sees where `mask` is
    true."""
    sequences, heads, rows, size = query.shape
    shared, sinks = key.shape[1], how.sinks
    if rows == 1 and heads != shared:  # the heads that share keys are rows of one product
        query = query.reshape(sequences, shared, heads // shared, size)
        sinks = None if sinks is None else sinks.view(shared, -1)
    elif heads != shared:
        key, value = (each.repeat_interleave(heads // shared, dim=1) for each in (key, value))
    if how.softcap is None and sinks is None:
        result = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=how.scaling)
    else:
        result = _weights(query @ key.transpose(2, 3) * how.scaling, mask, how.softcap, sinks).to(value.dtype) @ value
    return result.reshape(sequences, heads, rows, value.shape[-1])


def _weights(scores: Tensor, mask: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return scores.softmax(dim=-1, dtype=torch.float32)
    sink = sinks.view(1, scores.shape[1], -1, 1).expand(len(scores), -1, scores.shape[2], 1)
    return torch.cat([scores, sink.to(scores.dtype)], dim=-1).softmax(dim=-1, dtype=torch.float32)[..., :-1]


def attend_within(query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
    """Compute attention where each row sees itself and the rows before it."""
    rows = query.shape[2]
    if how.softcap is None and how.sinks is None:
        grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=how.scaling, enable_gqa=grouped)
    return attend(query, key, value, torch.ones(rows, rows, dtype=torch.bool, device=query.device).tril(), how)


class Shape(ctypes.Structure):
    """The struct of that name in `paged_attention.c`."""

    _fields_ = [
        *((name, ctypes.c_long) for name in NUMBERS),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
    ]


class PagedAttention:
    """The functions of the compiled library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend, self._store = library.attend, library.store
        self._attend.argtypes = [ctypes.POINTER(Shape), *[ctypes.c_void_p] * 8]
        self._store.argtypes = [ctypes.c_void_p, *[ctypes.c_long] * 5, *[ctypes.c_void_p] * 2]
        self._attend.restype = self._store.restype = None

    def store(self, rows: Tensor, to: Tensor, memory: Tensor) -> None:
        """Store rows [heads, rows, size] as rows `to` of the memory [any, heads * size]."""
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        (heads, count, size), (head, row, _) = rows.shape, rows.stride()
        self._store(rows.data_ptr(), count, heads, size, row, head, to.data_ptr(), memory.data_ptr())

    def attend(
        self,
        memory: Tensor,
        sizes: tuple[int, ...],
        tables: Tensor,
        which: Tensor,
        ends: Tensor,
        longest: int,
        how: How,
        query: Tensor,
        result: Tensor,
    ) -> None:
        """Compute attention of rows `which` of the queries [heads, rows, size] into the result [rows, heads, size]. For each row,
        `tables` [rows, pages] says where its keys and values lie, and `ends` how many tokens it sees. `sizes` are the heads of keys,
        the sizes of a key, a value and a page, and where in a page the values begin."""
        if query.stride(2) != 1:
            query = query.contiguous()
        heads, threads = query.shape[0], torch.get_num_threads()
        window, softcap = how.window or 0, how.softcap or 0.0
        strides = query.stride(1), query.stride(0)
        shape = Shape(
            len(which), heads, *sizes, *strides, tables.shape[1], window, longest, threads, how.scaling, softcap
        )
        room = torch.empty(threads * heads * (sizes[1] + sizes[2] + longest))
        sinks = None if how.sinks is None else how.sinks.float().contiguous()
        given = (query, memory, tables, which, ends)
        self._attend(
            shape, *(each.data_ptr() for each in given), None if sinks is None else sinks.data_ptr(),
            room.data_ptr(), result.data_ptr(),
        )  # fmt: skip


@lru_cache(maxsize=8)
def compiled(dtype: torch.dtype, block: int) -> PagedAttention | None:
    """Return the functions for this processor and pages of `block` tokens, or None without such a kernel or a C compiler."""
    if dtype not in DEFINED:
        return None
    try:
        with compile_c.compiled(SOURCE, *FLAGS, f"-DBLOCK={block}", *DEFINED[dtype]) as library:
            return PagedAttention(ctypes.CDLL(library))
    except (OSError, subprocess.SubprocessError):
        return None
