"""Few rows of several programs times frozen matrices, on a GPU. One kernel reads the rows where they lie, writes the results where they
go, and answers."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from symbiosis.kernels.gpu.gather import IN, PLACES, answer_page


class Tiling(NamedTuple):
    """The tiles that a matrix is cut into: their columns and width, and the stages of the pipeline that loads them. The values were
    measured."""

    N: int
    K: int
    stages: int


FINE = {16: Tiling(32, 256, 4), 32: Tiling(32, 256, 3)}  # by the rows
COARSE, EACH = Tiling(64, 128, 3), 2  # for so many columns that each of the GPU's processors has so many tiles
MOST = max(FINE)
SUPPORTED = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
WORDS = tl.constexpr(4)  # of a member
ALIGNED = 16  # values of a row, and bytes of where it lies


@triton.jit(do_not_specialize=["page", "turned", "count"])
def _product(  # type: ignore[no-untyped-def]
    page, turn, turned, done, members, count, K, FLOAT: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    IN: tl.constexpr, PLACES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    tile = tl.program_id(0)
    member = 0
    for later in range(1, count):
        member += (tile >= tl.load(members + WORDS * later + 3)).to(tl.int32)
    weight = tl.load(members + WORDS * member).to(tl.pointer_type(FLOAT))
    bias = tl.load(members + WORDS * member + 1)
    columns = tl.load(members + WORDS * member + 2).to(tl.int32)
    n = (tile - tl.load(members + WORDS * member + 3).to(tl.int32)) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, k = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    source, target = tl.load(page + IN + row), tl.load(page + IN + (1 + member) * ROWS + row)
    x = tl.multiple_of(source.to(tl.pointer_type(FLOAT))[:, None] + k[None, :], [16, 16])
    w = tl.multiple_of(weight + n.to(tl.int64)[:, None] * K + k[None, :], [16, 16])
    there, real = (source != 0)[:, None], (n < columns)[:, None]
    sums = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(0, tl.where(tl.max(source) != 0, K, 0), BLOCK_K):  # a cleared page: nobody is left
        inside = True if EVEN else (start + k < K)[None, :]
        w_NK = tl.load(w + start, mask=real & inside, other=0.0)
        x_RK = tl.load(x + start, mask=there & inside, other=0.0)
        sums = tl.dot(x_RK, w_NK.T, sums)
    if bias != 0:
        sums += tl.load(bias.to(tl.pointer_type(FLOAT)) + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    y = tl.multiple_of(target.to(tl.pointer_type(FLOAT))[:, None] + n[None, :], [16, 16])
    tl.store(y, sums.to(FLOAT), mask=(target != 0)[:, None] & (n < columns)[None, :])
    tl.debug_barrier()
    if tl.atomic_add(done, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.debug_barrier()
        answer_page(page, PLACES)
        tl.store(done, 0)
        tl.store(turn, turned)


def takes(matrices: Sequence[Tensor], rows: int) -> bool:
    """Whether the kernel can multiply so many rows by these, each K x N."""
    first = matrices[0]
    return rows <= MOST and first.is_cuda and first.dtype in SUPPORTED and len(first) % ALIGNED == 0 and all(
        v_KN.dim() == 2 and v_KN.stride() == (1, len(first)) and len(v_KN) == len(first)
        and v_KN.dtype == first.dtype and v_KN.device == first.device and v_KN.data_ptr() % ALIGNED == 0
        for v_KN in matrices
    )  # fmt: skip


def padded(rows: int) -> int:
    """Round up to the 16 rows that a matrix unit multiplies at least."""
    return max(16, triton.next_power_of_2(rows))  # type: ignore[no-any-return]


class FewRowsKernel:
    """The products of few rows with several matrices, and their biases."""

    def __init__(
        self, matrices: Sequence[Tensor], biases: Sequence[Tensor | None], rows: int, cut: Tiling | None = None
    ) -> None:
        """Prepare the kernel for up to so many `rows`."""
        self._kept, self._count = (matrices, biases), len(matrices)
        self._rows = padded(rows)
        self._cut = cut or _cut(matrices, self._rows)
        self._K, self._float = len(matrices[0]), SUPPORTED[matrices[0].dtype]
        self._tiles, words = 0, []
        for v_KN, bias in zip(matrices, biases, strict=True):
            words.append([v_KN.data_ptr(), 0 if bias is None else bias.data_ptr(), v_KN.shape[1], self._tiles])
            self._tiles += triton.cdiv(v_KN.shape[1], self._cut.N)
        self._members = torch.tensor(words, dtype=torch.int64, device=matrices[0].device)
        self.words = self._rows * (1 + self._count)  # of a page, from `IN` on

    def page(self, sources: Sequence[int], targets: Sequence[Sequence[int]]) -> list[int]:
        """Return the words of a page: where each row lies, and for each matrix where its results go."""
        padding = [0] * (self._rows - len(sources))
        return [word for addresses in (sources, *targets) for word in (*addresses, *padding)]

    def multiply(self, page: Tensor, turn: Tensor, turned: int, done: Tensor) -> None:
        """Multiply the rows that the page names, and write its answers; then `turn` becomes `turned`. `done`: a word of 32 bits, 0 before
        and after."""
        _product[(self._tiles,)](
            page, turn, turned, done, self._members, self._count, self._K, self._float,
            self._K % self._cut.K == 0, self._rows, IN, PLACES, self._cut.N, self._cut.K, num_warps=4, num_stages=self._cut.stages,
        )  # fmt: skip


def _cut(matrices: Sequence[Tensor], rows: int) -> Tiling:
    processors = torch.cuda.get_device_properties(matrices[0].device).multi_processor_count
    many = sum(v_KN.shape[1] for v_KN in matrices) >= EACH * processors * COARSE.N
    return COARSE if many else FINE[rows]


def load(weights: Sequence[Tensor]) -> None:
    """Make CUDA load the kernels for these weights (N x K) now, and not when somebody waits for them."""
    kinds = {(w.dtype, w.shape[1]): w.t() for w in weights if takes([w.t()], 1)}
    for v_KN in kinds.values():
        for rows, fine in FINE.items():
            for cut in (fine, COARSE):
                few_rows = FewRowsKernel([v_KN], [None], rows, cut)
                page, turn = (torch.zeros(n, dtype=torch.int64, device=v_KN.device) for n in (IN + few_rows.words, 1))
                few_rows.multiply(page, turn, 0, torch.zeros(1, dtype=torch.int32, device=v_KN.device))
    torch.cuda.synchronize()
