"""Copies pieces of matrices that lie anywhere on a GPU into one buffer, each transposed and scaled as it is needed there, in one launch.
`copy_pieces` of `symbiosis/serving/lora/held.py` is the formula.

A piece is described by 64-bit words: the address of its first element, where in the buffer it begins, how many rows and columns it has, and how
far apart its rows and its columns are where it comes from.
"""

import triton
import triton.language as tl
from torch import Tensor

from symbiosis.kernels.gpu.adapter_rows import SUPPORTED

WORDS = 6  # of a piece
ROWS, COLUMNS = 16, 64  # of a tile
PROGRAMS = 16  # for each piece


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    pieces, scales, buffer, FROM: tl.constexpr, TO: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    piece = tl.program_id(0)
    words = pieces + piece * WORDS
    source = tl.load(words).to(tl.pointer_type(FROM))
    to, rows, columns = tl.load(words + 1), tl.load(words + 2), tl.load(words + 3)
    row_stride, column_stride = tl.load(words + 4), tl.load(words + 5)
    scale = tl.load(scales + piece)
    across = tl.cdiv(columns, COLUMNS)
    for tile in range(tl.program_id(1), tl.cdiv(rows, ROWS) * across, tl.num_programs(1)):
        r = (tile // across) * ROWS + tl.arange(0, ROWS)
        c = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        values = tl.load(source + r[:, None] * row_stride + c[None, :] * column_stride, mask=inside, other=0.0)
        tl.store(buffer + to + r[:, None] * columns + c[None, :], (values.to(tl.float32) * scale).to(TO), mask=inside)


def gather(pieces: Tensor, scales: Tensor, buffer: Tensor, source: Tensor) -> None:
    """Fill `buffer`. `pieces` is int64 [pieces, WORDS] and `scales` float32 [pieces], both on the device; all are of the dtype of `source`."""
    _gather[(len(pieces), PROGRAMS)](
        pieces, scales, buffer, SUPPORTED[source.dtype], SUPPORTED[buffer.dtype], WORDS, ROWS, COLUMNS
    )
