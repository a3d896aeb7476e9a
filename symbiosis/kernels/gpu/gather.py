"""Gathers rows from many places and scatters results to them, by one kernel each, as a table says that the CPU fills in."""

import torch
import triton
import triton.language as tl
from torch import Tensor

PAGES = 128
PLACES = 32  # sessions in one product
PARTS = 8  # parts of the input, or of the result, of each
IN = 2 * PLACES
OUT = IN + 3 * PLACES * PARTS
WORDS = OUT + 3 * PLACES * PARTS
BLOCK = 512  # of 8-byte words


@triton.jit(do_not_specialize=["first", "pages", "stride"])
def _copy(table, turn, first, pages, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = table + (tl.load(turn) % pages) * stride + first + 3 * tl.program_id(0)
    source = tl.load(at).to(tl.pointer_type(tl.int64))
    target = tl.load(at + 1).to(tl.pointer_type(tl.int64))
    count = tl.load(at + 2).to(tl.int32)
    for start in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        where = start + tl.arange(0, BLOCK)
        tl.store(target + where, tl.load(source + where, mask=where < count), mask=where < count)


@triton.jit
def answer_page(page, PLACES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write its words, behind all that was written and seen before."""
    at = page + 2 * tl.arange(0, PLACES)
    address, value = tl.load(at), tl.load(at + 1)
    words = address.to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(words, value.to(tl.int32), mask=address != 0, sem="release", scope="sys")


@triton.jit(do_not_specialize=["pages", "stride"])
def _answer(table, turn, pages, stride, PLACES: tl.constexpr):  # type: ignore[no-untyped-def]
    now = tl.load(turn)
    answer_page(table + (now % pages) * stride, PLACES)
    tl.debug_barrier()
    tl.store(turn, now + 1)


@triton.jit(do_not_specialize=["page", "turned"])
def _answer_at(page, turn, turned, PLACES: tl.constexpr):  # type: ignore[no-untyped-def]
    answer_page(page, PLACES)
    tl.debug_barrier()
    tl.store(turn, turned)


def copy_in(table: Tensor, turn: Tensor, copies: int, nbytes: int) -> None:
    """Make the first `copies` of the copies that the page lists before the product, of about `nbytes` in all."""
    copy(table, turn, IN, copies, nbytes)


def copy_out(table: Tensor, turn: Tensor, copies: int, nbytes: int) -> None:
    """Make the first `copies` of the copies that the page lists after the product, of about `nbytes` in all."""
    copy(table, turn, OUT, copies, nbytes)


def copy(table: Tensor, turn: Tensor, first: int, copies: int, nbytes: int) -> None:
    """Make so many copies, which the page lists from word `first` on."""
    _copy[_grid(copies, nbytes)](table, turn, first, len(table), table.stride(0), BLOCK)


def answer(table: Tensor, turn: Tensor) -> None:
    """Write the page's words, behind all copies, and turn the page."""
    _answer[(1,)](table, turn, len(table), table.stride(0), PLACES, num_warps=1)


def answer_at(table: Tensor, turn: Tensor, at: int) -> None:
    """Write the words of page number `at`, behind all copies, and turn the page. Nothing has to be looked up."""
    _answer_at[(1,)](table[at], turn, at + 1, PLACES, num_warps=1)


def load() -> None:
    """Have CUDA load the kernels now. That takes a tenth of a second, for which otherwise a client would wait."""
    table, turn = new_table()
    copy_in(table, turn, 1, 0)
    answer(table, turn)
    answer_at(table, turn, 0)
    torch.cuda.synchronize()  # the table is ours until then


def _grid(copies: int, nbytes: int) -> tuple[int, int]:
    return copies, min(256, max(1, nbytes // copies // (8 * BLOCK)))


def reference(page: Tensor, first: int, copies: int, memory: Tensor) -> None:
    """Do what a copying kernel does, on `memory` (of 8-byte words) whose addresses count from 0, in bytes."""
    for source, target, count in page[first : first + 3 * copies].view(-1, 3).tolist():
        memory[target // 8 : target // 8 + count] = memory[source // 8 : source // 8 + count].clone()


def new_table() -> tuple[Tensor, Tensor]:
    """Return an empty table, and the number of the page that comes next, on the GPU."""
    table = torch.zeros(PAGES, WORDS, dtype=torch.int64, pin_memory=True)
    return table, torch.zeros(1, dtype=torch.int64, device="cuda")
