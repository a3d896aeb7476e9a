"""Attention over keys and values that lie in pages: a C function for few rows, compiled when first needed, and the torch formulas that
it is compared with."""

import ctypes
import math
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from symbiosis.kernels import compile_c

SOURCE = Path(__file__).with_suffix(".c")
DEFINED: dict[torch.dtype, list[str]] = {
    torch.float32: [],
    torch.bfloat16: ["-DBFLOAT16"],
    torch.float16: ["-DFLOAT16"],
}
NUMBERS = (
    "sequences", "rows", "heads", "shared", "key", "value", "block", "page", "values_at", "query_row", "query_head", "tables", "masked",
    "window", "parts", "threads",
)  # fmt: skip
POINTERS = "queries", "memory", "addresses", "numbers", "which", "begins", "ends", "mask", "sinks", "room", "results"
LEAST_PART, PARTS = 128, 4  # tokens of a part of a sequence; parts for each thread, as some finish sooner


@dataclass(frozen=True, slots=True)
class How:
    """How a model's attention differs from the usual. A sink takes part in the weights of its head, and has no value."""

    scaling: float
    window: int | None = None  # how many tokens a row sees, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]

    @classmethod
    def told(
        cls, query: Tensor, scaling: float | None, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> "How":
        """Make it of the arguments of transformers' attention interface."""
        return cls(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap, sinks)


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


class PageLayout(NamedTuple):
    """How keys and values lie in a page."""

    heads: int
    key: int  # the size of one
    value: int
    block: int  # tokens
    elements: int  # from one page to the next; 0 where addresses tell
    values_at: int


class SeenTokens(NamedTuple):
    """Which tokens are seen, and by whom. Rows of a sequence follow one another."""

    which: Tensor  # int64 [sequences]: the first row of each
    ends: Tensor  # int64 [sequences * rows]: a row sees what is before
    longest: int  # the largest of these
    rows: int = 1
    begins: Tensor | None = None  # int64 [sequences * rows]: ... and from here on
    mask: Tensor | None = None  # bool [sequences * rows, tokens]: ... where this is true


class Shape(ctypes.Structure):
    """The struct `shape` in `paged_attention.c`."""

    _fields_ = [
        *((name, ctypes.c_long) for name in NUMBERS),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
    ]


class Tensors(ctypes.Structure):
    """The struct `tensors` in `paged_attention.c`."""

    _fields_ = [(name, ctypes.c_void_p) for name in POINTERS]


ATTEND = [ctypes.POINTER(Shape), ctypes.POINTER(Tensors)]
STORE = [ctypes.c_void_p, *[ctypes.c_long] * 5, *[ctypes.c_void_p] * 2]


class PagedAttention:
    """The functions of the compiled library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend, self._store = library.attend, library.store
        self._room = threading.local()

    def store(self, rows: Tensor, to: Tensor, memory: Tensor) -> None:
        """Store rows [heads, rows, size] as rows `to` of the memory [any, heads * size]."""
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        (heads, count, size), (head, row, _) = rows.shape, rows.stride()
        self._store(rows.data_ptr(), count, heads, size, row, head, to.data_ptr(), memory.data_ptr())

    def attend(
        self,
        memory: Tensor | None,
        pages: PageLayout,
        tables: Tensor,
        seen: SeenTokens,
        how: How,
        query: Tensor,
        result: Tensor,
        threads: int | None = None,
    ) -> None:
        """Compute attention of queries [heads, rows, size] into the result [rows, heads, size]. For each sequence, `tables` [sequences,
        pages] says where its keys and values lie: as int32, pages of the memory; as int64, without a memory, addresses."""
        assert (memory is None) == (tables.dtype is torch.int64) and tables.is_contiguous() and result.is_contiguous()
        if query.stride(2) != 1:
            query = query.contiguous()
        heads, sequences, threads = query.shape[0], len(seen.which), threads or torch.get_num_threads()
        longest = seen.longest if how.window is None else min(seen.longest, how.window + seen.rows)
        parts = max(1, min(math.ceil(PARTS * threads / sequences), longest // LEAST_PART)) if threads > 1 else 1
        shape = Shape(
            sequences, seen.rows, heads, *pages, query.stride(1), query.stride(0), tables.shape[1],
            0 if seen.mask is None else seen.mask.stride(0), how.window or 0, parts, threads, how.scaling, how.softcap or 0.0,
        )  # fmt: skip
        room = self._of_size(heads * seen.rows * (threads * pages.key + sequences * parts * (pages.value + 2)))
        sinks = None if how.sinks is None else how.sinks.float().contiguous()
        addresses, numbers = (tables, None) if memory is None else (None, tables)
        given = (query, memory, addresses, numbers, seen.which, seen.begins, seen.ends, seen.mask, sinks, room, result)
        self._attend(shape, Tensors(*(None if each is None else each.data_ptr() for each in given)))

    def _of_size(self, elements: int) -> Tensor:
        """Return room for so many numbers. Each thread has its own, and keeps it until it needs more."""
        room = getattr(self._room, "room", None)
        if room is None or len(room) < elements:
            room = self._room.room = torch.empty(elements)
        return room


@lru_cache(maxsize=8)
def compiled(dtype: torch.dtype) -> PagedAttention | None:
    """Return the functions for this processor, or None without such a kernel or a C compiler."""
    if dtype not in DEFINED:
        return None
    flags = *compile_c.FAST, *DEFINED[dtype]
    library = compile_c.load(SOURCE, *flags, attend=(ATTEND, None), store=(STORE, None))
    return None if library is None else PagedAttention(library)
