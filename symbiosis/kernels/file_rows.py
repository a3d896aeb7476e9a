"""Reads matrices from a file straight into pages of memory, as rows: scaled, in another dtype, and those that lie there on their side.

The same by torch takes a copy for each step and milliseconds of Python. It is C (`file_rows.c`), compiled when first needed.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from symbiosis.kernels import compile_c

SOURCE = Path(__file__).with_suffix(".c")
DEFINED: dict[torch.dtype, list[str]] = {torch.float32: [], torch.bfloat16: ["-DBFLOAT16"]}


class Source(NamedTuple):
    """A matrix in a file: [rows, columns], or, on its side, [columns, rows]."""

    offset: int
    dtype: torch.dtype
    rows: int
    columns: int
    scale: float = 1.0
    is_transposed: bool = False


def can_read(sources: Sequence[Source], dtype: torch.dtype) -> bool:
    """Whether `put` puts these into memory of this dtype."""
    return dtype in DEFINED and all(each.dtype in DEFINED for each in sources) and _compiled(dtype) is not None


def matrices(sources: Sequence[Source], runs: Sequence[int]) -> Tensor:
    """Return the table of matrices that `put` takes, int64 [matrices, 9]; `runs` says into how many runs each of them goes."""
    scales = torch.tensor([each.scale for each in sources], dtype=torch.float64).view(torch.int64)
    firsts = list(accumulate(runs, initial=0))
    rows = [
        (each.offset, each.rows * each.columns * each.dtype.itemsize, each.dtype is torch.float32, each.is_transposed,
         each.columns, each.rows, first, count)
        for each, first, count in zip(sources, firsts, runs, strict=False)
    ]  # fmt: skip
    return torch.cat([torch.tensor(rows, dtype=torch.int64), scales[:, None]], dim=1)


def put(file: int | Tensor, table: Tensor, runs: Tensor, pages: Tensor, taken: Tensor) -> None:
    """Put the matrices of a table into pages. Raises `OSError` if the file cannot be read, or ends too soon.

    Args:
        file: Its descriptor, or its contents.
        runs: Rows of one matrix that follow one another in the pages, int64 [runs, 5]: the first row and how many, the first column and how
            many, and where they begin. Those of one matrix come behind those of another.
        taken: How many matrices have been begun, int64 [1]. Threads that are given the same share the work.
    """
    function = _compiled(pages.dtype)
    assert function is not None and all(t.is_contiguous() for t in (table, runs, pages, taken))
    fd, contents = (-1, file.data_ptr()) if isinstance(file, Tensor) else (file, None)
    of = table.data_ptr(), taken.data_ptr(), len(table), runs.data_ptr(), pages.data_ptr()
    if error := function(fd, contents, *of):
        raise OSError(error, os.strerror(error))


@cache
def _compiled(dtype: torch.dtype) -> "Callable[..., int] | None":
    pointer = ctypes.c_void_p
    arguments = [ctypes.c_int, pointer, pointer, pointer, ctypes.c_int64, pointer, pointer]
    flags = "-O3", "-march=native", *DEFINED[dtype]
    library = compile_c.load(SOURCE, *flags, put_matrices=(arguments, ctypes.c_int))
    return None if library is None else library.put_matrices
