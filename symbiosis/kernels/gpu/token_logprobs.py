"""Log probabilities of one token a row, and their gradient, on a GPU: logits are read once each way, and never exist in float32."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _find(logits, targets, logprobs, totals, V, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, COLUMNS)
    largest = tl.full((COLUMNS,), float("-inf"), tl.float32)
    sums = tl.zeros((COLUMNS,), tl.float32)
    for begin in range(0, V, COLUMNS):
        x = tl.load(logits + row * V + begin + c, mask=begin + c < V, other=float("-inf")).to(tl.float32)
        more = tl.maximum(largest, x)
        safe = tl.where(more == float("-inf"), 0.0, more)  # a column of which nothing was seen
        sums = sums * tl.exp(largest - safe) + tl.exp(x - safe)
        largest = more
    most = tl.max(largest, 0)
    total = most + tl.log(tl.sum(sums * tl.exp(largest - most), 0))
    tl.store(totals + row, total)
    wanted = tl.load(logits + row * V + tl.load(targets + row)).to(tl.float32)
    tl.store(logprobs + row, wanted - total)


@triton.jit
def _differentiate(logits, targets, totals, slopes, V, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = logits + row * V + columns
    x = tl.load(at, mask=columns < V, other=0.0).to(tl.float32)
    is_target = (columns == tl.load(targets + row)).to(tl.float32)
    slope = tl.load(slopes + row) * (is_target - tl.exp(x - tl.load(totals + row)))
    tl.store(at, slope.to(logits.dtype.element_ty), mask=columns < V)


def find(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log probability of each row's target, and the logarithm of what its probabilities are divided by."""
    rows, vocabulary = logits.shape
    assert logits.is_contiguous()
    logprobs, totals = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    _find[(rows,)](logits, targets, logprobs, totals, vocabulary, COLUMNS=2048, num_warps=8)
    return logprobs, totals


def differentiate_(logits: Tensor, targets: Tensor, totals: Tensor, slopes: Tensor) -> None:
    """Put the derivatives of a loss by the logits in their place, given those by the log probabilities."""
    rows, vocabulary = logits.shape
    _differentiate[(rows, triton.cdiv(vocabulary, 4096))](
        logits, targets, totals, slopes, vocabulary, COLUMNS=4096, num_warps=8
    )
